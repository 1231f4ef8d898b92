"""The free memory of a rank, by which parts of a run choose their size (`auto`).

On CUDA (not yet run): a share of what is free at that moment. On a CPU: a fixed amount, because the memory that a
machine has free is neither what a container may use nor what the other ranks leave.
"""

from __future__ import annotations

import torch

CPU_BYTES = 1 << 30


def free_bytes(place: torch.device, share: float) -> int:
    """The bytes that a part of a run may use on a device: on CUDA `share` of the free ones."""
    if place.type != "cuda":
        return CPU_BYTES
    free, _ = torch.cuda.mem_get_info(place)
    # what PyTorch has reserved and does not use is free, too
    unused = torch.cuda.memory_reserved(place) - torch.cuda.memory_allocated(place)
    return int(share * (free + unused))
