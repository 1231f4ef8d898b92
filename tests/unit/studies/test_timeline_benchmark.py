"""The benchmark of timelines: what it takes from a synchronous run, and its comparison on equal numbers of GPUs."""

from __future__ import annotations

from dataclasses import astuple

import pytest

from benchmarks import timeline_gpus
from benchmarks.timeline import STEP_S, settle, work_of
from benchmarks.timeline_model import Schedule, Servers, Work, predict


def test_the_phases_of_a_synchronous_run_are_found_in_its_timeline() -> None:
    work = Work(push=2.0, gradient=6.0, optimizer=1.0, other=0.5)
    intervals = predict([[5, 3]] * 5, work, Servers(1, 8, 1.0), Schedule(5))
    assert astuple(work_of(intervals)) == pytest.approx(astuple(work))


def test_servers_and_teacher_sleep_for_their_share() -> None:
    """Of 6 s, 4.2 s are sampling in 42 decoding steps; of the rest 0.3 s are not the teacher's."""
    assert STEP_S[70] == 6.0
    assert settle(70, 0.3, 42.0) == pytest.approx((0.1, 1.5))
    assert settle(98, 1.0, 42.0)[1] == 0.0


def test_equal_numbers_of_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch of equal responses on two GPUs; every number follows by hand.

    Together: 10 s for 10 tokens, 10 s of gradient. With one GPU each, servers take 10 s and the gradient 20 s.
    """
    settings = {"GPUS_IN_ALL": 2, "BATCHES": (2,), "SHARES": (50,), "MODES": {"exact": (1, None)}, "PUSH_S": 0.0}
    for name, value in settings.items():
        monkeypatch.setattr(timeline_gpus, name, value)
    monkeypatch.setattr(timeline_gpus, "lengths", lambda count: [[10] * count] * timeline_gpus.STEPS)
    monkeypatch.setattr(timeline_gpus, "servers", lambda count: Servers(count, 8, 1.0))
    (row,) = timeline_gpus.compare()
    assert (row["synchronous_s"], row["servers"], row["step_s"], row["of_synchronous"]) == (20, 1, 20, 1)
