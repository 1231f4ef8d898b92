"""`rollout.max_cache_tokens=auto`: how many tokens the KV cache of the in-process engine may hold.

On CUDA (not yet run): a share of the memory that is free when a call of `generate` begins. On a CPU: a fixed amount.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from nemo_oprd.models import ModelSpec
from nemo_oprd.models.megatron.device_memory import free_bytes
from nemo_oprd.models.megatron.parallel import Role, device

# The rest is for what decoding needs besides: activations of the prompts, logits in float64 and their sorted copies,
# and the copies of one layer's keys and values when finished sequences leave.
CUDA_SHARE = 0.7
# tokens; a cache of fewer would not hold one useful batch, and running out of memory says so more clearly
SMALLEST = 1024


def bytes_per_token(spec: ModelSpec, tensor: int, dtype: torch.dtype) -> int:
    """Bytes of the keys and values of one token, in all layers of one of `tensor` tensor ranks."""
    return spec.num_layers * (spec.num_kv_heads // tensor) * spec.head_dim * 2 * dtype.itemsize


def cache_budget(spec: ModelSpec, role: Role, dtype: torch.dtype) -> int:
    """The number of cached tokens, the smallest over the ranks of the role. Every rank of the role calls this."""
    own = free_bytes(device(), CUDA_SHARE) // bytes_per_token(spec, role.layout.tensor, dtype)
    smallest = torch.tensor([own], dtype=torch.int64, device=device())
    for group in (role.member_groups.tp, role.member_groups.dp):
        dist.all_reduce(smallest, op=dist.ReduceOp.MIN, group=group)
    return max(SMALLEST, int(smallest.item()))
