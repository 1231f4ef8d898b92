"""Values per token (`logging.token_metrics`) under several layouts, against plain models in float64."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from golden_runs import BASE, GOLDEN, weights
from pool import Pools
from transformers import AutoModelForCausalLM

from nemo_oprd.rollout.replay import read_rollouts

K, TEMPERATURE, LAYER_WEIGHTS = 4, 0.8, (1.0, 2.0, 5.0)
SHARED = [
    *BASE,
    f"loss.representation.k={K}",
    f"loss.representation.layer_weights={list(LAYER_WEIGHTS)}",
    f"loss.output.temperature={TEMPERATURE}",
    "loss.output.chunk_tokens=7",
    "logging.token_metrics=100",
    "train.export_hf=false",
]
FULL = ["loss.output.kind=full_vocab", "loss.output.weight=0.5"]
# several groups of microbatches, so that no row has the index that it has in the whole batch
GROUPS = ["train.tokens_per_microbatch=16", "teacher.resident_microbatches=1"]
PP2, CP2, TP2 = (f"student.parallel.{kind}=2" for kind in ("pipeline", "context", "tensor"))
SP = "student.parallel.sequence=true"
LAYOUTS = {
    "TP2": (2, [TP2]),
    "TP2 SP": (2, [TP2, SP, "student.recompute=full"]),
    "PP2": (2, [PP2, *GROUPS]),
    "CP2 DP2": (4, [CP2, "teacher.parallel.tensor=2", *GROUPS]),
    "PP2 CP2": (4, [PP2, CP2]),
}


@cache
def expected() -> list[dict[str, list[float | None]]]:
    """Per response: the values per token of the equations, without any layout."""
    models = [
        AutoModelForCausalLM.from_pretrained(GOLDEN / role, dtype=torch.float64) for role in ("student", "teacher")
    ]
    found = []
    for rollout in read_rollouts(GOLDEN / "rollouts.jsonl", 61):
        ids, start = torch.tensor([rollout.ids.tolist()]), len(rollout.prompt_ids)
        with torch.no_grad():
            outputs = [model(ids, output_hidden_states=True) for model in models]
        log_p, log_q = ((output.logits[0] / TEMPERATURE).log_softmax(-1) for output in outputs)
        layers = [[state[0] for state in output.hidden_states[1:]] for output in outputs]
        with_mask = [t for t, m in enumerate(rollout.mask) if m]
        values: dict[str, list[float | None]] = {name: [] for name in ("rep_loss", "cosine", "kl", "log_ratio")}
        for t, token in enumerate(rollout.response_ids):
            pairs = [(student[start + t], teacher[start + t]) for student, teacher in zip(*layers, strict=True)]
            losses = [float((s - z).square().mean()) for s, z in pairs]
            cosines = [float(torch.nn.functional.cosine_similarity(s, z, dim=0)) for s, z in pairs]
            p, q = log_p[start + t - 1], log_q[start + t - 1]
            is_row, is_output_row = t in with_mask[-K:], t in with_mask
            weighted = sum(w * loss for w, loss in zip(LAYER_WEIGHTS, losses, strict=True)) / sum(LAYER_WEIGHTS)
            values["rep_loss"].append(weighted if is_row else None)
            values["cosine"].append(sum(cosines) / len(cosines) if is_row else None)
            values["kl"].append(float((p.exp() * (p - q)).sum()) if is_output_row else None)
            values["log_ratio"].append(float(p[token] - q[token]) if is_output_row else None)
        found.append(values)
    return found


def train(pools: Pools, size: int, output: Path, *overrides: str) -> dict[int, list[dict[str, Any]]]:
    """Step -> the lines of its file."""
    settings = [*SHARED, "train.steps=1", *overrides, f"output={output}"]
    pools[size].run("cases:run_train", overrides=settings)
    files = sorted((output / "rollouts").glob("token_metrics_*.jsonl"))
    return {int(file.stem[-7:]): [json.loads(line) for line in file.open()] for file in files}


def check(line: dict[str, Any], names: tuple[str, ...]) -> None:
    """A line has exactly these columns, and the values of the equations."""
    reference = expected()[line["number"]]
    assert set(reference) & set(line) == set(names)
    for name in names:
        assert [value is None for value in line[name]] == [value is None for value in reference[name]], name
        pairs = [(v, r) for v, r in zip(line[name], reference[name], strict=True) if v is not None]
        assert [v for v, _ in pairs] == pytest.approx([r for _, r in pairs], rel=2e-5, abs=1e-6), name


@pytest.mark.parametrize("layout", LAYOUTS)
def test_values_are_those_of_plain_models(pools: Pools, tmp_path: Path, layout: str) -> None:
    size, settings = LAYOUTS[layout]
    (lines,) = train(pools, size, tmp_path, *settings, *FULL).values()
    rollouts = read_rollouts(GOLDEN / "rollouts.jsonl", 61)
    assert [line["number"] for line in lines] == list(range(len(rollouts)))
    assert sum(value is not None for line in lines for value in line["cosine"]) > 10
    for line, rollout in zip(lines, rollouts, strict=True):
        assert line["step"] == 1 and line["token_ids"] == rollout.response_ids.tolist()
        check(line, ("rep_loss", "cosine", "kl", "log_ratio"))


def test_only_what_is_measured(pools: Pools, tmp_path: Path) -> None:
    """`sampled_token` knows no distribution of the teacher; hidden states alone know no distribution at all."""
    sampled = ["loss.output.kind=sampled_token", "loss.output.weight=1", "logging.token_metrics=3"]
    (lines,) = train(pools, 2, tmp_path / "sampled", PP2, *sampled).values()
    assert [line["number"] for line in lines] == [0, 2, 4]  # of six, evenly spread
    for line in lines:
        check(line, ("rep_loss", "cosine", "log_ratio"))
    (lines,) = train(pools, 2, tmp_path / "hidden", PP2).values()
    for line in lines:
        check(line, ("rep_loss", "cosine"))


def test_of_watched_rows(pools: Pools, tmp_path: Path) -> None:
    """A divergence that is only measured on drawn rows gives the values of these rows."""
    watch = ["logging.output_metrics_every=2", "logging.output_metrics_rows=5", "train.lr=1e-12"]
    found = train(pools, 2, tmp_path, TP2, SP, *watch, "train.steps=3", "logging.every=2")
    assert list(found) == [1, 2, 3]  # the first, every second and the last
    for step, lines in found.items():
        drawn = [(line["number"], t) for line in lines for t, v in enumerate(line.get("kl", [])) if v is not None]
        assert len(drawn) == (0 if step == 3 else 5)
        for response, t in drawn:
            reference = expected()[response]
            assert lines[response]["kl"][t] == pytest.approx(reference["kl"][t], rel=2e-5, abs=1e-6)
            assert lines[response]["log_ratio"][t] == pytest.approx(reference["log_ratio"][t], rel=2e-5, abs=1e-6)


def test_off_by_default_and_without_influence(pools: Pools, tmp_path: Path) -> None:
    """Weights and metrics are the same bit by bit; a run that starts over leaves no file of steps it does not reach."""
    more = [TP2, SP, *FULL, "train.steps=2", "train.export_hf=true"]
    kept = train(pools, 2, tmp_path / "kept", *more)
    assert list(kept) == [1, 2]
    assert train(pools, 2, tmp_path / "off", *more, "logging.token_metrics=0") == {}
    before, after = weights(tmp_path / "off" / "hf"), weights(tmp_path / "kept" / "hf")
    assert all(torch.equal(after[name], value) for name, value in before.items())
    again = train(pools, 2, tmp_path / "kept", *more, "train.steps=1", "train.export_hf=false")
    assert again == {1: kept[1]}
