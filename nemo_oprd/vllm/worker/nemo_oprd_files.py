"""The files that a server opens for a trainer: those in a folder of the run, and no others on this machine.

The run names the folder when it starts the server (FOLDER in the environment). A student's server of `nemo-oprd serve`
serves one run after the other and has no such variable: it accepts any folder of this user directly in shared memory
whose name is that of a run's folder. The module needs the standard library alone.
"""

from __future__ import annotations

import os
import re
import stat

# variable in a server's environment: the folder of the run that has started it
FOLDER = "NEMO_OPRD_FOLDER"
_FOLDER_OF_A_RUN = re.compile(r"/dev/shm/nemo_oprd_[\w.-]+")


def open_bucket(path: str, size: int) -> int:
    """Opens a file of `size` bytes or more in the run's folder for reading; returns the descriptor.

    Raises:
        ValueError: the file is elsewhere, a link, no plain file, too short, or another user can change it.
    """
    folder, _, name = path.rpartition("/")
    own = os.environ.get(FOLDER)
    is_in_folder = folder == own if own else _FOLDER_OF_A_RUN.fullmatch(folder) is not None
    if not is_in_folder or name in ("", ".", ".."):
        raise ValueError(_wrong(path, "is elsewhere"))
    try:
        inside = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            found = os.fstat(inside)
            if found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & 0o077:
                raise ValueError(_wrong(path, "is in a folder that others can enter"))
            file = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=inside)
        finally:
            os.close(inside)
    except OSError as error:
        raise ValueError(_wrong(path, f"can't be opened ({error.strerror})")) from None
    found = os.fstat(file)
    if stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid() and found.st_size >= size:
        return file
    os.close(file)
    raise ValueError(_wrong(path, f"is no plain file of this user with {size} bytes"))


def _wrong(path: str, what: str) -> str:
    return f"{path} {what}; expected a file of weights in the run's own folder, which this user alone can enter"
