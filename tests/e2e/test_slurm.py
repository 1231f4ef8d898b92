"""The sbatch scripts on a real two-node Slurm cluster (loopback): two nodes, distinct TP sizes, both stages, a second
submission that resumes from the checkpoint, and a job that is asked to stop and queues itself again."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import slurm_cluster

ROOT = Path(__file__).parent.parent.parent
pytestmark = pytest.mark.slurm


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[slurm_cluster.SlurmCluster]:
    reason = slurm_cluster.missing()
    if reason:
        pytest.skip(reason)
    cluster = slurm_cluster.SlurmCluster(tmp_path_factory.mktemp("slurm"))
    yield cluster
    cluster.stop()


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from nemo_oprd.toy.pair import make_tiny_pair

    directory = tmp_path_factory.mktemp("pair") / "toy"
    make_tiny_pair(directory, log=lambda _: None)
    return directory


def submit(
    cluster: slurm_cluster.SlurmCluster, toy: Path, output: Path, log: Path, *overrides: str, script: str = "oprd_1p5b"
) -> str:
    """One job on both nodes, one task per node, CPU; the README's overrides in small. Returns the job's number."""
    cluster.environment.update(
        PYTHON=sys.executable, CONFIG="quickstart", MASTER_ADDR="127.0.0.1", OMP_NUM_THREADS="1",
        PYTHONPATH=str(ROOT), PYTHONWARNINGS="ignore",
    )  # fmt: skip
    settings = [
        f"output={output}", "student.checkpoint=null", f"student.hf_path={toy / 'student'}", "teacher.checkpoint=null",
        f"teacher.hf_path={toy / 'teacher'}", f"data.train={toy / 'prompts' / 'train.jsonl'}", "evaluation.every=0",
        "train.prompts_per_step=4", "train.save_every=2", "train.schedule=constant", "logging.tensorboard=false",
    ]  # fmt: skip
    command = ["sbatch", "--nodes=2", "--ntasks-per-node=1", "--gpus-per-node=0", f"--output={log}", "--parsable"]
    submitted = cluster.run([*command, f"scripts/{script}.sh", *settings, *overrides], cwd=ROOT)
    assert submitted.returncode == 0, submitted.stderr
    return submitted.stdout.strip()


def completes(cluster: slurm_cluster.SlurmCluster, job: str, log: Path) -> None:
    state = cluster.wait_for_job(job, timeout=180)
    assert state == "COMPLETED", f"{state}\n{log.read_text()[-4000:] if log.exists() else ''}"


def updates(output: Path) -> list[int]:
    file = output / "metrics.jsonl"
    return [json.loads(line)["step"] for line in file.read_text().splitlines()] if file.exists() else []


def test_two_nodes_and_a_second_submission(cluster: slurm_cluster.SlurmCluster, toy: Path, tmp_path: Path) -> None:
    output, log = tmp_path / "run", tmp_path / "job.log"
    completes(cluster, submit(cluster, toy, output, log, "train.steps=2"), log)
    assert (output / "hf" / "model.safetensors").exists()
    config = (output / "config.yaml").read_text()
    assert "tensor: 2" in config.split("teacher:")[0]  # the student's, from the script
    completes(cluster, submit(cluster, toy, output, log, "train.steps=4"), log)
    assert "resumed from" in log.read_text()
    assert updates(output) == [1, 2, 3, 4]
    assert os.environ.get("SLURM_JOB_ID") is None


def test_both_stages_of_a_bridge(cluster: slurm_cluster.SlurmCluster, toy: Path, tmp_path: Path) -> None:
    """Stage 1 is stopped and queues its job again, which goes on with its rollouts, and then to stage 2; a second
    submission takes the bridge that is there."""
    output, bridge, log = tmp_path / "run", tmp_path / "bridge", tmp_path / "job.log"
    cluster.environment["BRIDGE"] = str(bridge)
    settings = ["train.steps=2", "bridge.rank=2", "bridge.prompts=40", "loss.representation.kind=normalized_mse"]
    job = submit(cluster, toy, output, log, *settings, script="bridge_qwen3_4b_to_1p7b")
    deadline = time.monotonic() + 120
    while not list(bridge.glob("rollouts/step_*.jsonl")):
        assert time.monotonic() < deadline, log.read_text()[-4000:] if log.exists() else ""
        time.sleep(0.1)
    assert cluster.run(["scancel", "--signal=USR1", job]).returncode == 0
    wait_for_restart(cluster, job, log)
    (said,) = [line for line in log.read_text().splitlines() if line.startswith("stopped by SIGUSR1")]
    sampled = {file: file.stat().st_mtime_ns for file in bridge.glob("rollouts/step_*.jsonl")}
    assert int(said.split(" after ")[1].split()[0]) == 4 * len(sampled) < 40
    completes(cluster, job, log)
    assert all(file.stat().st_mtime_ns == time_ns for file, time_ns in sampled.items())
    assert updates(output) == [1, 2]
    assert (output / "bridge" / "bridge.safetensors").read_bytes() == (bridge / "bridge.safetensors").read_bytes()
    made = (bridge / "bridge.json").stat().st_mtime_ns
    settings[0] = "train.steps=3"
    completes(cluster, submit(cluster, toy, output, log, *settings, script="bridge_qwen3_4b_to_1p7b"), log)
    assert updates(output) == [1, 2, 3] and (bridge / "bridge.json").stat().st_mtime_ns == made


def wait_for_restart(cluster: slurm_cluster.SlurmCluster, job: str, log: Path) -> None:
    """Until the job is in the queue again, and nothing is left of its first start; then it may start at once."""
    deadline = time.monotonic() + 60
    waiting = {"Restarts=1", "JobState=PENDING"}
    while (
        not waiting <= set((shown := cluster.run(["scontrol", "show", "job", job]).stdout).split())
        or not cluster.idle()
    ):
        assert time.monotonic() < deadline, f"{shown}\n{log.read_text()[-4000:]}"
        time.sleep(0.3)
    # Slurm lets a requeued job wait for minutes. Some seconds it needs: the credential of the first start is revoked,
    # and one made in the same second counts as that.
    cluster.run(["scontrol", "update", f"JobId={job}", "StartTime=now+5"])


def wait_for_update(output: Path, number: int, job: str, cluster: slurm_cluster.SlurmCluster, log: Path) -> None:
    deadline = time.monotonic() + 120
    while len(updates(output)) < number:
        state = cluster.run(["scontrol", "show", "job", job]).stdout
        assert time.monotonic() < deadline and "JobState=FAILED" not in state, log.read_text()[-4000:]
        time.sleep(0.2)


def test_a_job_that_is_asked_to_stop_saves_and_queues_itself(
    cluster: slurm_cluster.SlurmCluster, toy: Path, tmp_path: Path
) -> None:
    """SIGUSR1 as `--signal` sends it before the time limit: saved, requeued by itself, finished by the next start."""
    output, log, steps = tmp_path / "run", tmp_path / "job.log", 20
    job = submit(cluster, toy, output, log, f"train.steps={steps}", "train.save_every=0")
    wait_for_update(output, 2, job, cluster, log)
    assert cluster.run(["scancel", "--signal=USR1", job]).returncode == 0
    wait_for_restart(cluster, job, log)
    said = [line for line in log.read_text().splitlines() if line.startswith("stopped by SIGUSR1")]
    assert len(said) == 1
    done = int(said[0].split("after step ")[1].split()[0])
    assert 2 <= done < steps
    completes(cluster, job, log)
    assert f"after {done} of {steps} steps" in log.read_text()
    assert updates(output) == list(range(1, steps + 1))
