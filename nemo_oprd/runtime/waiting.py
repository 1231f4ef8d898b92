"""Makes long waits visible and interruptible: after half a minute a line names the cause; a signal ends the wait.

torch waits outside of the interpreter, where Python's handlers don't run, and some of its calls have no limit. So they
run in a thread, while the main thread handles lines, limits and signals. Importing this module imports no torch.
"""

from __future__ import annotations

import logging
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from types import FrameType
from typing import TypeVar

from nemo_oprd.runtime import launcher
from nemo_oprd.runtime.messages import ANY_RANK
from nemo_oprd.runtime.signals import STOP_SIGNALS, Stopped

logger = logging.getLogger(__name__)

T = TypeVar("T")
# after this time a line names the cause of the wait, and again each time that the wait has become twice as long
SAY_AFTER_S = 30.0
# the delay with which a signal, the end of another rank, or the end of the limit may be noticed
_LOOK_EVERY_S = 0.2
_abandoned: list[threading.Thread] = []


def wait_for(work: Callable[[], T], what: Callable[[], str], limit_s: float) -> T:
    """Runs `work` in a thread; returns its result or raises its exception.

    Args:
        what: returns the cause of the wait and the fix, as in "rank(s) 1: start them". Called whenever a line is due;
            no line is printed if it is empty, because another rank prints it.

    Raises:
        ValueError: the wait took longer than `limit_s` seconds.
        Stopped: SIGTERM or SIGUSR1 arrived and had no handler. Ctrl-C raises KeyboardInterrupt, as always.
        NeighbourFailed: another rank of this machine has reported an error to torchrun.
    """
    outcome, over = Future[T](), threading.Event()

    def run() -> None:
        try:
            outcome.set_result(work())
        except BaseException as error:
            outcome.set_exception(error)
        over.set()

    thread = threading.Thread(target=run, name="wait", daemon=True)
    notice = Notice(limit_s)
    with _stop_requested() as asked:
        thread.start()
        try:
            while not over.wait(_LOOK_EVERY_S):
                if asked:
                    break
                if launcher.neighbour_reported():
                    raise launcher.NeighbourFailed
                if notice.is_over:
                    raise over_limit(limit_s, what())
                if notice.is_due and (line := notice.line(what())):
                    logger.warning(line, extra=ANY_RANK)
        except BaseException:
            _abandoned.append(thread)
            raise
    if asked:  # also if it arrived after the wait: no other code handles it
        _abandoned.append(thread)
        about = _or_ranks(what()).partition(": ")[0]
        raise Stopped(f"stopped by {asked[0]} while waiting for {about}; the same command starts again")
    return outcome.result()


def over_limit(limit_s: float, what: str) -> ValueError:
    """Returns the error of a wait that took longer than its limit; `what` is as for `wait_for`."""
    return ValueError(f"waited {duration(limit_s)}, which is the limit, for {_or_ranks(what)}")


def has_abandoned() -> bool:
    """Returns whether a thread is still in an abandoned call; the interpreter can't shut down cleanly around it."""
    return any(thread.is_alive() for thread in _abandoned)


class Notice:
    """Decides when a wait of at most `limit_s` seconds prints a line, and formats it."""

    def __init__(self, limit_s: float) -> None:
        self.limit_s, self._began, self._next_s = limit_s, time.monotonic(), SAY_AFTER_S

    @property
    def waited_s(self) -> float:
        """Returns the seconds since the wait began."""
        return time.monotonic() - self._began

    @property
    def is_over(self) -> bool:
        """Returns whether the limit has passed."""
        return self.waited_s > self.limit_s

    @property
    def is_due(self) -> bool:
        """Returns whether a line is due."""
        return self.waited_s >= self._next_s

    def line(self, what: str) -> str:
        """Returns the line that is due now, empty if `what` is; the next one is due after twice the time."""
        self._next_s *= 2
        about, _, advice = what.partition(": ")
        return what and f"waiting for {about}, limit {duration(self.limit_s)}{advice and f': {advice}'}"


def duration(seconds: float) -> str:
    """Formats a time in the largest unit that gives a whole number, such as "3 h", "15 min" or "90 s"."""
    for unit, name in ((3600, "h"), (60, "min")):
        if seconds >= unit and seconds % unit == 0:
            return f"{seconds // unit:.0f} {name}"
    return f"{seconds:g} s"


def _or_ranks(what: str) -> str:
    return what or "other ranks"


@contextmanager
def _stop_requested() -> Iterator[list[str]]:
    """Records the names of signals that ask the job to stop and would end this process without a message."""
    asked: list[str] = []

    def note(number: int, _: FrameType | None) -> None:
        asked.append(signal.Signals(number).name)

    before = {}
    if threading.current_thread() is threading.main_thread():
        for number in {*STOP_SIGNALS} - {signal.SIGINT}:  # a further Ctrl-C ends the process at once
            if signal.getsignal(number) is signal.SIG_DFL:
                before[number] = signal.signal(number, note)
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
