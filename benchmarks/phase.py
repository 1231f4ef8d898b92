"""One phase of `gpu_check` in a process of its own: `python -m benchmarks.phase NAME RESULT.json [options]`.

Writes what the phase measured, or which exception ended it; the traceback goes to the output.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch


@dataclass(frozen=True)
class Settings:
    """What all phases share.

    `scratch` is a directory for models and run directories that is deleted in the end; `layers` None lets the free GPU
    memory decide the depth of the real-shape models.
    """

    scratch: Path
    quick: bool
    layers: int | None


@dataclass
class Outcome:
    """What a phase found: numbers for the JSON, lines for the table, and the limits that were not kept."""

    numbers: dict[str, Any] = field(default_factory=dict)
    lines: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def require(self, holds: bool, problem: str) -> None:
        """Notes `problem` unless `holds`; the phase goes on, so that its other numbers are not lost."""
        if not holds:
            self.problems.append(problem)


def phases() -> dict[str, Callable[[Settings], Outcome]]:
    """Name -> what to run; `gpu_check.PHASES` has the order and the time limits."""
    from benchmarks import correctness, real_shape, short_training

    return {
        "environment": correctness.environment,
        "golden_fp32": correctness.golden_fp32,
        "golden_bf16": correctness.golden_bf16,
        "guard": correctness.guard,
        "decoding": correctness.decoding,
        "training": short_training.training,
        "models": real_shape.models,
        "step_recompute_none": real_shape.step_recompute_none,
        "step_recompute_full": real_shape.step_recompute_full,
        "generation": real_shape.generation,
    }


def main() -> None:
    """Runs one phase and writes {"numbers", "lines", "problems"}, or {"error"}."""
    parser = argparse.ArgumentParser()
    parser.add_argument("name")
    parser.add_argument("result", type=Path)
    parser.add_argument("--scratch", type=Path, required=True)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--layers", type=int)
    options = parser.parse_args()
    torch.set_float32_matmul_precision("highest")  # no TF32
    try:
        outcome = phases()[options.name](Settings(options.scratch, options.quick, options.layers))
    except Exception as error:
        # told here, because CUDA and NCCL print more after a traceback; CUDA says what went wrong in its first line
        first_line = str(error).strip().partition("\n")[0]
        options.result.write_text(json.dumps({"error": f"{type(error).__name__}: {first_line}"}))
        raise
    options.result.write_text(json.dumps(vars(outcome)))
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
