"""One member of the process group over which weights are broadcast: the trainer's first rank, or a worker of a server.

A collective waits for all members, and NCCL does not tell a member that another one is gone. So while a member waits in
a collective, it also reads a key of the group's store, under which the member that ends the transfer writes the reason,
and gives up after a deadline. The trainer and vLLM's workers both import this module, so it needs torch alone. The
group has not been run over NCCL.
"""

from __future__ import annotations

import datetime
import json
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist

# seconds between two reads of the store while a member waits
LOOK_EVERY_S = 0.2
# NCCL's watchdog ends the whole process; it must come after the deadline here
_WATCHDOG = datetime.timedelta(minutes=30)
# gloo's own limit must come later, too: only the error of the deadline here names the slow operation
_GLOO = datetime.timedelta(seconds=30)


class TransferEnded(RuntimeError):  # noqa: N818 - may be the normal end of a member that waits for another one
    """Raised if the transfer ended early for all members."""


class Group:
    """A member of a group of `size`; independent of the default group of the process.

    Args:
        store: a key-value store that all members reach; keys begin with `prefix`, which no other group has.
        backend: gloo, or nccl, whose members are on `device`.
        timeout_s: a member gives up if joining or one broadcast takes longer.
        ended_elsewhere: called repeatedly while this member waits; raises TransferEnded if the transfer is over for a
            reason that is not in the store.
    """

    def __init__(
        self,
        store: Any,
        prefix: str,
        rank: int,
        size: int,
        backend: str,
        device: torch.device,
        timeout_s: float,
        ended_elsewhere: Callable[[], None] | None = None,
    ) -> None:
        self._host = store.host
        self._store: Any = dist.PrefixStore(prefix, store)
        self._rank, self._size = rank, size
        self._backend, self.device, self._timeout_s = backend, device, timeout_s
        self._ended_elsewhere = ended_elsewhere
        self._group: Any = None
        self._work: Any = None

    def open(self) -> Group:
        """Connects to the other members once all of them are present; returns itself.

        RuntimeError or OSError if it fails; that ends the transfer for all.
        """
        try:
            self._open()
        except BaseException as error:
            self.end(f"{type(error).__name__}: {error}")
            raise
        return self

    def _open(self) -> None:
        self._store.add("here", 1)
        self._wait(lambda: self._store.add("here", 0) >= self._size, "joining")
        # connections of their own: while one waits, it serves no other call
        store, timeout = self._store.clone(), datetime.timedelta(seconds=self._timeout_s)
        if self._backend == "gloo":
            options = gloo_options(self._host, timeout + _GLOO)
            self._group = dist.ProcessGroupGloo(store, self._rank, self._size, options)
            return
        nccl = dist.ProcessGroupNCCL.Options()
        nccl._timeout = timeout + _WATCHDOG
        self._group = dist.ProcessGroupNCCL(store, self._rank, self._size, nccl)
        self._group.eager_connect_single_device(self.device)  # otherwise the first broadcast would do it

    def broadcast(self, tensor: torch.Tensor) -> torch.Tensor:
        """Broadcasts the first member's `tensor`, in place. RuntimeError if a member is gone or ended the transfer."""
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        self._work = self._group.broadcast([tensor], options)
        self._wait(self._work.is_completed, "a broadcast")
        self._work.wait()  # raises the error of the collective
        self._work = None
        return tensor

    def end(self, why: str, *, own: bool = False) -> None:
        """Ends the transfer for all members, and leaves. The first reason counts.

        `own`: whether this member caused the end, not the group or another member.
        """
        with suppress(RuntimeError):  # the store ends with the trainer
            self._store.compare_set("over", "", json.dumps([self._rank if own else None, why[:2000]]))
        group, work, self._group, self._work = self._group, self._work, None, None
        if group is not None:
            threading.Thread(target=_drop, args=(group, work), name="weight-group-end", daemon=True).start()

    def over(self) -> tuple[int | None, str] | None:
        """Returns (rank of the member that ended the transfer for its own reason, or None; the reason), or None."""
        if not self._store.check(["over"]):
            return None
        rank, why = json.loads(self._store.get("over"))
        return rank, why

    def _wait(self, is_done: Callable[[], bool], what: str) -> None:
        """Waits for the other members; TransferEnded if one ended the transfer, or after the deadline."""
        started = looked = time.monotonic()
        pause = 1e-4
        while not is_done():
            time.sleep(pause)
            pause, now = min(2 * pause, 0.02), time.monotonic()
            if now < looked + LOOK_EVERY_S:
                continue
            looked = now
            if (over := self.over()) is not None:
                raise TransferEnded(over[1])
            if self._ended_elsewhere is not None:
                self._ended_elsewhere()
            if now > started + self._timeout_s:
                raise TransferEnded(f"{what} took longer than {self._timeout_s:.0f} s: a member does not take part")


def _drop(group: Any, work: Any) -> None:
    """Drops a group whose last collective may not have ended: over gloo it can't be interrupted, only waited for."""
    with suppress(RuntimeError):
        group.abort()
        if work is not None:
            work.wait()


def address_towards(host: str) -> str:
    """Finds the address of this machine from which `host` is reached; sends nothing. OSError if no such host exists."""
    family, kind, protocol, _, place = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(place)
        return str(probe.getsockname()[0])


def gloo_options(host: str, timeout: datetime.timedelta) -> Any:
    """Makes options of a gloo group with its store at `host`: a member listens at its address towards `host` alone."""
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=address_towards(host))]
    options._timeout = timeout
    return options
