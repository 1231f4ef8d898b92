"""`Layout` -> process groups: one `ProcessGroupCollection` per role; roles may share ranks or use different ranks.

This is the only module that changes Megatron's global parallel state, and it creates only the global memory buffer. The
global groups are deliberately not initialised: a code path that used them would confuse two roles, and now fails with
Megatron's "not initialized" error.
"""

from __future__ import annotations

import datetime
import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection
from torch.distributed.distributed_c10d import _get_default_store

from nemo_oprd.batch.layout import Coordinates, Layout
from nemo_oprd.runtime import gpus, rendezvous, watchdog

# The free memory of a rank, by which parts of a run choose their size (`auto`).
#
# On CUDA (not yet run): a share of what is free at that moment. On a CPU: a fixed amount, because the memory that a
# machine has free is neither what a container may use nor what the other ranks leave.


CPU_BYTES = 1 << 30


def free_bytes(place: torch.device, share: float) -> int:
    """Returns the bytes that a part of a run may use: on CUDA `share` of the free ones, on a CPU `CPU_BYTES`."""
    if place.type != "cuda":
        return CPU_BYTES
    free, _ = torch.cuda.mem_get_info(place)
    # what PyTorch has reserved and does not use is free, too
    unused = torch.cuda.memory_reserved(place) - torch.cuda.memory_allocated(place)
    return int(share * (free + unused))


T = TypeVar("T")
# How long a collective of any group may wait. Ranks may arrive far apart, for example if one loads a teacher over a
# slow network. Subgroups get the same limit (torch's default with NCCL is ten minutes). If a rank dies, the watchdog
# ends the other ranks.
COLLECTIVE_TIMEOUT = datetime.timedelta(hours=3)
# Practically no limit; the store counts milliseconds in 32 bits, which overflows after 24 days.
LONGEST_WAIT = datetime.timedelta(days=20)


@dataclass
class Role:
    """A role (student, teacher, rollout) on this rank: the layout, and the process groups if the rank has the role."""

    name: str
    layout: Layout
    groups: ProcessGroupCollection | None  # None on ranks outside the role, and so are the coordinates
    coords: Coordinates | None
    # the ranks of "dp_cp" and those of "expt_dp", for tensors in host memory; if they were asked for
    host_group: dist.ProcessGroup | None = None
    expert_host_group: dist.ProcessGroup | None = None

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
    """Returns the device of this process: its CUDA device, or the CPU."""
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def on_device(values: np.ndarray | torch.Tensor) -> torch.Tensor:
    """Returns values in host memory as a tensor on this process's device; on a CPU, it shares their memory.

    On CUDA they are copied from pinned memory, so that the host does not wait: an ordinary copy waits until the device
    has finished all earlier work.
    """
    tensor = torch.from_numpy(values) if isinstance(values, np.ndarray) else values
    target = device()
    return tensor.to(target) if target.type == "cpu" else tensor.pin_memory().to(target, non_blocking=True)


def device_index(local_rank: int, count: int) -> int:
    """Returns the index of this rank's GPU among the `count` GPUs that the process sees.

    A Slurm task may see only its own GPU (--gpus-per-task), which has index 0; otherwise every process of a machine
    sees all GPUs and uses the one of its local rank.

    Raises:
        ValueError: there are fewer GPUs than ranks on this machine.
    """
    if count == 1 and "SLURM_PROCID" in os.environ:
        return 0
    if local_rank >= count:
        raise ValueError(
            f"LOCAL_RANK={local_rank}, but this process sees {count} GPUs "
            f"(CUDA_VISIBLE_DEVICES={os.environ.get('CUDA_VISIBLE_DEVICES', 'not set')}); expected one GPU per rank: "
            "start one rank per GPU, or make either all GPUs or only its own visible to every rank"
        )
    return local_rank


