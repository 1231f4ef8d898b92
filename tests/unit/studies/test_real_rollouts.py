"""The study of beginnings and lagged responses on SmolLM2: arms, measurements by position, the documents' tables."""

from __future__ import annotations

import json
import math
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from nemo_oprd.config.loading import load_config
from nemo_oprd.config.teacher_kinds import RECORDS, Records
from nemo_oprd.evaluation.agreement import SampledIds
from studies import real_rollout_measure, real_rollout_tables, real_rollouts
from studies.real_rollout_measure import buckets, measure, read_teacher, title
from studies.real_rollout_tables import BUCKETS
from studies.real_rollouts import CORRECTED, Arm, arms

ROOT = Path(__file__).parents[3]
GOLDEN = ROOT / "tests" / "golden"
RESULTS = real_rollout_tables.read_results()


def test_every_run_has_a_name_of_its_own_and_settings_that_load() -> None:
    every = list(arms())
    assert len({arm.name for arm in every}) == len(every)
    for arm in every:
        settings = [*arm.of_losses.all_settings, f"train.lr={arm.rate}", f"train.steps={arm.steps}"]
        if arm.loss == CORRECTED:
            with pytest.raises(ValueError, match="records no log-probabilities"):
                load_config("real_model", settings)
        with mock.patch.dict(RECORDS, {"megatron": Records()}):
            config = load_config("real_model", settings)
        assert (config.rollout.max_lag, config.response_limit[1]) == (arm.lag, arm.length)
        assert (config.rollout.token_correction is not None) == (arm.loss == CORRECTED)
        assert math.ceil(config.train.warmup_fraction * arm.steps) == real_rollouts.WARMUP
        # a student is measured from a checkpoint
        assert all(update % config.train.save_every == 0 for update in arm.at)
        assert (config.train.schedule, config.train.keep_checkpoints) == ("cosine", 0)  # the study sets constant


def test_buckets_cover_every_token_once() -> None:
    assert BUCKETS[0][0] == 1 and BUCKETS[-1][1] == real_rollouts.LIMIT
    assert all(last + 1 == first for (_, last), (first, _) in pairwise(BUCKETS))


def test_sums_by_position_against_a_plain_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    monkeypatch.setattr(real_rollout_measure, "BUCKETS", ((1, 2), (3, 4), (5, 8)))
    p, q = (torch.randn(3, 7).double().softmax(-1) for _ in range(2))
    p[0, 2], q[0, 2] = 5.0, 5.0  # the same most probable token at the first position
    found = buckets(p.log().float(), q.log().float())
    for bucket, places in (("1-2", (0, 1)), ("3-4", (2,)), ("5-8", ())):
        kl = [
            sum(float(a[t, v] * (a[t, v] / b[t, v]).log()) for t in places for v in range(7))
            for a, b in ((q, p), (p, q))
        ]
        assert found[bucket]["tokens"] == len(places)
        np.testing.assert_allclose([found[bucket][key] for key in ("forward_kl", "reverse_kl")], kl, atol=1e-5)
        assert found[bucket]["same_greedy"] == sum(int(p[t].argmax() == q[t].argmax()) for t in places)


