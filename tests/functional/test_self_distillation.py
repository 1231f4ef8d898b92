"""The student as its own teacher, who reads a prompt that tells it more: gradients, training, and going on.

The teacher is the student at its current weights, their moving average, or the initial ones. Against plain Hugging Face
models in float64, and for training against float64 AdamW, where the teacher's weights are kept by hand.
"""

from __future__ import annotations

import shutil
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from golden_runs import weights
from layout_cases import Case, check_result
from plain_computation import expected_result
from pool import Pools
from reference_adamw import ReferenceAdamW
from tiny_models import MODELS, SIZES, save_random
from transformers import AutoModelForCausalLM

from nemo_oprd.batch.types import Rollout
from nemo_oprd.config.loading import load_config
from nemo_oprd.distillation.reference import reference
from nemo_oprd.rollout.replay import write_rollouts

STUDENT = SIZES | MODELS["qwen2_tied"]
TOLD = "teacher.prompt='{prompt} {answer}'"
OBJECTIVES = {
    "hidden": ["loss.representation.k=9"],
    "composed": [
        "loss.representation.kind=normalized_mse",
        *("loss.output.kind=full_vocab", "loss.output.weight=1.5", "loss.output.chunk_tokens=7"),
    ],
    "sampled": ["loss.representation.layers=even", "loss.output.kind=sampled_token", "loss.output.weight=1"],
}
SMALL = 50
CASES = [
    Case("dp1", objective="composed", recompute="uniform 1", extra=("teacher.weights=student",)),
    Case("tp2 sp", objective="composed", tokens=SMALL, extra=("teacher.weights=student",)),
    Case("tp2", objective="sampled", extra=("teacher.weights=ema",)),
    Case("pp2", objective="composed", tokens=SMALL, extra=("teacher.weights=ema",)),
    Case("pp2 vpp2", objective="hidden", recompute="uniform 1", tokens=SMALL, extra=("teacher.weights=student",)),
    Case("cp2", objective="sampled", extra=("teacher.weights=student", "teacher.resident_microbatches=1")),
    Case("dp2", "tp2", objective="composed", tokens=SMALL, extra=("teacher.weights=initial",)),
    Case("tp2", "pp2 dedicated", objective="composed", extra=("teacher.weights=initial",)),
]
TRAINING = ["train.lr=1e-2", "train.weight_decay=0.1", "train.betas=[0.9,0.95]", "train.adam_eps=1e-2"]
TRAINING += ["train.clip_grad=1000", "train.steps=3", "logging.tensorboard=false"]
DECAY = 0.75
LAYOUTS = {"TP2": ["student.parallel.tensor=2"], "PP2": ["student.parallel.pipeline=2"], "DP2": []}
LAYOUTS["PP2 VPP2"] = [*LAYOUTS["PP2"], "student.parallel.virtual_pipeline=2"]


def make_rollouts() -> list[Rollout]:
    """The teacher's prompts are longer or shorter; one leaves no room for the response's end, which is cut."""
    rng, made = np.random.default_rng(11), []
    for prompt, response, told in [(4, 20, 9), (3, 6, 1), (7, 11, 30), (5, 2, 8), (9, 30, 44)]:
        ids = rng.integers(0, STUDENT["vocab_size"], prompt + response + told).tolist()
        mask = (rng.random(response) < 0.8).astype(int).tolist()
        room, cut = STUDENT["max_position_embeddings"] - told, {}
        if response > room:
            index = [t if t < room else -1 for t in range(response)]
            cut = {"teacher_response_ids": ids[prompt : prompt + room], "teacher_index": index}
        made.append(
            Rollout(
                ids[:prompt],
                ids[prompt : prompt + response],
                mask,
                teacher_prompt_ids=ids[prompt + response :],
                **cut,  # type: ignore[arg-type]
            )
        )
    assert made[-1].teacher_index is not None
    return made


class Bench:
    """A model and rollouts on disk."""

    def __init__(self, root: Path) -> None:
        self.root = root
        save_random(root / "student", STUDENT, 0)
        write_rollouts(root / "rollouts.jsonl", make_rollouts())

    def settings(self, objective: str) -> list[str]:
        """Of an objective."""
        files = [f"student.hf_path={self.root / 'student'}", f"rollout.replay={self.root / 'rollouts.jsonl'}"]
        return [*files, TOLD, *OBJECTIVES[objective]]

    @cache  # noqa: B019 - one bench lives as long as the module's tests
    def expected(self, objective: str) -> dict[str, Any]:
        """The plain computation, with a teacher that is an ordinary model of the student's weights."""
        own = f"teacher.hf_path={self.root / 'student'}"
        config = load_config("verify", [*self.settings(objective), own, "output=unused"])
        return expected_result(config, make_rollouts())

    @cache  # noqa: B019
    def trained(self, kind: str) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        """(Student, teacher) after three updates in float64."""
        student = AutoModelForCausalLM.from_pretrained(self.root / "student", dtype=torch.float64)
        teacher = AutoModelForCausalLM.from_pretrained(self.root / "student", dtype=torch.float64)
        named = dict(student.named_parameters())
        optimizer = ReferenceAdamW(named)
        for _ in range(3):
            for name, model in (("student_now", student), ("teacher_now", teacher)):
                model.save_pretrained(self.root / name)
            now = [f"{role}.hf_path={self.root / f'{role}_now'}" for role in ("student", "teacher")]
            config = load_config("verify", [*self.settings("composed"), *now, "output=unused"])
            optimizer.step(reference(config, make_rollouts())["gradients"])
            keep = {"student": 0.0, "ema": DECAY, "initial": 1.0}[kind]
            with torch.no_grad():
                for p, mine in zip(teacher.parameters(), student.parameters(), strict=True):
                    p.mul_(keep).add_(mine, alpha=1 - keep)
        return {n: p.detach() for n, p in named.items()}, {n: p.detach() for n, p in teacher.named_parameters()}


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return Bench(tmp_path_factory.mktemp("self"))


