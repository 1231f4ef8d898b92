"""Rows split over ranks in any way give the moments, the sample and the fit of one process that has them all."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from bridge_cases import SPLITS, all_rows, collect, summary
from pool import Pools

from nemo_oprd.bridge.row_sample import assign_parts

EXACT = {"teacher rows", "student rows"}


def check(result: dict[str, Any], expected: dict[str, Any]) -> None:
    assert set(result) == set(expected)
    for name, value in expected.items():
        if name in EXACT or name.endswith("count"):
            assert np.array_equal(result[name], value), name
        else:
            # sums in another order: float64 rounding relative to the largest entry
            np.testing.assert_allclose(result[name], value, rtol=0, atol=1e-9 * np.abs(value).max(), err_msg=name)


@pytest.mark.parametrize("split", SPLITS)
def test_any_split_over_ranks(pools: Pools, split: str) -> None:
    for capacity in (50, 1000):  # a sample, and room for all
        check(pools[2].run("bridge_cases:reduced", split=split, capacity=capacity), ONE[capacity])


ONE = {capacity: summary(collect("one rank has nothing", capacity, 0, 1)) for capacity in (50, 100, 1000)}


def test_one_process_is_numpy() -> None:
    teacher_NDt, student_NDs, response_N, _ = all_rows()
    part = assign_parts(range(30), 0.1)
    part_N = np.array([part[r] for r in response_N.tolist()])
    for p in range(3):
        t, s = (side.double().numpy()[part_N == p] for side in (teacher_NDt, student_NDs))
        expected = (s - s.mean(0)).T @ (t - t.mean(0))
        np.testing.assert_allclose(ONE[50][f"{p}.scatter_DsDt"], expected, atol=1e-9 * np.abs(expected).max())
        np.testing.assert_allclose(ONE[50][f"{p}.mean_Dt"], t.mean(0), rtol=1e-14)


def test_copies_fed_by_two_ranks_are_noticed(pools: Pools) -> None:
    assert "was fed more than once" in pools[2].run("bridge_cases:fed_twice")


def test_a_pair_without_rows(pools: Pools) -> None:
    assert pools[2].run("bridge_cases:nobody_has_rows") == 0


def test_the_group_is_respected(pools: Pools) -> None:
    check(pools[2].run("bridge_cases:alone"), ONE[100])
