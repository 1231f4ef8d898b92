"""Locks a run directory for one run; the kernel releases the lock when the process ends, however it ends.

The lock itself is filelock's `FileLock` (flock). This module adds the text that names the holder, the messages, and
continuing with a warning on file systems that are mounted without locks. filelock's fallback for those (a file that
exists while the lock is held) is switched off: such a file stays after a crash and blocks the next start.
"""

from __future__ import annotations

import logging
import os
import socket
from pathlib import Path
from typing import IO

from filelock import FileLock, Timeout

logger = logging.getLogger(__name__)


class RunLock:
    """The lock of a run directory; the world's first rank holds it from before its first write to its end.

    The file `.lock` stays after a crash and locks nothing. Its text only names the holder of the lock.
    """

    def __init__(self, directory: Path) -> None:
        """Creates `directory` if it is missing, and locks it; raises ValueError if it can't be written or is in use."""
        path = Path(os.path.realpath(directory / ".lock"))  # filelock opens no link
        self._path, self._made_directory = path, not directory.exists()
        self._lock = FileLock(path, blocking=False, thread_local=False, fallback_to_soft=False)
        try:
            directory.mkdir(parents=True, exist_ok=True)
            self._text: IO[str] = path.open("a+")
        except OSError as error:
            raise ValueError(
                f"output={directory} can't be written ({error.strerror}); choose a directory that this user may write"
            ) from error
        try:
            self._lock.acquire()
        except Timeout:
            self._text.seek(0)
            holder = self._text.read().strip() or "another process"
            self._text.close()
            raise ValueError(
                f"output={directory} is in use by {holder}; wait until it has ended, or choose another output"
            ) from None
        except OSError as error:  # some network file systems are mounted without locks
            logger.warning(f"{path} can't be locked ({error.strerror}): start no second run in {directory}")
        job = os.environ.get("SLURM_JOB_ID")
        self._text.truncate(0)
        self._text.write(f"process {os.getpid()} on {socket.gethostname()}" + (f", Slurm job {job}" if job else ""))
        self._text.flush()

    def undo(self) -> None:
        """Releases the lock; removes the directory if the lock created it and nothing else was written."""
        self.release()
        if self._made_directory and self._path.exists() and [*self._path.parent.iterdir()] == [self._path]:
            self._path.unlink()
            self._path.parent.rmdir()

    def release(self) -> None:
        """Releases the lock before the process ends; does nothing if it is already released."""
        if not self._text.closed:
            self._text.truncate(0)
            self._text.close()
            self._lock.release()