@pytest.mark.parametrize("case", sorted(CASES, key=lambda case: case.ranks), ids=str)
def test_gradients(pools: Pools, bench: Bench, tmp_path: Path, case: Case) -> None:
    """The same whoever the teacher is: before the first update all have the student's weights."""
    overrides = [o for o in case.overrides if case.teacher or not o.startswith("teacher.parallel")]
    arguments = [*bench.settings(case.objective), *overrides, f"output={tmp_path / 'out'}"]
    pools[case.ranks].run("layout_cases:run_verify", overrides=arguments)
    check_result(tmp_path / "out", bench.expected(case.objective), str(case))


def test_the_reference_knows_such_a_teacher(bench: Bench) -> None:
    """`verify --against reference` computes with the student's weights for every kind."""
    for kind in ("student", "ema", "initial"):
        config = load_config("verify", [*bench.settings("composed"), f"teacher.weights={kind}", "output=unused"])
        assert reference(config, make_rollouts())["loss/total"] == bench.expected("composed")["loss/total"]


@pytest.mark.parametrize("teacher", ["student TP2", "student DP2", "ema PP2", "initial TP2"])
def test_training_follows_the_teacher(pools: Pools, bench: Bench, tmp_path: Path, teacher: str) -> None:
    """Three updates; the three kinds part company with the second."""
    kind, layout = teacher.split()
    mine = [f"teacher.weights={kind}", f"teacher.ema_decay={DECAY}", f"output={tmp_path}"]
    pools[2].run("cases:run_train", overrides=[*bench.settings("composed"), *TRAINING, *LAYOUTS[layout], *mine])
    got = weights(tmp_path / "hf")
    for name, value in bench.trained(kind)[0].items():
        torch.testing.assert_close(got[name].double(), value, rtol=1e-5, atol=2e-6, msg=lambda m, n=name: f"{n}: {m}")
    others = [bench.trained(other)[0] for other in ("student", "ema", "initial") if other != kind]
    name = "model.layers.0.mlp.down_proj.weight"
    right = (got[name].double() - bench.trained(kind)[0][name]).abs().max()
    assert all((got[name].double() - other[name]).abs().max() > 100 * right for other in others)


@pytest.mark.parametrize(
    ("layers", "layouts"),
    [
        ("all", ("TP2", "PP2 VPP2")),
        ("[1,2]", ("PP2",)),
        pytest.param("all", ("PP2",), marks=pytest.mark.slow),
        pytest.param("[1,2]", ("TP2", "PP2 VPP2"), marks=pytest.mark.slow),
    ],
)
def test_the_moving_average_is_part_of_a_checkpoint(
    pools: Pools, bench: Bench, tmp_path: Path, layers: str, layouts: tuple[str, ...]
) -> None:
    """Gone on with bit by bit, and at another layout; also where the teacher has only the first layers."""
    kept = ["train.save_every=1", "train.keep_checkpoints=0", f"output={tmp_path}", "teacher.weights=ema"]
    objective = "composed" if layers == "all" else "hidden"
    shared = [*bench.settings(objective), *TRAINING, *kept, f"teacher.ema_decay={DECAY}"]
    shared.append(f"loss.representation.layers={layers}")
    pools[2].run("cases:run_train", overrides=[*shared, *LAYOUTS["TP2"]])
    got = weights(tmp_path / "hf")
    for layout in layouts:
        shutil.rmtree(tmp_path / "hf")
        (tmp_path / "checkpoints" / "latest_checkpointed_iteration.txt").write_text("1\n")
        pools[2].run("cases:run_train", overrides=[*shared, *LAYOUTS[layout]])
        again = weights(tmp_path / "hf")
        for name, value in got.items():
            # another layout sums in another order
            close = torch.equal if layout == "TP2" else lambda a, b: torch.allclose(a, b, rtol=1e-5, atol=2e-6)
            assert close(again[name], value), (layout, name)


def test_a_checkpoint_without_the_average_is_refused(pools: Pools, bench: Bench, tmp_path: Path) -> None:
    shared = [*bench.settings("hidden"), *TRAINING, "train.save_every=3", f"output={tmp_path}"]
    pools[1].run("cases:run_train", overrides=[*shared, "teacher.weights=student"])
    with pytest.raises(AssertionError, match=r"was made with moving_average_layers=0, this run has 4"):
        pools[1].run("cases:run_train", overrides=[*shared, "teacher.weights=ema"])


def test_no_second_copy(pools: Pools, bench: Bench) -> None:
    """With its current weights the teacher is the student's own parameters; an average has parameters of its own."""
    for kind, same in (("student", True), ("ema", False)):
        overrides = [*bench.settings("composed"), f"teacher.weights={kind}", "output=unused"]
        assert pools[1].run("cases:teacher_shares_parameters", overrides=overrides) is same


def test_the_average_is_kept_in_float32(pools: Pools, bench: Bench) -> None:
    """In bf16 runs, where a step of one in a thousand is less than a last bit."""
    overrides = [*bench.settings("hidden"), *TRAINING, "precision=bf16", "teacher.weights=ema", "output=unused"]
    start, student, average = pools[1].run("cases:average_after_update", overrides=overrides)
    expected = 0.999 * start.double() + 0.001 * student.double()
    assert not torch.equal(student, start)
    torch.testing.assert_close(average.double(), expected, rtol=1e-6, atol=1e-9)
    assert not torch.equal(average, start)
    assert (average.bfloat16() == start.bfloat16()).float().mean() > 0.9  # what would have stayed as it was
