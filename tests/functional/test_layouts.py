"""The result does not depend on the parallel layout.

- Losses, metrics and every gradient of `verify` at each layout below against plain Hugging Face models in float64; the
  deviations are collected into one table, printed at the end (`pytest -rA` or `-s` shows it).
- The same model as student and teacher trains nothing, also where the two roles are laid out differently.
- Each supervised (layer, row) travels from the teacher to the student once, and nothing else does.
- bfloat16 errs no more than twice as much as a plain Hugging Face run in bfloat16.
- A batch without any supervised token is an error that says so.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from layout_cases import (
    OBJECTIVES,
    VOCABULARY,
    WIDTH,
    Case,
    K,
    direct_metrics,
    hf_bf16_gradients,
    make_rollouts,
    read_result,
    save_model,
)
from pool import Pools, WorkerError

from nemo_oprd.config import load_config
from nemo_oprd.reference import agreement, reference
from nemo_oprd.rollout.replay import read_rollouts, write_rollouts
from nemo_oprd.types import Rollout

GOLDEN = Path(__file__).parent.parent / "golden"

# fp32 against float64 over 8 layers: rounding gives 1e-6 (see the table); anything missing or counted twice gives 1e-2
TOLERANCE = 1e-5
SMALL = 120

CASES = [
    # one rank
    Case("dp1"),
    Case("dp1", tokens=SMALL),
    Case("dp1", recompute="selective"),
    Case("dp1", recompute="uniform 1", tokens=SMALL),
    Case("dp1", recompute="uniform 2"),
    Case("dp1", recompute="block 3", tokens=SMALL),
    Case("dp1", objective="qwen3-sparse", recompute="uniform 2"),
    Case("dp1", objective="qwen2-tied", tokens=SMALL),
    # two ranks
    Case("tp2", tokens=SMALL),
    Case("tp2", recompute="selective"),
    Case("tp2 sp"),
    Case("tp2 sp", recompute="uniform 1", tokens=SMALL),
    Case("cp2", tokens=SMALL),
    Case("cp2", recompute="uniform 2"),
    Case("dp2", tokens=SMALL),
    Case("dp2", extra=("train.distributed_optimizer=false",)),
    Case("pp2"),
    Case("pp2", recompute="selective", tokens=SMALL),
    Case("pp2 vpp2", tokens=SMALL),
    Case("pp2 vpp4"),
    Case("pp2 vpp2", "pp2 vpp4", recompute="uniform 2", tokens=SMALL),
    Case("pp2 vpp4", "tp2 sp", recompute="block 1", tokens=SMALL),
    Case("pp2 first3", "pp2 last1", tokens=SMALL),
    Case("pp2 last2", "tp2", recompute="uniform 2"),
    Case("pp2 first6 vpp2", "cp2"),
    Case("tp2", "pp2 vpp2", tokens=SMALL),
    Case("cp2", "tp2", tokens=SMALL),
    Case("dp2", "cp2"),
    Case("dp1", "dp1 dedicated", tokens=SMALL),
    Case("pp2 vpp2", objective="qwen3-sparse", recompute="uniform 2", tokens=SMALL),
    Case("tp2 sp", "pp2", objective="qwen3-sparse", recompute="block 5"),
    Case("pp2", "tp2", objective="qwen2-tied", tokens=SMALL),
    Case("tp2 sp", objective="qwen2-tied", recompute="uniform 1"),
    # three ranks
    Case("pp3", tokens=SMALL),
    Case("pp3 first1 last4", "dp3", recompute="block 2"),
    Case("dp3", "pp3 first2 last2"),
    Case("cp3", "pp3", tokens=SMALL),
    Case("tp2 sp", "dp1 dedicated", tokens=SMALL),
    Case("dp1", "tp2 dedicated"),
    Case("pp2 vpp2", "dp1 dedicated"),
    # four ranks
    Case("tp2 pp2", tokens=SMALL),
    Case("tp2 sp pp2 vpp2", tokens=SMALL),
    Case("tp2 sp pp2 vpp4", "tp2 cp2", recompute="uniform 1"),
    Case("tp2 sp cp2", "tp2 pp2 vpp2", recompute="uniform 2", tokens=SMALL),
    Case("tp2 cp2", "pp4"),
    Case("tp2 dp2", "pp2 dp2 vpp2", tokens=SMALL),
    Case("tp2 sp dp2", recompute="selective"),
    Case("cp2 pp2", "tp2 sp dp2", tokens=SMALL),
    Case("cp2 pp2 vpp2", recompute="uniform 1", tokens=SMALL),
    Case("cp2 dp2", "cp4"),
    Case("cp4", "tp2 sp pp2"),
    Case("dp4", "tp2 sp cp2", tokens=SMALL),
    Case("pp2 dp2 vpp2", tokens=SMALL),
    Case("pp2 dp2 first5", recompute="block 2"),
    Case("pp4", "tp2 dp2", tokens=SMALL),
    Case("pp4 vpp2", "pp4 first1 last3", recompute="uniform 1"),
    Case("pp4 first3 last1", "pp4 vpp2", tokens=SMALL),
    Case("tp2", "tp2 sp dedicated", tokens=SMALL),
    Case("tp2 sp", "pp2 vpp2 dedicated", recompute="uniform 2"),
    Case("pp2 vpp2", "tp2 dedicated", tokens=SMALL),
    Case("cp2", "dp2 dedicated"),
    Case("dp2", "cp2 dedicated", tokens=SMALL),
    Case("dp1", "pp3 dedicated"),
    Case("pp3 first2 last4", "dp1 dedicated", tokens=SMALL),
    Case("pp4", objective="qwen3-sparse", tokens=SMALL),
    Case("pp4 vpp2", "tp2 pp2", objective="qwen3-sparse", recompute="uniform 1"),
    Case("tp2 sp pp2", objective="qwen2-tied", tokens=SMALL),
    Case("pp4", objective="qwen2-tied"),
    Case("pp2 dp2 vpp2", "cp2 dp2", objective="qwen2-tied", recompute="uniform 1", tokens=SMALL),
    Case("cp2 tp2", objective="qwen2-tied"),
]


@dataclass(frozen=True)
class Deviations:
    """A row of the table: the largest relative deviations of a layout, and the parameter with the largest one."""

    case: Case
    loss: float
    metrics: float
    gradient: float
    worst: str


TABLE: list[Deviations] = []


@dataclass(frozen=True)
class Workbench:
    """The models and the batch on disk, and what they must give."""

    root: Path

    def settings(self, objective: str) -> list[str]:
        """What all layouts of an objective share."""
        pair, settings = OBJECTIVES[objective]
        models = [f"{role}.hf_path={self.root / pair / role}" for role in ("student", "teacher")]
        return [*models, f"rollout.replay={self.root / 'rollouts.jsonl'}", *settings]

    @cache  # noqa: B019 - one workbench lives as long as the module's tests
    def expected(self, objective: str) -> tuple[dict[str, Any], dict[str, float]]:
        """The plain computation: losses and gradients, and the metrics."""
        config = load_config("verify", [*self.settings(objective), "output=unused"])
        rollouts = read_rollouts(self.root / "rollouts.jsonl", VOCABULARY)
        return reference(config, rollouts), direct_metrics(config, rollouts)


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Workbench:
    root = tmp_path_factory.mktemp("layouts")
    for seed, (pair, role) in enumerate((p, r) for p in ("qwen3", "qwen2") for r in ("student", "teacher")):
        save_model(root / pair / role, pair, seed)
    write_rollouts(root / "rollouts.jsonl", make_rollouts())
    return Workbench(root)


def relative(ours: float, theirs: float) -> float:
    return abs(ours / theirs - 1)


# layout by layout in order of their size: a pool of another size is another set of processes
@pytest.mark.parametrize("case", sorted(CASES, key=lambda case: case.ranks), ids=str)
def test_layout(pools: Pools, bench: Workbench, tmp_path: Path, case: Case) -> None:
    output = tmp_path / "out"
    overrides = [*bench.settings(case.objective), *case.overrides, f"output={output}"]
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
    """Prints the table; every layout that was selected is in it, and all of them together are enough of them."""
    selected = [item for item in request.session.items if getattr(item, "originalname", "") == "test_layout"]
    width = max(len(str(case)) for case in CASES)
    print(f"\nranks  {'layout':<{width}}  loss     metrics  gradient  largest at")
    for row in TABLE:
        print(
            f"{row.case.ranks:>5}  {row.case!s:<{width}}  {row.loss:.1e}  {row.metrics:.1e}  {row.gradient:.1e}   "
            f"{row.worst}"
        )
    print(
        f"{len(TABLE)} layouts; largest deviations: loss {max(row.loss for row in TABLE):.1e}, metrics "
        f"{max(row.metrics for row in TABLE):.1e}, gradient {max(row.gradient for row in TABLE):.1e}"
    ) if TABLE else None
    assert len(TABLE) == len(selected)
    assert len({(case.student, case.teacher, case.recompute) for case in CASES}) >= 24


def test_the_pairs_can_tell_a_mistake(bench: Workbench) -> None:
    """Student and teacher differ visibly at every layer, and most parameters have a gradient worth comparing."""
    for objective in OBJECTIVES:
        expected, metrics = bench.expected(objective)
        assert all(0.5 < value < 3 for name, value in metrics.items() if "relative_error" in name)
        assert all(abs(value) < 0.9 for name, value in metrics.items() if "cosine" in name)
        norms = {name: float(gradient.norm()) for name, gradient in expected["gradients"].items()}
        total = sum(norm**2 for norm in norms.values()) ** 0.5
        # Below 1e-3 the measure of agreement takes deviations relative to all gradients together: right for a few
        # parameters (a bias on keys cancels in the softmax), but not for most.
        negligible = [name for name, norm in norms.items() if norm < 1e-3 * total]
        assert len(negligible) < 0.4 * len(norms), negligible


# every pair of layouts here makes states that differ in their last bits, if at all
SAME_MODEL = [
    (Case("tp2 sp pp2", "tp2 sp pp2", tokens=SMALL), True),
    (Case("cp2 pp2 vpp2", "cp2 pp2 vpp2", recompute="uniform 1"), True),
    (Case("tp2 sp pp2", "cp2 dp2", tokens=SMALL), False),
    (Case("pp2 vpp2", "tp2 dedicated", recompute="uniform 2"), False),
    (Case("cp2 dp2", "pp4", tokens=SMALL), False),
    (Case("pp2", "dp2", tokens=SMALL), False),
]


@pytest.mark.parametrize(("case", "same_layout"), SAME_MODEL, ids=str)
def test_a_student_that_is_its_teacher_learns_nothing(
    pools: Pools, bench: Workbench, tmp_path: Path, case: Case, same_layout: bool
) -> None:
    """Exactly nothing at the same layout.

    Elsewhere the states differ by rounding, by about 1e-6 of their size, where those of the two models of the pair
    differ by about their size. The gradient is linear in that difference and the loss quadratic.
    """
    student = bench.root / "qwen3" / "student"
    overrides = [*bench.settings("qwen3"), f"teacher.hf_path={student}", *case.overrides, f"output={tmp_path / 'out'}"]
    metrics = pools[case.ranks].run("layout_cases:run_verify", overrides=overrides)
    losses, gradients = read_result(tmp_path / "out")
    expected, _ = bench.expected("qwen3")
    assert gradients.keys() == expected["gradients"].keys()
    norm, scale = (
        torch.stack([g.double().norm() for g in grads.values()]).norm() for grads in (gradients, expected["gradients"])
    )
    print(case, losses["loss/total"] / expected["loss/total"], norm / scale)
    if same_layout:
        assert losses["loss/total"] == 0.0 and not any(losses["rep/loss_per_layer"].values())
        assert norm == 0.0
    else:
        assert losses["loss/total"] < TOLERANCE**2 * expected["loss/total"]
        assert norm < TOLERANCE * scale
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
        assert 0 < stays < payload  # a rank that has a row keeps it


BF16 = [Case("tp2"), Case("tp2 sp", "pp2"), Case("pp2"), Case("dp1")]


@pytest.fixture(scope="module")
def golden_pair() -> tuple[list[str], dict[str, Any], dict[str, torch.Tensor]]:
    """Settings, the float64 computation, and the gradients of a plain bfloat16 run."""
    settings = [
        f"student.hf_path={GOLDEN / 'student'}",
        f"teacher.hf_path={GOLDEN / 'teacher'}",
        f"rollout.replay={GOLDEN / 'rollouts.jsonl'}",
    ]
    config = load_config("verify", [*settings, "output=unused"])
    rollouts = read_rollouts(GOLDEN / "rollouts.jsonl", 61)
    return settings, reference(config, rollouts), hf_bf16_gradients(config, rollouts)


@pytest.mark.parametrize("case", BF16, ids=str)
def test_bf16_errs_no_more_than_twice_a_plain_bf16_run(
    pools: Pools,
    golden_pair: tuple[list[str], dict[str, Any], dict[str, torch.Tensor]],
    tmp_path: Path,
    case: Case,
) -> None:
    settings, expected, plain = golden_pair
    overrides = [*settings, *case.overrides, "precision=bf16", f"output={tmp_path / 'out'}"]
    pools[case.ranks].run("layout_cases:run_verify", overrides=overrides)
    losses, ours = read_result(tmp_path / "out")
    a, b = agreement(ours, expected["gradients"]), agreement(plain, expected["gradients"])
    print(
        case,
        "max",
        max(a.values()),
        max(b.values()),
        "sum",
        whole(ours, expected["gradients"]),
        whole(plain, expected["gradients"]),
        relative(losses["loss/total"], expected["loss/total"]),
    )
    print(max((a[n] / b[n], n) for n in a), sum(a[n] / b[n] for n in a) / len(a))


def whole(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> float:
    """||g - g_ref|| / ||g_ref|| over all parameters together."""
    off = torch.stack([(ours[name].double() - g.double()).norm() for name, g in theirs.items()]).norm()
    return float(off / torch.stack([g.double().norm() for g in theirs.values()]).norm())


def test_a_batch_without_supervised_tokens_is_an_error(pools: Pools, bench: Workbench, tmp_path: Path) -> None:
    write_rollouts(tmp_path / "none.jsonl", [Rollout([5, 6], [7, 8, 9], [0, 0, 0]), Rollout([5], [])])
    overrides = [*bench.settings("qwen3"), f"rollout.replay={tmp_path / 'none.jsonl'}", f"output={tmp_path / 'out'}"]
    with pytest.raises(WorkerError, match="ValueError: none of the 2 responses has a supervised token"):
        pools[1].run("cases:run_verify", overrides=overrides)
    assert not (tmp_path / "out").exists()
