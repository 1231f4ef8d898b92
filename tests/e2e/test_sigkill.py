"""`benchmarks/sigkill.py` with fewer kills than the recorded run of docs/results.md."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path

from benchmarks.sigkill import PHASES, choose

ROOT = Path(__file__).parent.parent.parent


def test_twenty_kills_cover_every_phase() -> None:
    for seed in range(5):
        assert set(choose(20, random.Random(seed))) == set(PHASES)


def test_killed_again_and_again_it_ends_as_if_never_killed() -> None:
    """Exit code 0 says: bit-identical metrics and weights, and no process left after any kill."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore"}
    command = [sys.executable, "-m", "benchmarks.sigkill", "--kills", "5", "--steps", "6", "--seed", "2"]
    ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=200)
    assert ended.returncode == 0, ended.stdout + ended.stderr[-3000:]
    assert "5 kills, 6 starts" in ended.stdout
    assert "bit by bit" in ended.stdout
