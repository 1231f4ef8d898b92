"""One rank of a large world in one process: torch's fake process group, and what its collectives can't answer."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

# the description of groups for tensors in host memory
HOST = "host memory"


def join(rank: int, ranks: int, gpus_per_node: int) -> None:
    """This process becomes rank `rank` of `ranks`. Collectives change nothing; those of objects return one's own."""
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_RANK="0", LOCAL_WORLD_SIZE=str(gpus_per_node))
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)

    def all_gather_object(object_list: list[Any], obj: Any, group: Any = None) -> None:
        object_list[:] = [obj] * len(object_list)

    nothing: Any = lambda *_, **__: None  # noqa: E731
    dist.all_gather_object = torch.distributed.all_gather_object = all_gather_object
    dist.broadcast_object_list = dist.barrier = nothing
    enumerated = dist.new_subgroups_by_enumeration

    def subgroups(ranks: list[list[int]], *_: Any, backend: str | None = None, **__: Any) -> Any:
        # groups for tensors in host memory are fake, too, and say what they are
        return enumerated(ranks, backend="fake", group_desc=HOST if backend == "gloo" else None)

    dist.new_subgroups_by_enumeration = subgroups  # type: ignore[assignment]
    from nemo_oprd.models.megatron import parallel

    parallel.watchdog.start = parallel.wait_for_all = nothing  # there is no store to watch
