"""The model of a run's timeline against schedules that were computed by hand."""

from __future__ import annotations

import pytest

from benchmarks.timeline_model import Schedule, Servers, Work, finish_times, predict, seconds_per_step, tokens_after
from nemo_oprd.run.timeline import Interval, hidden_share

ONE = Servers(count=1, slots=8, token_s=1.0)
WORK = Work(push=2.0, gradient=6.0, optimizer=1.0)


def spans(intervals: list[Interval], *phases: str) -> list[tuple[int, str, float, float]]:
    return [(e.step, e.phase, e.began, e.ended) for e in intervals if e.phase in phases]


def sampled(intervals: list[Interval]) -> list[tuple[int, float, float]]:
    return [(e.batch, e.began, e.ended) for e in intervals if e.phase == "sampling"]


def test_slots_and_waves() -> None:
    """Two slots: the third response begins after the shortest one, or after both."""
    jobs = [(3, 0), (5, 0), (4, 0)]
    assert finish_times(jobs, Servers(1, 2, 1.0)) == [3, 5, 7]
    assert finish_times(jobs, Servers(1, 2, 1.0, continuous=False)) == [3, 5, 9]
    assert finish_times(jobs, Servers(3, 1, 2.0)) == [6, 10, 8]
    assert finish_times(jobs, ONE) == [3, 5, 4]
    assert finish_times([], ONE) == []


def test_what_is_sampled_until_a_cut() -> None:
    """The third job begins when a slot is free; what is known comes before the tokens."""
    jobs, two = [(3, 0), (5, 0), (4, 0)], Servers(1, 2, 1.0)
    assert [tokens_after(jobs, two, seconds) for seconds in (0, 2, 3, 4.5, 7, 9)] == [
        [0, 0, 0], [2, 2, 0], [3, 3, 0], [3, 4, 1], [3, 5, 4], [3, 5, 4]
    ]  # fmt: skip
    known = Servers(1, 2, token_s=1.0, known_s=0.1)
    assert [tokens_after([(2, 10)], known, seconds) for seconds in (0.5, 1.5, 2.5, 3)] == [[0], [0], [1], [2]]
    assert tokens_after([], ONE, 1.0) == []


def test_servers_are_slower_with_more_responses() -> None:
    """Two at a time take 3 s per token, one takes 2 s; what is known costs as much as tokens would."""
    servers = Servers(1, 2, token_s=1.0, live_s=1.0)
    assert finish_times([(2, 0), (4, 0)], servers) == pytest.approx([6.0, 10.0])
    assert finish_times([(2, 10)], Servers(1, 2, token_s=1.0, known_s=0.1)) == pytest.approx([3.0])


def test_a_synchronous_run() -> None:
    """push 2; then 5 sampling, 6 gradient, 1 optimizer, 2 push in each step."""
    found = predict([[5, 3]] * 3, WORK, ONE, Schedule(3))
    assert sampled(found) == [(1, 2, 7), (2, 16, 21), (3, 30, 35)]
    assert spans(found, "gradient") == [(1, "gradient", 7, 13), (2, "gradient", 21, 27), (3, "gradient", 35, 41)]
    assert spans(found, "sync") == [(s, "sync", 14 * s, 14 * s + 2) for s in range(4)]
    assert seconds_per_step(found) == [14, 14, 14] and hidden_share(found) == 0


@pytest.mark.parametrize(("tokens", "step"), [(5, 9), (6, 9), (9, 12)])
def test_a_lag_of_one_hides_the_shorter_of_both(tokens: int, step: int) -> None:
    """The first step waits for batch 1, the last one for nothing; the longer of sampling and gradient counts."""
    found = predict([[tokens]] * 4, WORK, ONE, Schedule(4, lag=1))
    begins = [2, 2 + tokens]  # batch 2 is sampled during the gradient of step 1
    begins += [begins[1] + step, begins[1] + 2 * step]
    assert sampled(found) == [(batch, begin, begin + tokens) for batch, begin in enumerate(begins, 1)]
    assert seconds_per_step(found) == [tokens + step, step, step, 9]
    assert max(e.ended for e in found) == 2 + tokens + 3 * step + 9
    hidden = [min(tokens, 6)] * 3
    assert hidden_share(found) == sum(hidden) / (4 * tokens)
    waits = spans(found, "generate")
    assert waits[0] == (1, "generate", 2, 2 + tokens) and len(waits) == (4 if tokens > 6 else 1)


