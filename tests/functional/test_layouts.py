"""The result does not depend on the parallel layout.

- Losses, metrics and every gradient of `verify` at each layout below against plain Hugging Face models in float64; the
  deviations are collected into one table, printed at the end (`pytest -rA` or `-s` shows it).
- A student that is its own teacher learns nothing, also where the two roles are laid out differently.
- Each supervised (layer, row) travels from the teacher to the student once, and nothing else does.
- bfloat16 errs no more than twice as much as a plain Hugging Face run in bfloat16.
- A batch without any supervised token is an error that says so.
"""

from __future__ import annotations

import shutil
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from layout_cases import (
    OBJECTIVES,
    WIDTH,
    Case,
    K,
    Workbench,
    make_rollouts,
    read_result,
)
from layout_grid import CASES, SERVED_CASES, SMALL
from pairwise import mark_slow, of_case
from pool import Pools, WorkerError
from served_teachers import SERVED, ServedTeachers
from tiny_models import edit_tensors

from nemo_oprd.batch.types import Rollout
from nemo_oprd.config.loading import load_config
from nemo_oprd.distillation.reference import agreement, reference
from nemo_oprd.rollout.replay import read_rollouts, write_rollouts
from tests.support.plain_bf16 import plain_bf16_gradients

GOLDEN = Path(__file__).parent.parent / "golden"

# fp32 against float64 over 8 layers: rounding gives 1e-6 (see the table); anything missing or counted twice gives 1e-2
TOLERANCE = 1e-5


@dataclass(frozen=True)
class Deviations:
    """A row of the table: the largest relative deviations of a layout, and the parameter with the largest one."""

    case: Case
    loss: float
    metrics: float
    gradient: float
    worst: str


TABLE: list[Deviations] = []


@pytest.fixture
def bench(workbench: Workbench) -> Workbench:
    return workbench


def relative(ours: float, theirs: float) -> float:
    return abs(ours / theirs - 1)


def _marked() -> list[Any]:
    """`mark_slow`, and eight ranks are for `scripts/test.sh --all`."""
    small = [case for case in CASES if case.ranks <= 4]
    large = [pytest.param(case, marks=pytest.mark.slow) for case in CASES if case.ranks > 4]
    return [*mark_slow(small, of_case), *large]


# In order of their ranks, because a pool of another size is another set of processes. The default run takes the cases
# that hold every pair of settings (pairwise.py), `scripts/test.sh --all` takes all.
@pytest.mark.parametrize("case", [*_marked(), *SERVED_CASES], ids=str)
def test_layout(pools: Pools, bench: Workbench, served_teachers: ServedTeachers, tmp_path: Path, case: Case) -> None:
    output = tmp_path / "out"
    overrides = served_teachers.of([*bench.settings(case.objective), *case.overrides, f"output={output}"])
    metrics = pools[case.ranks].run("layout_cases:run_verify", overrides=overrides)
    losses, gradients = read_result(output)
    expected, expected_metrics = bench.expected(case.objective)

    per_layer = {int(layer): loss for layer, loss in losses["rep/loss_per_layer"].items()}
    assert per_layer.keys() == expected["rep/loss_per_layer"].keys()
    assert metrics.keys() == expected_metrics.keys()
    gradient = agreement(gradients, expected["gradients"])
    worst = max(gradient, key=gradient.__getitem__)
    row = Deviations(
        case,
        loss=max(
            *(relative(losses[name], expected[name]) for name in ("loss/total", "rep/loss")),
            *(relative(loss, expected["rep/loss_per_layer"][layer]) for layer, loss in per_layer.items()),
        ),
        metrics=max(
            # a cosine can be close to 0, where only its absolute error says something
            abs(metrics[name] - value) / (1.0 if "cosine" in name else value)
            for name, value in expected_metrics.items()
        ),
        gradient=gradient[worst],
        worst=worst,
    )
    TABLE.append(row)
    assert losses["counts"] == counts(case)
    assert row.loss < TOLERANCE and row.metrics < TOLERANCE and row.gradient < TOLERANCE, row


def counts(case: Case) -> dict[str, int]:
    """`counts` of losses.json, from the masks alone."""
    lengths = [sum(rollout.mask) for rollout in make_rollouts()]
    limit = max(lengths) if "loss.representation.positions=all" in OBJECTIVES[case.objective][1] else K
    return {
        "responses": sum(length > 0 for length in lengths),
        "supervised_tokens": sum(min(length, limit) for length in lengths),
        "response_tokens": sum(lengths),
    }


