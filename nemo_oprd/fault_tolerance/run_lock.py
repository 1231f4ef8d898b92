"""One run per directory: a lock that the kernel lets go of when its process ends, however it ends."""

from __future__ import annotations

import fcntl
import os
import socket
import sys
from pathlib import Path
from typing import IO


class RunLock:
    """Held by the world's first rank from before anything is read until its process ends.

    A file lock, not a file: one left behind by a crash locks nothing. The file's text only says who holds it.
    """

    def __init__(self, directory: Path) -> None:
        """Takes the lock on `directory`, which is made if it isn't there.

        Raises:
            ValueError: another process holds it, or the directory can't be written.
        """
        path = directory / ".lock"
        self._path, self._made = path, not directory.exists()
        try:
            directory.mkdir(parents=True, exist_ok=True)
            self._file: IO[str] = path.open("a+")
        except OSError as error:
            raise ValueError(
                f"output={directory} can't be written ({error.strerror}); choose a directory that this user may write"
            ) from error
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._file.seek(0)
            holder = self._file.read().strip() or "another process"
            self._file.close()
            raise ValueError(
                f"output={directory} is in use by {holder}; wait until it has ended, or choose another output"
            ) from None
        except OSError as error:  # some network file systems are mounted without locks
            print(f"{path} can't be locked ({error.strerror}): start no second run in {directory}", file=sys.stderr)
        job = os.environ.get("SLURM_JOB_ID")
        self._file.truncate(0)
        self._file.write(f"process {os.getpid()} on {socket.gethostname()}" + (f", Slurm job {job}" if job else ""))
        self._file.flush()

    def undo(self) -> None:
        """Lets go of it before anything was written: a directory that was made for it alone is removed."""
        self.release()
        if self._made and [*self._path.parent.iterdir()] == [self._path]:
            self._path.unlink()
            self._path.parent.rmdir()

    def release(self) -> None:
        """Lets go of the lock before the process ends."""
        if not self._file.closed:
            self._file.truncate(0)
            self._file.close()
