"""Replaces `torch.cuda` in a rehearsal by one device that computes nothing, whose memory the recorder counts.

Call `install` once, after `shim.load()` and the import of torch: it changes torch for the whole process, which `join`
makes one rank of a large world.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch._subclasses import fake_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

NAME = "rehearsed GPU"


class Stream:
    """A stream in which everything has already happened."""

    cuda_stream, device, device_index, stream_id, priority = 0, torch.device("cuda", 0), 0, 0, 0
    wait: Callable[[str], None] = staticmethod(lambda what: None)  # type: ignore[assignment]

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: Any) -> None: ...

    def wait_stream(self, _: Any) -> None:
        """Returns at once: there is nothing to wait for."""

    wait_event = wait_stream

    def record_event(self, event: Any = None) -> Any:
        """Returns an event that has happened."""
        return event or Event()

    def query(self) -> bool:
        """Returns True: everything has happened."""
        return True

    def synchronize(self) -> None:
        """Notes that the host waits."""
        self.wait("Stream.synchronize")


class Event:
    """An event that has happened."""

    wait_on_host: Callable[[str], None] = staticmethod(lambda what: None)  # type: ignore[assignment]

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def record(self, *_: Any) -> None:
        """Does nothing: the event has happened."""

    wait = record

    def query(self) -> bool:
        """Returns True: the event has happened."""
        return True

    def elapsed_time(self, _: Any) -> float:
        """Returns 1.0, in milliseconds."""
        return 1.0

    def synchronize(self) -> None:
        """Notes that the host waits."""
        self.wait_on_host("Event.synchronize")


class Generator:
    """The random generator of the device, which draws nothing; its state stays as it is."""

    def __init__(self, state: torch.Tensor) -> None:
        self._state = state

    def get_state(self) -> torch.Tensor:
        """Returns the state that `__init__` got."""
        return self._state

    def set_state(self, _: torch.Tensor) -> None:
        """Ignores the state."""

    graphsafe_set_state, clone_state = set_state, get_state


def install(memory: int, live: Callable[[], int], peak: Callable[[], int], wait: Callable[[str], None]) -> None:
    """Replaces the functions of torch.cuda that would ask a driver.

    Args:
        memory: bytes of the device.
        live, peak: bytes that are in use now, and were at most.
        wait: called with a name where the host would wait for the device.
    """

    class Properties:
        name, major, minor, total_memory, multi_processor_count = NAME, 9, 0, memory, 132
        warp_size, gcnArchName, uuid = 32, "", "rehearsal"

    Stream.wait = staticmethod(wait)  # type: ignore[assignment]
    Event.wait_on_host = staticmethod(wait)  # type: ignore[assignment]
    stream, state = Stream(), torch.get_rng_state()
    nothing = _returning(None)
    new: dict[str, Any] = {
        "is_available": _returning(True),
        "is_initialized": _returning(True),
        **dict.fromkeys(("init", "_lazy_init", "set_device", "empty_cache", "set_stream", "set_rng_state"), nothing),
        **dict.fromkeys(("manual_seed", "manual_seed_all", "reset_peak_memory_stats", "ipc_collect"), nothing),
        "device_count": _returning(1),
        "current_device": _returning(0),
        "synchronize": lambda *_: wait("torch.cuda.synchronize"),
        "current_stream": _returning(stream),
        "default_stream": _returning(stream),
        "stream": lambda *_: contextlib.nullcontext(),
        "device": lambda *_: contextlib.nullcontext(),
        "Stream": Stream,
        "Event": Event,
        "get_rng_state": _returning(state),
        "get_device_properties": _returning(Properties()),
        "get_device_capability": _returning((9, 0)),
        "get_device_name": _returning(NAME),
        "memory_allocated": lambda *_: live(),
        "memory_reserved": lambda *_: live(),
        "max_memory_allocated": lambda *_: peak(),
        "max_memory_reserved": lambda *_: peak(),
        "mem_get_info": lambda *_: (memory - live(), memory),
        "is_current_stream_capturing": _returning(False),
        "is_bf16_supported": _returning(True),
    }
    for name, value in new.items():
        setattr(torch.cuda, name, value)
    import torch.cuda.random as cuda_random

    for name in ("get_rng_state", "set_rng_state", "manual_seed", "current_device"):
        setattr(cuda_random, name, new[name])
    torch.cuda.nvtx.range_push = torch.cuda.nvtx.range_pop = nothing  # type: ignore[assignment]
    torch.backends.cuda.enable_cudnn_sdp = nothing
    torch.cuda.default_generators = (Generator(state),)  # type: ignore[assignment]
    torch.cuda.amp.common.amp_definitely_not_available = _returning(False)
    # the first fake tensor on a device makes a real one there where `is_available` says that CUDA is (up to torch 2.11;
    # 2.13 asks torch.accelerator and makes none)
    fake_tensor.init_gpu_context = nothing  # type: ignore[assignment]
    # the fused AdamW asks the device guard, which has no memory to give
    torch.Tensor.record_stream = nothing  # type: ignore[method-assign,assignment]


def _returning(value: Any) -> Callable[..., Any]:
    return lambda *_, **__: value


# One rank of a large world in one process: torch's fake process group, and substitutes for what it lacks.


# the description of groups for tensors in host memory
HOST = "host memory"


def join(rank: int, ranks: int, gpus_per_node: int) -> None:
    """Makes this process rank `rank` of `ranks`. Collectives change nothing; gathered objects are this rank's own."""
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
    from nemo_oprd.megatron import parallel

    parallel.watchdog.start = parallel.wait_for_all = nothing  # there is no store to watch
