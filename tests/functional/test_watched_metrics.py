"""The output space watched in runs on hidden states alone: the paper's metrics on some rows in some updates."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from golden_runs import BASE, GOLDEN, weights
from pool import Pools
from transformers import AutoModelForCausalLM

from nemo_oprd.rollout.replay import read_rollouts

K, TEMPERATURE = 5, 0.8
# nothing above the first layer runs where nothing is watched
SHARED = [*BASE, "loss.representation.layers=[1]", f"loss.output.k={K}", f"loss.output.temperature={TEMPERATURE}"]
WATCH = ["logging.output_metrics_every=2", "loss.output.chunk_tokens=7"]
LAYOUTS = {
    "TP2+SP": ["student.parallel.tensor=2", "student.parallel.sequence=true", "teacher.parallel.pipeline=2"],
    "PP2": ["student.parallel.pipeline=2", "train.tokens_per_microbatch=16", "teacher.resident_microbatches=1"],
}


# by response token, filled by `watched`
OVERLAPS: list[float] = []


@cache
def watched() -> dict[str, float]:
    """The metrics over all response tokens with mask 1."""
    paths = [GOLDEN / role for role in ("student", "teacher")]
    models = [AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64) for path in paths]
    rows: list[list[torch.Tensor]] = [[], []]
    sampled: list[int] = []
    for rollout in read_rollouts(GOLDEN / "rollouts.jsonl", 61):
        tokens = [t for t, m in enumerate(rollout.mask) if m]
        sampled += [rollout.response_ids[t] for t in tokens]
        ids = torch.tensor([rollout.ids.tolist()])
        for found, model in zip(rows, models, strict=True):
            with torch.no_grad():
                logits = model(ids).logits[0, [len(rollout.prompt_ids) + t - 1 for t in tokens]]
            found.append((logits / TEMPERATURE).log_softmax(-1))
    log_p, log_q = (torch.cat(found) for found in rows)
    p, q = log_p.exp(), log_q.exp()
    at = torch.arange(len(sampled)), torch.tensor(sampled)
    tops = [set(map(tuple, enumerate(row))) for row in log_p.topk(K).indices.tolist()]
    shared = [
        len({i for _, i in top} & set(row)) / K for top, row in zip(tops, log_q.topk(K).indices.tolist(), strict=True)
    ]
    OVERLAPS[:] = shared
    support = log_p.topk(K).indices
    estimate = float((log_p[at] - log_q[at]).mean())
    return {
        "actor/entropy": float(-(p * log_p).sum(-1).mean()),
        "teacher/entropy": float(-(q * log_q).sum(-1).mean()),
        "output/reverse_kl": float((p * (log_p - log_q)).sum(-1).mean()),
        "output/kl_estimate": estimate,
        "actor/pg_loss": estimate,
        "val-topk/overlap_ratio": sum(shared) / len(shared),
        "val-topk/student_mass": float(p.gather(1, support).sum(-1).mean()),
        "val-topk/teacher_mass": float(q.gather(1, support).sum(-1).mean()),
        "val-topk/empty_support": 0.0,
    }


def train(pools: Pools, output: Path, layout: str, *overrides: str) -> list[dict[str, Any]]:
    settings = [*SHARED, *LAYOUTS[layout], *overrides, f"output={output}"]
    pools[2].run("cases:run_train", overrides=settings)
    return [json.loads(line) for line in (output / "metrics.jsonl").open()]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_all_rows_in_the_first_and_every_second_update(pools: Pools, tmp_path: Path, layout: str) -> None:
    lines = train(pools, tmp_path, layout, *WATCH, "train.steps=3", "train.lr=1e-12", "train.export_hf=false")
    expected = watched()
    for line in lines[:2]:
        for name, value in expected.items():
            assert line[name] == pytest.approx(value, rel=1e-5), name
    assert not set(expected) & set(lines[2])
    assert not any("output/loss" in line or "loss/weight_output" in line for line in lines)


@pytest.mark.parametrize(
    ("layout", "updates"), [("TP2+SP", 1), pytest.param("PP2", 1, marks=pytest.mark.slow), ("PP2", 2)]
)
def test_a_sampled_token_is_watched_in_the_same_updates(
    pools: Pools, tmp_path: Path, layout: str, updates: int
) -> None:
    """Then its teacher sends whole states: all rows are measured; loss, gradient and training stay what they are."""
    sampled = ["loss.representation.layers=none", "loss.output.kind=sampled_token", "loss.output.weight=1"]
    shared = [*sampled, "loss.output.aggregation=token_mean", "train.steps=3", "train.lr=1e-3"]
    shared.append(f"train.updates_per_rollout={updates}")
    lines = train(pools, tmp_path / "watched", layout, *shared, *WATCH)
    plain = train(pools, tmp_path / "plain", layout, *shared, "loss.output.chunk_tokens=7")
    for name, value in watched().items():
        assert lines[0][name] == pytest.approx(value, rel=1e-5), name
        assert name in lines[1]
    assert lines[0]["output/loss"] == pytest.approx(watched()["output/kl_estimate"], rel=1e-5)
    whole = {name for name in watched() if name.startswith("val-topk/") or name == "output/reverse_kl"}
    assert not whole & set(lines[2])
    for line, without in zip(lines, plain, strict=True):
        assert not whole & set(without)
        for name in ("loss/total", "actor/grad_norm", "actor/entropy", "teacher/entropy", "actor/pg_loss"):
            # the teacher's log-probabilities come from one product with its head or from another
            assert line[name] == pytest.approx(without[name], rel=1e-4, abs=1e-6), name
    before, after = weights(tmp_path / "plain" / "hf"), weights(tmp_path / "watched" / "hf")
    assert all(torch.allclose(after[name], value, rtol=0, atol=1e-5) for name, value in before.items())


@pytest.mark.parametrize("more", [[], ["logging.output_metrics_every=1"]], ids=["", "watched"])
def test_verify_asks_for_what_most_updates_ask_for(pools: Pools, tmp_path: Path, more: list[str]) -> None:
    """The two numbers per token of the sampled token's teacher, not the states of the updates that are watched."""
    sampled = ["loss.representation.layers=none", "loss.output.kind=sampled_token", "loss.output.weight=1", *more]
    products = pools[1].run("cases:teacher_products_of_verify", overrides=[*BASE, *sampled, f"output={tmp_path / 'v'}"])
    assert products > 0


