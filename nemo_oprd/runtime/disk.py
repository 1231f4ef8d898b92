"""Checks that the output can be written before any expensive work, and explains disk errors later."""

from __future__ import annotations

import errno
import os
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

# size of the probe for any free space; a run needs far more
PROBE_BYTES = 1 << 20
_ABOUT_FILES = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO, errno.EFBIG}
_ABOUT_FILES |= {errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ENAMETOOLONG, errno.ELOOP}

# system directories, which are no place for results; /mnt or /output may be a mounted volume
_OF_SYSTEM = {
    *("/bin", "/boot", "/dev", "/dev/shm", "/etc", "/home", "/lib", "/lib64", "/opt", "/run", "/sbin"),
    *("/tmp", "/usr", "/usr/local", "/var", "/var/tmp"),
}
# all files below these are the kernel's, except those on RAM disks
_OF_KERNEL, _MEMORY = (Path("/dev"), Path("/proc"), Path("/sys")), Path("/dev/shm")


def check_output(output: str | Path, key: str = "output") -> None:
    """Raises ValueError, naming the configuration `key`, unless the directory `output` can be created and written.

    Leaves nothing behind: the probe is an unnamed temporary file in the nearest directory that exists.
    """
    if not str(output).strip():
        raise ValueError(f"{key}={output!r}: expected a directory; name one, e.g. {key}=runs/first")
    check_place(output, key)
    path = Path(output).absolute()
    try:
        existing = next(parent for parent in (path, *path.parents) if parent.exists() or parent.is_symlink())
    except (OSError, ValueError) as error:  # too long a name, or one with a null character
        why = error.strerror if isinstance(error, OSError) else str(error)
        raise ValueError(f"{key}={output}: can't be the name of a directory ({why}); choose another {key}") from error
    if not existing.is_dir():
        what = f"a link to {os.readlink(existing)}, which does not exist" if existing.is_symlink() else "a file"
        raise ValueError(f"{key}={output}: {existing} is {what}, expected a directory; choose another {key}")
    try:
        with tempfile.TemporaryFile(dir=existing, buffering=0) as probe:
            probe.write(bytes(PROBE_BYTES))
    except OSError as error:
        raise ValueError(f"{key}={output}: {describe(error, existing)}") from error


def check_place(output: str | Path, key: str) -> None:
    """Raises ValueError, naming the option `key`, for a system or home directory, which no command may fill."""
    place = _shared_place(Path(output))
    if place is not None:
        raise ValueError(
            f"{key}={output} is {place}, where results would lie among other files; expected a directory of its own: "
            f"choose e.g. {key}=runs/first"
        )


def _shared_place(directory: Path) -> str | None:
    """Describes the root, the user's home, or a directory of the system or the kernel; None for all others."""
    try:
        place = directory.resolve()
    except (OSError, ValueError):  # a name that no directory can have
        return None
    if place == Path(place.anchor):
        return "the root of the file system"
    if place == Path(os.path.expanduser("~")).resolve():
        return "a home directory"
    if str(place) in _OF_SYSTEM:
        return "a directory of the system"
    of_kernel = any(place.is_relative_to(each) for each in _OF_KERNEL) and not place.is_relative_to(_MEMORY)
    return "a place of the kernel's" if of_kernel else None


def check_file(path: str | Path, option: str) -> None:
    """Raises ValueError, naming the command's `option`, unless a file can be written at `path`. Writes nothing."""
    file = Path(path)
    if file.is_dir():
        raise ValueError(f"{option} {path}: is a directory, expected a file to write; add a name such as report.json")
    if not file.absolute().parent.is_dir():
        raise ValueError(f"{option} {path}: there is no directory {file.parent}, expected one; create it first")


def describe(error: OSError, path: str | Path | None = None) -> str:
    """Returns one line that names the error, the path and the fix."""
    where = error.filename if path is None and error.filename else path
    fixes = {
        errno.ENOSPC: "free some space, or choose an output on another disk",
        errno.EDQUOT: "free some of the quota, or choose an output on another disk",
        errno.EROFS: "choose an output on another disk",
        errno.EACCES: "change its permissions, or choose another path",
        errno.EPERM: "change its permissions, or choose another path",
    }
    fix = fixes.get(error.errno or 0, "check the path, or choose another")
    place = f"{where}: " if where else ""
    return f"{place}can't be read or written ({error.strerror or error}), expected a usable path; {fix}"


@contextmanager
def naming(path: str | Path) -> Iterator[None]:
    """Adds `path` to the context's disk errors that name no file; torch's errors about a full disk become OSErrors."""
    try:
        yield
    except OSError as error:
        if error.filename is None and is_about_files(error):
            raise OSError(error.errno, error.strerror, str(path)) from error
        raise
    except RuntimeError as error:
        if no_space(error):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path)) from error
        raise


def is_about_files(error: BaseException) -> bool:
    """Returns whether an error comes from the disk or a path, as opposed to the network or the program."""
    return isinstance(error, OSError) and error.errno in _ABOUT_FILES


def no_space(error: BaseException) -> bool:
    """Returns whether safetensors or torch ran out of disk space: both raise exceptions of their own.

    The text holds the system's error number, or, from torch.save to a path, only that a C++ stream failed or that fewer
    bytes were written than given.
    """
    pattern = r"os error (28|122)\b|No space left|PytorchStreamWriter failed|unexpected pos \d+ vs \d+|iostream error"
    return re.search(pattern, str(error)) is not None
