"""Several updates on the same rollouts: the ratio to the student that sampled, clipped, against autograd in float64.

Also with `rollout.correction`, whose weights are those of the first update in all of them.
"""

from __future__ import annotations

import dataclasses
import json
import math
import random
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from golden_runs import BASE, GOLDEN, weights
from pool import Pools
from reference_adamw import ReferenceAdamW
from transformers import AutoModelForCausalLM

from nemo_oprd.batch.types import Rollout
from nemo_oprd.rollout.replay import read_rollouts, write_rollouts

UPDATES, LOW, HIGH, MU = 3, 0.1, 0.25, 0.5
SETTINGS = [
    *BASE,
    f"train.updates_per_rollout={UPDATES}",
    "train.clip_grad=1000",
    "loss.output.kind=sampled_token",
    "loss.output.weight=1",
    "loss.output.aggregation=token_mean",
    f"loss.output.clip=[{LOW},{HIGH}]",
    "loss.output.chunk_tokens=5",
    f"loss.representation.weight={MU}",
    "loss.representation.layers=[2]",
    "loss.representation.positions=all",
    "loss.representation.aggregation=token_mean",
]
LAYOUTS = {
    "TP2": (2, ["student.parallel.tensor=2"]),
    "TP2+SP, a teacher of its own": (
        3,
        ["student.parallel.tensor=2", "student.parallel.sequence=true", "teacher.placement=dedicated"],
    ),
    "PP2, in groups": (
        2,
        ["student.parallel.pipeline=2", "train.tokens_per_microbatch=16", "teacher.resident_microbatches=1"],
    ),
}


CORRECTED = {
    "truncate": (2, ["student.parallel.tensor=2", "train.tokens_per_microbatch=16"]),
    "mask": (2, ["student.parallel.pipeline=2", "train.tokens_per_microbatch=16", "teacher.resident_microbatches=1"]),
}
RANGE = (0.6, 1.3)


@cache
def recorded() -> list[Rollout]:
    """The golden rollouts with log-probabilities like an engine's: near those of an untrained student of 61 ids."""
    draw = random.Random(0)
    return [
        dataclasses.replace(rollout, logprobs=[-math.log(61) + draw.gauss(0, 0.3) for _ in rollout.response_ids])
        for rollout in read_rollouts(GOLDEN / "rollouts.jsonl", 61)
    ]


@cache
def expected(correction: str = "off") -> tuple[dict[str, torch.Tensor], dict[str, float]]:
    """Weights after one step, and its metrics."""
    student, teacher = (
        AutoModelForCausalLM.from_pretrained(GOLDEN / role, dtype=torch.float64) for role in ("student", "teacher")
    )
    # a padding id in a response is meant
    student.get_input_embeddings().padding_idx = None
    optimizer = ReferenceAdamW(dict(student.named_parameters()))
    rollouts = recorded()
    engine = torch.tensor(
        [logprob for rollout in rollouts for logprob, m in zip(rollout.logprobs, rollout.mask, strict=True) if m],
        dtype=torch.float64,
    )
    old: torch.Tensor | None = None
    metrics: dict[str, float] = {}
    for update in range(UPDATES):
        found: dict[str, list[Any]] = {"p": [], "q": [], "ours": [], "theirs": []}
        for rollout in rollouts:
            tokens = [t for t, m in enumerate(rollout.mask) if m]
            start, ids = len(rollout.prompt_ids), torch.tensor([rollout.ids.tolist()])
            for model, logprob, states in ((student, "p", "ours"), (teacher, "q", "theirs")):
                out = model(ids, output_hidden_states=True, use_cache=False)
                log_p = out.logits[0, [start + t - 1 for t in tokens]].log_softmax(-1)
                found[logprob].append(log_p[torch.arange(len(tokens)), [rollout.response_ids[t] for t in tokens]])
                found[states].append(out.hidden_states[2][0, [start + t for t in tokens]])
        p, q, ours, theirs = (torch.cat(found[name]) for name in ("p", "q", "ours", "theirs"))
        old = p.detach() if old is None else old
        advantage, ratio = (q - p).detach(), (p - old).exp()
        surrogate = torch.minimum(ratio * advantage, ratio.clamp(1 - LOW, 1 + HIGH) * advantage)
        mismatch = (old - engine).exp()
        inside = (mismatch >= RANGE[0]) & (mismatch <= RANGE[1])
        weight = {"off": torch.ones_like(old), "truncate": mismatch.clamp(*RANGE), "mask": mismatch * inside}[
            correction
        ]
        representation = (ours - theirs.detach()).square().mean()
        loss = -(weight * surrogate).mean() + MU * representation
        names, parameters = zip(*student.named_parameters(), strict=True)
        gradients = torch.autograd.grad(loss, parameters, materialize_grads=True)
        norm = optimizer.step(dict(zip(names, gradients, strict=True)))
        if update == 0:
            metrics = {"loss/total": float(loss), "actor/pg_loss": float(-(weight * advantage).mean())}
            metrics |= {"rep/loss": float(representation), "actor/grad_norm": norm}
            if correction != "off":
                effective = weight.sum().square() / weight.square().sum() / len(weight)
                metrics |= {"rollout/effective_sample_size": float(effective)}
                metrics |= {"rollout/correction_mean": float(weight.mean())}
                metrics |= {"rollout/correction_outside": float((~inside).double().mean())}
        clipped = surrogate < ratio * advantage
        metrics |= {"actor/ratio": float(ratio.mean()), "actor/clipped": float(clipped.double().mean())}
    return {name: w.detach() for name, w in student.named_parameters()}, metrics


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_clipped_surrogate(pools: Pools, tmp_path: Path, layout: str) -> None:
    ranks, sizes = LAYOUTS[layout]
    pools[ranks].run("cases:run_train", overrides=[*SETTINGS, *sizes, "train.steps=1", f"output={tmp_path}"])
    check_step(tmp_path)


