"""Training a model with experts: an update against AdamW in float64, and checkpoints that resume at another layout."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from golden_runs import weights
from layout_cases import VOCABULARY, make_rollouts, save_model
from pool import Pools
from reference_adamw import ReferenceAdamW

from nemo_oprd.config.loading import load_config
from nemo_oprd.distillation.reference import reference
from nemo_oprd.rollout.replay import read_rollouts, write_rollouts

SP2 = ["student.parallel.tensor=2", "student.parallel.sequence=true"]
EP2 = ["student.parallel.expert=2"]
ETP2 = ["student.parallel.expert_tensor=2", "student.parallel.dispatcher=allgather"]
LAYERS = 4
CLIP = 0.5


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("experts")
    for place, family in ((root, "qwen3_moe"), (root / "late", "qwen3_moe_late")):
        for seed, role in enumerate(("student", "teacher")):
            save_model(place / role, family, seed, LAYERS)
        write_rollouts(place / "rollouts.jsonl", make_rollouts())
    return root


def settings(root: Path) -> list[str]:
    """A run whose updates `ReferenceAdamW` repeats; `golden_runs.BASE` with other models and rollouts."""
    models = [f"{role}.hf_path={root / role}" for role in ("student", "teacher")]
    return [
        *models, f"rollout.replay={root / 'rollouts.jsonl'}", "loss.representation.k=48", "precision=fp32",
        "train.lr=1e-2", "train.schedule=constant", "train.warmup_fraction=0", "train.weight_decay=0.1",
        "train.adam_eps=1e-2", "train.betas=[0.9,0.95]", "rollout.per_prompt=1", "train.tokens_per_microbatch=120",
        f"train.prompts_per_step={len(make_rollouts())}",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("ranks", "sizes"),
    [
        pytest.param(1, [], marks=pytest.mark.slow),
        (2, EP2),
        pytest.param(2, [*EP2, "train.distributed_optimizer=false"], marks=pytest.mark.slow),
        (2, [*SP2, *EP2]),
        pytest.param(2, [*SP2, *ETP2], marks=pytest.mark.slow),
        pytest.param(2, ["student.parallel.pipeline=2"], marks=pytest.mark.slow),
        # the first stage trains no expert, and takes part in what the other stage does with its own
        (2, ["student.parallel.pipeline=2", "train.distributed_optimizer=false", "LATE"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_one_update_is_one_adamw_step(pools: Pools, root: Path, tmp_path: Path, ranks: int, sizes: list[str]) -> None:
    """The gradients of experts and of everything else are clipped by their common norm, in which each counts once."""
    if "LATE" in sizes:
        root, sizes = root / "late", [size for size in sizes if size != "LATE"]
    output, base = tmp_path / "run", settings(root)
    overrides = [*base, f"train.clip_grad={CLIP}", "train.steps=1", f"output={output}", *sizes]
    pools[ranks].run("cases:run_train", overrides=overrides)
    config = load_config("verify", [*base, "output=unused"])
    gradients = reference(config, read_rollouts(root / "rollouts.jsonl", VOCABULARY))["gradients"]
    start = weights(root / "student")
    parameters = {name: torch.nn.Parameter(value.double()) for name, value in start.items()}
    norm = ReferenceAdamW(parameters).step(gradients, CLIP)
    got = weights(output / "hf")
    assert set(got) == set(start)
    for name, value in parameters.items():
        # lr is 1e-2: 1e-6 is 1e-4 of a full update
        torch.testing.assert_close(
            got[name].double(), value.detach(), rtol=1e-6, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}"
        )
    assert not torch.equal(got["model.layers.3.mlp.gate.weight"], start["model.layers.3.mlp.gate.weight"])
    line = json.loads((output / "metrics.jsonl").read_text())
    assert line["actor/grad_norm"] == pytest.approx(norm, rel=1e-5)


@pytest.mark.slow
def test_a_run_resumes_at_other_expert_sizes(pools: Pools, root: Path, tmp_path: Path) -> None:
    """Two updates each at EP2, at EP1 and at PP2: the same weights as six on one rank."""
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    shared = [*settings(root), "train.save_every=2", "train.clip_grad=0.5"]
    pools[1].run("cases:run_train", overrides=[*shared, "train.steps=6", f"output={whole}"])
    for steps, ranks, sizes in ((2, 2, EP2), (4, 1, []), (6, 2, ["student.parallel.pipeline=2"])):
        pools[ranks].run("cases:run_train", overrides=[*shared, *sizes, f"train.steps={steps}", f"output={parts}"])
    expected, got = weights(whole / "hf"), weights(parts / "hf")
    for name, value in expected.items():
        torch.testing.assert_close(got[name], value, rtol=1e-5, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("distributed", ["true", pytest.param("false", marks=pytest.mark.slow)])
def test_a_stage_without_experts_saves_and_resumes(pools: Pools, root: Path, tmp_path: Path, distributed: str) -> None:
    """The first stage has no experts; its rank saves what is not split, also the number of the experts' updates."""
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    shared = [*settings(root / "late"), "train.save_every=1", f"train.distributed_optimizer={distributed}"]
    pp2 = "student.parallel.pipeline=2"
    pools[1].run("cases:run_train", overrides=[*shared, "train.steps=3", f"output={whole}"])
    pools[2].run("cases:run_train", overrides=[*shared, pp2, "train.steps=1", f"output={parts}"])
    pools[1].run("cases:run_train", overrides=[*shared, "train.steps=2", f"output={parts}"])
    pools[2].run("cases:run_train", overrides=[*shared, pp2, "train.steps=3", f"output={parts}"])
    expected, got = weights(whole / "hf"), weights(parts / "hf")
    for name, value in expected.items():
        torch.testing.assert_close(got[name], value, rtol=1e-5, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")


def test_the_noise_of_the_gradient_counts_every_expert_once(pools: Pools, root: Path, tmp_path: Path) -> None:
    """Experts that are split over data ranks, and experts of which two tensor ranks hold whole copies."""
    measured = {}
    for name, ranks, sizes in (("one", 1, []), ("split", 2, EP2), ("copies", 2, SP2)):
        overrides = [*settings(root), *sizes, "train.steps=1", "logging.gradient_noise_every=1"]
        pools[ranks].run("cases:run_train", overrides=[*overrides, f"output={tmp_path / name}"])
        line = json.loads((tmp_path / name / "metrics.jsonl").read_text())
        measured[name] = [line["actor/gradient_signal"], line["actor/gradient_noise"]]
    for name in ("split", "copies"):
        assert measured[name] == pytest.approx(measured["one"], rel=1e-4), name