def test_students_against_float64(tmp_path: Path) -> None:
    """Two students of small models, the teacher itself among them, against divergences by plain transformers."""
    from transformers import AutoModelForCausalLM

    names = ("student", "teacher")
    responses = [SampledIds([5, 6, 7], [8, 9, 3, 4], ended=True), SampledIds([4, 3], list(range(3, 21)), ended=False)]
    tokenizer = SimpleNamespace(vocab_size=50)
    with mock.patch.object(real_rollout_measure.Tokenizer, "load", return_value=tokenizer):
        students = {name: GOLDEN / name for name in names}
        found = measure(students, GOLDEN / "teacher", responses, tmp_path / "kept.pt")
        again = measure({"s": GOLDEN / "student"}, GOLDEN / "nowhere", responses, tmp_path / "kept.pt")
    assert again["s"] == found["student"]  # the teacher is not asked again
    models = [AutoModelForCausalLM.from_pretrained(GOLDEN / name, dtype=torch.float64).eval() for name in names]
    p, q = ([_distributions(model, each) for each in responses] for model in models)
    for bucket, (first, last) in zip(map(title, BUCKETS), BUCKETS, strict=True):
        parts = [(a[first - 1 : last], b[first - 1 : last]) for a, b in zip(p, q, strict=True)]
        assert found["student"][bucket]["tokens"] == [len(a) for a, _ in parts]
        for key, kl in (
            ("reverse_kl", [float((a * (a / b).log()).sum()) for a, b in parts]),
            ("forward_kl", [float((b * (b / a).log()).sum()) for a, b in parts]),
        ):
            np.testing.assert_allclose(found["student"][bucket][key], kl, rtol=1e-4, atol=1e-6)
            np.testing.assert_allclose(found["teacher"][bucket][key], 0, atol=1e-6)
        assert found["teacher"][bucket]["same_greedy"] == found["teacher"][bucket]["tokens"]


@torch.no_grad()
def _distributions(model: Any, response: SampledIds) -> torch.Tensor:
    logits = model(torch.tensor([response.prompt + response.tokens])).logits[0]
    return logits[len(response.prompt) - 1 : -1, :50].softmax(-1)


def measured(kl: list[list[float]], tokens: list[list[float]]) -> dict[str, dict[str, list[float]]]:
    """Measurements of two buckets in which all measures are `kl`."""
    keys = ("forward_kl", "reverse_kl", "same_greedy")
    pairs = zip("ab", kl, tokens, strict=True)
    return {name: {"tokens": count, **dict.fromkeys(keys, values)} for name, values, count in pairs}


def test_intervals_against_a_plain_loop() -> None:
    draw = np.random.default_rng(7)
    tokens = draw.integers(1, 30, (2, 12)).tolist()
    one, other = (measured(draw.uniform(0, 20, (2, 12)).tolist(), tokens) for _ in range(2))
    for names in ([], ["b"]):
        found = real_rollout_tables.difference(one, other, "reverse_kl", names)
        values = []
        for prompts in [range(12), *np.random.default_rng(0).integers(12, size=(real_rollout_tables.DRAWS, 12))]:
            total = [0.0, 0.0]
            for name in names or "ab":
                for prompt in prompts:
                    total[0] += one[name]["reverse_kl"][prompt] - other[name]["reverse_kl"][prompt]
                    total[1] += one[name]["tokens"][prompt]
            values.append(total[0] / total[1])
        assert found[0] == pytest.approx(values[0])
        ordered = sorted(values[1:])
        assert found[1] == pytest.approx(ordered[50], abs=0.01) and found[2] == pytest.approx(ordered[-51], abs=0.01)
    with pytest.raises(ValueError, match="other responses of the teacher"):
        real_rollout_tables.difference(one, measured([[1.0] * 12] * 2, [[3.0] * 12] * 2), "reverse_kl")


def result(tokens: str, work: float, at: dict[str, float], **values: Any) -> dict[str, Any]:
    arm = {"loss": "mse", "tokens": tokens, "limit": 128, "lag": 0, "seed": 0, **values}
    found = {updates: measured([[kl, kl]] * 2, [[1.0, 1.0]] * 2) for updates, kl in at.items()}
    return {"arm": arm, "rate": 1e-4, "operations": {"update": work}, "measured": found}