@pytest.mark.parametrize("correction", CORRECTED)
def test_the_corrected_surrogate(pools: Pools, tmp_path: Path, correction: str) -> None:
    ranks, sizes = CORRECTED[correction]
    replayed = tmp_path / "rollouts.jsonl"
    write_rollouts(replayed, recorded())
    settings = [setting for setting in SETTINGS if not setting.startswith("rollout.replay=")]
    settings += [f"rollout.replay={replayed}", f"rollout.correction={correction}"]
    settings += [f"rollout.correction_range=[{RANGE[0]},{RANGE[1]}]", *sizes]
    output = tmp_path / "run"
    pools[ranks].run("cases:run_train", overrides=[*settings, "train.steps=1", f"output={output}"])
    assert 0 < expected(correction)[1]["rollout/correction_outside"] < 1
    check_step(output, correction)


def check_step(output: Path, correction: str = "off") -> None:
    """Compares a run of one step with `expected`."""
    want, metrics = expected(correction)
    assert 0 < metrics["actor/clipped"] < 1
    line = json.loads((output / "metrics.jsonl").read_text())
    assert ("rollout/correction_mean" in line) == (correction != "off")
    for name, value in metrics.items():
        assert line[name] == pytest.approx(value, rel=1e-4), name
    got = weights(output / "hf")
    for name, value in want.items():
        torch.testing.assert_close(got[name].double(), value, rtol=1e-5, atol=3e-6, msg=lambda m, n=name: f"{n}: {m}")


def test_resume(pools: Pools, tmp_path: Path) -> None:
    """The step stays the unit: bit by bit. The engine is told the number of updates behind its weights."""
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    shared = [*SETTINGS, *LAYOUTS["TP2"][1], "train.save_every=1"]
    pools[2].run("cases:run_train", overrides=[*shared, "train.steps=2", f"output={whole}"])
    told = []
    for steps in (1, 2):
        shutil.rmtree(parts / "hf", ignore_errors=True)
        overrides = [*shared, f"train.steps={steps}", f"output={parts}"]
        told.append(pools[2].run("cases:weights_of_train", overrides=overrides))
    assert told == [[0, UPDATES], [UPDATES, 2 * UPDATES]]
    got, once = weights(parts / "hf"), weights(whole / "hf")
    assert all(torch.equal(got[name], value) for name, value in once.items())


def test_the_optimizer_steps_behind_the_weights_go_on_after_a_change(pools: Pools, tmp_path: Path) -> None:
    """Also on ranks outside the student, and from a checkpoint that does not count them."""
    sizes = ["teacher.placement=dedicated", "teacher.ranks=1", "train.tokens_per_microbatch=32", "train.save_every=2"]

    def given(updates: int, steps: int) -> list[int]:
        changed = [f"train.updates_per_rollout={updates}", "train.allow_changes=[train.updates_per_rollout]"]
        overrides = [*BASE, *sizes, *changed, f"train.steps={steps}", f"output={tmp_path}", "train.export_hf=false"]
        return pools[2].run("fault_tolerance_cases:versions_of_weights", overrides=overrides)

    assert given(2, 2) == [0, 2, 4]
    assert given(3, 4) == [4, 7, 10]
    file = tmp_path / "checkpoints" / "iter_0000004" / "state.json"
    state = json.loads(file.read_text())
    assert state.pop("optimizer_steps") == 10
    del state["sha256"], state["state_sha256"]
    file.write_text(json.dumps(state))
    assert given(3, 5) == [12, 15]
