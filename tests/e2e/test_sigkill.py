"""`benchmarks/sigkill.py`: a few kills in the default run; every phase of a step under `scripts/test.sh --all`."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.sigkill import PHASES, choose

ROOT = Path(__file__).parent.parent.parent


def test_twenty_kills_cover_every_phase() -> None:
    for seed in range(5):
        assert set(choose(20, random.Random(seed))) == set(PHASES)


def run(kills: int, steps: int, seed: int, *more: str) -> str:
    """What it printed; exit code 0 says bit-identical metrics and weights, and no process left after any kill."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore"}
    command = [sys.executable, "-m", "benchmarks.sigkill"]
    command += ["--kills", str(kills), "--steps", str(steps), "--seed", str(seed), *more]
    ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=40 * kills)
    assert ended.returncode == 0, ended.stdout + ended.stderr[-3000:]
    assert f"{kills} kills, {kills + 1} starts" in ended.stdout
    assert "bit by bit" in ended.stdout
    return ended.stdout


def test_killed_again_and_again_it_ends_as_if_never_killed() -> None:
    run(kills=5, steps=6, seed=2)


@pytest.mark.slow
def test_models_with_experts_end_as_if_never_killed() -> None:
    run(3, 6, 3, "--experts", "4")


@pytest.mark.slow
def test_killed_once_in_every_phase() -> None:
    """As many kills as the recorded run of docs/results.md, in fewer steps."""
    said = run(kills=20, steps=16, seed=1)
    assert {phase.name for phase in PHASES if f" {phase.name} " in said} == {phase.name for phase in PHASES}
