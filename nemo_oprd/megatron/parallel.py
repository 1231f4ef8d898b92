"""From a `Layout` to process groups: one `ProcessGroupCollection` per role, side by side on the same ranks or apart.

This is the only module that touches Megatron's global parallel state, and it only creates the global memory buffer
there. The global groups stay uninitialised on purpose: a code path that would ask them, and so mix up two roles, stops
with Megatron's own "not initialized" error.
"""

from __future__ import annotations

import datetime
import os
from dataclasses import dataclass

import torch
import torch.distributed as dist

from nemo_oprd.layout import Coordinates, Layout


@dataclass
class Role:
    """A role (student, teacher, rollout) on this rank: its layout, and its groups if the rank has the role."""

    name: str
    layout: Layout
    groups: object | None  # ProcessGroupCollection; None on ranks outside the role
    at: Coordinates | None

    @property
    def here(self) -> bool:
        """Whether this rank has the role."""
        return self.groups is not None


def device() -> torch.device:
    """The device of this process: its CUDA device, or the CPU."""
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def init_distributed(timeout_minutes: int = 30) -> None:
    """Joins the process group that torchrun or srun describes; a lone process makes one of size 1.

    NCCL where CUDA is available, else gloo. Also readies Megatron-core (CPU patches, memory buffer).
    """
    from megatron.core import parallel_state

    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    else:
        from nemo_oprd.megatron import cpu

        cpu.install()
    if not dist.is_initialized():
        for key, value in (("RANK", "0"), ("WORLD_SIZE", "1"), ("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", "0")):
            os.environ.setdefault(key, value)
        dist.init_process_group(
            backend="nccl" if torch.cuda.is_available() else "gloo",
            timeout=datetime.timedelta(minutes=timeout_minutes),
        )
    if parallel_state._GLOBAL_MEMORY_BUFFER is None:
        parallel_state._set_global_memory_buffer()


def make_role(name: str, layout: Layout) -> Role:
    """Creates the groups of a role. Every rank of the world calls this, for the same roles in the same order."""
    from megatron.core.hyper_comm_grid import HyperCommGrid
    from megatron.core.process_groups_config import ProcessGroupCollection

    sizes = [layout.tensor, layout.context, layout.data, layout.pipeline]
    grid = HyperCommGrid(sizes, ["tp", "cp", "dp", "pp"], rank_offset=layout.first_rank)
    groups = {key: grid.create_pg(dims) for key, dims in _GROUPS.items()}
    alone = grid.get_rank_enum(["tp", "cp", "dp", "pp"])[0]
    groups["ep"], _ = dist.new_subgroups_by_enumeration([[rank] for rank in alone])
    # Tied embeddings are summed over the first and the last stage only; with more ranks in the group the all-reduce
    # would wait for the stages in between.
    ends = [sorted({ranks[0], ranks[-1]}) for ranks in grid.get_rank_enum("pp")]
    groups["embd"], _ = dist.new_subgroups_by_enumeration(ends)
    here = dist.get_rank() in layout.ranks
    if not here:
        return Role(name, layout, None, None)
    groups.update(pos_embd=None, expt_dp=groups["dp_cp"], expt_tp=groups["tp"])
    return Role(name, layout, ProcessGroupCollection(**groups), layout.coordinates(dist.get_rank()))


# name in ProcessGroupCollection -> dimensions it spans
_GROUPS = {
    "tp": "tp",
    "cp": "cp",
    "dp": "dp",
    "pp": "pp",
    "dp_cp": ["dp", "cp"],
    "mp": ["tp", "pp"],
    "tp_cp": ["tp", "cp"],
    "tp_ep_pp": ["tp", "pp", "cp"],
    "intra_dist_opt": ["tp", "cp", "dp", "pp"],
}


def seed_everything(seed: int, role: Role) -> None:
    """Seeds torch and Megatron's RNG tracker (sequence parallel needs it even without dropout)."""
    import random

    import numpy as np
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    tensor_rank = role.at.tensor if role.at else 0
    model_parallel_cuda_manual_seed(seed, tp_rank=tensor_rank, ep_rank=0, etp_rank=tensor_rank, force_reset_rng=True)
