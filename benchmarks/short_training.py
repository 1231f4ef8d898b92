"""The phases of `gpu_check` that train a tiny random pair on a recorded batch with the real loop, in fp32 and bf16.

`training` looks at the loss; `save` and `resume` interrupt a run and continue it in another process.
"""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from benchmarks.outcome import Outcome, Settings
from nemo_oprd.config.loading import load_config
from nemo_oprd.config.schema import Config
from nemo_oprd.observability.step_recorder import StepRecorder
from nemo_oprd.runtime.signals import Stopped
from nemo_oprd.train import train
from tests.support.random_pair import Shape, save_random_model, save_random_rollouts

SHAPE = Shape(4, 64, 128, 4, 2, 256, 256)
RESPONSES = [20, 35, 50, 60, 75, 90, 100, 120]
STEPS = 50
# The batch is the same at every step. On the CPU the loss falls to 0.19 of its initial value (--quick: 0.11) in both
# precisions; without learning it would stay at 1.
FALLS_TO = 0.5
PRECISIONS = ("fp32", "bf16")
# Of the run that is interrupted: its steps, and the step after which a signal makes it save and end.
RESUME_STEPS, STOPPED_AFTER = 8, 4
# Limits of the deviation of a metric of the resumed run from the uninterrupted one's. On a CPU there is none; on a GPU
# sums may be added in another order every time, in both runs from the first step on (not yet measured). Without the
# optimizer's moments the loss deviates by 0.08 and the norm of the gradient by 1.
RESUME_LIMITS = {"fp32": 1e-4, "bf16": 2e-2} if torch.cuda.is_available() else {"fp32": 0.0, "bf16": 0.0}
# metrics that are compared
COMPARED = ("loss/total", "rep/loss", "actor/grad_norm", "lr")


def training(settings: Settings) -> Outcome:
    """Trains `STEPS` steps; the last step's loss must be at most `FALLS_TO` times the first step's."""
    root = settings.scratch / "training"
    _save_pair(root, quick=settings.quick)
    outcome = Outcome()
    for precision in PRECISIONS:
        train(_configure(root, precision, precision, STEPS))
        losses = [line["loss/total"] for line in _metrics(root / precision)]
        ratio = losses[-1] / losses[0]
        outcome.numbers[precision] = {"ratio": ratio, "losses": losses}
        outcome.lines.append(f"{precision}: loss {losses[0]:.4g} -> {losses[-1]:.4g} in {STEPS} steps ({ratio:.2f})")
        outcome.require(len(losses) == STEPS, f"{precision}: {len(losses)} steps were logged, expected {STEPS}")
        outcome.require(
            ratio <= FALLS_TO, f"{precision}: the loss fell to {ratio:.2f} of its initial value, limit {FALLS_TO}"
        )
    return outcome


def save(settings: Settings) -> Outcome:
    """Trains without an interruption, and once more with a signal on the way, after which the run saves and ends."""
    root = settings.scratch / "save"
    _save_pair(root, quick=True)
    outcome = Outcome()
    record = StepRecorder.record

    def record_and_stop(recorder: StepRecorder, done: int, *arguments: Any) -> None:
        record(recorder, done, *arguments)
        if done == STOPPED_AFTER:
            os.kill(os.getpid(), signal.SIGTERM)

    for precision in PRECISIONS:
        train(_configure(root, f"{precision}_whole", precision, RESUME_STEPS))
        message = ""
        with mock.patch.object(StepRecorder, "record", record_and_stop):
            try:
                train(_configure(root, f"{precision}_stopped", precision, RESUME_STEPS))
            except Stopped as stop:
                message = str(stop)
        files = [file for file in (root / f"{precision}_stopped" / "checkpoints").rglob("*") if file.is_file()]
        outcome.numbers[precision] = {"message": message, "checkpoint_bytes": sum(f.stat().st_size for f in files)}
        outcome.lines.append(f"{precision}: {message or 'the run did not stop'}")
        outcome.require(f"after step {STOPPED_AFTER} " in message, f"{precision}: the run did not stop: {message!r}")
    return outcome


def resume(settings: Settings) -> Outcome:
    """Resumes what `save` interrupted; every later step must have the uninterrupted run's metrics."""
    root = settings.scratch / "save"
    outcome = Outcome()
    for precision in PRECISIONS:
        before = len(_metrics(root / f"{precision}_stopped"))
        train(_configure(root, f"{precision}_stopped", precision, RESUME_STEPS))
        whole, resumed = (_metrics(root / f"{precision}_{name}") for name in ("whole", "stopped"))
        outcome.require(
            before == STOPPED_AFTER and len(resumed) == len(whole) == RESUME_STEPS,
            f"{precision}: {before} steps were logged before and {len(resumed)} after the resume, "
            f"expected {STOPPED_AFTER} and {RESUME_STEPS}",
        )
        later = list(zip(resumed, whole, strict=True))[STOPPED_AFTER:]
        worst = {key: max(abs(a[key] - b[key]) / (abs(b[key]) or 1.0) for a, b in later) for key in COMPARED}
        limit = RESUME_LIMITS[precision]
        outcome.numbers[precision] = {"deviations": worst, "limit": limit}
        outcome.lines.append(
            f"{precision}: steps {STOPPED_AFTER + 1} to {RESUME_STEPS} after a resume, metrics within "
            f"{max(worst.values()):.1e} of an uninterrupted run (limit {limit:.0e})"
        )
        for key, deviation in worst.items():
            outcome.require(deviation <= limit, f"{precision}: {key} deviates by {deviation:.1e} after the resume")
    return outcome


def _save_pair(root: Path, *, quick: bool) -> None:
    for seed, role in enumerate(("student", "teacher")):
        save_random_model(root / role, SHAPE, seed=seed, std=0.1, dtype=torch.float32)
    save_random_rollouts(root / "rollouts.jsonl", SHAPE, prompt=8, responses=RESPONSES[: 3 if quick else None])


def _configure(root: Path, output: str, precision: str, steps: int) -> Config:
    return load_config(
        "verify",
        [
            *(f"{role}.hf_path={root / role}" for role in ("student", "teacher")),
            f"rollout.replay={root / 'rollouts.jsonl'}",
            f"output={root / output}",
            f"precision={precision}",
            f"train.steps={steps}",
            "train.lr=3e-3",
            "train.schedule=cosine",
            "train.warmup_fraction=0.1",
            "train.tokens_per_microbatch=256",  # several microbatches per step
            "train.export_hf=false",
            "logging.tensorboard=false",
        ],
    )


def _metrics(output: Path) -> list[dict[str, float]]:
    """The lines of a run's metrics.jsonl that belong to a step."""
    lines = map(json.loads, (output / "metrics.jsonl").read_text().splitlines())
    return [line for line in lines if "loss/total" in line]
