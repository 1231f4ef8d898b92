"""`rollout.max_cache_tokens=auto`: how many tokens the KV cache of the in-process engine may hold.

On CUDA (not yet run): a share of the memory that is free when a call of `generate` begins. On a CPU: a fixed amount.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from nemo_oprd.config.memory_bounds import CACHE_SHARE, cache_bytes_per_token
from nemo_oprd.models import ModelSpec
from nemo_oprd.models.megatron.device_memory import free_bytes
from nemo_oprd.models.megatron.parallel import Role, device

# tokens; a cache of fewer would not hold one useful batch, and running out of memory says so more clearly
SMALLEST = 1024


def cache_budget(spec: ModelSpec, role: Role, dtype: torch.dtype) -> int:
    """The number of cached tokens, the smallest over the ranks of the role. Every rank of the role calls this."""
    own = free_bytes(device(), CACHE_SHARE) // cache_bytes_per_token(spec, role.layout.tensor, dtype.itemsize)
    smallest = torch.tensor([own], dtype=torch.int64, device=device())
    for group in (role.member_groups.tp, role.member_groups.dp):
        dist.all_reduce(smallest, op=dist.ReduceOp.MIN, group=group)
    return max(SMALLEST, int(smallest.item()))
