"""Handles SIGTERM, SIGUSR1 and Ctrl-C: a run finishes its step, saves and exits. A further Ctrl-C ends it at once.

Slurm sends SIGUSR1 some time before a job's end (`--signal`) and SIGTERM when it is preempted. Importing this module
does not import torch: the command line uses it for every error, even before torch is needed.
"""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import TYPE_CHECKING, Any

from nemo_oprd.runtime import watchdog

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

# exit code of a run that was asked to stop (BSD's EX_TEMPFAIL): no error; the same command resumes
STOPPED_EXIT_CODE = 75

# the signals that a scheduler or a user sends to all processes of a job
JOB_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
# those of them that end a program which has nothing to save
END_SIGNALS = JOB_SIGNALS[:3]

# those that ask a run to stop
STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)

_entered: Signals | None = None


class Stopped(Exception):  # noqa: N818 - not an error
    """Raised after a signal asked the run to stop and it saved what it had; the same command resumes from there."""


class StoppedWaiting(Stopped):
    """Raised when a signal asks the run to stop while it waits for a server; nothing is saved yet."""


def requested_stop() -> str | None:
    """Returns the signal that asked this run to stop, such as "SIGTERM"; None before any, or outside of `Signals`."""
    return None if _entered is None else _entered.received


class Signals:
    """Records the signals that ask this process to stop. A context manager; outside the main thread it does nothing.

    Every rank of the world enters it and waits there for the others: a signal to the job must not end a rank whose
    handlers are not installed yet. If the body raises and a watchdog runs, the handlers stay installed; the watchdog
    then ends the process should it hang. `received` is the name of the first signal ("SIGTERM"), None before any.
    """

    def __init__(self) -> None:
        self.received: str | None = None
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Signals:
        global _entered
        import torch.distributed as dist

        _entered = self
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._remember) for number in STOP_SIGNALS}
        if dist.is_initialized():
            dist.barrier()
        return self

    def __exit__(self, kind: type[BaseException] | None = None, *_: object) -> None:
        global _entered
        _entered = None
        # A launcher sends SIGTERM to the other ranks as soon as one rank has failed or stopped. The signal must neither
        # cut off the messages of those ranks nor change their exit codes. The watchdog ends ranks that hang.
        if kind is None or watchdog.current() is None:
            for number, handler in self._before.items():
                signal.signal(number, handler)

    @property
    def stop_requested(self) -> bool:
        """Returns whether this process received one of the signals."""
        return self.received is not None

    @property
    def by(self) -> str:
        """Describes the signal that asked the run to stop, in words."""
        return self.received or "a signal to another rank"

    def _remember(self, number: int, _: FrameType | None) -> None:
        self.received = self.received or signal.Signals(number).name
        # The kernel handles the next Ctrl-C: Python would wait until the main thread has returned from a collective.
        signal.signal(signal.SIGINT, signal.SIG_DFL)


def agree(device: torch.device, *flags: bool, group: dist.ProcessGroup | None = None) -> list[bool]:
    """Returns per flag whether any rank of the group (None: of the world) has set it. All its ranks call this."""
    import torch
    import torch.distributed as dist

    merged = torch.tensor(flags, dtype=torch.int32, device=device)
    dist.all_reduce(merged, op=dist.ReduceOp.MAX, group=group)
    return [bool(flag) for flag in merged.tolist()]
