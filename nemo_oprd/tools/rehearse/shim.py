"""Builds `shim.cpp` once per version of torch, and loads it before torch."""

from __future__ import annotations

import ctypes
import hashlib
import importlib.metadata
import importlib.util
import shutil
import subprocess
import tempfile
from pathlib import Path

from nemo_oprd.runtime.files import cache_directory

SOURCE = Path(__file__).with_name("shim.cpp")
COMPILERS = ("g++", "clang++", "c++")


def load() -> None:
    """Imports torch with the shim in it; torch must not be imported yet.

    The shim's CUDA hooks register themselves before those of a CUDA build of torch, which leaves them in place. Its
    device guard is registered after torch's, because the last guard is the one that is used.

    Raises:
        ValueError: there is no C++ compiler, or it refuses the source.
    """
    found = importlib.util.find_spec("torch")
    assert found is not None and found.origin is not None, "torch is a dependency of this package"
    torch = Path(found.origin).parent
    library = build(torch)
    for path in (torch / "lib" / "libc10.so", torch / "lib" / "libtorch_cpu.so"):
        ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
    shim = ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
    importlib.import_module("torch")
    shim.register_rehearsal_guard()


def build(torch: Path) -> Path:
    """Returns the path of the compiled shim in the user's cache folder; compiles it if it is not there yet.

    Raises:
        ValueError: there is no compiler, or it refuses the source.
    """
    version = importlib.metadata.version("torch")
    known = hashlib.sha256(SOURCE.read_bytes() + version.encode()).hexdigest()[:16]
    library = cache_directory() / f"cuda_shim_{known}.so"
    if library.exists():
        return library
    compiler = next(filter(None, map(shutil.which, COMPILERS)), None)
    if compiler is None:
        raise ValueError(
            f"no C++ compiler ({', '.join(COMPILERS)}) is on PATH; expected one, with which the rehearsal builds its "
            "stand-in for a CUDA device: install g++"
        )
    library.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        made = Path(folder) / library.name
        command = [compiler, "-O1", "-std=c++20", "-shared", "-fPIC", f"-I{torch / 'include'}", str(SOURCE)]
        command += [f"-L{torch / 'lib'}", "-Wl,--no-as-needed", "-lc10", "-ltorch_cpu", "-o", str(made)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            errors = [line for line in done.stderr.splitlines() if "error" in line] or ["no message"]
            raise ValueError(
                f"{compiler} can't build the stand-in for a CUDA device: {errors[0][:300]}; expected a compiler of "
                "C++20 and torch's headers: install a newer g++"
            )
        made.replace(library)  # whole, also if several processes build it
    return library
