"""scripts/one_architecture.py: kernels of other GPUs are emptied, everything else in a wheel stays."""

from __future__ import annotations

import base64
import hashlib
import struct
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
CODE, TEXT = 2, 1


def entry(kind: int, architecture: int, code: bytes) -> bytes:
    """Header of 64 bytes and code, as the compiler of CUDA writes them."""
    header = struct.pack("<HHIQQIHHI", kind, 0x101, 64, len(code), 0, 0, 0, 0, architecture)
    return header[:28] + struct.pack("<I", architecture) + bytes(32) + code


def region(*entries: bytes) -> bytes:
    content = b"".join(entries)
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(content)) + content


def make_wheel(folder: Path, library: bytes) -> Path:
    info = "thing-1.0.dist-info"
    wheel = folder / "thing-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as file:
        file.writestr("thing/libthing.so", library)
        file.writestr("thing/__init__.py", "VALUE = 3\n")
        file.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: thing\nVersion: 1.0\n")
        file.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        file.writestr(f"{info}/RECORD", "".join(f"{name},,\n" for name in [*file.namelist(), f"{info}/RECORD"]))
    return wheel


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "scripts" / "one_architecture.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True)


def test_other_architectures_are_emptied(tmp_path: Path) -> None:
    """Where the wanted one is there: a GPU of another kind would otherwise find nothing in that region."""
    own, other, text = b"own" * 40, b"other" * 40, b"text" * 8
    both = region(entry(CODE, 80, other), entry(CODE, 90, own), entry(TEXT, 90, text))
    alone = region(entry(CODE, 80, other))
    wheel = make_wheel(tmp_path, b"head" + both + b"between" + alone + b"tail")
    done = run(str(wheel), "90")
    assert done.returncode == 0, done.stderr
    with zipfile.ZipFile(wheel) as file:
        found = file.read("thing/libthing.so")
        assert file.read("thing/__init__.py") == b"VALUE = 3\n"
        code = base64.urlsafe_b64encode(hashlib.sha256(found).digest()).rstrip(b"=").decode()
        assert f"thing/libthing.so,sha256={code},{len(found)}" in file.read("thing-1.0.dist-info/RECORD").decode()
    emptied = region(entry(CODE, 80, bytes(200)), entry(CODE, 90, own), entry(TEXT, 90, bytes(32)))
    assert found == b"head" + emptied + b"between" + alone + b"tail"


def test_an_architecture_without_kernels_is_refused(tmp_path: Path) -> None:
    wheel = make_wheel(tmp_path, region(entry(CODE, 80, b"other")))
    before = wheel.read_bytes()
    done = run(str(wheel), "90")
    assert done.returncode == 1 and "has no kernels for architecture 90; expected that of the GPU" in done.stderr
    assert wheel.read_bytes() == before


@pytest.mark.parametrize(
    ("damaged", "expected"),
    [
        (
            region(entry(CODE, 90, b"own"))[:-1].replace(struct.pack("<Q", 3), struct.pack("<Q", 400)),
            "behind its region",
        ),
        (region(entry(CODE, 90, b"own"))[:40], "unpack_from requires"),
    ],
)
def test_a_damaged_wheel_is_refused_and_stays(damaged: bytes, expected: str, tmp_path: Path) -> None:
    wheel = make_wheel(tmp_path, damaged)
    before = wheel.read_bytes()
    done = run(str(wheel), "90")
    assert done.returncode == 1 and expected in done.stderr and "fetch it again" in done.stderr
    assert "Traceback" not in done.stderr
    assert wheel.read_bytes() == before


def test_arguments() -> None:
    assert "expected WHEEL ARCHITECTURE" in run("a.whl", "sm_90").stderr
