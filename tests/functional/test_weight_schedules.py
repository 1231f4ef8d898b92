"""Weights of the terms that change over the steps, and parameters that only a later stage begins to train.

Against float64 AdamW on gradients of the plain Hugging Face computation, to which a parameter group is added where the
output term begins.
"""

from __future__ import annotations

import json
import shutil
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from golden_runs import BASE, GOLDEN, weights
from pool import Pools
from reference_adamw import ReferenceAdamW
from transformers import AutoModelForCausalLM

from nemo_oprd.config.loading import load_config
from nemo_oprd.distillation.reference import reference
from nemo_oprd.megatron.weights.megatron_checkpoint import MegatronCheckpoint
from nemo_oprd.rollout.replay import read_rollouts

# The first layer for two updates, then it fades while the distributions come in: layers 2 and 3, final norm and head
# begin with the third update.
SCHEDULE = [
    "loss.representation.layers=[1]",
    "loss.representation.weight=[{until:2,weight:2},{until:4,start:2,weight:1}]",
    "loss.output.kind=full_vocab",
    "loss.output.weight=[{until:2,weight:0},{until:4,start:0,weight:1.5}]",
    "train.clip_grad=1000",
]
WEIGHTS = [(2.0, 0.0), (2.0, 0.0), (1.5, 0.75), (1.0, 1.5)]
LAYOUTS = {
    "TP2": (2, ["student.parallel.tensor=2"]),
    "PP2": (2, ["student.parallel.pipeline=2"]),  # all parameters of the second stage begin late
    "DP2": (2, []),
    "without the distributed optimizer": (1, ["train.distributed_optimizer=false"]),
}


@cache
def expected(directory: Path) -> dict[str, torch.Tensor]:
    """Weights after the four updates."""
    rollouts = read_rollouts(GOLDEN / "rollouts.jsonl", 61)
    model = AutoModelForCausalLM.from_pretrained(GOLDEN / "student", dtype=torch.float64)
    named = dict(model.named_parameters())
    optimizer = ReferenceAdamW(named)
    for of_layers, of_output in WEIGHTS:
        model.save_pretrained(directory)
        now = [f"student.hf_path={directory}", f"loss.representation.weight={of_layers}"]
        config = load_config("verify", [*BASE, *SCHEDULE, *now, f"loss.output.weight={of_output}", "output=unused"])
        optimizer.step(reference(config, rollouts)["gradients"])
    return {name: p.detach() for name, p in named.items()}


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("student")


# data parallel ranks in the default run: test_parameters_rest_while_their_loss_pauses
@pytest.mark.parametrize("layout", [pytest.param(n, marks=[pytest.mark.slow] if n == "DP2" else []) for n in LAYOUTS])
def test_late_parameters_begin_afresh_and_resume_exactly(
    pools: Pools, tmp_path: Path, scratch: Path, layout: str
) -> None:
    """Gone on with from before their first update, and from after it, bit by bit."""
    ranks, sizes = LAYOUTS[layout]
    shared = [*BASE, *SCHEDULE, *sizes, "train.save_every=1", "train.keep_checkpoints=0", "train.steps=4"]
    pools[ranks].run("cases:run_train", overrides=[*shared, f"output={tmp_path}"])
    start, got = weights(GOLDEN / "student"), weights(tmp_path / "hf")
    for name, value in expected(scratch).items():
        torch.testing.assert_close(got[name].double(), value, rtol=1e-5, atol=2e-6, msg=lambda m, n=name: f"{n}: {m}")
    saved = {step: MegatronCheckpoint(str(tmp_path / "checkpoints" / f"iter_{step:07d}")) for step in (2, 3)}
    late = [name for name in start if not name.startswith(("model.embed_tokens", "model.layers.0."))]
    assert "lm_head.weight" in late
    assert all(torch.equal(saved[2][name], start[name]) for name in late)
    assert not any(torch.equal(saved[3][name], start[name]) for name in late)
    for step in (2, 3):
        shutil.rmtree(tmp_path / "hf")
        (tmp_path / "checkpoints" / "latest_checkpointed_iteration.txt").write_text(f"{step}\n")
        pools[ranks].run("cases:run_train", overrides=[*shared, f"output={tmp_path}"])
        again = weights(tmp_path / "hf")
        for name, value in got.items():
            assert torch.equal(again[name], value), (step, name)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").open()]
    assert [(line["loss/weight_representation"], line["loss/weight_output"]) for line in lines] == WEIGHTS
    for line, (of_layers, of_output) in zip(lines, WEIGHTS, strict=True):
        total = of_layers * line["rep/loss"] + of_output * line["output/loss"]
        assert line["loss/total"] == pytest.approx(total)


def test_resume_at_another_layout(pools: Pools, tmp_path: Path, scratch: Path) -> None:
    """Step counts of their own go along: two and a half stages at TP2, the rest at PP2."""
    shared = [*BASE, *SCHEDULE, "train.save_every=1", f"output={tmp_path}"]
    for steps, layout in ((3, "TP2"), (4, "PP2")):
        shutil.rmtree(tmp_path / "hf", ignore_errors=True)
        sizes = LAYOUTS[layout][1]
        pools[2].run("cases:run_train", overrides=[*shared, *sizes, f"train.steps={steps}"])
    got = weights(tmp_path / "hf")
    for name, value in expected(scratch).items():
        torch.testing.assert_close(got[name].double(), value, rtol=1e-5, atol=2e-6, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("distributed", [True, False])
def test_parameters_rest_while_their_loss_pauses(pools: Pools, tmp_path: Path, distributed: bool) -> None:
    """Distributions in the first and third update, in bf16; gone on with bit by bit from the pause."""
    pausing = "loss.output.weight=[{until:1,weight:1},{until:2,weight:0},{weight:1}]"
    settings = ["loss.representation.weight=1", pausing, "precision=bf16", "train.lr=1e-3", "train.steps=3"]
    kept = [f"train.distributed_optimizer={distributed}", "train.save_every=1", "train.keep_checkpoints=0"]
    overrides = [*BASE, *SCHEDULE[:1], "loss.output.kind=full_vocab", *settings, *kept, f"output={tmp_path}"]
    pools[2].run("cases:run_train", overrides=overrides)
    saved = [MegatronCheckpoint(str(tmp_path / "checkpoints" / f"iter_{step:07d}")) for step in (1, 2, 3)]
    late, early = "model.layers.2.mlp.down_proj.weight", "model.layers.0.mlp.down_proj.weight"
    for name in (late, "lm_head.weight", early):
        moved = [not torch.equal(one[name], other[name]) for one, other in pairwise(saved)]
        assert moved == [name == early, True], name
    got = weights(tmp_path / "hf")
    shutil.rmtree(tmp_path / "hf")
    (tmp_path / "checkpoints" / "latest_checkpointed_iteration.txt").write_text("2\n")
    pools[2].run("cases:run_train", overrides=overrides)
    again = weights(tmp_path / "hf")
    assert all(torch.equal(again[name], value) for name, value in got.items())
