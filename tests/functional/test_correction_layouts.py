"""`rollout.correction` under several layouts: losses, gradients and metrics against plain models in float64.

The recorded log-probabilities are the student's, plus noise that takes some of the ratios out of the range. Without the
noise the result is that without a correction. `test_updates_per_rollout.py` has several updates on the same rollouts.
"""

from __future__ import annotations

import dataclasses
import random
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from layout_cases import VOCABULARY, Case, check_result, make_rollouts, read_result, save_model
from plain_computation import expected_result
from pool import Pools
from transformers import AutoModelForCausalLM

from nemo_oprd.batch.types import Rollout
from nemo_oprd.config.loading import load_config
from nemo_oprd.config.schema import Config
from nemo_oprd.distillation.reference import agreement
from nemo_oprd.rollout.replay import read_rollouts, write_rollouts

TOLERANCE = 1e-5
TEMPERATURE = 0.8
NOISE = 0.5
SHARED = [
    "loss.representation.layers=[2,8]",
    "loss.output.kind=sampled_token",
    "loss.output.weight=1.5",
    "loss.output.chunk_tokens=37",
    f"loss.output.temperature={TEMPERATURE}",
]
OBJECTIVES = {
    "truncate": ["rollout.correction=truncate"],
    "mask": [
        *["rollout.correction=mask", "rollout.correction_range=[0.6,1.8]", "loss.output.aggregation=token_mean"],
        *["loss.representation.layers=none", "loss.representation.weight=0"],
    ],
}
SMALL = 120
CASES = [
    Case("dp1", objective="mask", tokens=SMALL),
    Case("tp2", objective="truncate"),
    Case("tp2 sp", "pp2", objective="mask", tokens=SMALL, extra=("teacher.resident_microbatches=1",)),
    Case("pp2", objective="truncate", tokens=SMALL),
    Case("dp2", "tp2", objective="mask", tokens=SMALL),
    Case("cp2", "dp2", objective="truncate", tokens=SMALL),
    Case("tp2 dp2", "pp2 dp2", objective="truncate", tokens=SMALL),
]


class Bench:
    """The models, and rollouts with log-probabilities of another engine ("other") and with the student's ("same")."""

    def __init__(self, root: Path) -> None:
        self.root = root
        for seed, role in enumerate(("student", "teacher")):
            save_model(root / role, "qwen3", seed)
        draw = random.Random(1)
        exact = student_logprobs(root / "student", make_rollouts())
        for name, noise in (("other", NOISE), ("same", 0.0)):
            recorded = [
                dataclasses.replace(rollout, logprobs=[min(0.0, value + noise * draw.gauss(0, 1)) for value in values])
                for rollout, values in zip(make_rollouts(), exact, strict=True)
            ]
            write_rollouts(root / f"{name}.jsonl", recorded)

    def settings(self, rollouts: str, *more: str) -> list[str]:
        """The configuration without a layout."""
        models = [f"{role}.hf_path={self.root / role}" for role in ("student", "teacher")]
        return [*models, f"rollout.replay={self.root / rollouts}.jsonl", *SHARED, *more]

    @cache  # noqa: B019 - one bench lives as long as the module's tests
    def expected(self, objective: str) -> tuple[dict[str, Any], dict[str, float]]:
        """The plain computation, and the metrics of the weights."""
        config = load_config("verify", [*self.settings("other", *OBJECTIVES[objective]), "output=unused"])
        rollouts = read_rollouts(self.root / "other.jsonl", VOCABULARY)
        return expected_result(config, rollouts), weight_metrics(config, rollouts, self.root / "student")


