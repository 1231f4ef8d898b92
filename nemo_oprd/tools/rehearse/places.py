"""Places in the source: the innermost line of this package, and of a library that it calls."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

PACKAGE = Path(__file__).parents[2]
_OWN, _HERE = f"{PACKAGE}/", f"{Path(__file__).parent}/"
# Megatron and Transformer Engine
_LIBRARIES = ("/megatron/core/", "/transformer_engine/")


@dataclass(frozen=True, order=True)
class CodeLocation:
    """A line of this package, and the innermost line of a library below it.

    Attributes:
        file: relative to the package's parent, such as nemo_oprd/distillation/step.py; a library's file if no line of
            this package is on the stack (in a backward pass).
        function: the name of the function that holds the line.
        below: FILE:LINE of the library; empty if this package calls torch itself.
        innermost: (file, function) of the innermost line of the two.
    """

    file: str
    line: int
    function: str
    below: str = ""
    innermost: tuple[str, str] = ("", "")

    def __str__(self) -> str:
        return f"{self.file}:{self.line}" + (f" ({self.below})" if self.below else "")


def current_place() -> CodeLocation:
    """Returns the place that is running now."""
    below, innermost = "", ("torch", "")
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if name.startswith(_OWN) and not name.startswith(_HERE):
            file, function = f"{PACKAGE.name}/{name[len(_OWN) :]}", frame.f_code.co_name
            return CodeLocation(file, frame.f_lineno, function, below, innermost if below else (file, function))
        library = None if below else next((part for part in _LIBRARIES if part in name), None)
        if library is not None:
            innermost = library[1:] + name.rpartition(library)[2], frame.f_code.co_name
            below = f"{innermost[0]}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    file, _, line = below.partition(":")
    return CodeLocation(file or "torch", int(line or 0), innermost[1], "", innermost)
