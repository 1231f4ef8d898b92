"""What tests of the golden pair share: its models and rollouts, the settings of a training run, and what a run leaves.

The golden cases themselves (tests/golden/README.md) are `EXPECTED`; `overrides` gives a case's configuration and
`check` compares what `verify` wrote with it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from nemo_oprd.distillation.reference import agreement

GOLDEN = Path(__file__).parent.parent / "golden"
EXPECTED: dict[str, dict[str, Any]] = json.loads((GOLDEN / "expected.json").read_text())
# the golden program's names -> ours; the others are those of loss.representation
NAMES = {
    "w_rep": "loss.representation.weight",
    "w_out": "loss.output.weight",
    "out": "loss.output.kind",
    "topk": "loss.output.k",
}
# fp32 against float64; the golden README asks for 1e-5 in both
TOLERANCE = 1e-5
# A training run whose updates `ReferenceAdamW` repeats: reference_adamw.py says why adam_eps is this large.
BASE = [
    f"student.hf_path={GOLDEN / 'student'}",
    f"teacher.hf_path={GOLDEN / 'teacher'}",
    f"rollout.replay={GOLDEN / 'rollouts.jsonl'}",
    "loss.representation.k=4",
    "train.lr=1e-2",
    "train.weight_decay=0.1",
    "train.betas=[0.9,0.95]",
    "train.adam_eps=1e-2",
    "logging.tensorboard=false",
]


def overrides(case: str, output: Path) -> list[str]:
    """A golden case as configuration overrides."""
    options = [
        f"{NAMES.get(name, f'loss.representation.{name}')}={value}".replace(" ", "")
        for name, value in EXPECTED[case]["options"].items()
    ]
    if case.startswith("bridge_"):
        options.append(f"bridge.path={GOLDEN}")
    return [
        f"student.hf_path={GOLDEN / 'student'}",
        f"teacher.hf_path={GOLDEN / EXPECTED[case]['teacher']}",
        f"rollout.replay={GOLDEN / 'rollouts.jsonl'}",
        f"output={output}",
        *options,
    ]


def check(output: Path, case: str) -> None:
    """Compares a verify result with a golden case."""
    expected = EXPECTED[case]
    losses = json.loads((output / "losses.json").read_text())
    assert ("output/loss" in losses) == ("output/loss" in expected)
    for name in {"loss/total", "rep/loss", "output/loss"} & set(losses):
        assert losses[name] == pytest.approx(expected[name], rel=TOLERANCE)
    per_layer = losses["rep/loss_per_layer"]
    assert per_layer == pytest.approx(expected["rep/loss_per_layer"], rel=TOLERANCE)
    deviations = agreement(load_file(output / "grads.safetensors"), load_file(GOLDEN / f"grads_{case}.safetensors"))
    worst = max(deviations, key=deviations.__getitem__)
    assert deviations[worst] < TOLERANCE, f"{worst}: {deviations[worst]:.1e}"


def weights(directory: Path) -> dict[str, torch.Tensor]:
    """The weights of a Hugging Face directory that is one file."""
    return load_file(directory / "model.safetensors")


def metrics(run: Path) -> list[dict[str, float]]:
    """The lines of a run's metrics.jsonl without times and speeds, which differ between equal runs."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if k != "time" and not k.startswith(("timing/", "perf/"))} for line in lines]