def init_distributed() -> None:
    """Joins the process group that torchrun or srun describes; a single process creates a group of size 1.

    Uses NCCL if CUDA is available, otherwise gloo. Also prepares Megatron-core (CPU patches, memory buffer).

    Raises:
        ValueError: there is no GPU for this rank, or one that does not fit, the port is in use, or another rank was
            missing for too long.
        Stopped: SIGTERM or SIGUSR1 arrived while this rank waited for others.
    """
    from megatron.core import parallel_state

    gpus.check_promise()
    backend, gpu = "gloo", None
    if torch.cuda.is_available():
        gpu = device_index(int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count())
        backend = "nccl"
        torch.cuda.set_device(gpu)
        # On H100 and later torch prefers cuDNN for scaled_dot_product_attention. cuDNN builds and keeps a graph for
        # every new length of the keys, hence for every decoded token, and silently computed wrong results with few
        # key/value heads (pytorch issue 193893).
        torch.backends.cuda.enable_cudnn_sdp(False)
        # NVIDIA's containers allow TF32 by an environment variable, but `precision: fp32` must mean float32
        torch.set_float32_matmul_precision("highest")
    else:
        from nemo_oprd.megatron import cpu_patches

        cpu_patches.install()
    if not dist.is_initialized():
        if gpu is not None:
            gpus.check_device(gpu, rendezvous.Job.here().world)
        rendezvous.join(backend, COLLECTIVE_TIMEOUT, gpu)  # ranks may start minutes apart
    host_group()
    watchdog.start()  # once all ranks have joined
    if parallel_state._GLOBAL_MEMORY_BUFFER is None:
        parallel_state._set_global_memory_buffer()


def host_group(ranks: Iterable[int] | None = None) -> dist.ProcessGroup | None:
    """Returns a gloo group for data in host memory: that of the world, or of `ranks`; None on other ranks.

    Over NCCL even a number takes device memory, and a copy to the device waits for all of its work. Every rank of the
    world calls this; the first call for the same ranks makes the group, so `init_distributed` does that for the world.
    """
    if ranks is None and dist.get_backend() == "gloo":
        return dist.group.WORLD
    return _subgroups([sorted(range(dist.get_world_size()) if ranks is None else ranks)], "gloo")


