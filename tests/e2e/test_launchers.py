"""Real `torchrun`: a rank that dies ends the job within seconds with one message; signals are passed on.

The jobs of both tests of signals start side by side and are held in their second step until their test comes. What
ranks print when one of them fails is in test_interrupted.py, and which of them torchrun lists in
tests/unit/runtime/test_launcher.py.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from default_signals import default_signals

ROOT = Path(__file__).parent.parent.parent
ENDS_WITHIN_S = 15


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from nemo_oprd.tools.toy.pair import make_tiny_pair

    directory = tmp_path_factory.mktemp("pair") / "toy"
    make_tiny_pair(directory, log=lambda _: None)
    return directory


class Job:
    """A `torchrun` of two ranks, held in the middle of a long run from `wait_until_held` to `go_on`."""

    def __init__(self, toy: Path, directory: Path) -> None:
        self.directory, self.log, self.output = directory, directory / "log", directory / "run"
        overrides = [
            f"output={self.output}", "student.checkpoint=null", f"student.hf_path={toy / 'student'}",
            "teacher.checkpoint=null", f"teacher.hf_path={toy / 'teacher'}", "evaluation.every=0", "train.steps=1000",
            f"data.train={toy / 'prompts' / 'train.jsonl'}", "train.prompts_per_step=4", "logging.tensorboard=false",
        ]  # fmt: skip
        program = str(Path(__file__).with_name("launched_run.py"))
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone", program]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
        with self.log.open("w") as log:
            self.launcher = subprocess.Popen(
                [*command, str(directory), "train", "--config-name", "quickstart", *overrides],
                cwd=ROOT, env=environment, stdout=log, stderr=log, preexec_fn=default_signals,
            )  # fmt: skip
        self.ranks: list[int] = []

    def wait_until_held(self) -> None:
        deadline = time.monotonic() + 240
        while not all((self.directory / f"pid-{rank}").exists() for rank in range(2)):
            assert time.monotonic() < deadline and self.launcher.poll() is None, self.said()
            time.sleep(0.05)
        self.ranks = [int((self.directory / f"pid-{rank}").read_text()) for rank in range(2)]

    def go_on(self) -> None:
        (self.directory / "go-on").touch()

    def said(self) -> str:
        return self.log.read_text()

    def ends(self) -> float:
        """Seconds until the launcher and the ranks are gone, with what they started."""
        began = time.monotonic()
        self.launcher.wait(ENDS_WITHIN_S)
        while left := [pid for pid in self.ranks if session_lives(pid)]:
            assert time.monotonic() - began < ENDS_WITHIN_S, f"still there: {left}\n{self.said()[-3000:]}"
            time.sleep(0.05)
        return time.monotonic() - began

    def errors(self) -> list[str]:
        """Our one-line errors, and the last lines of tracebacks; the launcher's own begin with another name."""
        return re.findall(r"^(?:error: .*|RuntimeError: .*)$", self.said(), flags=re.MULTILINE)


def session_lives(leader: int) -> bool:
    """Whether any process of the session that torchrun made for a rank is there."""
    for file in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, _, session = file.read_text().rsplit(")", 1)[1].split()[:4]
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(session) == leader and state != "Z":
            return True
    return False


@pytest.fixture(scope="module")
def jobs(toy: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Job]]:
    """The job of each test, held."""
    started: dict[str, Job] = {}
    try:
        for name in ("killed", "asked"):
            started[name] = Job(toy, tmp_path_factory.mktemp(name))
        for job in started.values():
            job.wait_until_held()
        yield started
    finally:
        for job in started.values():
            if job.launcher.poll() is None:  # a test failed
                job.launcher.kill()
                for pid in job.ranks:
                    if session_lives(pid):
                        os.kill(pid, signal.SIGKILL)


def test_a_killed_rank_ends_all_with_one_message(jobs: dict[str, Job]) -> None:
    running = jobs["killed"]
    running.go_on()
    os.kill(running.ranks[1], signal.SIGKILL)
    assert running.ends() < ENDS_WITHIN_S
    (error,) = running.errors()
    assert error.startswith("error: rank 1 on ")
    assert error.endswith("died without a message (killed, or out of memory?); all ranks end")
    assert running.launcher.returncode == 1


def test_sigterm_to_the_launcher_saves(jobs: dict[str, Job]) -> None:
    running = jobs["asked"]
    running.go_on()
    running.launcher.send_signal(signal.SIGTERM)
    assert running.ends() < ENDS_WITHIN_S
    assert running.said().count("stopped by SIGTERM after step ") == 1
    assert running.errors() == []
    saved = (running.output / "checkpoints" / "latest_checkpointed_iteration.txt").read_text()
    assert f"after step {int(saved)} of 1000" in running.said()


def test_the_summary_shows_a_users_mistake() -> None:
    """After the line itself, which comes first; the launcher's own traceback is between them."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    command += ["-m", "nemo_oprd", "train", "--config-name", "quickstart", "train.lr=-1"]
    ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)
    mistake = "train.lr=-1.0: expected more than 0; choose a larger number"
    shown = [line for line in ended.stderr.splitlines() if mistake in line]
    assert shown == [f"error: {mistake}", f"  traceback : {mistake}"]
    assert ended.returncode == 1 and re.search(r"^  exitcode  : 2 \(pid", ended.stderr, flags=re.MULTILINE)
