"""`grade` that is killed: no traceback of its child, the exit code of the signal, files whole or absent."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from default_signals import default_signals

PROBLEMS = 2000
PATIENCE_S = 120


def response(problem: int) -> str:
    """A right answer that only math-verify can tell, each written in another way; all answers are read before the first
    response is graded, so there are few of them."""
    sevenths, factor = problem % 20 + 1, problem + 2
    text = f"\\boxed{{\\frac{{{sevenths * factor}}}{{{7 * factor}}}}}"
    answer = f"\\frac{{{sevenths}}}{{7}}"
    return json.dumps({"problem": problem, "sample": 0, "response": text, "response_ids": [1], "answer": answer})


@pytest.mark.parametrize(
    ("number", "job"),
    [
        pytest.param(signal.SIGINT, False, id="process-SIGINT"),
        pytest.param(signal.SIGTERM, True, id="job-SIGTERM"),
        pytest.param(signal.SIGTERM, False, marks=pytest.mark.slow, id="process-SIGTERM"),
        pytest.param(signal.SIGINT, True, marks=pytest.mark.slow, id="job-SIGINT"),
    ],
)
def test_killed(tmp_path: Path, number: signal.Signals, job: bool) -> None:
    responses = tmp_path / "generations" / "sums.jsonl"
    responses.parent.mkdir()
    responses.write_text("".join(response(problem) + "\n" for problem in range(PROBLEMS)))
    process = subprocess.Popen(
        [sys.executable, "-m", "nemo_oprd", "grade", str(tmp_path)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
        preexec_fn=default_signals,
    )  # fmt: skip
    part, until = tmp_path / "grades" / ".sums.part.jsonl", time.monotonic() + PATIENCE_S
    while not (part.is_file() and part.read_bytes().count(b"\n") > 3) and time.monotonic() < until:
        time.sleep(0.02)
    (os.killpg if job else os.kill)(process.pid, number)
    said = process.communicate(timeout=PATIENCE_S)  # returns when the child has closed them, too
    assert said == ("", "")
    assert process.returncode == (130 if number is signal.SIGINT else -number)
    assert not (tmp_path / "evaluation.json").exists() and not (tmp_path / "grades" / "sums.jsonl").exists()
    graded = len(part.read_text().splitlines()) - 1
    assert 3 <= graded < PROBLEMS
