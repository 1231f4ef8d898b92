"""TensorBoard's files, read back by TensorBoard's own reader. W&B has its test in tests/e2e/test_wandb.py."""

from __future__ import annotations

import json
import math
from pathlib import Path
from unittest import mock

import pytest
import torch.distributed as dist

from nemo_oprd.config.loading import load_config
from nemo_oprd.run.metrics_log import MetricsLog


def write(output: Path, first_step: int, lines: dict[int, dict[str, float]]) -> None:
    """A run that resumes after `first_step` and writes these lines."""
    config = load_config("verify", ["student.hf_path=a", "teacher.hf_path=b", f"output={output}"])
    with mock.patch.object(dist, "get_rank", return_value=0):
        log = MetricsLog(config, first_step)
        for step, metrics in lines.items():
            log.write(step, metrics)
        log.close()


def read(output: Path) -> dict[str, list[tuple[int, float]]]:
    """Name -> (step, value) of every event that TensorBoard shows."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(output / "tensorboard"), size_guidance={"scalars": 0})
    events.Reload()
    return {name: [(event.step, event.value) for event in events.Scalars(name)] for name in events.Tags()["scalars"]}


def test_tensorboard_holds_what_metrics_jsonl_holds(tmp_path: Path) -> None:
    lines = {step: {"rep/loss": 1 / (step + 1), "val/a b/avg@4": 0.25 * step} for step in range(4)}
    lines[3]["only/once"] = -2.5e-7
    write(tmp_path, 0, lines)
    kept = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    found = read(tmp_path)
    assert set(found) == {"rep/loss", "val/a b/avg@4", "only/once"}
    for name, events in found.items():
        expected = [(line["step"], line[name]) for line in kept if name in line]
        assert [step for step, _ in events] == [step for step, _ in expected]
        assert [v for _, v in events] == pytest.approx([v for _, v in expected], rel=1e-6)  # float32


def test_a_resumed_run_replaces_the_steps_that_it_repeats(tmp_path: Path) -> None:
    write(tmp_path, 0, {step: {"rep/loss": float(step)} for step in range(1, 6)})
    write(tmp_path, 3, {step: {"rep/loss": 100.0 + step} for step in (4, 5, 6)})
    kept = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert read(tmp_path)["rep/loss"] == [(line["step"], line["rep/loss"]) for line in kept]
    assert [line["rep/loss"] for line in kept] == [1.0, 2.0, 3.0, 104.0, 105.0, 106.0]


def test_a_value_that_is_not_finite_stays_so(tmp_path: Path) -> None:
    write(tmp_path, 0, {1: {"rep/loss": math.nan}, 2: {"rep/loss": math.inf}})
    (_, first), (_, second) = read(tmp_path)["rep/loss"]
    assert math.isnan(first) and second == math.inf
