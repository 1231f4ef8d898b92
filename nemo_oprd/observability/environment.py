"""environment.json of a run directory: versions, devices and kernels, one entry per start of the run."""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from nemo_oprd import __version__
from nemo_oprd.observability.config_history import STARTS, starts
from nemo_oprd.runtime.files import write_atomically

PACKAGES = ("torch", "megatron-core", "transformers", "transformer-engine", "apex", "numpy", "safetensors")


def record_environment(
    directory: Path,
    ranks: int,
    layouts: dict[str, str],
    kernels: dict[str, str],
    start: Mapping[str, Any] | None = None,
) -> None:
    """Adds an entry to `directory`/environment.json.

    Args:
        ranks: ranks of the job.
        layouts: role -> its parallel layout in words.
        kernels: purpose -> implementation.
        start: what `config_history.py` and `setup/resume.py` read: "config", "after_step" and "models".
    """
    file = directory / STARTS
    entry = {
        "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "nemo_oprd": __version__,
        "python": platform.python_version(),
        "packages": {name: found for name in PACKAGES if (found := _version(name)) is not None},
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "cuda": torch.version.cuda if torch.cuda.is_available() else None,
        "directory": os.getcwd(),
        "ranks": ranks,
        "layouts": layouts,
        "kernels": kernels,
        **(start or {}),
    }
    write_atomically(file, json.dumps([*starts(directory), entry], indent=1) + "\n")


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
