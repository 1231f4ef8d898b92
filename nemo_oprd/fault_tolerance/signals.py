"""SIGTERM, SIGUSR1 and Ctrl-C: finish the step, save, leave. Ctrl-C after any of them ends the process at once.

Slurm sends SIGUSR1 some time before a job's end (`--signal`) and SIGTERM when it is preempted.

Importing this module does not import torch: the command line asks it about every error, also where torch was not needed
yet.
"""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import TYPE_CHECKING, Any

from nemo_oprd.fault_tolerance import watchdog

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

# what a run that was asked to stop exits with (BSD's EX_TEMPFAIL): nothing is wrong, start the same command again
STOPPED_EXIT_CODE = 75

_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)


class Stopped(Exception):  # noqa: N818 - it is no error
    """The run was asked to stop, has saved, and can go on from there."""


class Signals:
    """Remembers that this process was asked to stop. Use as a context; outside the main thread it does nothing.

    Every rank of the world enters it, and goes on once all have: a signal to the job that reaches one rank at work
    must not end another that isn't ready to answer. On the way out by an exception the signals stay remembered, as long
    as a watchdog ends the process where it hangs.
    """

    def __init__(self) -> None:
        self.received: str | None = None
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Signals:
        import torch.distributed as dist

        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._remember) for number in _SIGNALS}
        if dist.is_initialized():
            dist.barrier()
        return self

    def __exit__(self, kind: type[BaseException] | None = None, *_: object) -> None:
        # A launcher asks the others to end as soon as one rank has failed or was stopped: that must neither cut off
        # what they say of it nor change their exit codes. The watchdog keeps them from staying for ever.
        if kind is None or watchdog.current() is None:
            for number, handler in self._before.items():
                signal.signal(number, handler)

    def _remember(self, number: int, _: FrameType | None) -> None:
        self.received = self.received or signal.Signals(number).name
        # The next Ctrl-C is the kernel's to answer: Python would wait until the main thread is back from a collective.
        signal.signal(signal.SIGINT, signal.SIG_DFL)


def agree(device: torch.device, *flags: bool, group: dist.ProcessGroup | None = None) -> list[bool]:
    """Per flag, whether any rank of the group (None: of the world) has it set; the same answer on all of them.

    Every rank of the group calls this.
    """
    import torch
    import torch.distributed as dist

    merged = torch.tensor(flags, dtype=torch.int32, device=device)
    dist.all_reduce(merged, op=dist.ReduceOp.MAX, group=group)
    return [bool(flag) for flag in merged.tolist()]
