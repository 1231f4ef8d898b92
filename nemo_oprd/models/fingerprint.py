"""Fingerprints a model on disk, whatever its path; samples large files, because every run does this at its start."""

from __future__ import annotations

import hashlib
from functools import cache
from pathlib import Path

from nemo_oprd.models.checkpoint_directory import checkpoint_directory

_PIECES, _PIECE_BYTES = 64, 1 << 16
_WHOLE = ("config.json", "hf/config.json", "common.pt", ".metadata")


def fingerprint(directory: Path) -> str | None:
    """Returns the sha256 (hex) of a model's config.json and weights; None if there is no such directory.

    `directory` is a Hugging Face model, or as for `checkpoint_directory`. The hash covers each file's name and size,
    and 64 evenly spread pieces of 64 KiB; files of at most 4 MiB are read completely.

    Raises:
        ValueError: as `checkpoint_directory`.
        OSError: a file can't be read.
    """
    directory = checkpoint_directory(directory)
    if not directory.is_dir():
        return None
    whole = [directory / name for name in _WHOLE]
    weights = [*directory.glob("*.safetensors"), *directory.glob("*.distcp")]
    files = sorted(path for path in (*whole, *weights) if path.is_file())
    states = [(str(file.relative_to(directory)), file.stat()) for file in files]
    return _digest(directory.resolve(), tuple((name, stat.st_size, stat.st_mtime_ns) for name, stat in states))


@cache
def _digest(directory: Path, files: tuple[tuple[str, int, int], ...]) -> str:
    found = hashlib.sha256()
    for name, size, _ in files:
        found.update(f"{name} {size}\n".encode())
        with (directory / name).open("rb") as stream:
            for offset in _offsets(size):
                stream.seek(offset)
                found.update(stream.read(_PIECE_BYTES))
    return found.hexdigest()


def _offsets(size: int) -> range | list[int]:
    """Returns the offsets of the pieces of a file of `size` bytes."""
    if size <= _PIECES * _PIECE_BYTES:
        return range(0, size, _PIECE_BYTES)
    return [number * (size - _PIECE_BYTES) // (_PIECES - 1) for number in range(_PIECES)]
