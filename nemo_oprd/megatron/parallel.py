"""From a `Layout` to process groups: one `ProcessGroupCollection` per role, side by side on the same ranks or apart.

This is the only module that touches Megatron's global parallel state, and it only creates the global memory buffer
there. The global groups stay uninitialised on purpose: a code path that would ask them, and so mix up two roles, stops
with Megatron's own "not initialized" error.
"""

from __future__ import annotations

import datetime
import os
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection
from torch.distributed.distributed_c10d import _get_default_store

from nemo_oprd.fault_tolerance import watchdog
from nemo_oprd.layout import Coordinates, Layout

# How long a collective of any group may wait: ranks can be far apart, as where one loads a teacher over a slow network.
# Not shorter for subgroups, to which torch gives ten minutes with NCCL. When a rank dies, the watchdog ends the others.
COLLECTIVE_TIMEOUT = datetime.timedelta(hours=3)
# no limit in practice; the store counts milliseconds in 32 bits, so 24 days would be too many
LONGEST_WAIT = datetime.timedelta(days=20)


@dataclass
class Role:
    """A role (student, teacher, rollout) on this rank: its layout, and its groups if the rank has the role."""

    name: str
    layout: Layout
    groups: ProcessGroupCollection | None  # None on ranks outside the role, and so are the coordinates
    coords: Coordinates | None

    @property
    def is_member(self) -> bool:
        """Whether this rank has the role."""
        return self.groups is not None

    @property
    def member_groups(self) -> ProcessGroupCollection:
        """The process groups of a rank that has the role."""
        assert self.groups is not None, f"this rank has no part in the role {self.name}"
        return self.groups

    @property
    def member_coords(self) -> Coordinates:
        """The coordinates of a rank that has the role."""
        assert self.coords is not None, f"this rank has no part in the role {self.name}"
        return self.coords


def device() -> torch.device:
    """The device of this process: its CUDA device, or the CPU."""
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def device_index(local_rank: int, count: int) -> int:
    """Which of the `count` GPUs that a process sees is this rank's: that of its local rank, or its only one.

    A Slurm task may be shown its own GPU alone (--gpus-per-task); a launcher on one machine shows all of them to all.

    Raises:
        ValueError: there are fewer GPUs than ranks on this machine.
    """
    if count == 1 and "SLURM_PROCID" in os.environ:
        return 0
    if local_rank >= count:
        raise ValueError(
            f"LOCAL_RANK={local_rank}, but this process sees {count} GPUs "
            f"(CUDA_VISIBLE_DEVICES={os.environ.get('CUDA_VISIBLE_DEVICES', 'not set')}); expected one GPU per rank: "
            "start as many ranks per machine as it has GPUs, or show every rank all of them, or its own only"
        )
    return local_rank


def init_distributed() -> None:
    """Joins the process group that torchrun or srun describes; a lone process makes one of size 1.

    NCCL where CUDA is available, else gloo. Also readies Megatron-core (CPU patches, memory buffer).

    Raises:
        ValueError: there is no GPU for this rank.
    """
    from megatron.core import parallel_state

    if torch.cuda.is_available():
        torch.cuda.set_device(device_index(int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()))
        # On H100 and later torch prefers cuDNN for scaled_dot_product_attention. That builds and keeps a graph for
        # every new length of the keys, of which decoding has one per token, and was seen to compute wrong results
        # without a word where there are few key/value heads (pytorch issue 193893).
        torch.backends.cuda.enable_cudnn_sdp(False)
        # NVIDIA's containers allow TF32 by an environment variable; `precision: fp32` means float32
        torch.set_float32_matmul_precision("highest")
    else:
        from nemo_oprd.megatron import cpu_patches

        cpu_patches.install()
    if not dist.is_initialized():
        for key, value in (("RANK", "0"), ("WORLD_SIZE", "1"), ("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", "0")):
            os.environ.setdefault(key, value)
        dist.init_process_group(
            backend="nccl" if torch.cuda.is_available() else "gloo",
            timeout=COLLECTIVE_TIMEOUT,
        )
        # Ranks can start minutes apart, and NCCL connects at the first collective only, which must be one of all ranks
        # (transfers among some of them come later). Watching begins when everybody is here.
        dist.barrier()
    watchdog.start()
    if parallel_state._GLOBAL_MEMORY_BUFFER is None:
        parallel_state._set_global_memory_buffer()