def test_a_lag_of_two_has_no_more_overlap_than_one() -> None:
    """The first weights sample three batches, of which the first step waits for two; later steps are equally long."""
    one, two = (predict([[9]] * 5, WORK, ONE, Schedule(5, lag=lag)) for lag in (1, 2))
    assert sampled(two) == [(1, 2, 11), (2, 11, 20), (3, 20, 29), (4, 32, 41), (5, 44, 53)]
    assert seconds_per_step(two) == [9 + 9 + 12, 12, 12, 9, 9]
    assert seconds_per_step(one) == [9 + 12, 12, 12, 12, 9]


def test_a_check_and_an_evaluation() -> None:
    """With a lag a step compares twice; an evaluation and the rest come after the push."""
    work = Work(push=2.0, gradient=6.0, optimizer=1.0, check=0.5, other=0.25, evaluation=10.0, evaluate_every=2)
    assert seconds_per_step(predict([[5]] * 3, work, ONE, Schedule(3))) == [14.75, 24.75, 24.75]
    found = predict([[5]] * 3, work, ONE, Schedule(3, lag=1))
    assert seconds_per_step(found) == [5 + 10.25, 20.25, 20.25]
    assert spans(found, "evaluation")[0][2:] == (2 + 5 + 10.25 + 10.25, 2 + 5 + 10.25 + 20.25)


def test_segments() -> None:
    """A lag of 1, segments of 4: weights 0 sample 8 tokens of batch 1 and then 4 of batch 2, weights k the last 4 of
    batch k + 1, for which the step waits, and then the first 4 of batch k + 2."""
    found = predict([[8, 2], [7, 3], [4, 4], [8, 1]], WORK, ONE, Schedule(4, lag=1, segment_tokens=4))
    assert sampled(found) == [
        (1, 2, 10), (2, 10, 14),  # weights 0: 8 and 2 tokens; 4 and 3
        (2, 19, 22), (3, 22, 26),  # weights 1: the last 3 of 7; all of batch 3
        (4, 31, 35),  # weights 2: nothing of batch 3 is left
        (4, 40, 44),  # weights 3: the last 4 of 8
    ]  # fmt: skip
    assert spans(found, "generate") == [(1, "generate", 2, 10), (2, "generate", 19, 22), (4, "generate", 40, 44)]
    assert [e.began for e in found if e.phase == "gradient"] == [10, 22, 31, 44]
    assert seconds_per_step(found) == [17, 12, 9, 13]


def test_segments_with_a_spare_lag_wait_for_nothing() -> None:
    """Each response is complete one step before it is used; a step is as long as a segment or the gradient."""
    found = predict([[8]] * 6, WORK, ONE, Schedule(6, lag=2, segment_tokens=4))
    assert seconds_per_step(found)[1:] == [9] * 5
    long = predict([[20]] * 6, WORK, ONE, Schedule(6, lag=2, segment_tokens=10))
    assert seconds_per_step(long)[1:] == [13, 13, 13, 13, 9]  # 10 + 1 + 2, until batch 6 is complete


def test_a_stream() -> None:
    """Lag 2, so one batch ahead: the response of 20 tokens has 11 at the first cut, and is taken by step 3 of 4."""
    found = predict([[5], [20], [5], [5]], WORK, ONE, Schedule(4, lag=2, streams=True))
    assert [(e.step, e.began, e.ended) for e in found if e.phase == "sampling"] == [
        (1, 2, 13),
        (2, 16, 25),
        (3, 30, 35),
    ]
    assert spans(found, "generate") == [(1, "generate", 2, 7), (2, "generate", 16, 21)]
    assert [e.began for e in found if e.phase == "gradient"] == [7, 21, 30, 39]
    assert seconds_per_step(found) == [14, 14, 9, 9]


def test_a_stream_waits_for_what_is_due() -> None:
    """Both first responses are due in the third step, whatever else is complete: it has to wait for one of 40."""
    found = predict([[40], [5], [5], [5]], WORK, ONE, Schedule(4, lag=2, streams=True))
    # 11 tokens until 13, 11 more until 27 (from 16), and the last 18 of 40 while step 3 waits (from 30)
    assert spans(found, "generate") == [
        (1, "generate", 2, 7), (2, "generate", 16, 21), (3, "generate", 30, 48)
    ]  # fmt: skip


def test_segments_that_a_lag_does_not_allow() -> None:
    with pytest.raises(ValueError, match="expected a lag of 2"):
        predict([[9]], WORK, ONE, Schedule(1, lag=1, segment_tokens=4))
