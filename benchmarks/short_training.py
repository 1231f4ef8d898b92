"""The training phase of `gpu_check`: the real loop on a tiny random pair and a recorded batch, in fp32 and bf16."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from benchmarks.phase import Outcome, Settings
from benchmarks.random_pair import Shape, save_random_model, save_random_rollouts
from nemo_oprd.config.loading import load_config
from nemo_oprd.train import train

SHAPE = Shape(4, 64, 128, 4, 2, 256, 256)
RESPONSES = [20, 35, 50, 60, 75, 90, 100, 120]
STEPS = 50
# The batch is the same at every step. On the CPU the loss falls to 0.19 of its initial value (--quick: 0.11) in both
# precisions; without learning it would stay at 1.
FALLS_TO = 0.5


def training(settings: Settings) -> Outcome:
    """Trains `STEPS` steps; the last step's loss must be at most `FALLS_TO` times the first step's."""
    root = settings.scratch / "training"
    for seed, role in enumerate(("student", "teacher")):
        save_random_model(root / role, SHAPE, seed=seed, std=0.1, dtype=torch.float32)
    save_random_rollouts(root / "rollouts.jsonl", SHAPE, prompt=8, responses=RESPONSES[: 3 if settings.quick else None])
    outcome = Outcome()
    for precision in ("fp32", "bf16"):
        losses = _losses(root, precision)
        ratio = losses[-1] / losses[0]
        outcome.numbers[precision] = {"ratio": ratio, "losses": losses}
        outcome.lines.append(f"{precision}: loss {losses[0]:.4g} -> {losses[-1]:.4g} in {STEPS} steps ({ratio:.2f})")
        outcome.require(len(losses) == STEPS, f"{precision}: {len(losses)} steps were logged, expected {STEPS}")
        outcome.require(
            ratio <= FALLS_TO, f"{precision}: the loss fell to {ratio:.2f} of its initial value, limit {FALLS_TO}"
        )
    return outcome


def _losses(root: Path, precision: str) -> list[float]:
    output = root / precision
    train(
        load_config(
            "verify",
            [
                *(f"{role}.hf_path={root / role}" for role in ("student", "teacher")),
                f"rollout.replay={root / 'rollouts.jsonl'}",
                f"output={output}",
                f"precision={precision}",
                f"train.steps={STEPS}",
                "train.lr=3e-3",
                "train.schedule=cosine",
                "train.warmup_fraction=0.1",
                "train.tokens_per_microbatch=256",  # several microbatches per step
                "train.export_hf=false",
                "logging.tensorboard=false",
            ],
        )
    )
    lines = map(json.loads, (output / "metrics.jsonl").read_text().splitlines())
    return [line["loss/total"] for line in lines if "loss/total" in line]
