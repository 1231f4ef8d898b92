"""Runs one phase of `gpu_check` in this process: `python -m benchmarks.phase NAME RESULT.json [options]`.

Writes the measurements of the phase, or the exception that ended it, to RESULT.json; a traceback goes to stderr.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path

import torch

from benchmarks.outcome import Outcome, Settings
from nemo_oprd.runtime.messages import show


def phases() -> dict[str, Callable[[Settings], Outcome]]:
    """Name -> function of the phase; `gpu_check.PHASES` has the order and the time limits."""
    # imported here, so that main() records what goes wrong there
    from benchmarks import correctness, long_context, real_shape, short_training, two_ranks

    return {
        "environment": correctness.environment,
        "golden_fp32": correctness.golden_fp32,
        "golden_bf16": correctness.golden_bf16,
        "guard": correctness.guard,
        "decoding": correctness.decoding,
        "two_ranks": two_ranks.two_ranks,
        "training": short_training.training,
        "save": short_training.save,
        "resume": short_training.resume,
        "models": real_shape.models,
        "step_recompute_none": real_shape.step_recompute_none,
        "step_recompute_full": real_shape.step_recompute_full,
        "generation": real_shape.generation,
        "generation_16k": long_context.generation_16k,
    }


def main() -> None:
    """Runs one phase and writes {"numbers", "lines", "problems", "skipped"}, or {"error"}."""
    parser = argparse.ArgumentParser()
    parser.add_argument("name")
    parser.add_argument("result", type=Path)
    parser.add_argument("--scratch", type=Path, required=True)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--layers", type=int)
    options = parser.parse_args()
    show()  # the messages of a run go to the log
    torch.set_float32_matmul_precision("highest")  # no TF32
    try:
        outcome = phases()[options.name](Settings(options.scratch, options.quick, options.layers))
    except Exception as error:
        # Recorded here, because CUDA and NCCL print more text after a traceback. CUDA's first line names the error.
        first_line = str(error).strip().partition("\n")[0]
        options.result.write_text(json.dumps({"error": f"{type(error).__name__}: {first_line}"}))
        raise
    options.result.write_text(json.dumps(vars(outcome)))
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
