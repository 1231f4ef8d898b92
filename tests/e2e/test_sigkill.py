"""`benchmarks/sigkill.py`: a few kills in the default run; every phase of a step under `scripts/test.sh --all`."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
from forked_commands import python
from pool import Pools
from served_teachers import serving_teachers

from benchmarks.server_killer import API_SERVER, GROUP, GUARD
from benchmarks.sigkill import PHASES, choose
from benchmarks.sigkill_teacher import PHASES as TEACHER_PHASES
from benchmarks.sigkill_teacher import choose as teacher_kills

ROOT = Path(__file__).parent.parent.parent
# the processes of a stand-in for a teacher's server
STAND_INS = (GUARD, API_SERVER, GROUP)


def test_twenty_kills_cover_every_phase() -> None:
    for seed in range(5):
        assert set(choose(20, random.Random(seed))) == set(PHASES)


@pytest.fixture
def run(pools: Pools, tmp_path: Path) -> Callable[..., str]:
    """`run(kills, steps, seed, *more)`: what it printed; status 0 says bit-identical metrics and weights, and that no
    process was left after any kill."""

    def kill(kills: int, steps: int, seed: int, *more: str, tool: str = "sigkill") -> str:
        command = ["-m", f"benchmarks.{tool}"]
        command += ["--kills", str(kills), "--steps", str(steps), "--seed", str(seed), *more]
        said = python(pools, command, ROOT, tmp_path / tool / "logs", patience_s=40 * kills)
        assert f"{kills} kills, {kills + 1} starts" in said
        assert ("bit by bit" if tool == "sigkill" else "was taken by one step") in said
        return said

    return kill


def test_killed_again_and_again_it_ends_as_if_never_killed(run: Callable[..., str]) -> None:
    run(kills=5, steps=6, seed=2)


@pytest.mark.slow
def test_models_with_experts_end_as_if_never_killed(run: Callable[..., str]) -> None:
    run(3, 6, 3, "--experts", "4")


@pytest.mark.slow
def test_killed_once_in_every_phase(run: Callable[..., str]) -> None:
    """As many kills as the recorded run of docs/results_system.md, in fewer steps."""
    said = run(kills=20, steps=16, seed=1)
    names = {phase.name for phase in PHASES}
    assert {name for name in names if f" {name} " in said} == names - {"save: rollouts ahead"}  # only with a lag


@pytest.mark.slow
def test_sampled_ahead_it_ends_as_if_never_killed(run: Callable[..., str]) -> None:
    """With the responses of two later steps under way, in memory, or in the checkpoint."""
    said = run(20, 16, 1, "--lag", "2")
    assert all(f" {phase.name} " in said for phase in PHASES)


@pytest.mark.slow
def test_responses_that_go_on_over_updates_end_as_if_never_killed(run: Callable[..., str]) -> None:
    """With begun responses of two later steps under way, in memory, or in the checkpoint."""
    run(20, 16, 1, "--lag", "2", "--mode", "segments")


@pytest.mark.slow
def test_what_a_stream_has_not_taken_is_taken_once(run: Callable[..., str]) -> None:
    """Beside servers; in this process all that is admitted is complete at once, and the run as if never killed."""
    run(20, 16, 1, "--lag", "4", tool="sigkill_stream")
    run(8, 16, 1, "--lag", "4", "--mode", "stream")


@pytest.mark.slow
def test_a_run_whose_teacher_is_killed_ends_as_if_it_never_was(pools: Pools, tmp_path: Path) -> None:
    """The teacher's servers are stand-ins, which have no engine core and no workers."""
    phases = {strike.phase for run in teacher_kills(20, random.Random(1), STAND_INS) for strike in run}
    assert phases == set(TEACHER_PHASES)
    with serving_teachers(tmp_path) as served:
        command = ["-m", "benchmarks.sigkill", "--teacher", "vllm", "--seed", "1", "--tensor", "1"]
        command += ["--python", str(served.bench() / "python"), "--processes", *STAND_INS]
        said = python(pools, command, ROOT, tmp_path / "logs", patience_s=900)
    assert "20 kills" in said and "bit by bit" in said and "no process of a server" in said
    assert {phase for phase in TEACHER_PHASES if f" {phase} " in said} == phases
