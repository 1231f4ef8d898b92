"""A teacher that reads other tokens than the student: gradients, and the fit of a bridge, under layouts of both.

A Qwen3 student and a Phi-4 teacher with another vocabulary, width and depth. Which of its states stands for which of
the student's is random here (repeated, missing, out of step), and the teacher's sequences lie on either side of
LongRoPE's switch. Against plain Hugging Face models in float64.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from layout_cases import Case, check_result
from plain_computation import expected_result
from pool import Pools
from safetensors.torch import load_file
from served_teachers import DEDICATED, SERVED, ServedTeachers
from tiny_models import MODELS, SIZES, save_random, save_random_bridge

from nemo_oprd.batch.types import Rollout
from nemo_oprd.bridge.row_sample import TRAIN, assign_parts
from nemo_oprd.config.loading import load_config
from nemo_oprd.rollout.replay import write_rollouts

STUDENT = SIZES | MODELS["qwen3_untied"]
TEACHER = SIZES | MODELS["phi4_tied"] | {"vocab_size": 431, "num_hidden_layers": 6, "max_position_embeddings": 96}
RANK = 4
# servers have no LongRoPE
SERVED_TEACHER = TEACHER | MODELS["qwen2_untied"] | {"rope_parameters": SIZES["rope_parameters"]}
PAIRS = {1: 1, 2: 3, 3: 4, 4: 6}  # by the paper's rule
BRIDGE = ["loss.representation.kind=normalized_mse", "loss.representation.dim_reduction=sum"]
OBJECTIVES = {
    "token": [*BRIDGE, "loss.representation.weight=10", "loss.representation.k=9"],
    "predicting": ["loss.representation.position=predicting", "loss.representation.positions=all"],
    "token, served": [*BRIDGE, "loss.representation.weight=10", "loss.representation.k=9"],
    "predicting, served": ["loss.representation.position=predicting", "loss.representation.positions=all"],
    "cosine": ["loss.representation.kind=cosine", "loss.representation.positions=first_k", "loss.representation.k=5"],
}
# tokens of the student's prompt and response, and of the teacher's
SIZES_OF_RESPONSES = [(4, 20, 9, 31), (3, 6, 1, 4), (7, 11, 2, 6), (5, 2, 20, 60), (9, 30, 4, 17)]
SMALL = 70
CASES = [
    Case("dp1", objective="token"),
    Case("dp1", objective="predicting", tokens=SMALL),
    Case("tp2 sp", "pp2", objective="token", tokens=SMALL),
    Case("pp2", "tp2", objective="predicting", tokens=SMALL, extra=("teacher.resident_microbatches=1",)),
    Case("cp2", "tp2 sp", objective="cosine"),
    Case("dp2", "cp2", objective="predicting", tokens=SMALL),
    Case("tp2", "pp2 dedicated", objective="token", tokens=SMALL),
]
SLOW = [
    Case("tp2 sp", objective="predicting, served", tokens=SMALL, extra=SERVED),
    Case("pp2", objective="token, served", tokens=SMALL, extra=(*DEDICATED, "teacher.resident_microbatches=1")),
]


def make_rollouts() -> list[Rollout]:
    """Sequences of the student and of the teacher, and a partner for most tokens."""
    rng = np.random.default_rng(5)
    made = []
    for prompt, response, theirs_prompt, theirs in SIZES_OF_RESPONSES:
        index = np.sort(rng.integers(0, theirs, response))
        index[rng.random(response) < 0.25] = -1
        index[-1] = theirs - 1
        made.append(
            Rollout(
                rng.integers(0, STUDENT["vocab_size"], prompt).tolist(),
                rng.integers(0, STUDENT["vocab_size"], response).tolist(),
                (rng.random(response) < 0.9).astype(int).tolist() if response > 10 else None,
                teacher_prompt_ids=rng.integers(0, TEACHER["vocab_size"], theirs_prompt).tolist(),
                teacher_response_ids=rng.integers(0, TEACHER["vocab_size"], theirs).tolist(),
                teacher_index=index.tolist(),
            )
        )
    return made


class Bench:
    """Models, rollouts and a random bridge on disk."""

    def __init__(self, root: Path) -> None:
        self.root = root
        save_random(root / "student", STUDENT, 0)
        save_random(root / "teacher", TEACHER, 1)
        write_rollouts(root / "rollouts.jsonl", make_rollouts())
        save_random(root / "served_teacher", SERVED_TEACHER, 2)
        for position in ("token", "predicting"):
            save_random_bridge(root / position, STUDENT, TEACHER, PAIRS, RANK, position)
            save_random_bridge(root / f"{position}, served", STUDENT, SERVED_TEACHER, PAIRS, RANK, position)

    def models(self) -> list[str]:
        """What all runs share."""
        models = [f"{role}.hf_path={self.root / role}" for role in ("student", "teacher")]
        return [*models, "teacher.reads=text", f"rollout.replay={self.root / 'rollouts.jsonl'}"]

    def settings(self, objective: str) -> list[str]:
        """Of an objective."""
        bridge = objective if objective.startswith("predicting") or "served" in objective else "token"
        teacher = [f"teacher.hf_path={self.root / 'served_teacher'}"] if "served" in objective else []
        return [*self.models(), *teacher, f"bridge.path='{self.root / bridge}'", *OBJECTIVES[objective]]

    @cache  # noqa: B019 - one bench lives as long as the module's tests
    def expected(self, objective: str) -> dict[str, Any]:
        """The plain computation."""
        return expected_result(load_config("verify", [*self.settings(objective), "output=unused"]), make_rollouts())


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return Bench(tmp_path_factory.mktemp("across"))


@pytest.fixture(scope="module")
def states(bench: Bench) -> dict[str, list[torch.Tensor]]:
    """Role -> per response, float64 [layers, tokens of what the model reads, H]."""
    from transformers import AutoModelForCausalLM

    found: dict[str, list[torch.Tensor]] = {}
    for role in ("student", "teacher"):
        model = AutoModelForCausalLM.from_pretrained(
            bench.root / role, dtype=torch.float64, attn_implementation="eager"
        )
        for rollout in make_rollouts():
            read = rollout.as_read_by_teacher() if role == "teacher" else rollout
            with torch.no_grad():
                ids = torch.tensor([read.ids.tolist()])
                hidden = model.model(ids, output_hidden_states=True, use_cache=False).hidden_states
            found.setdefault(role, []).append(torch.cat(hidden[1:]))
    return found


def partners() -> list[tuple[int, int, int, int]]:
    """(response, token, place in what the student read, place in what the teacher read), spelled out."""
    rows = []
    for i, rollout in enumerate(make_rollouts()):
        assert rollout.teacher_index is not None and rollout.teacher_prompt_ids is not None
        for t, (m, partner) in enumerate(zip(rollout.mask, rollout.teacher_index.tolist(), strict=True)):
            if m and partner != -1:
                rows.append((i, t, len(rollout.prompt_ids) + t, len(rollout.teacher_prompt_ids) + partner))
    return rows


def test_the_plain_computation(bench: Bench, states: dict[str, list[torch.Tensor]]) -> None:
    """`reference` against the loss written out for one objective: the first 5 tokens with a partner, cosine."""
    tensors = load_file(bench.root / "token" / "bridge.safetensors")
    losses = []
    for s, t in PAIRS.items():
        mean, basis, projector = (
            tensors[f"s{s}.t{t}.{name}"].double() for name in ("teacher_mean", "teacher_basis", "student_projector")
        )
        per_response: dict[int, list[float]] = {}
        for i, _, ours, theirs in partners():
            x = projector @ states["student"][i][s - 1, ours]
            y = basis @ (states["teacher"][i][t - 1, theirs] - mean)
            per_response.setdefault(i, []).append(1 - float(x @ y / x.norm() / y.norm()))
        losses.append(np.mean([np.mean(values[:5]) for values in per_response.values()]))
    assert bench.expected("cosine")["rep/loss"] == pytest.approx(np.mean(losses), rel=1e-9)


@pytest.mark.parametrize(
    "case",
    [*sorted(CASES, key=lambda case: case.ranks), *(pytest.param(case, marks=pytest.mark.slow) for case in SLOW)],
    ids=str,
)
def test_gradients(pools: Pools, bench: Bench, served_teachers: ServedTeachers, tmp_path: Path, case: Case) -> None:
    output = f"output={tmp_path / 'out'}"
    arguments = served_teachers.of([*bench.settings(case.objective), *case.overrides, output])
    pools[case.ranks].run("layout_cases:run_verify", overrides=arguments)
    check_result(tmp_path / "out", bench.expected(case.objective), str(case))


@pytest.mark.parametrize(
    ("ranks", "layout"),
    [(1, []), (2, ["student.parallel.tensor=2", "teacher.parallel.pipeline=2", "train.prompts_per_step=2"])],
)
def test_fit(pools: Pools, bench: Bench, tmp_path: Path, states: dict, ranks: int, layout: list[str]) -> None:
    """Mean and basis of the teacher's states at the partners of the training part's tokens: numpy alone."""
    output = tmp_path / "bridge"
    settings = [f"bridge.rank={RANK}", f"output={output}", "bridge.held_out=0.2"]
    pools[ranks].run("cases:run_fit_bridge", overrides=[*bench.models(), *layout, *settings])
    tensors = load_file(output / "bridge.safetensors")
    part = assign_parts(range(len(make_rollouts())), 0.2, 0)
    rows = [row for row in partners() if part[row[0]] == TRAIN]
    assert len(rows) > 20
    for s, t in PAIRS.items():
        theirs = np.stack([states["teacher"][i][t - 1, place].numpy() for i, _, _, place in rows])
        np.testing.assert_allclose(tensors[f"s{s}.t{t}.teacher_mean"], theirs.mean(0), rtol=1e-4, atol=1e-5)
        vectors = np.linalg.eigh(np.cov(theirs.T))[1][:, ::-1][:, :RANK].T
        overlap = np.abs(np.sum(tensors[f"s{s}.t{t}.teacher_basis"].numpy() * vectors, axis=1))
        np.testing.assert_allclose(overlap, 1.0, atol=1e-3)