def test_the_table_of_layouts(request: pytest.FixtureRequest) -> None:
    """Prints the table; every layout that was selected for this run is in it, and all of them are enough of them."""
    width = max(len(str(case)) for case in CASES)
    print(f"\nranks  {'layout':<{width}}  loss     metrics  gradient  largest at")
    for row in TABLE:
        deviations = f"{row.loss:.1e}  {row.metrics:.1e}  {row.gradient:.1e}"
        print(f"{row.case.ranks:>5}  {row.case!s:<{width}}  {deviations}   {row.worst}")
    for what in ("loss", "metrics", "gradient"):
        print(f"largest deviation of {what}: {max((getattr(row, what) for row in TABLE), default=0.0):.1e}")
    selected = [item for item in request.session.items if getattr(item, "function", None) is test_layout]
    assert len(TABLE) == len(selected)
    assert len({(case.student, case.teacher, case.recompute) for case in CASES}) >= 24


def test_the_pairs_can_tell_a_mistake(bench: Workbench) -> None:
    """Student and teacher differ visibly at every layer, and a missing gradient of any parameter would be seen."""
    for objective in OBJECTIVES:
        expected, metrics = bench.expected(objective)
        assert all(0.5 < value < 3 for name, value in metrics.items() if "relative_error" in name)
        assert all(abs(value) < 0.9 for name, value in metrics.items() if "cosine" in name)
        gradients = expected["gradients"]
        missing = agreement({name: torch.zeros_like(g) for name, g in gradients.items()}, gradients)
        # not all are 1: the measure takes small gradients (a bias on keys) relative to all of them together
        assert min(missing.values()) > 1000 * TOLERANCE, min(missing.items(), key=lambda item: item[1])


# (layouts, whether those of the two roles are the same)
SAME_MODEL = [
    (Case("tp2 sp pp2", "tp2 sp pp2", tokens=SMALL), True),
    (Case("cp2 pp2 vpp2", "cp2 pp2 vpp2", recompute="uniform 1"), True),
    (Case("tp2 sp", "tp2 sp dedicated", tokens=SMALL), True),
    (Case("tp2 sp pp2", "cp2 dp2", tokens=SMALL), False),
    (Case("pp2 vpp2", "tp2 dedicated", recompute="uniform 2"), False),
    pytest.param(Case("cp2 dp2", "pp4", tokens=SMALL), False, marks=pytest.mark.slow),
    pytest.param(Case("dp4", "tp2 pp2"), False, marks=pytest.mark.slow),
]


def norm(gradients: dict[str, torch.Tensor]) -> float:
    """The norm of all gradients together."""
    return float(torch.stack([gradient.double().norm() for gradient in gradients.values()]).norm())


@pytest.mark.parametrize(("case", "same_layout"), SAME_MODEL, ids=str)
def test_a_student_that_is_its_teacher_learns_nothing(
    pools: Pools, bench: Workbench, tmp_path: Path, case: Case, same_layout: bool
) -> None:
    """Exactly nothing where both roles compute alike: what travels is not changed on its way.

    Elsewhere the states of the two roles differ by rounding, about 1e-6 of their size, where those of the pair's two
    models differ by about their size. The gradient is linear in that difference and the loss quadratic.
    """
    student = bench.root / "qwen3" / "student"
    overrides = [*bench.settings("qwen3"), f"teacher.hf_path={student}", *case.overrides, f"output={tmp_path / 'out'}"]
    metrics = pools[case.ranks].run("layout_cases:run_verify", overrides=overrides)
    losses, gradients = read_result(tmp_path / "out")
    expected, _ = bench.expected("qwen3")
    assert gradients.keys() == expected["gradients"].keys()
    size, usual_size = norm(gradients), norm(expected["gradients"])
    if same_layout:
        assert losses["loss/total"] == 0.0 and not any(losses["rep/loss_per_layer"].values())
        assert size == 0.0
    else:
        assert losses["loss/total"] < TOLERANCE**2 * expected["loss/total"]
        assert size < TOLERANCE * usual_size
    # fp32 gives a cosine of 1 up to its last bits
    assert metrics["rep/cosine_similarity"] == pytest.approx(1.0, abs=1e-6)


TRANSFERS = [
    Case("tp2 pp2", "cp4", tokens=SMALL),
    Case("pp4", "tp2 sp dp2"),
    Case("pp2 vpp2 cp2", "tp2 pp2 vpp2", objective="qwen3-sparse", tokens=SMALL),
    Case("pp2", "tp2 dedicated", tokens=SMALL),
    Case("tp2", "tp2 sp dedicated", extra=("precision=bf16",)),
    Case("dp1", "pp3 dedicated", objective="qwen3-sparse"),
]


