"""The golden cases: losses and every gradient of `verify` against numbers computed in float64 by a program that knows
nothing of this project (tests/golden/README.md).

The default run takes every case at TP1 and at one other layout, in turn; the remaining pairs are marked `slow`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from golden_runs import EXPECTED, check, overrides
from pool import Pools

CASES = list(EXPECTED)
LAYOUTS = {
    "TP1": (1, []),
    "TP2": (2, ["student.parallel.tensor=2"]),
    "PP2": (2, ["student.parallel.pipeline=2"]),
    "DP2": (2, []),
    "TP2xPP2": (4, ["student.parallel.tensor=2", "student.parallel.pipeline=2"]),
}
OTHERS = [layout for layout in LAYOUTS if layout != "TP1"]


def in_default_run(layout: str, case: str) -> bool:
    """Whether the default run takes a case at a layout."""
    return layout in ("TP1", OTHERS[CASES.index(case) % len(OTHERS)])


def parameters() -> list[Any]:
    """All layouts with all cases; layout by layout, because a pool of another size is another set of processes."""
    return [
        pytest.param(layout, case, marks=[] if in_default_run(layout, case) else pytest.mark.slow)
        for layout in LAYOUTS
        for case in CASES
    ]


@pytest.mark.parametrize(("layout", "case"), parameters())
def test_golden(pools: Pools, tmp_path: Path, layout: str, case: str) -> None:
    ranks, sizes = LAYOUTS[layout]
    output = tmp_path / "out"
    pools[ranks].run("cases:run_verify", overrides=overrides(case, output) + sizes)
    check(output, case)


def test_there_are_golden_cases() -> None:
    assert len(CASES) == 19
    for case in CASES:
        assert [in_default_run(layout, case) for layout in LAYOUTS].count(True) == 2
    for layout in OTHERS:
        assert 4 <= sum(in_default_run(layout, case) for case in CASES) <= 5
