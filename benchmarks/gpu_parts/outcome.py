"""What a part of `gpu_check` gets and gives. Only the standard library is imported here."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

GB = 1e9


@dataclass(frozen=True)
class Settings:
    """Settings of one part.

    Attributes:
        scratch: a directory of the part's own, deleted at its end.
        quick: tiny shapes, also without a GPU.
        layers: depth of the real-shape models; None: as many layers as fit.
        rehearsed: tensors are fake, on a device that only counts their memory (`rehearsed.py`).
        limit: seconds after which the part is killed.
    """

    scratch: Path
    quick: bool = False
    layers: int | None = None
    rehearsed: bool = False
    limit: float = 600.0


@dataclass
class Outcome:
    """The results of a part: numbers for the JSON file, lines for the log, and what is wrong.

    Attributes:
        skipped: why the machine cannot run the part.
        file: where `save` writes the results so far, so that a part that is killed leaves them.
    """

    numbers: dict[str, Any] = field(default_factory=dict)
    lines: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    skipped: str | None = None
    file: Path | None = None

    def require(self, holds: bool, problem: str) -> None:
        """Records `problem` unless `holds`; the part continues, so that its other numbers are not lost."""
        if not holds:
            self.problems.append(problem)

    def row(
        self,
        what: str,
        *,
        seconds: float | None = None,
        peak: float | None = None,
        planned_peak: float | None = None,
        delta: float | None = None,
        planned_delta: float | None = None,
        note: str = "",
    ) -> None:
        """Adds a row to the final table; memory is in bytes here and in GB in the JSON. None: not measured."""
        sizes = {"peak_gb": peak, "planned_peak_gb": planned_peak, "delta_gb": delta, "planned_delta_gb": planned_delta}
        in_gb = {name: None if size is None else size / GB for name, size in sizes.items()}
        self.numbers.setdefault("rows", []).append({"what": what, "seconds": seconds, **in_gb, "note": note})
        self.save()

    def save(self) -> None:
        """Writes the results so far to `file`, if there is one."""
        if self.file is not None:
            written = self.file.with_suffix(".part")
            written.write_text(json.dumps(self.as_json(), default=str))
            os.replace(written, self.file)

    def as_json(self) -> dict[str, Any]:
        """The fields of a part in the JSON file, without its name and seconds; `lines` is for the terminal."""
        numbers = self.numbers if self.skipped is None else {**self.numbers, "skipped": self.skipped}
        return {"ok": not self.problems, "numbers": numbers, "problems": self.problems, "lines": self.lines}