def test_watching_some_rows_changes_nothing_else(pools: Pools, tmp_path: Path) -> None:
    """Weights and the other metrics stay bit by bit; the rows are the same at any layout."""
    some = [*WATCH, "logging.output_metrics_rows=5", "train.steps=2"]
    lines = train(pools, tmp_path / "watched", "TP2+SP", *some)
    plain = train(pools, tmp_path / "plain", "TP2+SP", "train.steps=2")
    elsewhere = train(pools, tmp_path / "elsewhere", "PP2", *some, "train.export_hf=false")
    before, after = weights(tmp_path / "plain" / "hf"), weights(tmp_path / "watched" / "hf")
    assert all(torch.equal(after[name], value) for name, value in before.items())
    for line, without, other in zip(lines, plain, elsewhere, strict=True):
        same = [name for name in without if name.startswith(("rep/", "loss/", "actor/grad_norm"))]
        assert {name: line[name] for name in same} == {name: without[name] for name in same}
        for name in watched():
            assert line[name] == pytest.approx(other[name], rel=1e-5)
            assert name not in without
        assert line["actor/pg_loss"] != pytest.approx(watched()["actor/pg_loss"], rel=1e-3)  # not all rows
    assert lines[0]["actor/entropy"] != pytest.approx(lines[1]["actor/entropy"], rel=1e-3)  # drawn anew


def test_top_sets_are_searched_in_drawn_rows(pools: Pools, tmp_path: Path) -> None:
    """Other ones in each update, the same at any layout; what else is measured is that of all rows."""
    full = ["loss.representation.layers=none", "loss.output.kind=full_vocab", "loss.output.weight=1", "seed=3"]
    full += ["loss.output.aggregation=token_mean", "train.steps=2", "train.lr=1e-12", "train.export_hf=false"]
    some = [*full, "logging.output_metrics_rows=5", "loss.output.chunk_tokens=7"]
    lines, elsewhere = (train(pools, tmp_path / layout, layout, *some) for layout in LAYOUTS)
    expected = watched()
    for step, (line, other) in enumerate(zip(lines, elsewhere, strict=True)):
        rows = np.random.default_rng((3, step)).choice(len(OVERLAPS), 5, replace=False)
        overlap = float(np.mean([OVERLAPS[row] for row in rows]))
        assert line["val-topk/overlap_ratio"] == pytest.approx(overlap, rel=1e-6) == other["val-topk/overlap_ratio"]
        for name in ("actor/entropy", "teacher/entropy", "output/reverse_kl"):
            assert line[name] == pytest.approx(expected[name], rel=1e-5)
        assert line["val-topk/student_mass"] == pytest.approx(other["val-topk/student_mass"], rel=1e-5)
