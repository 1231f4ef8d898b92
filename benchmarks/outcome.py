"""What the phases of `gpu_check` get and give; `phase.py` runs one of them."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Settings:
    """Settings that all phases share.

    `scratch` is a directory for models and run directories, deleted at the end. `layers` is the depth of the real-shape
    models; None chooses it by the free GPU memory.
    """

    scratch: Path
    quick: bool
    layers: int | None


@dataclass
class Outcome:
    """The results of a phase: numbers for the JSON file, lines for the table, and the limits that were exceeded.

    `skipped` is why the phase cannot run on this machine.
    """

    numbers: dict[str, Any] = field(default_factory=dict)
    lines: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    skipped: str | None = None

    def require(self, holds: bool, problem: str) -> None:
        """Records `problem` unless `holds`; the phase continues, so that its other numbers are not lost."""
        if not holds:
            self.problems.append(problem)