def wait_for_all() -> None:
    """Waits until every rank of the world has come here, however late; a barrier's wait ends with the group's timeout.

    The ranks meet at the job's key-value store, so an accelerator is not kept spinning. Every rank calls this.
    """
    world = dist.group.WORLD
    if _meetings.get("world") is not world:
        # a connection of its own: one that waits answers nobody else, such as NCCL's threads
        _meetings.update(world=world, number=0, store=_get_default_store().clone())
    _meetings["number"] += 1
    store, number = _meetings["store"], _meetings["number"]
    here, before = (f"nemo_oprd/meeting/{meeting}" for meeting in (number, number - 1))
    if store.add(here, 1) == dist.get_world_size():
        store.set(f"{here}/all", "here")
    store.wait([f"{here}/all"], LONGEST_WAIT)
    if dist.get_rank() == 0 and number > 1:  # all have come here, so nobody waits there any more
        store.delete_key(before)
        store.delete_key(f"{before}/all")


_meetings: dict[str, Any] = {}


def make_role(name: str, layout: Layout) -> Role:
    """Creates the groups of a role. Every rank of the world calls this, for the same roles in the same order."""
    from megatron.core.hyper_comm_grid import HyperCommGrid
    from megatron.core.process_groups_config import ProcessGroupCollection

    sizes = [layout.tensor, layout.context, layout.data, layout.pipeline]
    grid = HyperCommGrid(sizes, ["tp", "cp", "dp", "pp"], rank_offset=layout.first_rank)
    groups = {key: _subgroups(grid.get_rank_enum(dims)) for key, dims in _GROUPS.items()}
    groups["ep"] = _subgroups([[rank] for rank in layout.ranks])
    # Tied embeddings are summed over the first and the last stage only; with more ranks in the group the all-reduce
    # would wait for the stages in between.
    groups["embd"] = _subgroups([sorted({ranks[0], ranks[-1]}) for ranks in grid.get_rank_enum("pp")])
    here = dist.get_rank() in layout.ranks
    if not here:
        return Role(name, layout, None, None)
    groups.update(pos_embd=None, expt_dp=groups["dp_cp"], expt_tp=groups["tp"])
    return Role(name, layout, ProcessGroupCollection(**groups), layout.coordinates(dist.get_rank()))


def _subgroups(ranks: list[list[int]]) -> dist.ProcessGroup | None:
    """The group of this rank in a partition; equal partitions (of one role or of several) share their groups.

    A communicator costs memory and threads, and most of a role's partitions are equal: without context parallelism
    "dp" is "dp_cp", and a student and a teacher of one layout need the same groups. Every rank asks in the same order.
    """
    world = dist.group.WORLD
    partition = tuple(tuple(sorted(group)) for group in ranks)
    if _known_groups.get("world") is not world:
        _known_groups.clear()  # another process group was joined since
        _known_groups["world"] = world
    if partition not in _known_groups:
        _known_groups[partition], _ = dist.new_subgroups_by_enumeration(
            [list(group) for group in partition], timeout=COLLECTIVE_TIMEOUT
        )
    return _known_groups[partition]


_known_groups: dict[Any, Any] = {}

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
    "tp_dp_cp": ["tp", "cp", "dp"],  # a pipeline stage
    "intra_dist_opt": ["tp", "cp", "dp", "pp"],
}


def seed_everything(seed: int, tensor_rank: int = 0) -> None:
    """Seeds torch and Megatron's RNG tracker (sequence parallel needs it even without dropout)."""
    import random

    import numpy as np
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    model_parallel_cuda_manual_seed(seed, tp_rank=tensor_rank, ep_rank=0, etp_rank=tensor_rank, force_reset_rng=True)
