"""Streaming moments, parts and the sample of rows, against numpy on all rows at once."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from nemo_oprd.bridge.covariance import LayerPair, Moments, PairStatistics
from nemo_oprd.bridge.row_sample import SELECTION, TEST, TRAIN, Reservoir, assign_parts, hash_ids

TEACHER_WIDTH, STUDENT_WIDTH = 6, 4


def rows(n: int, offset: float = 0.0, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    rng = np.random.default_rng(seed)
    shared = rng.standard_normal((n, 3))
    sides = [
        shared @ rng.standard_normal((3, d)) + rng.standard_normal((n, d)) + offset
        for d in (TEACHER_WIDTH, STUDENT_WIDTH)
    ]
    return torch.from_numpy(sides[0]), torch.from_numpy(sides[1])


def numpy_moments(teacher_NDt: torch.Tensor, student_NDs: torch.Tensor) -> dict[str, np.ndarray]:
    t, s = teacher_NDt.double().numpy(), student_NDs.double().numpy()
    joint = np.cov(np.concatenate([t, s], axis=1), rowvar=False, bias=True)
    d = t.shape[1]
    return {
        "mean_Dt": t.mean(0),
        "mean_Ds": s.mean(0),
        "sigma_DtDt": joint[:d, :d],
        "sigma_DsDs": joint[d:, d:],
        "sigma_DsDt": joint[d:, :d],
    }


def assert_moments(moments: Moments, expected: dict[str, np.ndarray], tolerance: float) -> None:
    for name, value in expected.items():
        np.testing.assert_allclose(getattr(moments, name).numpy(), value, rtol=tolerance, atol=tolerance, err_msg=name)


@pytest.mark.parametrize(("offset", "tolerance"), [(0.0, 1e-12), (1e4, 1e-10), (1e8, 1e-6)])
def test_moments_in_pieces(offset: float, tolerance: float) -> None:
    """Unit variance beside a mean of 1e4: sums of raw products would keep 8 digits less."""
    teacher_NDt, student_NDs = rows(1000, offset)
    moments = Moments(TEACHER_WIDTH, STUDENT_WIDTH)
    for start, stop in ((0, 1), (1, 300), (300, 300), (300, 1000)):
        moments.update(teacher_NDt[start:stop], student_NDs[start:stop])
    assert moments.count == 1000
    assert_moments(moments, numpy_moments(teacher_NDt, student_NDs), tolerance)


def test_moments_of_growing_means() -> None:
    """Every batch has another mean, so the update of the common mean matters."""
    parts = [rows(50, offset=10.0**k, seed=k) for k in range(5)]
    moments = Moments(TEACHER_WIDTH, STUDENT_WIDTH)
    for teacher_NDt, student_NDs in parts:
        moments.update(teacher_NDt, student_NDs)
    together = [torch.cat(side) for side in zip(*parts, strict=True)]
    expected = numpy_moments(together[0], together[1])
    for name, value in expected.items():
        np.testing.assert_allclose(getattr(moments, name).numpy(), value, rtol=1e-12)


def test_rows_of_low_precision() -> None:
    teacher_NDt, student_NDs = (side.bfloat16() for side in rows(500, 100.0))
    moments = Moments(TEACHER_WIDTH, STUDENT_WIDTH)
    for chunk in range(0, 500, 64):
        moments.update(teacher_NDt[chunk : chunk + 64], student_NDs[chunk : chunk + 64])
    assert moments.sigma_DtDt.dtype == torch.float64
    assert_moments(moments, numpy_moments(teacher_NDt, student_NDs), 1e-11)


def test_parts_are_exact_fractions_of_responses() -> None:
    part = assign_parts(range(1000), 0.1, seed=3)
    counts = {p: sum(v == p for v in part.values()) for p in (TRAIN, SELECTION, TEST)}
    assert counts == {TRAIN: 800, SELECTION: 100, TEST: 100}
    assert part == assign_parts(reversed(range(1000)), 0.1, seed=3)
    assert part != assign_parts(range(1000), 0.1, seed=4)
    assert sorted(assign_parts([7, 8, 9], 0.1).values()) == [TRAIN, SELECTION, TEST]


@pytest.mark.parametrize(
    ("ids", "held_out", "message"),
    [
        ([1, 2], 0.1, "at least 3"),
        ([1, 2, 3], 0.0, r"held_out=0.0"),
        ([1, 2, 3], 0.5, r"held_out=0.5"),
        ([1, 2, 2], 0.1, "no repeats"),
    ],
)
def test_parts_refuse(ids: list[int], held_out: float, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        assign_parts(ids, held_out)


def test_hash_is_fixed() -> None:
    """Another machine or a later version must choose the same split and the same sample."""
    first = hash_ids(0, np.array([1, 2]), np.array([3, 4]))
    assert first.tolist() == [0x86D6FD953217AE03, 0xDF54701EBC7A7BE9]
    assert len(np.unique(hash_ids(1, np.repeat(np.arange(300), 300), np.tile(np.arange(300), 300)))) == 90000


def fill(reservoir: Reservoir, order: np.ndarray, chunk: int, per_response: int = 20) -> Reservoir:
    for start in range(0, len(order), chunk):
        index = order[start : start + chunk]
        teacher_NDt = torch.from_numpy(index[:, None] + np.arange(TEACHER_WIDTH) / 8.0)
        student_NDs = torch.from_numpy(-index[:, None] + np.arange(STUDENT_WIDTH) / 8.0)
        response_N, token_N = index // per_response, index % per_response
        reservoir.update(teacher_NDt, student_NDs, response_N, token_N, response_N % 3)
    return reservoir


def row_numbers(reservoir: Reservoir, part: int | None = None) -> np.ndarray:
    """`fill` puts the number of a row into its first teacher value."""
    return reservoir.rows(part)[0][:, 0].long().numpy()


@pytest.mark.parametrize("capacity", [7, 100, 1000])
def test_reservoir_is_the_same_for_any_order(capacity: int) -> None:
    order = np.arange(500)
    first = fill(Reservoir(TEACHER_WIDTH, STUDENT_WIDTH, capacity, seed=5), order, 500)
    for seed, chunk in ((1, 1), (2, 13), (3, 400)):
        other = fill(
            Reservoir(TEACHER_WIDTH, STUDENT_WIDTH, capacity, seed=5),
            np.random.default_rng(seed).permutation(order),
            chunk,
        )
        assert len(other) == min(capacity, 500)
        for one, two in zip(first.rows(), other.rows(), strict=True):
            assert torch.equal(one, two)
    assert torch.equal(first.rows()[0][:, 0], -first.rows()[1][:, 0])  # teacher and student rows of one token
    for part in range(3):
        assert (row_numbers(first, part) // 20 % 3 == part).all()
    assert sum(len(first.rows(part)[0]) for part in range(3)) == len(first) == len(np.unique(row_numbers(first)))


def test_reservoir_is_uniform() -> None:
    """1000 of 10,000 rows are kept, about a tenth of each tenth of the rows."""
    reservoir = fill(Reservoir(TEACHER_WIDTH, STUDENT_WIDTH, 1000), np.arange(10000), 2500)
    counts = np.bincount(row_numbers(reservoir) // 1000, minlength=10)
    assert counts.min() > 60 and counts.max() < 140


def statistics(**options: Any) -> PairStatistics:
    return PairStatistics(LayerPair(2, 3), TEACHER_WIDTH, STUDENT_WIDTH, **options)


def feed(stats: PairStatistics, responses: range, per_response: int = 10) -> None:
    part = assign_parts(range(12), 0.2)
    for response in responses:
        teacher_NDt, student_NDs = rows(per_response, seed=response)
        ids_N = np.full(per_response, response)
        stats.update(teacher_NDt, student_NDs, ids_N, np.arange(per_response), np.full(per_response, part[response]))


def test_parts_are_kept_apart() -> None:
    stats = statistics(reservoir_rows=50)
    feed(stats, range(12))
    part = assign_parts(range(12), 0.2)
    for p, moments in enumerate(stats.moments):
        expected = [rows(10, seed=response) for response in range(12) if part[response] == p]
        together = [torch.cat(side) for side in zip(*expected, strict=True)]
        assert moments.count == len(together[0])
        assert_moments(moments, numpy_moments(together[0], together[1]), 1e-12)
    assert len(stats.reservoir) == 50


def test_bad_rows_are_named() -> None:
    stats = statistics()
    teacher_NDt, student_NDs = rows(10)
    ids_N, part_N = np.arange(10), np.zeros(10, dtype=np.int64)
    broken_ND = student_NDs.clone()
    broken_ND[3, 1], broken_ND[5] = float("nan"), float("inf")
    with pytest.raises(ValueError, match="student layer 2: 2 of 10 rows"):
        stats.update(teacher_NDt, broken_ND, ids_N, ids_N, part_N)
    with pytest.raises(ValueError, match=r"teacher layer 3: hidden states of shape \[10, 4\]"):
        stats.update(student_NDs, student_NDs, ids_N, ids_N, part_N)
    assert stats.moments[TRAIN].count == 0 and len(stats.reservoir) == 0
    stats.update(teacher_NDt, student_NDs, ids_N, ids_N, part_N)
    with pytest.raises(ValueError, match=r"row \(response 4, token 4\) was fed more than once"):
        stats.update(teacher_NDt[4:5], student_NDs[4:5], ids_N[4:5], ids_N[4:5], part_N[4:5])
