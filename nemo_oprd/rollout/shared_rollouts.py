"""Rollouts that the first rank has read from a file -> every rank."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from nemo_oprd.batch.types import TOKEN_FIELDS, Rollout
from nemo_oprd.models.megatron.parallel import first_ranks
from nemo_oprd.rollout.exchange import Exchange

_ARRAYS = {*TOKEN_FIELDS, "weight_versions", "expert_routes"}


def first_ranks_rollouts(rollouts: dict[int, Rollout]) -> dict[int, Rollout]:
    """What the world's first rank gave, on every rank; the values of the others do not count. Every rank calls this."""
    own = rollouts if dist.get_rank() == 0 else {}
    plain: dict[int, dict[str, Any]] = {
        i: {name: value for name, value in vars(own[i]).items() if name not in _ARRAYS} for i in own
    }
    arrays = {i: {name: vars(own[i])[name] for name in _ARRAYS if vars(own[i])[name] is not None} for i in own}
    told, shared = first_ranks(plain), Exchange().share(arrays)
    return {i: Rollout(**(fields | shared[i])) for i, fields in told.items()}
