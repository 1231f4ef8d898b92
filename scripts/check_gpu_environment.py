"""Checks what scripts/setup_gpu.sh or a container image has: versions, CUDA, Transformer Engine.

python scripts/check_gpu_environment.py [--without-gpu]

Prints one line per package. Exit status 1, with one line on stderr, if Transformer Engine is not of the versions that
pyproject.toml asks for (the range of Megatron-core), or torch has no CUDA or sees no GPU. --without-gpu leaves out what
needs the driver: a login node, or the build of an image.
"""

from __future__ import annotations

import argparse
import importlib
import sys
import tomllib
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# distribution -> module; Apex is optional
PACKAGES = {"torch": "torch", "megatron-core": "megatron.core", "transformer-engine": "transformer_engine.pytorch"}
OPTIONAL = {"apex": "fused_weight_gradient_mlp_cuda"}


def requirements() -> dict[str, str]:
    """Distribution -> what pyproject.toml asks for."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    from packaging.requirements import Requirement

    lines = [*project["dependencies"], *project["optional-dependencies"]["te"]]
    parsed = [Requirement(line) for line in lines]
    return {each.name: str(each.specifier) for each in parsed if each.marker is None or each.marker.evaluate()}


def problem(without_gpu: bool) -> str | None:
    """What is wrong, in one line; prints the versions."""
    from packaging.specifiers import SpecifierSet
    from packaging.version import Version

    wanted = requirements()
    for name, module in PACKAGES.items():
        try:
            found = version(name)
        except PackageNotFoundError:
            return f"{name} is not installed; expected {name}{wanted[name]}: bash scripts/setup_gpu.sh"
        print(f"{name} {found}")
        # NVIDIA's containers have builds with versions such as 2.10.0a0+b558c98, which count as the release
        if not SpecifierSet(wanted[name]).contains(Version(found).base_version):
            return f"{name} {found}: expected {wanted[name]} (pyproject.toml); install that, or choose another image"
        if name == "transformer-engine" and without_gpu:
            continue  # its libraries need the driver's
        try:
            importlib.import_module(module)
        except (ImportError, OSError, RuntimeError, AssertionError) as error:
            return (
                f"{name} {found} can't be imported: {' '.join(str(error).split())}; build it against this torch again"
            )
    import torch

    for name, module in OPTIONAL.items():
        try:
            importlib.import_module(module)
            print(f"{name} with {module}")
        except ImportError:
            print(f"{name}: none (optional)")
    if torch.version.cuda is None:
        return (
            f"torch {torch.__version__} is a build without CUDA; expected a CUDA build: install it from another index"
        )
    print(f"CUDA {torch.version.cuda}")
    if without_gpu:
        return None
    if not torch.cuda.is_available():
        return "torch.cuda.is_available() is False; expected a GPU and a driver for CUDA " + torch.version.cuda
    print(f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}, driver for torch's CUDA found")
    return None


def main() -> None:
    """Exit status 1 if something is wrong."""
    parser = argparse.ArgumentParser(description="Does this environment have what training on GPUs needs?")
    parser.add_argument("--without-gpu", action="store_true", help="leave out what needs the driver")
    wrong = problem(parser.parse_args().without_gpu)
    if wrong is not None:
        sys.exit(f"error: {wrong}")


if __name__ == "__main__":
    main()