@pytest.mark.parametrize("case", TRANSFERS, ids=str)
def test_every_row_travels_once(pools: Pools, bench: Workbench, case: Case) -> None:
    """By every receiver's plan each (layer, row) arrives once, and the bytes that came from other ranks are those."""
    overrides = [*bench.settings(case.objective), *case.overrides, "output=unused"]
    moved = pools[case.ranks].run("layout_cases:move_targets", overrides=overrides)
    times = Counter(pair for _, pairs in moved["planned"] for pair in pairs)
    assert times == Counter((layer, row) for layer in moved["layers"] for row in range(moved["rows"]))

    itemsize = 2 if "precision=bf16" in case.extra else 4
    payload = moved["rows"] * len(moved["layers"]) * WIDTH * itemsize
    stays = sum(len(pairs) for (source, target), pairs in moved["planned"] if source == target) * WIDTH * itemsize
    assert sum(moved["received"]) == payload - stays
    for rank, received in enumerate(moved["received"]):
        planned = sum(len(pairs) for (source, target), pairs in moved["planned"] if source != target == rank)
        assert received == planned * WIDTH * itemsize
    if case.dedicated:
        assert stays == 0
    else:
        assert 0 < stays < payload


BF16 = [Case("tp2 pp2"), Case("tp2 sp", "pp2"), Case("pp2", recompute="uniform 1"), Case("dp1")]
BF16 += [pytest.param(Case("tp2 sp", extra=SERVED), marks=pytest.mark.slow)]


@pytest.fixture(scope="module")
def bf16_pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[str], dict[str, Any], dict[str, torch.Tensor]]:
    """Settings, the float64 computation, and the gradients of a plain bfloat16 run.

    The golden pair with its weights rounded to bfloat16, as real ones are stored: what is measured is the arithmetic.
    """
    root = tmp_path_factory.mktemp("bf16")
    for role in ("student", "teacher"):
        shutil.copytree(GOLDEN / role, root / role)
        edit_tensors(root / role, lambda tensors: tensors.update({n: t.bfloat16() for n, t in tensors.items()}))
    models = [f"{role}.hf_path={root / role}" for role in ("student", "teacher")]
    settings = [*models, f"rollout.replay={GOLDEN / 'rollouts.jsonl'}", "precision=bf16"]
    config = load_config("verify", [*settings, "output=unused"])
    rollouts = read_rollouts(GOLDEN / "rollouts.jsonl", 61)
    return settings, reference(config, rollouts), plain_bf16_gradients(config, rollouts)


@pytest.mark.parametrize("case", BF16, ids=str)
def test_bf16_errs_no_more_than_twice_a_plain_bf16_run(
    pools: Pools,
    bf16_pair: tuple[list[str], dict[str, Any], dict[str, torch.Tensor]],
    served_teachers: ServedTeachers,
    tmp_path: Path,
    case: Case,
) -> None:
    """All gradients together, and the parameter with the largest deviation."""
    settings, expected, plain = bf16_pair
    overrides = served_teachers.of([*settings, *case.overrides, f"output={tmp_path / 'out'}"])
    pools[case.ranks].run("cases:run_verify", overrides=overrides)
    losses, ours = read_result(tmp_path / "out")
    reference_gradients = expected["gradients"]
    error, plain_error = (
        norm({name: grads[name].double() - g for name, g in reference_gradients.items()}) / norm(reference_gradients)
        for grads in (ours, plain)
    )
    worst, plain_worst = (max(agreement(grads, reference_gradients).values()) for grads in (ours, plain))
    print(f"gradient error {error:.4f} (plain: {plain_error:.4f}), worst {worst:.4f} (plain: {plain_worst:.4f})")
    assert error < 2 * plain_error and worst < 2 * plain_worst
    assert error > 1e-3  # eight bits of mantissa: a run in fp32 would err by 1e-6
    # the loss adds up hundreds of roundings of 2^-9 that mostly cancel
    assert losses["loss/total"] == pytest.approx(expected["loss/total"], rel=2**-9)


def test_a_batch_without_supervised_tokens_is_an_error(pools: Pools, bench: Workbench, tmp_path: Path) -> None:
    write_rollouts(tmp_path / "none.jsonl", [Rollout([5, 6], [7, 8, 9], [0, 0, 0]), Rollout([5], [])])
    overrides = [*bench.settings("qwen3"), f"rollout.replay={tmp_path / 'none.jsonl'}", f"output={tmp_path / 'out'}"]
    with pytest.raises(WorkerError, match="none of the 2 responses has a supervised token"):
        pools[1].run("cases:run_verify", overrides=overrides)
    assert not (tmp_path / "out").exists()
