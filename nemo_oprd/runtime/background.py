"""Work that a thread does aside, such as writing files, while the caller goes on. Imports only the standard library."""

from __future__ import annotations

import logging
import signal
import threading
import time
from collections.abc import Callable

logger = logging.getLogger(__name__)

# what a scheduler or a user sends to all processes of a job; only the main thread answers it
_JOB_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)

# how long a process that ends with an error waits for the work that was under way
LEAVE_S = 5.0
_abandoned: list[Aside] = []


class Aside:
    """Does one piece of work at a time in a thread. What the work raises is raised by the next call, once.

    The interpreter does not exit before the work is done; `leave` says whether it is. Processes that the work starts do
    not see the signals that ask a job to stop; they end with the work.
    """

    def __init__(self, name: str) -> None:
        """Waits for what another one has abandoned in this process: the new work may be on the same files."""
        leave(None)
        self._name = name
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def start(self, work: Callable[[], object]) -> None:
        """Starts `work`, after the previous work is done. It should need the interpreter for moments only."""
        self.finish()
        self._thread = threading.Thread(target=self._run, args=(work,), name=self._name)
        self._thread.start()

    def check(self) -> None:
        """Raises what the work raised if it has failed; does not wait."""
        if self._thread is None or not self._thread.is_alive():
            self.finish()

    def finish(self) -> None:
        """Waits until the work is done, and raises what it raised."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error

    def abandon(self) -> None:
        """In place of `finish` where another error is on its way, which is told first: does not wait, see `leave`."""
        _abandoned.append(self)

    def _left(self, seconds: float | None) -> bool:
        """Whether the work ends within `seconds`; what it raises is a warning."""
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
        # a process that this thread starts inherits the mask, also before its first instruction
        signal.pthread_sigmask(signal.SIG_BLOCK, _JOB_SIGNALS)
        try:
            work()
        except BaseException as error:
            self._error = error


def leave(most_s: float | None) -> bool:
    """Waits for abandoned work, `most_s` seconds in all (None: to its end); whether nothing of it goes on."""
    deadline = None if most_s is None else time.monotonic() + most_s
    waited, _abandoned[:] = _abandoned[:], []
    ended = [aside._left(None if deadline is None else max(0.0, deadline - time.monotonic())) for aside in waited]
    return all(ended)
