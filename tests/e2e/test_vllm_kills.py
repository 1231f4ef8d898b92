"""Deaths of a vLLM server's processes: what the run does about them, and what they leave.

The whole matrix of processes and phases is `python -m benchmarks.sigkill --engine vllm` (docs/results_system.md).
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import vllm_environment

from benchmarks.server_killer import PHASES, PROCESSES, STARTING, TRAINER
from benchmarks.sigkill_vllm import choose
from nemo_oprd.runtime.signals import JOB_SIGNALS
from nemo_oprd.vllm.server_lifecycle import WORKER_FOLDER
from nemo_oprd.vllm.worker import nemo_oprd_guard as guard

ROOT = Path(__file__).parent.parent.parent
STRIKES = ("guard/generation", "engine core/update: between buckets", "worker/evaluation")
# stands for a server: what vLLM's processes make in shared memory, named as nemo_oprd_serve.py says
SERVER = """
import multiprocessing, time
from multiprocessing import shared_memory
import nemo_oprd_serve
memory = shared_memory.SharedMemory(create=True, size=4096)
lock = multiprocessing.get_context("spawn").Lock()
print("made", flush=True)
time.sleep(60)
"""


def test_twenty_kills_meet_every_process_and_every_phase() -> None:
    for seed in range(5):
        runs = choose(20, random.Random(seed))
        strikes = [strike for run in runs for strike in run]
        assert len(strikes) == 20
        assert {strike.process for strike in strikes} == {*PROCESSES, TRAINER}
        assert {strike.phase for strike in strikes} == set(PHASES)
        for run in runs:
            # a server that dies twice before it is ready ends the run
            assert [strike.phase for strike in run].count(STARTING) <= 1
            assert TRAINER not in [strike.process for strike in run[:-1]]


@pytest.mark.parametrize("killed", ["guard", "group"])
def test_shared_memory_is_found_by_its_names(tmp_path: Path, killed: str) -> None:
    """Also after processes that were killed before anybody saw what they had mapped."""
    names = f"nemo_oprd_test_{time.time_ns()}_0_1_"
    environment = {**os.environ, guard.SHARED_NAMES: names, "PYTHONPATH": str(WORKER_FOLDER)}
    command = guard.guarded_command([sys.executable, "-c", SERVER], tmp_path, JOB_SIGNALS)
    server = subprocess.Popen(
        command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
    )
    assert server.stdout is not None and server.stdout.readline() == b"made\n"
    assert {Path(path).name.startswith("sem.") for path in guard.named_shared_memory(names)} == {True, False}
    if killed == "guard":
        os.kill(server.pid, signal.SIGKILL)
        deadline = time.monotonic() + 10
        while (left := guard.group_members(server.pid)) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not left
    else:
        os.killpg(server.pid, signal.SIGKILL)
        server.wait()
        guard.clean_up(server.pid, set(), names=names)
    assert not guard.named_shared_memory(names)
    server.communicate()


@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.skipif(vllm_environment.missing() is not None, reason=str(vllm_environment.missing()))
def test_a_run_goes_on_and_ends_the_same(tmp_path: Path) -> None:
    """Exit code 0 says that metrics and weights are those of a run that was left alone, and that nothing was left."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore"}
    command = [sys.executable, "-m", "benchmarks.sigkill", "--engine", "vllm", "--json", str(tmp_path / "results.json")]
    command += [argument for strike in STRIKES for argument in ("--strike", strike)]
    ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=1500)
    assert ended.returncode == 0, ended.stdout + ended.stderr[-6000:]
    found = json.loads((tmp_path / "results.json").read_text())
    assert [f"{hit['process']}/{hit['phase']}" for hit in found["hits"]] == list(STRIKES)
    assert all(hit["seconds"] > 0 for hit in found["hits"])
    assert found["differences"] == [] and found["left"] == []
    assert found["equal_responses"] == found["responses"] > 0