def everyones(value: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """Gathers the value of each rank of the group (None: of the world), in order of ranks. Every rank of it calls this.

    For small objects: they are pickled, and padded to the largest one. For the world they stay in host memory.
    """
    group = group or host_group()
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def first_ranks(value: T) -> T:
    """Returns the value of the world's first rank on every rank; the others' do not count. Every rank calls this.

    For small objects, which stay in host memory.
    """
    values = [value]
    dist.broadcast_object_list(values, src=0, group=host_group())
    return values[0]


def wait_for_all() -> None:
    """Waits until every rank of the world has called this function; unlike a barrier, without the group's timeout.

    The ranks wait on the job's key-value store, so that no accelerator is kept busy. Every rank must call this
    function.
    """
    world = dist.group.WORLD
    if _meetings.get("world") is not world:
        # a separate connection: while one waits, other users of it, such as NCCL's threads, get no answer
        _meetings.update(world=world, number=0, store=_get_default_store().clone())  # type: ignore[attr-defined]
    _meetings["number"] += 1
    store, number = _meetings["store"], _meetings["number"]
    key, previous_key = (f"nemo_oprd/meeting/{meeting}" for meeting in (number, number - 1))
    if store.add(key, 1) == dist.get_world_size():
        store.set(f"{key}/all", "here")
    store.wait([f"{key}/all"], LONGEST_WAIT)
    if dist.get_rank() == 0 and number > 1:  # all ranks have arrived, so no rank waits for the previous key any more
        store.delete_key(previous_key)
        store.delete_key(f"{previous_key}/all")


_meetings: dict[str, Any] = {}


def make_role(name: str, layout: Layout, *, saves: bool = False, experts: bool = False) -> Role:
    """Creates the groups of a role. Every rank of the world must call this, for the same roles in the same order.

    Args:
        saves: whether the role's optimizer is saved, which takes `Role.host_group`.
        experts: whether the model has experts; if it is saved, that takes `Role.expert_host_group`, too.
    """
    from megatron.core.hyper_comm_grid import HyperCommGrid

    sizes = [layout.tensor, layout.context, layout.data, layout.pipeline]
    grid = HyperCommGrid(sizes, ["tp", "cp", "dp", "pp"], rank_offset=layout.first_rank)
    groups = {key: _subgroups(grid.get_rank_enum(dims)) for key, dims in _GROUPS.items()}
    host_group = _subgroups(grid.get_rank_enum(_GROUPS["dp_cp"]), "gloo") if saves else None
    experts_grid = HyperCommGrid(
        [layout.expert_tensor, layout.expert, layout.expert_copies, layout.pipeline],
        ["etp", "ep", "copy", "pp"],
        rank_offset=layout.first_rank,
    )
    groups |= {key: _subgroups(experts_grid.get_rank_enum(dims)) for key, dims in _EXPERT_GROUPS.items()}
    # Tied embeddings are summed over the first and the last stage only; with more ranks in the group the all-reduce
    # would wait for the stages in between.
    groups["embd"] = _subgroups([sorted({ranks[0], ranks[-1]}) for ranks in grid.get_rank_enum("pp")])
    copies = experts_grid.get_rank_enum(_EXPERT_GROUPS["expt_dp"])
    expert_host_group = _subgroups(copies, "gloo") if saves and experts else None
    if dist.get_rank() not in layout.ranks:
        return Role(name, layout, None, None)
    groups["pos_embd"] = None
    own, coords = ProcessGroupCollection(**groups), layout.coordinates(dist.get_rank())
    return Role(name, layout, own, coords, host_group, expert_host_group)


def _subgroups(ranks: list[list[int]], backend: str | None = None) -> dist.ProcessGroup | None:
    """Returns this rank's group in a partition; equal partitions, of one role or of several, share their groups.

    A communicator costs memory and threads, and many partitions are equal: without context parallelism "dp" equals
    "dp_cp", and a student and a teacher with the same layout need the same groups. Every rank must call this in the
    same order.
    """
    world = dist.group.WORLD
    backend = backend or dist.get_backend()
    partition = tuple(tuple(sorted(group)) for group in ranks)
    if _known_groups.get("world") is not world:
        _known_groups.clear()  # another process group has been initialised since
        _known_groups["world"] = world
    if (partition, backend) not in _known_groups:
        _known_groups[partition, backend], _ = dist.new_subgroups_by_enumeration(
            [list(group) for group in partition], timeout=COLLECTIVE_TIMEOUT, backend=backend
        )
    return _known_groups[partition, backend]


_known_groups: dict[Any, Any] = {}

# name in ProcessGroupCollection -> dimensions that the group spans
_GROUPS: dict[str, str | list[str]] = {
    **{name: name for name in ("tp", "cp", "dp", "pp")},
    "dp_cp": ["dp", "cp"],
    "mp": ["tp", "pp"],
    "tp_cp": ["tp", "cp"],
    "tp_dp_cp": ["tp", "cp", "dp"],  # a pipeline stage
    "intra_dist_opt": ["tp", "cp", "dp", "pp"],
}
# the same for the experts' grid
_EXPERT_GROUPS = {
    "ep": "ep",
    "expt_tp": "etp",
    "tp_ep": ["etp", "ep"],
    "tp_ep_pp": ["etp", "ep", "pp"],
    "expt_dp": "copy",
}


def compute_dtype(precision: str) -> torch.dtype:
    """Returns the dtype of weights and products for a `precision` of the configuration."""
    return torch.bfloat16 if precision == "bf16" else torch.float32


def seed_everything(seed: int, tensor_rank: int = 0) -> None:
    """Seeds Python, numpy, torch and Megatron's RNG tracker (sequence parallelism needs it even without dropout)."""
    import random

    import numpy as np
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    model_parallel_cuda_manual_seed(seed, tp_rank=tensor_rank, ep_rank=0, etp_rank=tensor_rank, force_reset_rng=True)
