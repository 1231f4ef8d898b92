"""Where the values per token of a run's responses are: `rollouts/token_metrics_*.jsonl`, one file per step.

`token_records.py` writes their lines. This module imports no torch, for the report.
"""

from __future__ import annotations

import re
from pathlib import Path

_NAME = re.compile(r"token_metrics_(\d{7,})\.jsonl")


def token_file(directory: Path, done: int) -> Path:
    """The file of step `done`, from 1, in the directory `rollouts`."""
    return directory / f"token_metrics_{done:07d}.jsonl"


def token_files(directory: Path) -> dict[int, Path]:
    """Step -> its file, steps ascending."""
    files = {int(match[1]): file for file in directory.glob("*") if (match := _NAME.fullmatch(file.name))}
    return dict(sorted(files.items()))


def remove_token_files(directory: Path, last: int) -> None:
    """Removes the files of the steps after `last`: a run that starts over, or repeats steps, writes them anew."""
    for step, file in token_files(directory).items():
        if step > last:
            file.unlink()
