"""Weights of layers and positions that follow the gap between student and teacher: values, gradients, resuming."""

from __future__ import annotations

import json
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from golden_runs import BASE, GOLDEN, weights
from pool import Pools
from transformers import AutoModelForCausalLM

from nemo_oprd.rollout.replay import read_rollouts

ADAPTIVE = ["loss.representation.adaptive.layers=true", "loss.representation.adaptive.positions=true"]
LAYER_WEIGHTS = [1.0, 3.0, 0.5]
K = 4
LAYOUTS = {
    "TP2+SP": ["student.parallel.tensor=2", "student.parallel.sequence=true"],
    "PP2": ["student.parallel.pipeline=2", "train.tokens_per_microbatch=16", "teacher.resident_microbatches=1"],
}


@cache
def second_step() -> dict[str, float]:
    """Loss, norm of the gradient and weights of a second update on the same batch and (all but) the same weights."""
    student, teacher = (
        AutoModelForCausalLM.from_pretrained(GOLDEN / role, dtype=torch.float64) for role in ("student", "teacher")
    )
    rows: dict[str, list[Any]] = {"ours": [], "theirs": [], "weight": [], "bin": []}
    for rollout in read_rollouts(GOLDEN / "rollouts.jsonl", 61):
        tokens = [t for t, m in enumerate(rollout.mask) if m]
        tokens = tokens[-K:]
        ids = torch.tensor([rollout.ids.tolist()])
        where = [len(rollout.prompt_ids) + t for t in tokens]
        for name, model in (("ours", student), ("theirs", teacher)):
            states = model.model(ids, output_hidden_states=True, use_cache=False).hidden_states[1:]
            rows[name].append(torch.stack(states)[:, 0, where])
        rows["weight"] += [1 / len(tokens) for _ in tokens]
        # the last token, the one before, the third and the fourth from the end: bins 0, 1, 2, 2
        rows["bin"] += [(0, 1, 2, 2)[back] for back in reversed(range(len(tokens)))]
    ours, theirs = torch.cat(rows["ours"], dim=1), torch.cat(rows["theirs"], dim=1).detach()
    weight, bins = torch.tensor(rows["weight"], dtype=torch.float64), torch.tensor(rows["bin"])
    error = ((ours - theirs).flatten(1).norm(dim=1) / theirs.flatten(1).norm(dim=1)).detach()
    of_layers = torch.tensor(LAYER_WEIGHTS) * error / error.mean()
    cosine = torch.nn.functional.cosine_similarity(ours[-1], theirs[-1], dim=-1).detach()
    gap = torch.stack([1 - cosine[bins == j].mean() for j in range(3)])
    of_bins = gap / gap.mean()
    adapted = weight * of_bins[bins]
    per_layer = ((ours - theirs).square().mean(-1) * adapted / adapted.sum()).sum(1)
    loss = (of_layers * per_layer).sum() / of_layers.sum()
    loss.backward()
    norm = torch.stack([p.grad.norm() for p in student.parameters() if p.grad is not None]).norm()
    return {
        "rep/loss": float(loss),
        "loss/total": float(loss),
        "actor/grad_norm": float(norm),
        **{f"rep/loss_layer/{i + 1}": float(value) for i, value in enumerate(per_layer)},
        **{f"rep/layer_weight/{i + 1}": float(value) for i, value in enumerate(of_layers / of_layers.mean())},
        **{f"rep/position_weight/{1 << j}": float(value) for j, value in enumerate(of_bins)},
    }


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_second_step_is_weighted_by_the_gaps_of_the_first(pools: Pools, tmp_path: Path, layout: str) -> None:
    settings = [f"loss.representation.layer_weights={LAYER_WEIGHTS}", "train.lr=1e-12", "train.export_hf=false"]
    overrides = [*BASE, *ADAPTIVE, *settings, *LAYOUTS[layout], "train.steps=2", f"output={tmp_path}"]
    pools[2].run("cases:run_train", overrides=overrides)
    first, second = (json.loads(line) for line in (tmp_path / "metrics.jsonl").open())
    for name, value in second_step().items():
        assert second[name] == pytest.approx(value, rel=1e-5), name
    assert [first[f"rep/position_weight/{k}"] for k in (1, 2, 4)] == [1, 1, 1]
    assert first["rep/loss"] != pytest.approx(second["rep/loss"], rel=1e-3)


def test_a_resumed_run_knows_the_gaps(pools: Pools, tmp_path: Path) -> None:
    """Bit by bit, with a moving average over two steps."""
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    shared = [*BASE, *ADAPTIVE, *LAYOUTS["TP2+SP"], "train.save_every=2", "loss.representation.adaptive.decay=0.5"]
    pools[2].run("cases:run_train", overrides=[*shared, "train.steps=3", f"output={whole}"])
    for steps in (2, 3):
        shutil.rmtree(parts / "hf", ignore_errors=True)
        pools[2].run("cases:run_train", overrides=[*shared, f"train.steps={steps}", f"output={parts}"])
    got, expected = weights(parts / "hf"), weights(whole / "hf")
    assert all(torch.equal(got[name], value) for name, value in expected.items())
    lines = [[json.loads(line) for line in (run / "metrics.jsonl").open()] for run in (whole, parts)]
    for before, after in zip(*lines, strict=True):
        named = [name for name in before if name.startswith("rep/")]
        assert {name: before[name] for name in named} == {name: after[name] for name in named}
    # each step's weights are those of the moving average of the steps before
    gaps = [[line[f"rep/relative_error_layer/{layer}"] for layer in (1, 2, 3)] for line in lines[1]]
    average = [0.5 * a + 0.5 * b for a, b in zip(gaps[0], gaps[1], strict=True)]
    for layer in range(3):
        got_weight = lines[1][2][f"rep/layer_weight/{layer + 1}"]
        assert got_weight == pytest.approx(average[layer] * 3 / sum(average))
