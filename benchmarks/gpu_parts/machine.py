"""What a machine is: its GPU, driver and versions; found without asking CUDA, which would forbid to fork."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import subprocess
from typing import Any

PACKAGES = (
    "torch", "triton", "megatron-core", "transformers", "transformer-engine", "trl", "liger-kernel",
    "nvidia-cublas", "nvidia-cudnn-cu13", "nvidia-nccl-cu13",
)  # fmt: skip
QUERY = "name,memory.total,driver_version,power.limit"


def describe() -> dict[str, Any]:
    """GPU (None: there is none), count, memory, driver, Python, CPUs and the versions of packages that are there."""
    gpus = _gpus()
    name, memory, driver, power = gpus[0] if gpus else (None, None, None, None)
    return {
        "gpu": name,
        "gpus": len(gpus),
        "gpu_memory": memory,
        "driver": driver,
        "power_limit": power,
        "cpus": os.cpu_count(),
        "python": platform.python_version(),
        "torch_cuda": _torch_cuda(),
        **{package: version(package) for package in PACKAGES},
    }


def version(package: str) -> str | None:
    """The version of a package; None if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _torch_cuda() -> str | None:
    import torch

    return torch.version.cuda


def _gpus() -> list[tuple[str, ...]]:
    if shutil.which("nvidia-smi") is None:
        return []
    command = ["nvidia-smi", f"--query-gpu={QUERY}", "--format=csv,noheader"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    rows = [tuple(cell.strip() for cell in line.split(",")) for line in done.stdout.splitlines()]
    return [row for row in rows if len(row) == len(QUERY.split(","))] if done.returncode == 0 else []
