"""Routes that are recorded while sampling and replayed in training; routers in float32."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from layout_cases import read_result
from plain_routers import routed
from pool import Pools
from safetensors.torch import load_file, save_file
from tiny_models import save_random_model

from nemo_oprd.batch.types import Rollout
from nemo_oprd.config.loading import load_config
from nemo_oprd.distillation.reference import agreement
from nemo_oprd.rollout.replay import read_rollouts, write_rollouts
from nemo_oprd.tools.toy.pair import write_tokenizer

STEPS = 40  # beyond the tokens after which finished sequences leave the batch
VOCABULARY = 300


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A student, a student of the same weights but for the last bits of a router's row, a teacher."""
    root = tmp_path_factory.mktemp("replay")
    for role in ("student", "teacher"):
        save_random_model(root / role, "qwen3_moe", torch.float32)
    teacher = load_file(root / "teacher" / "model.safetensors")
    save_file({name: 1.1 * tensor for name, tensor in teacher.items()}, root / "teacher" / "model.safetensors")
    tensors = load_file(root / "student" / "model.safetensors")
    shutil.copytree(root / "student", root / "rounded")
    for name, sign in (("student", 1), ("rounded", -1)):
        changed = {key: tensor.clone() for key, tensor in tensors.items()}
        # experts 0 and 1 of every layer tie but for rounding, and do quite different things
        for gate in (gate for key, gate in changed.items() if key.endswith("mlp.gate.weight")):
            gate[1] = gate[0] * (1 + sign * 5e-7)
        save_file(changed, root / name / "model.safetensors", {"format": "pt"})
    return root


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    draw = np.random.default_rng(3)
    return [draw.integers(4, 280, length).tolist() for length in (5, 17, 1, 9, 12, 3, 20)]


def verify(pools: Pools, root: Path, student: str, output: Path, *overrides: str) -> dict[str, float]:
    models = [f"student.hf_path={root / student}", f"teacher.hf_path={root / 'teacher'}"]
    loss = ["loss.representation.positions=all", "loss.representation.position=predicting"]
    overrides = (*models, f"rollout.replay={root / 'rollouts.jsonl'}", *loss, *overrides, f"output={output}")
    return pools[1].run("layout_cases:run_verify", overrides=list(overrides))


def sample(pools: Pools, path: Path, prompts: list[list[int]], size: int = 1) -> list[Rollout]:
    sizes = {"tensor": size, "expert": size}
    return pools[size].run("router_cases:sample", hf_path=str(path), prompts=prompts, steps=STEPS, **sizes)


@pytest.mark.parametrize("size", [1, 2])
def test_recorded_routes_are_those_of_the_model(
    pools: Pools, root: Path, prompts: list[list[int]], tmp_path: Path, size: int
) -> None:
    """Against one forward of the Hugging Face model per response, ragged, with sequences that leave the batch early."""
    rollouts = sample(pools, root / "teacher", prompts, size)
    assert len({len(rollout.response_ids) for rollout in rollouts}) > 1, "all responses end together"
    write_rollouts(tmp_path / "rollouts.jsonl", rollouts)
    read = read_rollouts(tmp_path / "rollouts.jsonl", VOCABULARY)
    assert read == rollouts
    config = load_config("verify", [f"student.hf_path={root / 'teacher'}", "teacher.hf_path=x", "output=unused"])
    representation = replace(config.loss.representation, positions="all")
    config = replace(config, loss=replace(config.loss, representation=representation))
    plain = routed(config, rollouts)
    last = np.cumsum([rollout.length for rollout in rollouts]) - 1
    for rollout, again in zip(rollouts, read, strict=True):
        assert rollout.expert_routes is not None and np.array_equal(rollout.expert_routes, again.expert_routes)
        # every token but the last one, which is sampled and not computed; layer 2 of 4 has no experts
        assert rollout.expert_routes.shape == (rollout.length - 1, 3, 2)
    for i, layer in enumerate((1, 3, 4)):
        recorded = np.vstack([rollout.expert_routes[:, i] for rollout in rollouts])  # type: ignore[index]
        expected = np.delete(plain[layer][1].numpy(), last, axis=0)
        assert np.array_equal(np.sort(recorded, -1), np.sort(expected, -1))


