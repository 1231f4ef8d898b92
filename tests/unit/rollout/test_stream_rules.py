"""What a step takes with `rollout.mode=stream`, whatever is complete when."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemo_oprd.rollout.stream_rollouts import Place, StreamRules


@given(lag=st.integers(2, 7), size=st.integers(1, 5), steps=st.integers(1, 12), seed=st.integers(0, 10**6))
def test_each_place_is_taken_once_and_in_time(lag: int, size: int, steps: int, seed: int) -> None:
    """By an order of completion that prefers the youngest, at random; a step waits only as long as it has to."""
    draw, rules = random.Random(seed), StreamRules(lag, lag // 2, size, steps)
    pool, complete, admitted_at = set[Place](), set[Place](), dict[Place, int]()
    taken, groups = list[Place](), 0
    for step in range(steps):
        new = [(group, i) for group in range(groups, rules.admitted(step)) for i in range(size)]
        groups = rules.admitted(step)
        pool |= {*new}
        admitted_at |= dict.fromkeys(new, step)
        assert len(pool) == size * (groups - step), "as many as are admitted and not taken"
        while (batch := rules.batch(step, pool, complete)) is None:
            waiting = sorted(pool - complete)
            assert waiting, "all are complete, and the step waits"
            complete.add(waiting[-1] if draw.random() < 0.7 else draw.choice(waiting))
        assert len(batch) == size and set(batch) <= complete & pool
        assert all(step - admitted_at[place] <= lag for place in batch)
        pool -= {*batch}
        taken += batch
    assert sorted(taken) == [(group, i) for group in range(steps) for i in range(size)]


def test_a_worked_example() -> None:
    """Lag 2 and one group ahead: what is not complete can wait for one step, and no longer."""
    rules = StreamRules(lag=2, early_groups=1, size=2, steps=5)
    assert [rules.admitted(done) for done in range(5)] == [2, 3, 4, 5, 5]
    assert [rules.deadline(group) for group in range(5)] == [2, 2, 3, 4, 5]
    first = [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert rules.batch(0, first, {(1, 0)}) is None, "two are taken"
    assert rules.batch(0, first, {(1, 0), (1, 1)}) == [(1, 0), (1, 1)]
    left = [(0, 0), (0, 1), (2, 0), (2, 1)]
    assert rules.batch(1, left, {(2, 0), (2, 1)}) == [(2, 0), (2, 1)], "the old ones are due in step 2"
    assert rules.batch(1, left, {(0, 1), (2, 0), (2, 1)}) == [(0, 1), (2, 0)], "the oldest first"
    last = [(0, 0), (0, 1), (3, 0), (3, 1)]
    assert rules.batch(2, last, {(3, 0), (3, 1), (0, 1)}) is None, "the step waits for what is due"
    assert rules.batch(2, last, {*last}) == [(0, 0), (0, 1)]
    crowded = [(0, 0), (1, 0), (1, 1), (2, 0)]
    assert rules.batch(1, crowded, {(1, 1), (2, 0)}) == [(1, 1), (2, 0)]
    assert rules.batch(1, [(0, 0), (0, 1), (1, 0), (1, 1)], {(1, 0), (1, 1)}) == [(1, 0), (1, 1)]
    with pytest.raises(AssertionError):  # three would be due in one step
        assert rules.batch(1, [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0)], {(1, 1), (2, 0)})
