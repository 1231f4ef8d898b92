"""The memory of GPUs that servers share with the trainer (not yet run). Every rank calls these functions."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist

from nemo_oprd.models.megatron.parallel import everyones
from nemo_oprd.rollout.vllm.placement import Place

# seconds until the memory of a process that was killed is free
SETTLE_S = 10.0


def release() -> None:
    """Before servers take memory: every rank gives back what it keeps for itself and does not use."""
    torch.cuda.empty_cache()
    dist.barrier()


def lacking(places: list[Place], share: float) -> list[str]:
    """Per GPU of servers at `places` that has less free than `share` of its memory, what is wrong; on every rank."""
    found = []
    for place in places:
        if dist.get_rank() not in place.ranks:
            continue
        give_up = time.monotonic() + SETTLE_S
        free, total = torch.cuda.mem_get_info()
        while free < share * total and time.monotonic() < give_up:
            time.sleep(0.2)
            free, total = torch.cuda.mem_get_info()
        if free < share * total:
            found.append(
                f"vLLM server {place.number} can't be started again: of the {total / 1e9:.1f} GB of rank "
                f"{dist.get_rank()}'s GPU {free / 1e9:.1f} GB are free while nothing is computed, expected "
                f"{share * total / 1e9:.1f} GB for rollout.vllm.gpu_memory_utilization={share}: lower that, or use "
                "rollout.vllm.placement=dedicated"
            )
    return [problem for part in everyones(found) for problem in part]
