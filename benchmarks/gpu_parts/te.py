"""The part `te`: Transformer Engine's layers, where it is installed: golden cases in bf16, and a step at full size."""

from __future__ import annotations

import os
from dataclasses import replace
from functools import partial

from benchmarks.gpu_parts import correctness, update_step
from benchmarks.gpu_parts.forking import run_forked
from benchmarks.gpu_parts.machine import version
from benchmarks.gpu_parts.measure import is_cuda
from benchmarks.gpu_parts.outcome import Outcome, Settings
from nemo_oprd.megatron.model import LAYERS_VARIABLE

NAME = "transformer_engine"


def te(settings: Settings, outcome: Outcome) -> None:
    """Golden cases in bf16; OPRD's step with full recomputation and without. Each runs in a process of its own."""
    outcome.numbers["version"] = version("transformer-engine")
    if outcome.numbers["version"] is None:
        outcome.skipped = "Transformer Engine is not installed (scripts/gpu_wheels.sh --te)"
        return
    if not is_cuda():
        outcome.skipped = f"Transformer Engine {outcome.numbers['version']} loads; its kernels need a GPU"
        return
    os.environ[LAYERS_VARIABLE] = NAME
    for name in ("golden_bf16", "full", "none"):
        own = replace(settings, scratch=settings.scratch / name)
        own.scratch.mkdir()
        found = run_forked(partial(_run, name, own), limit=settings.limit / 2)
        rows = found.numbers.pop("rows", [])
        outcome.numbers[name] = found.numbers
        outcome.lines += found.lines
        outcome.problems += [f"{name}: {problem}" for problem in found.problems]
        outcome.numbers.setdefault("rows", []).extend({**row, "what": f"{name}: {row['what']}"} for row in rows)
        outcome.save()


def _run(name: str, settings: Settings) -> Outcome:
    outcome = Outcome()
    if name == "golden_bf16":
        correctness.golden_bf16(settings, outcome)
    else:
        update_step.measure_step(settings, outcome, "oprd", recompute=name, layers=NAME)
    return outcome
