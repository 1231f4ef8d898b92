"""Which tokens are supervised and what they weigh, against hand-worked cases."""

from __future__ import annotations

import tracemalloc
from dataclasses import fields, replace

import numpy as np
import pytest

from nemo_oprd.batch.token_table import make_rows
from nemo_oprd.batch.types import Rollout

BATCH = [
    Rollout([9, 9, 9], [1, 2, 3, 4], [1, 0, 1, 1]),
    Rollout([9], [5], [1]),
    Rollout([9, 9], [6, 7], [0, 0]),
]


def rows(**options):
    defaults = {"positions": "last_k", "k": 2, "position": "token", "aggregation": "sequence_mean"}
    return make_rows(BATCH, **{**defaults, **options})


def test_last_k_counts_only_unmasked_tokens() -> None:
    table = rows()
    assert table.response.tolist() == [0, 0, 1]
    assert table.token.tolist() == [2, 3, 0]
    assert table.position.tolist() == [5, 6, 1]
    assert table.num_responses == 2


def test_first_k_and_all() -> None:
    assert rows(positions="first_k").token.tolist() == [0, 2, 0]
    assert rows(positions="all").token.tolist() == [0, 2, 3, 0]


def test_predicting_is_one_earlier() -> None:
    assert rows(position="predicting").position.tolist() == [4, 5, 0]


def test_weights() -> None:
    assert rows().weight.tolist() == [0.25, 0.25, 0.5]
    assert rows(aggregation="token_mean").weight == pytest.approx([1 / 3] * 3)
    assert rows(k=100, positions="all").weight.sum() == pytest.approx(1.0)


def test_a_batch_without_supervision_is_an_error() -> None:
    with pytest.raises(ValueError, match="supervised token"):
        make_rows([BATCH[2]], positions="all", k=1, position="token", aggregation="token_mean")


def test_predicting_needs_a_prompt() -> None:
    with pytest.raises(ValueError, match="empty prompt"):
        make_rows([Rollout([], [1, 2])], positions="all", k=1, position="predicting", aggregation="token_mean")


def test_single_tokens_and_long_responses() -> None:
    batch = [Rollout([1], [2] * n) for n in range(1, 201)]
    table = make_rows(batch, positions="last_k", k=7, position="token", aggregation="sequence_mean")
    assert len(table) == sum(min(n, 7) for n in range(1, 201))
    assert np.bincount(table.response, weights=table.weight) == pytest.approx(np.full(200, 1 / 200))


def test_numbers_of_rows_count_the_tokens_with_mask_1() -> None:
    batch = [Rollout([1], [2, 3, 4, 5, 6], [1, 0, 1, 1, 1])]
    table = make_rows(batch, positions="last_k", k=2, position="token", aggregation="token_mean")
    assert table.token.tolist() == [3, 4]
    assert table.from_start.tolist() == [2, 3]
    assert table.from_end.tolist() == [1, 0]


@pytest.mark.parametrize("positions", ["all", "last_k", "first_k"])
@pytest.mark.parametrize("position", ["token", "predicting"])
def test_a_mask_of_ones_and_an_equal_index_change_nothing(positions: str, position: str) -> None:
    """Without them the rows are made from the lengths alone."""
    plain = [Rollout([1] * 3, [2] * n, teacher_prompt_ids=[1] * told) for n, told in ((9, 2), (0, 4), (2, 3), (5, 1))]
    masked = [replace(one, response_mask=[1] * len(one.response_ids)) for one in plain]
    indexed = [
        replace(one, teacher_response_ids=one.response_ids, teacher_index=range(len(one.response_ids))) for one in plain
    ]
    how = {"positions": positions, "k": 4, "position": position, "aggregation": "sequence_mean"}
    expected = make_rows(plain, **how)
    for other in (make_rows(masked, **how), make_rows(indexed, **how)):
        for field in fields(expected):
            assert np.array_equal(getattr(other, field.name), getattr(expected, field.name)), field.name


def test_a_token_without_a_state_of_the_teacher_before_it_has_no_row() -> None:
    batch = [Rollout([1], [2, 3, 4], teacher_prompt_ids=[])]
    table = make_rows(batch, positions="all", k=1, position="predicting", aggregation="token_mean")
    assert (table.token.tolist(), table.from_start.tolist(), table.teacher_position.tolist()) == (
        [1, 2],
        [0, 1],
        [0, 1],
    )


def test_tokens_and_logprobs_of_rows() -> None:
    logprobs = [-1.0, -2.0, -3.0]
    batch = [Rollout([1], [7, 8, 9], [1, 0, 1], logprobs=logprobs), Rollout([1], []), Rollout([1], [5, 6])]
    table = make_rows(batch, positions="all", k=1, position="token", aggregation="token_mean")
    assert table.tokens(batch).tolist() == [7, 9, 5, 6] and table.tokens(batch).dtype == np.int64
    found = table.engine_logprobs(batch)
    assert found.dtype == np.float32 and found[:2].tolist() == [-1.0, -3.0] and np.isnan(found[2:]).all()


@pytest.mark.parametrize("masked", [False, True])
def test_memory_goes_with_the_rows_not_with_the_tokens(masked: bool) -> None:
    """A step may have millions of tokens, and every rank makes the table."""
    count, length, k = 64, 16384, 8
    mask = np.ones(length, np.bool_) if masked else None
    rollouts = [Rollout([1], np.zeros(length, np.int32), mask) for _ in range(count)]
    tracemalloc.start()
    try:
        table = make_rows(rollouts, positions="last_k", k=k, position="token", aggregation="token_mean")
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert len(table) == count * k
    assert peak < count * length  # an eighth of one int64 array of all tokens
