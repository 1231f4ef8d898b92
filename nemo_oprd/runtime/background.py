"""Runs work in a background thread, such as writing files, while the caller continues. Standard library only."""

from __future__ import annotations

import logging
import signal
import threading
import time
from collections.abc import Callable

from nemo_oprd.runtime.signals import JOB_SIGNALS

logger = logging.getLogger(__name__)

# how long a process that ends with an error waits for unfinished work
LEAVE_S = 5.0
_abandoned: list[BackgroundWriter] = []


class BackgroundWriter:
    """Does one piece of work at a time in a thread. The next call raises the work's exception, once.

    The interpreter does not exit before the work is done; `leave` limits the wait for abandoned work. Processes that
    the work starts do not receive the signals that ask a job to stop; they end with the work.
    """

    def __init__(self, name: str) -> None:
        """Waits for work that another instance abandoned in this process: the new work may use the same files."""
        leave(None)
        self._name = name
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def start(self, work: Callable[[], object]) -> None:
        """Starts `work`, after the previous work is done. `work` should hold the interpreter only briefly."""
        self.finish()
        self._thread = threading.Thread(target=self._run, args=(work,), name=self._name)
        self._thread.start()

    def check(self) -> None:
        """Raises the work's exception if it has failed; does not wait."""
        if self._thread is None or not self._thread.is_alive():
            self.finish()

    def finish(self) -> None:
        """Waits until the work is done, and raises its exception if it failed."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error

    def abandon(self) -> None:
        """Leaves the work to `leave`, without waiting: the caller raises another error, which is reported first."""
        _abandoned.append(self)

    def _left(self, seconds: float | None) -> bool:
        """Returns whether the work ends within `seconds`; logs its exception as a warning."""
        if self._thread is not None:
            self._thread.join(seconds)
            if self._thread.is_alive():
                logger.warning(f"{self._name}: given up, because they are not written after {LEAVE_S:.0f} s")
                return False
        try:
            self.finish()
        except Exception as error:
            logger.warning(f"{self._name}: {error}")
        return True

    def _run(self, work: Callable[[], object]) -> None:
        # a process that this thread starts inherits the mask before its first instruction
        signal.pthread_sigmask(signal.SIG_BLOCK, JOB_SIGNALS)  # only the main thread handles them
        try:
            work()
        except BaseException as error:
            self._error = error


def leave(most_s: float | None) -> bool:
    """Waits at most `most_s` seconds (None: without limit) for all abandoned work; returns whether it has ended."""
    deadline = None if most_s is None else time.monotonic() + most_s
    waited, _abandoned[:] = _abandoned[:], []
    ended = [writer._left(None if deadline is None else max(0.0, deadline - time.monotonic())) for writer in waited]
    return all(ended)
