"""`sbatch scripts/oprd_1p5b.sh` on a real two-node Slurm cluster (loopback): two nodes, distinct TP sizes, and a second
submission that resumes from the checkpoint."""

from __future__ import annotations

import json
import os
import sys
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


def submit(cluster: slurm_cluster.SlurmCluster, toy: Path, output: Path, log: Path, steps: int) -> None:
    """One job on both nodes, one process per node, CPU; the README's overrides in small."""
    cluster.environment.update(
        PYTHON=sys.executable, PROCESSES="1", CONFIG="quickstart", MASTER_ADDR="127.0.0.1", OMP_NUM_THREADS="1",
        PYTHONPATH=str(ROOT), PYTHONWARNINGS="ignore",
    )  # fmt: skip
    overrides = [
        f"output={output}", "student.checkpoint=null", f"student.hf_path={toy / 'student'}", "teacher.checkpoint=null",
        f"teacher.hf_path={toy / 'teacher'}", f"data.train={toy / 'prompts' / 'train.jsonl'}", "evaluation.every=0",
        "train.prompts_per_step=4", f"train.steps={steps}", "train.save_every=2", "train.schedule=constant",
    ]  # fmt: skip
    command = ["sbatch", "--nodes=2", "--gpus-per-node=0", f"--output={log}", "--parsable", "scripts/oprd_1p5b.sh"]
    submitted = cluster.run([*command, *overrides], cwd=ROOT)
    assert submitted.returncode == 0, submitted.stderr
    state = cluster.wait_for_job(submitted.stdout.strip(), timeout=180)
    assert state == "COMPLETED", f"{state}\n{log.read_text()[-4000:] if log.exists() else ''}"


def test_two_nodes_and_requeue(cluster: slurm_cluster.SlurmCluster, tmp_path: Path) -> None:
    from nemo_oprd.toy.pair import make_tiny_pair

    make_tiny_pair(tmp_path / "toy", log=lambda _: None)
    output, log = tmp_path / "run", tmp_path / "job.log"
    submit(cluster, tmp_path / "toy", output, log, steps=2)
    assert (output / "hf" / "model.safetensors").exists()
    config = (output / "config.yaml").read_text()
    assert "tensor: 2" in config.split("teacher:")[0]  # the student's, from the script
    submit(cluster, tmp_path / "toy", output, log, steps=4)
    assert "resumed from" in log.read_text()
    steps = [json.loads(line)["step"] for line in (output / "metrics.jsonl").open()]
    assert steps == [1, 2, 3, 4]
    assert os.environ.get("SLURM_JOB_ID") is None
