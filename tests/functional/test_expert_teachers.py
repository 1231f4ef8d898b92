"""Teachers with experts, students without: directly at one width, through a bridge at another, with output-space terms.

Losses and every gradient of `verify`, with the teacher's experts split over ranks, against plain Hugging Face models in
float64, sequence by sequence.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from layout_cases import Case, check_result, read_result
from plain_computation import expected_result
from pool import Pools
from safetensors.torch import load_file
from tiny_models import MODELS, SIZES, save_random, save_random_bridge
from transformers import AutoModelForCausalLM

from nemo_oprd.batch.types import Rollout
from nemo_oprd.bridge.row_sample import TRAIN, assign_parts
from nemo_oprd.config.loading import load_config
from nemo_oprd.distillation.reference import agreement, reference
from nemo_oprd.rollout.replay import write_rollouts

STUDENT = SIZES | MODELS["qwen3_untied"]
DEEP = {"num_hidden_layers": 6}
# a layer without experts among those with experts, in the Qwen3 teachers
TEACHERS = {
    "same width": SIZES | MODELS["qwen3_moe"] | DEEP,
    "wide": SIZES | MODELS["qwen3_moe"] | DEEP | {"hidden_size": 48, "num_experts": 6, "num_experts_per_tok": 3},
    "mixtral": SIZES | MODELS["mixtral"],
}
RANK = 4
PAIRS = {1: 1, 2: 3, 3: 4, 4: 6}  # by the paper's rule
OBJECTIVES = {
    # by width; student layers 2, 3 and 4 with teacher layers of choice: with experts, without, the last
    "hidden": (
        "same width",
        ["loss.representation.layers=[2,3,4]", "loss.representation.layer_map={2:1,3:2,4:6}"],
    ),
    "composed": (
        "same width",
        ["loss.representation.k=9", "loss.output.kind=full_vocab", "loss.output.weight=1.5"],
    ),
    "bridge": (
        "wide",
        [
            *["loss.representation.kind=normalized_mse", "loss.representation.dim_reduction=sum"],
            *["loss.output.kind=top_k", "loss.output.k=5", "loss.output.weight=0.5"],
        ],
    ),
    "mixtral": (
        "mixtral",
        ["loss.representation.kind=cosine", "loss.output.kind=sampled_token", "loss.output.weight=1"],
    ),
}
RESPONSES = [(4, 20), (3, 6), (7, 11), (5, 2), (9, 30), (2, 3), (1, 13), (6, 25)]
SMALL = 40
WAVES = ("teacher.resident_microbatches=1", "teacher.offload=true")
DEFAULT = [
    Case("tp2 sp", "dp2 ep2", objective="hidden", tokens=SMALL),
    Case("tp2 sp", "dp2 ep2", objective="bridge", tokens=SMALL),
    Case("tp2", "tp2 sp ep2", objective="composed", extra=WAVES),
]
SLOW = [
    Case("pp2", "dp2 ep2 allgather", objective="composed", tokens=SMALL),
    Case("cp2", "tp2 ep2", objective="bridge", recompute="uniform 2"),
    Case("pp2 vpp2", "dp2 ep2", objective="mixtral", recompute="uniform 1", tokens=SMALL),
    Case("tp2 sp", "tp2 etp2 allgather", objective="mixtral"),
    Case("tp2", "dp2 ep2 dedicated", objective="bridge", tokens=SMALL, extra=WAVES),
    Case("tp2 sp pp2", "tp2 dp2 ep4", objective="mixtral", tokens=SMALL),
    Case("tp2 sp dp2", "pp2 dp2 ep2", objective="hidden", tokens=SMALL),
]


def make_rollouts() -> list[Rollout]:
    """Responses with holes in their masks."""
    rng = np.random.default_rng(7)
    made = []
    for prompt, response in RESPONSES:
        ids = rng.integers(0, SIZES["vocab_size"], prompt + response).tolist()
        made.append(Rollout(ids[:prompt], ids[prompt:], (rng.random(response) < 0.8).astype(int).tolist()))
    return made


class Bench:
    """Models, rollouts and a random bridge on disk."""

    def __init__(self, root: Path) -> None:
        self.root = root
        for seed, (name, config) in enumerate({"student": STUDENT, **TEACHERS}.items()):
            save_random(root / name, config, seed)
        write_rollouts(root / "rollouts.jsonl", make_rollouts())
        save_random_bridge(root / "bridge", STUDENT, TEACHERS["wide"], PAIRS, RANK, "token")

    def settings(self, objective: str) -> list[str]:
        """What all layouts of an objective share."""
        teacher, settings = OBJECTIVES[objective]
        return [
            f"student.hf_path={self.root / 'student'}",
            f"teacher.hf_path={self.root / teacher}",
            *([f"bridge.path={self.root / 'bridge'}"] if teacher == "wide" else []),
            f"rollout.replay={self.root / 'rollouts.jsonl'}",
            *settings,
        ]

    @cache  # noqa: B019 - one bench lives as long as the module's tests
    def expected(self, objective: str) -> dict[str, Any]:
        """The plain computation."""
        return expected_result(load_config("verify", [*self.settings(objective), "output=unused"]), make_rollouts())


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return Bench(tmp_path_factory.mktemp("expert_teachers"))


@pytest.mark.parametrize("case", [*DEFAULT, *(pytest.param(case, marks=pytest.mark.slow) for case in SLOW)], ids=str)
def test_a_dense_student_of_a_teacher_with_experts(pools: Pools, bench: Bench, tmp_path: Path, case: Case) -> None:
    arguments = [*bench.settings(case.objective), *case.overrides, f"output={tmp_path / 'out'}"]
    pools[case.ranks].run("layout_cases:run_verify", overrides=arguments)
    losses, gradients = read_result(tmp_path / "out")
    assert losses["rep/loss"] > 0 and ("output/loss" in losses) == (case.objective != "hidden")
    assert gradients and not any("experts" in name for name in gradients)
    check_result(tmp_path / "out", bench.expected(case.objective), str(case))


def test_the_experts_matter(bench: Bench, tmp_path: Path) -> None:
    """A teacher whose tokens visit one expert fewer would be seen."""
    for objective, (teacher, _) in OBJECTIVES.items():
        config = TEACHERS[teacher]
        fewer = {**config, "num_experts_per_tok": config["num_experts_per_tok"] - 1}
        save_random(tmp_path / teacher, fewer, list(TEACHERS).index(teacher) + 1)  # the same weights
        settings = [*bench.settings(objective), f"teacher.hf_path={tmp_path / teacher}", "output=unused"]
        other = reference(load_config("verify", settings), make_rollouts())
        assert min(agreement(other["gradients"], bench.expected(objective)["gradients"]).values()) > 1e-3


@pytest.mark.slow
def test_a_bridge_is_fitted_to_a_teacher_with_experts(pools: Pools, bench: Bench, tmp_path: Path) -> None:
    """With the experts split over ranks: the teacher's mean and basis by numpy, then training through that bridge."""
    base = [
        f"student.hf_path={bench.root / 'student'}",
        f"teacher.hf_path={bench.root / 'wide'}",
        f"rollout.replay={bench.root / 'rollouts.jsonl'}",
        *Case("tp2 sp", "dp2 ep2").overrides,
    ]
    bridge = tmp_path / "bridge"
    pools[2].run("cases:run_fit_bridge", overrides=[*base, f"bridge.rank={RANK}", f"output={bridge}"])
    tensors = load_file(bridge / "bridge.safetensors")
    parts = assign_parts(range(len(RESPONSES)), 0.1, 0)
    model = AutoModelForCausalLM.from_pretrained(bench.root / "wide", dtype=torch.float64)
    model.set_experts_implementation("eager")
    rows: dict[int, list[torch.Tensor]] = {}
    for i, rollout in enumerate(make_rollouts()):
        if parts[i] != TRAIN:
            continue
        with torch.no_grad():
            states = model.model(torch.tensor([rollout.ids.tolist()]), output_hidden_states=True)
        where = [len(rollout.prompt_ids) + t for t, m in enumerate(rollout.mask) if m]
        for layer in PAIRS.values():
            rows.setdefault(layer, []).append(states.hidden_states[layer][0, where])
    for student_layer, teacher_layer in PAIRS.items():
        key, found = f"s{student_layer}.t{teacher_layer}", torch.cat(rows[teacher_layer]).numpy()
        np.testing.assert_allclose(tensors[f"{key}.teacher_mean"], found.mean(0), rtol=1e-4, atol=1e-5)
        vectors = np.linalg.eigh(np.cov(found.T))[1][:, ::-1][:, :RANK].T
        overlap = np.abs(np.sum(tensors[f"{key}.teacher_basis"].numpy() * vectors, axis=1))
        np.testing.assert_allclose(overlap, 1.0, atol=1e-4)
    overrides = [*base, f"bridge.path={bridge}", f"output={tmp_path / 'out'}"]
    pools[2].run("layout_cases:run_verify", overrides=overrides)
    check_result(tmp_path / "out", expected_result(load_config("verify", overrides), make_rollouts()), "fitted bridge")
