"""`benchmarks.planted_faults` plants, asks and counts; a few of its cases, so that it keeps working."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import planted_faults
from benchmarks.planted_cases import FAULTS, HEALTHY, Case
from benchmarks.planted_samples import SAMPLED_FAULTS, SAMPLED_HEALTHY
from nemo_oprd.tools.doctor.findings import CODES
from tests.support.planted_models import make_world

CHEAP = [
    "shipped: oprd_1p5b", "shipped: real_model", "setting train.lr=10", "teacher's theta 12000", "reversed map",
    "even map of a pruned student", "validation is training", "10 prompts 400 times", "box in other words",
    "both end at endoftext",
]  # fmt: skip


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("planted") / "files"
    make_world(root)
    return root


def test_some_cases(world: Path) -> None:
    cases = [case for case in (*HEALTHY, *FAULTS) if case.name in CHEAP]
    assert len(cases) == len(CHEAP)
    results = planted_faults.run(cases, world, sampled=False)
    assert {result.case: result.outcome for result in results} == {
        case.name: "quiet" if case.code is None else "named" for case in cases
    }
    assert "| 8 | 8 | 0 | 0 | 2 | 0 |" in planted_faults.table(results).splitlines()[-1]


def test_what_counts(world: Path) -> None:
    """A wrong expectation is a symptom, a change of nothing is missed, and a fault in a healthy pair is an alarm."""
    cases = [
        Case("another name", "same-weights", ("train.lr=10",)),
        Case("nothing", "same-weights"),
        Case("not healthy", None, ("train.lr=10",)),
    ]
    outcomes = [planted_faults.run_case(case, world, sampled=False).outcome for case in cases]
    assert outcomes == ["symptom", "missed", "false alarm"]


def test_the_cases() -> None:
    """At least 60 faults and 12 healthy pairs, from many shipped configurations; stable names, known codes."""
    faults, healthy = [*FAULTS, *SAMPLED_FAULTS], [*HEALTHY, *SAMPLED_HEALTHY]
    assert len(faults) >= 60 and len(healthy) >= 12
    names = [case.name for case in (*faults, *healthy)]
    assert len(set(names)) == len(names) and {case.code for case in faults} <= CODES.keys()
    shipped = {file.stem for file in (Path(__file__).parent.parent.parent / "conf").glob("*.yaml")} - {"verify"}
    assert {case.config for case in HEALTHY} == shipped
