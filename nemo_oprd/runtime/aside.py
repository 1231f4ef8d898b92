"""Work that a thread does aside, such as writing files, while the caller goes on. Imports only the standard library."""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Callable

logger = logging.getLogger(__name__)

# what a scheduler or a user sends to all processes of a job; only the main thread answers it
_JOB_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


class Aside:
    """Does one piece of work at a time in a thread. What the work raises is raised by the next call, once.

    The interpreter does not exit before the work is done. Processes that the work starts do not see the signals that
    ask a job to stop; they end with the work.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def start(self, work: Callable[[], None]) -> None:
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
        """Waits as `finish`, where another error is on its way: what the work raised is a warning."""
        try:
            self.finish()
        except Exception as error:
            logger.warning(f"{self._name}: {error}")

    def _run(self, work: Callable[[], None]) -> None:
        # a process that this thread starts inherits the mask, also before its first instruction
        signal.pthread_sigmask(signal.SIG_BLOCK, _JOB_SIGNALS)
        try:
            work()
        except BaseException as error:
            self._error = error
