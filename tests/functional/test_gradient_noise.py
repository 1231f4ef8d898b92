"""Signal and noise of a batch's gradient: against float64 Hugging Face gradients of its two halves."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from golden_runs import weights
from pool import Pools
from tiny_models import MODELS, SIZES, save_random

from nemo_oprd.batch.types import Rollout
from nemo_oprd.config.loading import load_config
from nemo_oprd.distillation.reference import reference
from nemo_oprd.rollout.replay import write_rollouts

OBJECTIVE = ["loss.representation.k=9", "loss.output.kind=full_vocab", "loss.output.weight=0.5"]
LAYOUTS = {
    "TP1": (1, []),
    "TP2+SP": (2, ["student.parallel.tensor=2", "student.parallel.sequence=true"]),
    "PP2": (2, ["student.parallel.pipeline=2"]),  # the tied head is on another stage than the embedding
    "DP2, groups": (2, ["train.tokens_per_microbatch=40", "teacher.resident_microbatches=1"]),
    "CP2, DP1": (2, ["student.parallel.context=2"]),
}


def make_rollouts() -> list[Rollout]:
    """Seven responses, one of them without a supervised token: halves of three."""
    rng = np.random.default_rng(3)
    lengths = [(4, 20), (3, 6), (7, 11), (5, 2), (9, 30), (2, 8), (4, 4)]
    ids = [rng.integers(0, SIZES["vocab_size"], prompt + response).tolist() for prompt, response in lengths]
    made = [Rollout(row[:prompt], row[prompt:]) for row, (prompt, _) in zip(ids, lengths, strict=True)]
    return [*made[:2], Rollout(made[2].prompt_ids, made[2].response_ids, [0] * 11), *made[3:]]


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    root = tmp_path_factory.mktemp("noise")
    for seed, role in enumerate(("student", "teacher")):
        save_random(root / role, SIZES | MODELS["qwen2_tied"], seed)
    write_rollouts(root / "rollouts.jsonl", make_rollouts())
    models = [f"{role}.hf_path={root / role}" for role in ("student", "teacher")]
    return (*models, f"rollout.replay={root / 'rollouts.jsonl'}", *OBJECTIVE, "logging.tensorboard=false")


@cache
def expected(settings: tuple[str, ...]) -> dict[str, float]:
    active = [rollout for rollout in make_rollouts() if any(rollout.mask)]
    config = load_config("verify", [*settings, "output=unused"])
    first, second = (reference(config, half)["gradients"] for half in (active[::2], active[1::2]))
    a, b = (torch.cat([gradients[name].flatten() for name in first]) for gradients in (first, second))
    signal, noise = float(a @ b), float((a - b).square().sum()) / 4
    return {"signal": signal, "noise": noise, "snr": signal / noise}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_halves(pools: Pools, settings: tuple[str, ...], tmp_path: Path, layout: str) -> None:
    ranks, sizes = LAYOUTS[layout]
    run = [*settings, *sizes, "train.steps=1", "logging.gradient_noise_every=1", f"output={tmp_path / 'run'}"]
    pools[ranks].run("cases:run_train", overrides=run)
    line = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1])
    for name, value in expected(settings).items():
        assert line[f"actor/gradient_{name}"] == pytest.approx(value, rel=1e-4), name
    assert line["timing/gradient_noise_s"] > 0


def test_responses_to_one_prompt_are_in_one_half(pools: Pools, settings: tuple[str, ...], tmp_path: Path) -> None:
    """Every response twice in a row, as with rollout.per_prompt=2: signal and noise are those of the single ones."""
    write_rollouts(tmp_path / "twice.jsonl", [rollout for rollout in make_rollouts() for _ in range(2)])
    run = [*settings, f"rollout.replay={tmp_path / 'twice.jsonl'}", "train.steps=1", "logging.gradient_noise_every=1"]
    pools[1].run("cases:run_train", overrides=[*run, f"output={tmp_path / 'run'}"])
    line = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1])
    for name, value in expected(settings).items():
        assert line[f"actor/gradient_{name}"] == pytest.approx(value, rel=1e-4), name


def test_measuring_changes_nothing(pools: Pools, settings: tuple[str, ...], tmp_path: Path) -> None:
    """In the first and every second update; the weights are those of a run that doesn't measure, bit by bit."""
    for every in (0, 2):
        run = [*settings, "train.steps=3", f"logging.gradient_noise_every={every}", f"output={tmp_path / str(every)}"]
        pools[2].run("cases:run_train", overrides=run)
    lines = [json.loads(line) for line in (tmp_path / "2" / "metrics.jsonl").open()]
    assert ["actor/gradient_snr" in line for line in lines] == [True, True, False]
    without, measured = (weights(tmp_path / name / "hf") for name in ("0", "2"))
    assert all(torch.equal(measured[name], value) for name, value in without.items())
