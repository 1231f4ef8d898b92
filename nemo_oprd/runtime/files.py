"""Writes files atomically, and reads JSON with one-line errors that name the file.

A file is first written in the same directory as `.partial_NAME` and then renamed, so a reader finds the old content or
the new content and never a part of it, and a killed process leaves the old content. The next write of the same name
replaces a `.partial_NAME` that a killed process left behind. Imports nothing but the standard library and
`runtime/disk.py`.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from nemo_oprd.runtime.disk import naming

PARTIAL = ".partial_"
# first line of the pointer that stands for a large file until `git lfs pull` has fetched it
_LFS_POINTER = b"version https://git-lfs"


def cache_directory() -> Path:
    """Returns the folder of this package in the user's cache; it need not exist."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "nemo_oprd"


def partial_path(path: Path) -> Path:
    """Returns the temporary path beside `path` for its new content."""
    return path.with_name(f"{PARTIAL}{path.name}")


@contextmanager
def replacing(path: Path, *, durable: bool = True) -> Iterator[Path]:
    """Yields a path for a new file; at the end that file replaces `path`. The directory must exist.

    If the body raises, the partial file is removed and `path` stays as it was. With `durable`, the content and the new
    name are also flushed to the disk, so that they survive a loss of power.

    Raises:
        OSError: the disk is full or the file can't be written; the error names `path`, see `disk.naming`.
    """
    partial = partial_path(path)
    with naming(path):
        try:
            yield partial
            if durable:
                flush(partial)
            partial.rename(path)
        except BaseException:
            partial.unlink(missing_ok=True)
            raise
        if durable:
            flush(path.parent)


@contextmanager
def replacing_directory(path: Path, *, overwrite: bool = True) -> Iterator[Path]:
    """Yields an empty new directory; at the end it replaces the directory `path`, flushed to the disk.

    Directories can't be exchanged in one operation: a process that is killed between the removal of an old `path` and
    the renaming leaves none. If the body raises, the partial directory is removed and `path` stays as it was. Without
    `overwrite`, files that are in `path` by then are kept, e.g. the result of another process.

    Raises:
        OSError: the disk is full, a file can't be written, or `path` holds files that must not be overwritten; the
            error names `path`, see `disk.naming`.
    """
    partial = partial_path(path)
    with naming(path):
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        try:
            yield partial
            flush_tree(partial)
            if overwrite:
                shutil.rmtree(path, ignore_errors=True)
            partial.rename(path)  # replaces an empty directory, and fails on any other
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
        flush(path.parent)


def write_atomically(path: Path, text: str) -> None:
    """Replaces the content of `path` by `text` in UTF-8, flushed to the disk. Raises OSError as `replacing`."""
    with replacing(path) as partial:
        partial.write_text(text, encoding="utf-8")


def flush(path: Path) -> None:
    """Waits until the disk has the content of a file, or the names in a directory."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def flush_tree(directory: Path) -> None:
    """Waits until the disk has everything in a directory, at any depth."""
    for path in [*directory.rglob("*"), directory]:
        flush(path)


_KINDS = {
    stat.S_IFIFO: "a named pipe (FIFO)",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket",
}


def kind_of(path: str | Path) -> str:
    """Names an object at `path` that is neither file nor directory, for messages ("a device"); else "".

    Reading a named pipe waits for a writer, and reading /dev/zero never ends, so neither is opened.
    """
    try:
        return _KINDS.get(stat.S_IFMT(os.stat(path).st_mode), "")
    except (OSError, ValueError):  # no such file, or a name that no file can have
        return ""


def why_no_file(path: str | Path, *extensions: str) -> str:
    """Describes, for messages, what is at `path` instead of a file; lists a directory's files with the `extensions`."""
    path = Path(path)
    if not path.is_dir():
        if kind := kind_of(path):
            return f"is {kind}"
        if path.is_symlink():
            return f"is a link to {os.readlink(path)}, which does not exist"
        return "no such file"
    found = sorted(each.name for each in path.iterdir() if each.is_file() and each.suffix in extensions)
    if not found:
        return f"is a directory, and has no {' or '.join(extensions) or 'such'} file in it"
    return f"is a directory, with {', '.join(found[:3])}{f' and {len(found) - 3} more' if len(found) > 3 else ''} in it"


def read_json(path: Path, expected: str, fix: str) -> dict[str, Any]:
    """Reads the JSON object in a file.

    For messages, `expected` is the file's expected content ("an object with weight_map"), and `fix` the remedy for a
    file that is missing or damaged ("copy it again").

    Raises:
        ValueError: the file doesn't exist, isn't JSON, or holds something other than an object.
    """
    if not path.is_file():
        raise ValueError(f"{path}: {why_no_file(path, path.suffix)}; expected {expected}: {fix}")
    content = parse_json(path.read_bytes(), str(path), expected, fix)
    if not isinstance(content, dict):
        raise ValueError(f"{path}: holds a {type(content).__name__}, expected {expected}; {fix}")
    return content


def refuse_lfs_pointer(file: Path) -> None:
    """Raises ValueError if a file is a pointer of Git LFS. Does nothing if there is no such file."""
    if not file.is_file():
        return
    with file.open("rb") as stream:
        _refuse_pointer(stream.read(len(_LFS_POINTER)), str(file))


def _refuse_pointer(data: bytes, where: str) -> None:
    if data.startswith(_LFS_POINTER):
        raise ValueError(
            f"{where}: a pointer of Git LFS, which stands for the file in a repository that was cloned without it; "
            "expected the file itself: run `git lfs pull` in that folder, or copy the file from its source"
        )


def parse_json(data: str | bytes, where: str, expected: str, fix: str, *, encodes: bool = False) -> Any:
    """Parses a JSON text in UTF-8; raises ValueError if it is malformed, or a pointer of Git LFS.

    `where` is the file, or the file and its line, for the message; `expected` and `fix` are as in `read_json`.
    `encodes`: a lone surrogate is an error, too, because the text will be encoded, for a model or a file.
    """
    beginning = data[: len(_LFS_POINTER)]
    _refuse_pointer(beginning.encode(errors="replace") if isinstance(beginning, str) else beginning, where)
    try:
        content = json.loads(data)
    except (ValueError, RecursionError) as error:  # malformed JSON, malformed UTF-8, or brackets nested too deeply
        raise ValueError(f"{where}: not valid JSON ({error}); expected {expected}: {fix}") from error
    surrogates = _SURROGATE_BYTES if isinstance(data, bytes) else _SURROGATES
    if encodes and surrogates.search(data) and (half := half_of_a_character(content)) is not None:  # type: ignore[arg-type]
        raise ValueError(
            f"{where}: holds {half!r}, half of a character (a lone surrogate), which is no text and cannot be encoded; "
            f"expected whole characters: {fix}"
        )
    return content


# a surrogate in JSON, escaped or as it stands; halves of one character follow each other
_SURROGATES = re.compile(r"\\u[dD][89a-fA-F]|[\ud800-\udfff]")
_SURROGATE_BYTES = re.compile(rb"\\u[dD][89a-fA-F]|\xed[\xa0-\xbf]")


def half_of_a_character(value: Any) -> str | None:
    """Returns the first lone surrogate in the texts of a JSON value, with its context; None if there is none."""
    if isinstance(value, str):
        found = re.search("[\ud800-\udfff]", value)
        return None if found is None else value[max(0, found.start() - 10) : found.end() + 10]
    parts = [*value, *value.values()] if isinstance(value, dict) else value if isinstance(value, list) else ()
    return next((half for part in parts if (half := half_of_a_character(part)) is not None), None)