def student_logprobs(path: Path, rollouts: list[Rollout]) -> list[list[float]]:
    """Per response, the log-probabilities of its tokens under a plain float64 model."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64, attn_implementation="eager")
    found = []
    for rollout in rollouts:
        where = [len(rollout.prompt_ids) + t - 1 for t in range(len(rollout.response_ids))]
        with torch.no_grad():
            logits = model(torch.tensor([rollout.ids.tolist()])).logits[0, where]
        log_p = (logits / TEMPERATURE).log_softmax(-1)
        found.append(log_p[torch.arange(len(where)), rollout.response_ids].tolist())
    return found


def weight_metrics(config: Config, rollouts: list[Rollout], student: Path) -> dict[str, float]:
    """The metrics of the weights, over all response tokens with mask 1."""
    low, high = config.rollout.correction_range
    ratios = [
        torch.tensor(p - engine, dtype=torch.float64).exp()
        for rollout, logprobs in zip(rollouts, student_logprobs(student, rollouts), strict=True)
        for p, engine, m in zip(logprobs, rollout.logprobs, rollout.mask, strict=True)
        if m
    ]
    ratio = torch.stack(ratios)
    assert min((ratio - bound).abs().min() for bound in (low, high)) > 1e-5  # rounding takes none over a bound
    outside = (ratio < low) | (ratio > high)
    weight = ratio.masked_fill(outside, 0) if config.rollout.correction == "mask" else ratio.clamp(low, high)
    return {
        "rollout/effective_sample_size": float(weight.sum() ** 2 / (len(weight) * weight.square().sum())),
        "rollout/correction_mean": float(weight.mean()),
        "rollout/correction_outside": float(outside.double().mean()),
    }


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return Bench(tmp_path_factory.mktemp("correction"))


@pytest.mark.parametrize("case", sorted(CASES, key=lambda case: case.ranks), ids=str)
def test_layouts(pools: Pools, bench: Bench, tmp_path: Path, case: Case) -> None:
    settings = [*bench.settings("other", *OBJECTIVES[case.objective]), *case.overrides, f"output={tmp_path / 'out'}"]
    metrics = pools[case.ranks].run("layout_cases:run_verify", overrides=settings)
    expected, weights = bench.expected(case.objective)
    check_result(tmp_path / "out", expected, str(case), TOLERANCE)
    assert 0 < weights["rollout/correction_outside"] < 0.5 and weights["rollout/effective_sample_size"] < 0.95
    for name, value in weights.items():
        assert metrics[name] == pytest.approx(value, rel=TOLERANCE), name
    assert metrics["actor/pg_loss"] == metrics["output/loss"]


@pytest.mark.parametrize("mode", ["truncate", "mask"])
def test_equal_probabilities_change_nothing(pools: Pools, bench: Bench, tmp_path: Path, mode: str) -> None:
    results = []
    for correction in ("off", mode):
        output = tmp_path / correction
        settings = bench.settings("same", f"rollout.correction={correction}", "rollout.correction_range=[0.9,1.1]")
        layout = ["student.parallel.tensor=2", f"output={output}"]
        metrics = pools[2].run("layout_cases:run_verify", overrides=[*settings, *layout])
        results.append((read_result(output), metrics))
    ((plain_losses, plain), plain_metrics), ((losses, gradients), metrics) = results
    assert losses["output/loss"] == pytest.approx(plain_losses["output/loss"], rel=1e-5)
    assert max(agreement(gradients, plain).values()) < 1e-5
    assert set(metrics) - set(plain_metrics) == {
        "rollout/effective_sample_size",
        "rollout/correction_mean",
        "rollout/correction_outside",
    }
    assert metrics["rollout/effective_sample_size"] == pytest.approx(1, abs=1e-9)
    assert metrics["rollout/correction_mean"] == pytest.approx(1, abs=1e-6)
    assert metrics["rollout/correction_outside"] == 0


def test_off_does_not_read_the_log_probabilities(pools: Pools, bench: Bench, tmp_path: Path) -> None:
    """Bit by bit, with log-probabilities in the file and without."""
    write_rollouts(tmp_path / "none.jsonl", make_rollouts())
    results = []
    for name, rollouts in (("with", bench.root / "other"), ("without", tmp_path / "none")):
        settings = [*bench.settings(str(rollouts)), "student.parallel.tensor=2", f"output={tmp_path / name}"]
        metrics = pools[2].run("layout_cases:run_verify", overrides=settings)
        results.append((read_result(tmp_path / name), metrics))
    ((losses, gradients), metrics), ((other_losses, others), other_metrics) = results
    assert losses == other_losses and metrics == other_metrics
    assert all(torch.equal(gradients[name], value) for name, value in others.items())


def test_training_checks_its_gradient_first(pools: Pools, bench: Bench, tmp_path: Path) -> None:
    """The random rollouts of the gradient check have log-probabilities, too."""
    settings = [*bench.settings("other", *OBJECTIVES["mask"]), f"output={tmp_path / 'run'}"]
    said = pools[2].run("cases:check_gradients", overrides=[*settings, "student.parallel.pipeline=2"])
    assert said == "gradient check: the output loss had one backward pass per microbatch"
