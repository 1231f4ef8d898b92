"""Checks what scripts/setup_gpu.sh or a container image has: versions, CUDA, cuDNN, Transformer Engine, NCCL.

python scripts/check_gpu_environment.py [--without-gpu] [--vllm PYTHON]
python scripts/check_gpu_environment.py --constraints [kept]

Prints one line per package. Exit status 1, with one line on stderr, if Transformer Engine is not of the versions that
pyproject.toml asks for, cuDNN is older than LEAST_CUDNN, or torch has no CUDA or sees no GPU. --without-gpu leaves out
what needs the driver: a login node, or the build of an image. --vllm names the interpreter of vLLM's environment and
compares NCCL: weights that go to servers by rollout.vllm.transport=group need one version in both.

--constraints prints what pip may install into an image: the packages that its torch was built with as they are, and
everything else in the versions of the tests (requirements-cpu.txt); with `kept` the former alone.
"""

from __future__ import annotations

import argparse
import importlib
import re
import subprocess
import sys
import tomllib
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# distribution -> module; Apex is optional
PACKAGES = {"torch": "torch", "megatron-core": "megatron.core", "transformer-engine": "transformer_engine.pytorch"}
OPTIONAL = {"apex": "fused_weight_gradient_mlp_cuda"}
# Gradients of packed sequences could be NaN on Hopper before it: NVIDIA/TransformerEngine, issue 2186.
LEAST_CUDNN = (9, 18)
# what the packages of an image are built for; `pip freeze` names paths for those that were built in place
KEPT = ("torch", "transformer-engine", "apex", "triton", "pytorch-triton", "numpy")
# run by both interpreters; torch.cuda.nccl.version() is what torch was compiled with, not what it has loaded
NCCL = """
import ctypes, torch
found = ctypes.c_int()
ctypes.CDLL("libnccl.so.2").ncclGetVersion(ctypes.byref(found))
print(found.value // 10000, found.value // 100 % 100, found.value % 100, sep=".")
"""


def requirements() -> dict[str, str]:
    """Distribution -> what pyproject.toml asks for."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    from packaging.requirements import Requirement

    lines = [*project["dependencies"], *project["optional-dependencies"]["te"]]
    parsed = [Requirement(line) for line in lines]
    return {each.name: str(each.specifier) for each in parsed if each.marker is None or each.marker.evaluate()}


def constraints(kept_alone: bool) -> list[str]:
    """Lines of a constraints file: KEPT as they are here, and other packages as requirements-cpu.txt pins them."""
    kept = {}
    for name in KEPT:
        try:
            kept[name] = version(name)
        except PackageNotFoundError:
            continue
    lines = [f"{name}=={found}" for name, found in kept.items()]
    if kept_alone:
        return lines
    pins = [line for line in (ROOT / "requirements-cpu.txt").read_text().splitlines() if re.match(r"[\w.-]+==", line)]
    return lines + [line for line in pins if re.sub(r"[-_.]+", "-", line.split("==")[0]).lower() not in KEPT]


def wrong_package(name: str, module: str, wanted: str, importable: bool) -> str | None:
    """What is wrong with a package, in one line; prints its version."""
    from packaging.specifiers import SpecifierSet
    from packaging.version import Version

    try:
        found = version(name)
    except PackageNotFoundError:
        return f"{name} is not installed; expected {name}{wanted}: bash scripts/setup_gpu.sh"
    print(f"{name} {found}")
    # NVIDIA's containers have builds with versions such as 2.10.0a0+b558c98, which count as the release
    if not SpecifierSet(wanted).contains(Version(found).base_version):
        return f"{name} {found}: expected {wanted} (pyproject.toml); install that, or choose another image"
    if not importable:
        return None
    try:
        importlib.import_module(module)
    except (ImportError, OSError, RuntimeError, AssertionError) as error:
        return f"{name} {found} can't be imported: {' '.join(str(error).split())}; build it against this torch again"
    return None


def wrong_libraries() -> str | None:
    """What is wrong with the libraries that torch has; prints their versions."""
    import torch

    if torch.version.cuda is None:
        return (
            f"torch {torch.__version__} is a build without CUDA; expected a CUDA build: install it from another index"
        )
    print(f"CUDA {torch.version.cuda}")
    found = torch.backends.cudnn.version() or 0
    cudnn = (found // 10000, found // 100 % 100)  # such as 92400 for 9.24.0
    print(f"cuDNN {cudnn[0]}.{cudnn[1]}.{found % 100}")
    if cudnn < LEAST_CUDNN:
        least = ".".join(str(part) for part in LEAST_CUDNN)
        return (
            f"cuDNN {cudnn[0]}.{cudnn[1]}: expected {least} or later, before which gradients of packed sequences can "
            "be NaN on Hopper; install a later one with pip --no-deps, or choose another image"
        )
    return None


def wrong_nccl(vllm: Path) -> str | None:
    """What is wrong with NCCL beside that of vLLM's environment; prints both versions."""
    import torch

    versions = []
    for python in (sys.executable, str(vllm)):
        asked = subprocess.run([python, "-c", NCCL], capture_output=True, text=True)
        if asked.returncode != 0:
            reason = (asked.stderr.splitlines() or [f"exit status {asked.returncode}"])[-1]
            return f"{python} does not say which NCCL it has: {reason}; expected a torch for CUDA"
        versions.append(asked.stdout.strip())
    own, other = versions
    print(f"NCCL {own}, in vLLM's environment {other}")
    if own == other:
        return None
    package = f"nvidia-nccl-cu{(torch.version.cuda or '').split('.')[0]}"
    return (
        f"NCCL {own} here and {other} in vLLM's environment: expected one version, without which "
        f"rollout.vllm.transport=group can't send weights; {vllm} -m pip install --no-deps {package}=={own}, "
        f"or of an image --build-arg NCCL={own}"
    )


def problem(without_gpu: bool, vllm: Path | None = None) -> str | None:
    """What is wrong, in one line; prints the versions."""
    wanted = requirements()
    for name, module in PACKAGES.items():
        # the libraries of Transformer Engine need the driver's
        importable = name != "transformer-engine" or not without_gpu
        if wrong := wrong_package(name, module, wanted[name], importable):
            return wrong
    for name, module in OPTIONAL.items():
        try:
            importlib.import_module(module)
            print(f"{name} with {module}")
        except ImportError:
            print(f"{name}: none (optional)")
    if wrong := wrong_libraries():
        return wrong
    if vllm is not None and (wrong := wrong_nccl(vllm)):
        return wrong
    if without_gpu:
        return None
    import torch

    if not torch.cuda.is_available():
        return f"torch.cuda.is_available() is False; expected a GPU and a driver for CUDA {torch.version.cuda}"
    print(f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}, driver for torch's CUDA found")
    return None


def main() -> None:
    """Exit status 1 if something is wrong."""
    parser = argparse.ArgumentParser(description="Does this environment have what training on GPUs needs?")
    parser.add_argument("--without-gpu", action="store_true", help="leave out what needs the driver")
    parser.add_argument("--vllm", type=Path, metavar="PYTHON", help="compare NCCL with this environment's")
    parser.add_argument(
        "--constraints", nargs="?", const="all", choices=("all", "kept"), help="print what pip may change in an image"
    )
    arguments = parser.parse_args()
    if arguments.constraints:
        print(*constraints(arguments.constraints == "kept"), sep="\n")
        return
    wrong = problem(arguments.without_gpu, arguments.vllm)
    if wrong is not None:
        sys.exit(f"error: {wrong}")


if __name__ == "__main__":
    main()
