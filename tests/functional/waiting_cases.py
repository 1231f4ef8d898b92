"""What the pool's workers run for test_waiting.py."""

from __future__ import annotations

import datetime
import signal
import time
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from nemo_oprd.layout import Layout
from nemo_oprd.models.megatron import parallel


def wait_for_the_late(late_s: float) -> dict[str, Any]:
    """Meets twice; the last rank is late for the second meeting, and the others get signals while they wait.

    What else the connection is asked has a tenth of that time.
    """
    parallel.init_distributed()
    parallel.wait_for_all()
    store = parallel._meetings["store"]
    usual = store.timeout
    store.set_timeout(datetime.timedelta(seconds=late_s / 10))
    heard: list[int] = []
    before = signal.signal(signal.SIGALRM, lambda number, _: heard.append(number))
    signal.setitimer(signal.ITIMER_REAL, late_s / 4, late_s / 4)
    began = time.monotonic()
    if dist.get_rank() == dist.get_world_size() - 1:
        while time.monotonic() - began < late_s:
            time.sleep(0.01)
    parallel.wait_for_all()
    waited = time.monotonic() - began
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)
    store.set_timeout(usual)
    return {"waited_s": waited, "signals": len(heard)}


def keys_after(meetings: list[int]) -> list[int]:
    """How many keys the store has after so many more meetings each."""
    parallel.init_distributed()
    counts = []
    for more in meetings:
        for _ in range(more):
            parallel.wait_for_all()
        dist.barrier()  # the first rank has tidied up
        counts.append(_get_default_store().num_keys())
        dist.barrier()
    return counts


def timeouts() -> list[float]:
    """Seconds that a collective may wait: of the world, then of a role's groups."""
    parallel.init_distributed()
    role = parallel.make_role("student", Layout(tensor=dist.get_world_size()))
    groups = [dist.group.WORLD, role.groups.tp, role.groups.dp]  # type: ignore[attr-defined, union-attr]
    return [group._get_backend(parallel.device()).options._timeout.total_seconds() for group in groups]
