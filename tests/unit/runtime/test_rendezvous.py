"""The variables of a job, and the lines of a wait; ranks that wait are in tests/functional/test_waiting.py."""

from __future__ import annotations

import os
import re
import signal

import pytest
import torch.distributed as dist

from nemo_oprd.runtime import waiting
from nemo_oprd.runtime.rendezvous import Job, _Meeting, _Speaker
from nemo_oprd.runtime.signals import Stopped

VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@pytest.fixture(autouse=True)
def no_job(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.setenv(name, "")  # so that what `Job.here` sets is undone
        monkeypatch.delenv(name)


def test_a_process_alone_is_a_job() -> None:
    assert Job.here() == Job(0, 1, "127.0.0.1", 0)


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({"RANK": "2", "WORLD_SIZE": "2", "MASTER_PORT": "1"}, "RANK=2 with WORLD_SIZE=2; expected a rank of 0 to 1"),
        ({"WORLD_SIZE": "3"}, "WORLD_SIZE=3 without MASTER_PORT: waiting for rank(s) 1-2 would never end"),
        ({"MASTER_PORT": "99999"}, "MASTER_PORT=99999: expected 1 to 65535"),
        ({"WORLD_SIZE": "two"}, "WORLD_SIZE='two'; expected a whole number"),
    ],
)
def test_variables_that_no_launcher_sets(monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], said: str) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=f"^{re.escape(said)}.+$"):
        Job.here()


def test_lines_come_after_twice_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(waiting.time, "monotonic", lambda: now)
    notice, said = waiting.Notice(3 * 3600.0), []
    for second in range(500):
        now = float(second)
        if notice.is_due:
            said.append((second, notice.line("rank(s) 1: start them")))
    assert said == [(second, "waiting for rank(s) 1, limit 3 h: start them") for second in (30, 60, 120, 240, 480)]
    assert [waiting.duration(seconds) for seconds in (900.0, 90.0, 0.5)] == ["15 min", "90 s", "0.5 s"]


def test_a_signal_at_the_end_of_a_wait_is_not_lost() -> None:
    """It arrives while the work ends, and the main thread has not looked since."""
    with pytest.raises(Stopped, match="^stopped by SIGUSR1 while waiting for other ranks; the same command starts"):
        waiting.wait_for(lambda: os.kill(os.getpid(), signal.SIGUSR1), str, 3.0)
    assert signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL


def test_the_limit_of_a_meeting_is_an_error() -> None:
    """Also where its own thread notices before the main thread: a rank that never came is not there."""
    store = dist.HashStore()
    with pytest.raises(ValueError, match="^waited 0.1 s, which is the limit, for other ranks$"):
        _Meeting(Job(0, 2, "127.0.0.1", 1), store).wait(0.1)


def test_a_long_name_of_a_host_has_one_speaker() -> None:
    job = Job(0, 2, "worker-0." * 20, 29500)
    with _Speaker(job) as first, _Speaker(job) as second:
        assert (first.says("a"), second.says("b"), first.says("c")) == ("a", "", "c")


def test_a_limit_ends_a_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    over = waiting.threading.Event()
    with pytest.raises(ValueError, match=r"^waited 0.3 s, which is the limit, for rank\(s\) 1: start them$"):
        waiting.wait_for(lambda: over.wait(20), lambda: "rank(s) 1: start them", 0.3)
    assert waiting.has_abandoned()
    over.set()
    waiting._abandoned[-1].join()
    assert not waiting.has_abandoned()
    with pytest.raises(ZeroDivisionError):
        waiting.wait_for(lambda: 1 / 0, str, 3.0)
    assert waiting.wait_for(lambda: 5, str, 3.0) == 5