def test_a_flipped_route_is_undone_by_replay(
    pools: Pools, root: Path, prompts: list[list[int]], tmp_path: Path
) -> None:
    """The trainer's routers differ from the engine's in their last bits only, as two programs' do.

    Without replay many tokens visit another expert in training than while they were sampled, and the loss is another
    one. With the recorded routes it is that of the model that has sampled. The last token, whose experts are not
    recorded, has no loss here.
    """
    rollouts = sample(pools, root / "student", prompts)
    write_rollouts(root / "rollouts.jsonl", rollouts)
    replay = "student.router_replay=true"
    sampled = verify(pools, root, "student", tmp_path / "sampled", replay)
    flipped = verify(pools, root, "rounded", tmp_path / "flipped")
    replayed = verify(pools, root, "rounded", tmp_path / "replayed", replay)
    # the engine's weights, whose ties the trainer's own rounding decides in another way for some tokens
    assert sampled["moe/route_changed"] < 0.1
    assert flipped["moe/route_changed"] > 0.15 and replayed["moe/route_changed"] > 0.15
    assert abs(flipped["loss/total"] / sampled["loss/total"] - 1) > 1e-3
    assert abs(replayed["loss/total"] / sampled["loss/total"] - 1) < 1e-5
    ours, theirs, other = (read_result(tmp_path / name)[1] for name in ("replayed", "sampled", "flipped"))
    assert max(agreement(ours, theirs).values()) < 1e-4
    assert max(agreement(other, theirs).values()) > 0.1


def test_training_replays_what_its_engine_sampled(pools: Pools, root: Path, tmp_path: Path) -> None:
    """Two steps of `train` that sample: the engine records, the step replays, the files keep the routes."""
    for role in ("student", "teacher"):
        write_tokenizer(root / role)
    (tmp_path / "prompts.jsonl").write_text(json.dumps({"prompt": "1+1=", "answer": "2"}) + "\n")
    models = [f"{role}.hf_path={root / role}" for role in ("student", "teacher")]
    overrides = [
        *models, f"data.train={tmp_path / 'prompts.jsonl'}", f"output={tmp_path / 'run'}", "rollout.replay=null",
        "student.router_replay=true", "student.router_aux_loss=0.01", "rollout.save=true", "precision=fp32",
        "train.steps=2", "train.prompts_per_step=1", "rollout.per_prompt=4", "rollout.max_new_tokens=12",
        "train.export_hf=false",
    ]  # fmt: skip
    pools[1].run("cases:run_train", overrides=overrides)
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert len(lines) == 2
    for line in lines:
        # the same weights in the same precision: a route changes only where float32 rounds a near tie in another way
        assert 0 <= line["moe/route_changed"] < 0.2
        assert {f"moe/route_changed_layer/{layer}" for layer in (1, 3, 4)} <= line.keys()
        assert line["moe/load_min"] <= 1 <= line["moe/load_max"]
    saved = read_rollouts(next((tmp_path / "run" / "rollouts").glob("step_0000002.jsonl")), VOCABULARY)
    assert all(rollout.expert_routes is not None for rollout in saved)


@pytest.mark.parametrize(
    ("ranks", "sizes"),
    [
        (1, ["student.recompute=full"]),
        (2, ["student.parallel.expert=2", "student.parallel.dispatcher=allgather"]),
        pytest.param(
            2,
            ["student.parallel.tensor=2", "student.parallel.sequence=true", "student.parallel.expert=2"],
            marks=pytest.mark.slow,
        ),
    ],
    ids=["recomputed", "EP2 allgather", "TP2 EP2"],
)
def test_routers_compute_in_float32(pools: Pools, root: Path, tmp_path: Path, ranks: int, sizes: list[str]) -> None:
    """Beside weights in bf16: logits are those of the float64 product to float32's precision."""
    write_rollouts(root / "bf16.jsonl", [Rollout(list(range(5, 12)), list(range(20, 50))) for _ in range(4)])
    models = [f"{role}.hf_path={root / role}" for role in ("student", "teacher")]
    base = [*models, f"rollout.replay={root / 'bf16.jsonl'}", "precision=bf16", *sizes]
    rounded, exact = (
        pools[ranks].run("router_cases:spied_verify", overrides=[*base, *setting, f"output={tmp_path / name}"])
        for name, setting in (("bf16", []), ("fp32", ["student.router_dtype=fp32"]))
    )
    errors = []
    for passes in (rounded, exact):
        # the teacher has routers, too, in bf16
        chosen = [part for part in passes if part[2].dtype == (torch.float32 if passes is exact else torch.bfloat16)]
        assert chosen and all(part[1].dtype == torch.bfloat16 for part in chosen)
        assert all(part[3].dtype == part[2].dtype for part in chosen)
        product = [input.double() @ weight.double().T for input, weight, *_ in chosen]
        errors.append(max(float((part[2] - p).norm() / p.norm()) for part, p in zip(chosen, product, strict=True)))
    assert errors[0] > 1e-3 and errors[1] < 1e-6
    (losses, gradients), (plain, _) = (read_result(tmp_path / name) for name in ("fp32", "bf16"))
    assert losses["loss/total"] == pytest.approx(plain["loss/total"], rel=0.05)
    gates = [gradient for name, gradient in gradients.items() if name.endswith("gate.weight")]
    assert len(gates) == 3 and all(float(gradient.norm()) > 0 for gradient in gates)
