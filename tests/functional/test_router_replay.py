"""Routes that are recorded while sampling and replayed in training; routers in float32."""

from __future__ import annotations

import json
import shutil
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
from nemo_oprd.rollout.replay import read_rollouts, write_rollouts
from nemo_oprd.toy.task import write_tokenizer

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
    for name, sign in (("student", 1), ("rounded", -1)):
        shutil.copytree(root / "student", root / name, dirs_exist_ok=True)
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
    settings = [*models, f"rollout.replay={root / 'rollouts.jsonl'}", "loss.representation.positions=all", *overrides]
    return pools[1].run("layout_cases:run_verify", overrides=[*settings, f"output={output}"])


@pytest.mark.parametrize(("ranks", "tensor", "expert"), [(1, 1, 1), pytest.param(2, 2, 2, marks=pytest.mark.slow)])
def test_a_flipped_route_is_undone_by_replay(
    pools: Pools, root: Path, prompts: list[list[int]], tmp_path: Path, ranks: int, tensor: int, expert: int
) -> None:
    """The trainer's routers differ from the engine's in their last bits only, as two programs' do.

    Without replay many tokens visit another expert in training than while they were sampled, and the loss is another
    one. With the recorded routes it is that of the model that has sampled.
    """
    rollouts: list[Rollout] = pools[ranks].run(
        "router_cases:sample",
        hf_path=str(root / "student"),
        tensor=tensor,
        prompts=prompts,
        steps=STEPS,
        expert=expert,
    )
    write_rollouts(root / "rollouts.jsonl", rollouts)
    assert read_rollouts(root / "rollouts.jsonl", VOCABULARY) == rollouts
    assert len({len(rollout.response_ids) for rollout in rollouts}) > 1, "all responses end together"
    for rollout, read in zip(rollouts, read_rollouts(root / "rollouts.jsonl", VOCABULARY), strict=True):
        assert rollout.expert_routes is not None and read.expert_routes is not None
        assert np.array_equal(rollout.expert_routes, read.expert_routes)
        # every token but the last one, which is sampled and not computed; layer 2 of 4 has no experts
        assert rollout.expert_routes.shape == (rollout.length - 1, 3, 2)

    config = load_config("verify", [f"student.hf_path={root / 'student'}", "teacher.hf_path=x", "output=unused"])
    config.loss.representation.positions = "all"
    plain = [experts.sort(-1).values for _, experts in routed(config, rollouts).values()]
    recorded = [np.vstack([np.sort(r.expert_routes[:, i], -1) for r in rollouts]) for i in range(3)]  # type: ignore[index]
    last = np.cumsum([rollout.length for rollout in rollouts]) - 1
    for ours, theirs in zip(recorded, plain, strict=True):
        same = (torch.from_numpy(ours) == np.delete(theirs.numpy(), last, axis=0)).all(-1)
        # the tie of experts 0 and 1 is decided by float32, in which the engine computes and the float64 model does not
        assert same.double().mean() > 0.6

    same = verify(pools, root, "student", tmp_path / "same")
    flipped = verify(pools, root, "rounded", tmp_path / "flipped")
    replayed = verify(pools, root, "rounded", tmp_path / "replayed", "student.router_replay=true")
    assert same["moe/route_changed"] < 0.02
    assert flipped["moe/route_changed"] > 0.1 and replayed["moe/route_changed"] > 0.1
    total = "loss/total"
    assert abs(flipped[total] / same[total] - 1) > 1e-3
    assert abs(replayed[total] / same[total] - 1) < 1e-5
    ours, theirs = (read_result(tmp_path / name)[1] for name in ("replayed", "same"))
    worst = max(float((ours[name] - g).norm() / g.norm().clamp_min(1e-3)) for name, g in theirs.items())
    assert worst < 1e-4


def test_training_replays_what_its_engine_sampled(pools: Pools, root: Path, tmp_path: Path) -> None:
    """Two steps of `train` that sample: the engine records, the step replays, the files keep the routes."""
    for role in ("student", "teacher"):
        if not (root / role / "tokenizer.json").exists():
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
