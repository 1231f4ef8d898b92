"""The learning rate, and the metrics file across restarts."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from nemo_oprd.config.schema import Config, LoggingConfig, TrainConfig
from nemo_oprd.config.weight_schedule import WeightStage, largest, vanishes, weight_at
from nemo_oprd.megatron import parallel
from nemo_oprd.megatron.optimizer import learning_rate
from nemo_oprd.run.metrics_log import MetricsLog


def test_constant_and_warmup() -> None:
    train = TrainConfig(steps=100, lr=1.0, warmup_fraction=0.03)
    assert [learning_rate(step, train) for step in range(4)] == pytest.approx([1 / 3, 2 / 3, 1.0, 1.0])
    assert learning_rate(0, TrainConfig(steps=1, lr=0.5, warmup_fraction=0.03)) == 0.5


def test_cosine_ends_at_the_minimum() -> None:
    train = TrainConfig(steps=200, lr=1.0, min_lr=0.1, schedule="cosine", warmup_fraction=0.1)
    rates = [learning_rate(step, train) for step in range(200)]
    assert max(rates) == rates[19] == 1.0
    assert rates[110] == pytest.approx(0.1 + 0.45 * (1 + math.cos(math.pi * 0.5)))
    assert rates[20:] == sorted(rates[20:], reverse=True)
    assert rates[-1] == pytest.approx(0.1, abs=1e-3)


def test_a_restart_drops_what_it_will_write_again(tmp_path: Path) -> None:
    """Killed in the middle of a line after step 4, resumed from the checkpoint of step 2."""
    parallel.init_distributed()
    config = Config(output=str(tmp_path), logging=LoggingConfig(tensorboard=False))
    lines = [json.dumps({"step": step, "rep/loss": 1.0}) for step in (0, 1, 2, 2, 3, 4)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + '\n{"step": 5, "rep')
    log = MetricsLog(config, first_step=2)
    log.write(3, {"rep/loss": 0.5})
    log.close()
    records = [json.loads(line) for line in (tmp_path / "metrics.jsonl").open()]
    assert [record["step"] for record in records] == [0, 1, 2, 2, 3]
    assert records[-1]["rep/loss"] == 0.5


def test_weights_by_stages() -> None:
    stages = [WeightStage(0.0, until=2), WeightStage(0.3, until=5, start=0.0), WeightStage(2.0)]
    assert [weight_at(stages, step) for step in range(7)] == pytest.approx([0, 0, 0.1, 0.2, 0.3, 2, 2])
    assert weight_at(stages, 4) == 0.3  # reached exactly
    assert [weight_at(stages[:2], step) for step in (4, 5, 99)] == [0.3, 0.3, 0.3]  # the last weight stays
    assert (largest(stages), largest(0.5), vanishes(stages), vanishes(stages[1:]), vanishes(0.0)) == (
        2.0, 0.5, True, False, True
    )  # fmt: skip
