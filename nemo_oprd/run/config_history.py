"""The settings of a run directory's starts: `config.yaml` of the first one, `config.1.yaml`, ... of changed ones.

No start changes an existing file: a start with other settings adds a file, and a start with the settings of an earlier
file refers to that file. `record_environment` adds an entry per start to environment.json; its `config` names the file
of settings, and `after_step` the steps before it. Entries of earlier versions have neither.
"""

from __future__ import annotations

import json
import os
import platform
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from nemo_oprd import __version__
from nemo_oprd.config.loading import as_plain, to_yaml
from nemo_oprd.config.resume_rules import changes
from nemo_oprd.config.schema import Config
from nemo_oprd.runtime.files import write_atomically

FIRST = "config.yaml"
STARTS = "environment.json"


@dataclass(frozen=True)
class Span:
    """Steps that ran with the settings of one file, from `after` + 1 to the beginning of the next span."""

    after: int
    file: str


def config_files(directory: Path) -> list[Path]:
    """Returns the configurations of a run directory, oldest first."""
    found = [path for path in directory.glob("config*.yaml") if _NAME.fullmatch(path.name)]
    return sorted(found, key=_number)


def current_config(directory: Path) -> Path:
    """Returns the file with the settings of the last start; config.yaml if there is none."""
    named = [directory / start["config"] for start in _described(directory)]
    return next((file for file in (*named[::-1], *config_files(directory)[::-1]) if file.is_file()), directory / FIRST)


def spans(directory: Path) -> list[Span]:
    """Returns the spans of steps per file, ascending; a start continues after some step and replaces all later ones."""
    found = [Span(0, FIRST)]
    for start in _described(directory):
        found = [span for span in found if span.after < start["after_step"]]
        if not found or found[-1].file != start["config"]:
            found.append(Span(start["after_step"], start["config"]))
    return found


def config_at(directory: Path, step: int) -> Path | None:
    """Returns the file with the settings under which step `step` (from 1) ran; None if there is none."""
    names = [span.file for span in spans(directory) if span.after < step]
    file = directory / names[-1] if names else current_config(directory)
    return file if file.is_file() else None


def read_config(file: Path) -> dict[str, Any]:
    """Returns the content of a configuration file of a run.

    Raises:
        ValueError: the file is malformed.
    """
    import yaml

    try:
        config = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"{file}: not valid YAML ({error}); restore the file that the run wrote") from error
    if not (config and isinstance(config, dict)):
        raise ValueError(f"{file}: holds {config!r:.80}, expected a mapping; restore the file that the run wrote")
    return config


def record_config(directory: Path, config: Config) -> str:
    """Returns the name of the file with these settings; writes it if no file has them yet.

    Raises:
        ValueError: a file is malformed.
        OSError: the disk is full or the file can't be written; the error names the file.
    """
    files, plain = config_files(directory), as_plain(config)
    current = current_config(directory)
    for file in dict.fromkeys([*(f for f in files if f == current), *reversed(files)]):
        if not changes(read_config(file), plain):
            return file.name
    name = f"config.{_number(files[-1]) + 1}.yaml" if files else FIRST
    write_atomically(directory / name, to_yaml(config))
    return name


def _number(file: Path) -> int:
    """Returns 0 for config.yaml, 1 for config.1.yaml, ..."""
    return int(file.name.removeprefix("config").removesuffix("yaml").strip(".") or 0)


def starts(directory: Path) -> list[dict[str, Any]]:
    """Returns the entries of environment.json, one per start; [] if the file is missing or can't be read."""
    try:
        entries = json.loads((directory / STARTS).read_bytes())
    except (OSError, ValueError):
        return []
    return [entry for entry in entries if isinstance(entry, dict)] if isinstance(entries, list) else []


def _described(directory: Path) -> list[dict[str, Any]]:
    """Returns the starts that record their settings and the step after which they continued."""
    return [
        start
        for start in starts(directory)
        if _NAME.fullmatch(str(start.get("config"))) and isinstance(start.get("after_step"), int)
    ]


_NAME = re.compile(r"config(?:\.([1-9]\d*))?\.yaml")


# environment.json of a run directory: versions, devices and kernels, one entry per start of the run.


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
        start: more entries; this module and `run/resume.py` read "config", "after_step" and "models".
    """
    import torch  # takes seconds, and the readers of the file do not need it

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