def test_runs_are_compared_at_equal_updates_and_at_equal_operations() -> None:
    results = {
        "start": {"measured": {"0": measured([[9.0, 9.0]] * 2, [[1.0, 1.0]] * 2)}},
        "a": result("all", 10.0, {"4": 3.0, "10": 1.0}),
        "b": result("first 16", 4.0, {"10": 2.0}),
        "c": result("last 32", 10.0, {"10": 5.0}),
        "d": result("first 16", 4.0, {"10": 0.0}, lag=4),  # of another study
    }
    rows = [line.split(" | ")[:4] for line in real_rollout_tables.against_whole(results).splitlines()[2:]]
    assert rows == [
        ["| last 32, 10 updates - all, 10", "updates and operations", *["+4.000 [+4.000, +4.000]"] * 2],
        ["| first 16, 10 updates - all, 10", "updates", *["+1.000 [+1.000, +1.000]"] * 2],
        ["| first 16, 10 updates - all, 4", "operations", *["-1.000 [-1.000, -1.000]"] * 2],
    ]
    rows = [line.split(" | ")[:4] for line in real_rollout_tables.beginnings(results).splitlines()[2:]]
    assert rows == [
        ["| (start)", "0", "0", "9.000"],
        ["| all", "10", "1.00", "1.000"],
        ["| last 32", "10", "1.00", "5.000"],
        ["| all", "4", "0.40", "3.000"],
        ["| first 16", "10", "0.40", "2.000"],
    ]


def test_a_lag_is_compared_with_the_same_loss_without_it() -> None:
    results = {
        "a": result("all", 1.0, {"16": 1.0}, limit=32),
        "b": result("all", 1.0, {"16": 1.5}, limit=32, lag=4),
        "c": result("all", 1.0, {"16": 2.0}, limit=32, loss="sampled_token"),
        "d": result("all", 1.0, {"16": 4.0}, limit=32, loss=CORRECTED, lag=4),
    }
    rows = [line.split(" | ") for line in real_rollout_tables.lagged(results).splitlines()[2:]]
    assert [(row[0], row[1], row[7]) for row in rows] == [
        ("| mse", "0", ""), ("| mse", "4", "+0.500 [+0.500, +0.500]"),
        ("| sampled_token", "0", ""), (f"| {CORRECTED}", "4", "+2.000 [+2.000, +2.000]"),
    ]  # fmt: skip


def test_results_are_those_of_their_arms() -> None:
    runs = {name: each for name, each in RESULTS.items() if "arm" in each}
    assert runs, "studies/results/real_rollouts holds the finished runs"
    lengths = np.array([len(response.tokens) for response in read_teacher()])
    assert len(lengths) == real_rollout_measure.PROMPTS and lengths.max() <= real_rollouts.LIMIT
    for each in RESULTS.values():
        for found in each["measured"].values():
            for (first, last), bucket in zip(BUCKETS, found.values(), strict=True):
                assert bucket["tokens"] == np.clip(lengths - first + 1, 0, last - first + 1).tolist()
    for name, each in runs.items():
        arm = Arm(**{**each["arm"], "at": tuple(each["arm"]["at"])})
        assert (arm.name, list(arm.settings), arm.rate) == (name, each["settings"], each["rate"])
        assert list(each["measured"]) == [str(update) for update in arm.at]
        assert len(each["training"]["loss/total"]) == arm.steps
        assert each["training"].get("rollout/lag_mean", 0) == arm.lag  # of the second half of the updates
        text = json.dumps(each)
        assert len(text) < 50_000 and "/tmp" not in text and "/work" not in text, name


def test_shorter_runs_on_all_tokens_have_the_operations_of_beginnings() -> None:
    runs = [each for each in RESULTS.values() if "arm" in each and each["arm"]["limit"] == real_rollouts.LIMIT]
    (whole,) = (each for each in runs if each["arm"]["tokens"] == "all")
    for each in runs:
        if "first" in each["arm"]["tokens"]:
            share = real_rollout_tables.work(each, real_rollouts.STEPS)
            near = min(abs(share / real_rollout_tables.work(whole, at) - 1) for at in whole["arm"]["at"])
            assert near < real_rollout_tables.EQUAL, each["arm"]["tokens"]


def test_the_documents_have_the_tables_of_the_results() -> None:
    page = (ROOT / "docs" / "results_smollm2.md").read_text()
    for table in real_rollout_tables.tables(RESULTS).split("\n\n"):
        assert table in page, f"docs/results_smollm2.md lacks a table of `studies.real_rollouts table`:\n{table}"
