"""Empties the CUDA kernels of a wheel that other GPUs need: `python scripts/one_architecture.py WHEEL 90`.

The wheel stays installable, and compresses to a fraction: of Transformer Engine 2.20.2, 32 of 277 MB for capability
9.0. Not yet run on a GPU.

A shared library holds regions of kernels, each a header of 16 bytes (magic, version, size of the header, size of what
follows) and entries (kind, version, size of the header, size of the code, ..., architecture). Code for the device's own
architecture is what the driver loads, so the others' is replaced by zeros where a region has the wanted one.
"""

from __future__ import annotations

import base64
import hashlib
import mmap
import struct
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

_MAGIC = struct.pack("<IHH", 0xBA55ED50, 1, 16)
_REGION = struct.Struct("<8xQ")
_ENTRY = struct.Struct("<HHIQ12xI")  # kind, version, sizes of header and code, ..., architecture
_CODE = 2  # kind of an entry of machine code; another is text for the driver's compiler


def entries(data: mmap.mmap, start: int) -> Iterator[tuple[int, int, int, int]]:
    """(Kind, architecture, first byte, size) of the code of each entry of the region at `start`.

    Raises:
        ValueError: an entry does not end inside of the region.
    """
    (size,) = _REGION.unpack_from(data, start)
    place, end = start + 16, start + 16 + size
    while place < end:
        kind, _, header, code, architecture = _ENTRY.unpack_from(data, place)
        if header < _ENTRY.size or place + header + code > end:
            raise ValueError(
                f"at byte {place}: an entry of {header} and {code} bytes ends behind its region; expected one inside"
            )
        yield kind, architecture, place + header, code
        place += header + code


def empty_others(library: Path, architecture: int) -> tuple[int, int]:
    """Writes zeros over the code of other architectures; returns how many bytes, and those of the one that is kept."""
    emptied = kept = 0
    with library.open("r+b") as file, mmap.mmap(file.fileno(), 0) as data:
        start = data.find(_MAGIC)
        while start >= 0:
            found = list(entries(data, start))
            wanted = [each for each in found if each[:2] == (_CODE, architecture)]
            for kind, given, first, size in found if wanted else []:
                if (kind, given) != (_CODE, architecture):
                    data[first : first + size] = bytes(size)
                    emptied += size
            kept += sum(size for *_, size in wanted)
            start = data.find(_MAGIC, start + 16 + _REGION.unpack_from(data, start)[0])
    return emptied, kept


def smaller(wheel: Path, target: Path, architecture: int) -> int:
    """Writes the wheel without the code of other architectures; returns the bytes of the code that is kept."""
    kept = 0
    changed: dict[str, str] = {}  # file -> its line of RECORD
    with zipfile.ZipFile(wheel) as read, zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as written:
        names = sorted(read.namelist(), key=lambda name: name.endswith(".dist-info/RECORD"))  # which is the last one
        for name in names:
            if name.endswith("/RECORD"):
                lines = read.read(name).decode().splitlines()
                written.writestr(name, "".join(f"{changed.get(line.split(',')[0], line)}\n" for line in lines))
            elif ".so" in Path(name).suffixes:
                with tempfile.TemporaryDirectory(dir=target.parent) as folder:
                    library = Path(read.extract(name, folder))
                    kept += empty_others(library, architecture)[1]
                    with library.open("rb") as file:
                        digest = hashlib.file_digest(file, "sha256").digest()
                    code = base64.urlsafe_b64encode(digest).rstrip(b"=").decode()
                    changed[name] = f"{name},sha256={code},{library.stat().st_size}"
                    written.write(library, name)
            else:
                written.writestr(read.getinfo(name), read.read(name), zipfile.ZIP_DEFLATED)
    return kept


def main(arguments: list[str]) -> None:
    """Replaces the wheel by the smaller one, of the same name."""
    if len(arguments) != 2 or not arguments[1].isdigit():
        raise SystemExit(f"{' '.join(arguments)}: expected WHEEL ARCHITECTURE, such as 90 for compute capability 9.0")
    wheel, architecture = Path(arguments[0]), int(arguments[1])
    with tempfile.TemporaryDirectory(dir=wheel.parent) as folder:
        made = Path(folder) / wheel.name
        try:
            kept = smaller(wheel, made, architecture)
        except (ValueError, struct.error, zipfile.BadZipFile) as error:
            raise SystemExit(f"{wheel.name}: {error}; the wheel is as it was: fetch it again") from error
        if not kept:
            raise SystemExit(
                f"{wheel.name} has no kernels for architecture {architecture}; expected that of the GPU: name another"
            )
        made.replace(wheel)


if __name__ == "__main__":
    main(sys.argv[1:])
