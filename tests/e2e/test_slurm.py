"""The sbatch scripts on a real Slurm cluster (loopback): two nodes, distinct TP sizes, both stages, a second submission
that resumes from the checkpoint, and jobs that are asked to stop and queue themselves again.

The scenarios run side by side, on two nodes each: every job starts with imports and ends with Slurm's own waiting.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import slurm_cluster
import vllm_environment

from nemo_oprd.rollout import resume_cache
from nemo_oprd.tools.toy.pair import Recipe, build_pair
from tests.support.forked_run import differences

ROOT = Path(__file__).parent.parent.parent
# the scenarios share two cores
PATIENCE_S = 600
pytestmark = pytest.mark.slurm


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[slurm_cluster.SlurmCluster]:
    reason = slurm_cluster.missing()
    if reason:
        pytest.skip(reason)
    cluster = slurm_cluster.SlurmCluster(tmp_path_factory.mktemp("slurm"))
    yield cluster
    cluster.stop()


@dataclass(frozen=True)
class Site:
    """Where a scenario takes place: two nodes of the cluster and a directory."""

    cluster: slurm_cluster.SlurmCluster
    nodes: tuple[str, ...]
    toy: Path
    directory: Path

    @property
    def output(self) -> Path:
        return self.directory / "run"

    @property
    def log(self) -> Path:
        return self.directory / "job.log"

    @property
    def bridge(self) -> Path:
        return self.directory / "bridge"

    def said(self) -> str:
        """The end of the log."""
        return self.log.read_text()[-4000:] if self.log.exists() else ""

    def submit(self, *overrides: str, script: str = "oprd_1p5b", python: str = sys.executable) -> str:
        """One job, one task per node, CPU; the README's overrides in small. Returns the job's number."""
        environment = {
            "PYTHON": python, "CONFIG": "quickstart", "MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore", "BRIDGE": str(self.bridge), "NEMO_OPRD_CPU": "1",
            # as a container would be given (docs/cluster.md)
            "SRUN_ARGS": "--comment=an-argument --quiet", "LAUNCH_PREFIX": "env --unset=NO_SUCH_VARIABLE",
        }  # fmt: skip
        settings = [
            f"output={self.output}", "student.checkpoint=null", f"student.hf_path={self.toy / 'student'}",
            "teacher.checkpoint=null", f"teacher.hf_path={self.toy / 'teacher'}", "evaluation.every=0",
            f"data.train={self.toy / 'prompts' / 'train.jsonl'}", "train.prompts_per_step=4", "train.save_every=2",
            "train.schedule=constant", "logging.tensorboard=false",
        ]  # fmt: skip
        command = ["sbatch", "--nodes=2", "--ntasks-per-node=1", "--gpus-per-node=0", f"--output={self.log}"]
        command += [f"--nodelist={','.join(self.nodes)}", "--parsable", f"scripts/{script}.sh"]
        submitted = self.cluster.run([*command, *settings, *overrides], environment, cwd=ROOT)
        assert submitted.returncode == 0, submitted.stderr
        return submitted.stdout.strip()

    def completes(self, job: str) -> None:
        state = self.cluster.wait_for_job(job, PATIENCE_S)
        assert state == "COMPLETED", f"{state}\n{self.said()}"

    def updates(self) -> list[int]:
        file = self.output / "metrics.jsonl"
        return [json.loads(line)["step"] for line in file.read_text().splitlines()] if file.exists() else []

    def ask_to_stop(self, job: str) -> str:
        """SIGUSR1, as `--signal` sends it before the time limit; returns what the command says of it.

        Waits until the job is in the queue again, and nothing is left of its first start; then it may start at once.
        """
        assert self.cluster.run(["scancel", "--signal=USR1", job]).returncode == 0
        deadline = time.monotonic() + PATIENCE_S
        waiting = {"Restarts=1", "JobState=PENDING"}
        while not waiting <= set((shown := self._show(job)).split()) or not self.cluster.idle(self.nodes):
            assert time.monotonic() < deadline, f"{shown}\n{self.said()}"
            time.sleep(0.3)
        # Slurm lets a requeued job wait for minutes. Some seconds it needs: the credential of the first start is
        # revoked, and one made in the same second counts as that.
        self.cluster.run(["scontrol", "update", f"JobId={job}", "StartTime=now+3"])
        # the signal reaches the nodes one after the other: the first rank may learn of it from another
        stopped = re.compile("stopped by (SIGUSR1|a signal to another rank) ")
        (said,) = filter(stopped.match, self.log.read_text().splitlines())
        return said

    def wait_until(self, reached: Callable[[], bool], job: str) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not reached():
            assert time.monotonic() < deadline and "JobState=FAILED" not in self._show(job), self.said()
            time.sleep(0.1)

    def _show(self, job: str) -> str:
        return self.cluster.run(["scontrol", "show", "job", job]).stdout


def two_nodes_and_a_second_submission(site: Site) -> None:
    site.completes(site.submit("train.steps=2"))
    assert (site.output / "hf" / "model.safetensors").exists()
    config = (site.output / "config.yaml").read_text()
    assert "tensor: 2" in config.split("teacher:")[0]  # the student's, from the script
    site.completes(site.submit("train.steps=4"))
    assert "resumed from" in site.log.read_text()
    assert site.updates() == [1, 2, 3, 4]
    assert os.environ.get("SLURM_JOB_ID") is None


def both_stages_of_a_bridge(site: Site) -> None:
    """Stage 1 is stopped and queues its job again, which goes on with its rollouts, and then to stage 2; a second
    submission takes the bridge that is there."""
    bridge, script = site.bridge, "bridge_qwen3_4b_to_1p7b"
    settings = ["train.steps=2", "bridge.rank=2", "bridge.prompts=40", "loss.representation.kind=normalized_mse"]
    job = site.submit(*settings, script=script)
    site.wait_until(lambda: bool(list(bridge.glob("rollouts/step_*.jsonl"))), job)
    said = site.ask_to_stop(job)
    sampled = {file: file.stat().st_mtime_ns for file in bridge.glob("rollouts/step_*.jsonl")}
    assert int(said.split(" after ")[1].split()[0]) == 4 * len(sampled) < 40
    site.completes(job)
    assert all(file.stat().st_mtime_ns == time_ns for file, time_ns in sampled.items())
    assert site.updates() == [1, 2]
    assert (site.output / "bridge" / "bridge.safetensors").read_bytes() == (bridge / "bridge.safetensors").read_bytes()
    made = (bridge / "bridge.json").stat().st_mtime_ns
    settings[0] = "train.steps=3"
    site.completes(site.submit(*settings, script=script))
    assert site.updates() == [1, 2, 3] and (bridge / "bridge.json").stat().st_mtime_ns == made


def a_job_that_is_asked_to_stop_saves_and_queues_itself(site: Site) -> None:
    """Saved, requeued by itself, finished by the next start."""
    steps = 20
    job = site.submit(f"train.steps={steps}", "train.save_every=0")
    site.wait_until(lambda: len(site.updates()) >= 2, job)
    said = site.ask_to_stop(job)
    after, while_sampling = re.search(r"after step (\d+) of", said), re.search(r"while sampling step (\d+) of", said)
    done = int(after[1]) if after else int(while_sampling[1]) - 1 if while_sampling else -1
    assert 2 <= done < steps
    site.completes(job)
    assert f"after {done} of {steps} steps" in site.log.read_text()
    assert site.updates() == list(range(1, steps + 1))


def _held_python(site: Site, batch: int) -> str:
    """In place of the interpreter: held_rank.py, which holds this batch (from 1; 0: none)."""
    python = site.directory / "python"
    python.parent.mkdir()
    held = f'{sys.executable} {ROOT}/tests/e2e/held_rank.py {site.directory} {batch} "$@"'
    python.write_text(f"#!/bin/sh\nshift 2 # -m nemo_oprd\nexec {held}\n")
    python.chmod(0o755)
    return str(python)


def _responses(file: Path) -> list[tuple[list[int], list[int]]]:
    """(Prompt, response) of each line."""
    return [(line["prompt_ids"], line["response_ids"]) for line in map(json.loads, file.read_text().splitlines())]


def a_job_that_is_asked_to_stop_while_it_samples(site: Site) -> None:
    """In the middle of the second of three batches of a step: the first ones are kept, only the others are sampled
    after the requeue, and the run ends as one that was never asked."""
    toy = site.directory / "toy"
    shutil.copytree(site.toy, toy)
    for file in toy.glob("*/config.json"):  # room for more tokens than lie between two questions whether to stop
        file.write_text(json.dumps({**json.loads(file.read_text()), "max_position_embeddings": 512}))
    site, whole = (replace(site, toy=toy, directory=site.directory / name) for name in ("stopped", "whole"))
    settings = [
        "train.steps=3", "train.save_every=0", "train.prompts_per_step=12", "rollout.save=true",
        "rollout.max_new_tokens=300",
        "rollout.max_cache_tokens=700",  # two responses: three batches for each of the two ranks
    ]  # fmt: skip
    job = site.submit(*settings, python=_held_python(site, batch=5))
    site.wait_until(lambda: all((site.directory / f"held-{rank}").exists() for rank in range(2)), job)
    assert "while sampling step 2 of 3, with 4 of 12 responses complete and kept" in site.ask_to_stop(job)
    _, kept_rollouts = resume_cache._load(site.output / "rollouts" / "pending.safetensors")
    kept = [(rollout.prompt_ids.tolist(), rollout.response_ids.tolist()) for rollout in kept_rollouts]
    site.completes(job)
    log = site.log.read_text()
    assert log.count("after 1 of 3 steps") == 1
    assert log.count("step 2 resumes with 4 of 12 rollouts sampled before the interruption") == 1
    for rank in range(2):
        batches = [(site.directory / f"batches-{start}-{rank}").read_text().split() for start in range(2)]
        assert batches == [["2", "2", "2", "2", "cancelled"], ["2"] * 5]

    whole.completes(whole.submit(*settings, python=_held_python(whole, batch=0)))
    names = [f"step_000000{step}.jsonl" for step in (1, 2, 3)]
    rollouts, expected = ([_responses(run.output / "rollouts" / name) for name in names] for run in (site, whole))
    assert rollouts == expected
    assert len(kept) == 4 and all(response in rollouts[1] for response in kept)
    assert site.updates() == [1, 2, 3]
    assert differences(site.output, whole.output) == []


def test_a_dry_run_in_a_job(cluster: slurm_cluster.SlurmCluster, tmp_path: Path) -> None:
    """The plan is asked for by one task on the first node, for all ranks of the job, and its exit code is the job's."""
    python, log = tmp_path / "python", tmp_path / "job.log"
    python.write_text('#!/bin/bash\necho "$SLURM_NODEID $SLURM_STEP_NUM_TASKS: $*"\nexit 3\n')
    python.chmod(0o755)
    options = ["--nodes=2", "--ntasks-per-node=1", "--gpus-per-node=0", f"--output={log}", "--parsable"]
    command = ["sbatch", *options, "scripts/oprd_1p5b.sh", "--dry-run", "train.steps=2"]
    environment = {"PYTHON": str(python), "SRUN_ARGS": "--quiet", "LAUNCH_PREFIX": "env"}
    submitted = cluster.run(command, environment, cwd=ROOT)
    assert submitted.returncode == 0, submitted.stderr
    job = submitted.stdout.strip()
    assert cluster.wait_for_job(job, PATIENCE_S) == "FAILED"
    assert "ExitCode=3:0" in cluster.run(["scontrol", "show", "job", job]).stdout
    settings = "student.parallel.tensor=2 teacher.parallel.tensor=1 rollout.tensor=1 train.steps=2"
    # before or after the task's line, srun says that the task failed
    assert [line for line in log.read_text().splitlines() if not line.startswith(("srun:", "slurmstepd"))] == [
        "plan of train on 2 nodes of 1 GPUs:",
        f"0 1: -m nemo_oprd plan --config-name oprd_1p5b --ranks 2 --gpus-per-node 1 {settings}",
    ]


# options of sbatch, and where from -> the ranks that start and the GPUs that each sees, or what the job says
GPU_JOBS: list[tuple[list[str], Path, tuple[int, int] | str]] = [
    ([], ROOT, (8, 8)),
    (["--nodes=2"], ROOT, (16, 8)),
    (["--gpus-per-node=4", "--ntasks-per-node=4"], ROOT, (4, 4)),
    (["--gpus-per-node=0", "--gres=gpu:8"], ROOT, "has 8 tasks, and the tasks get 0 GPUs (SLURM_GPUS_PER_NODE=0)"),
    (["--gpus-per-node=0"], ROOT, "has 8 tasks, and the tasks get 0 GPUs (SLURM_GPUS_PER_NODE=0)"),
    (["--gres=gpu:4", "--ntasks-per-node=4"], ROOT, "has 4 tasks, and the tasks get 8 GPUs (SLURM_GPUS_PER_NODE=8)"),
    (["--gpus-per-node=4"], ROOT, "has 8 tasks, and the tasks get 4 GPUs (SLURM_GPUS_PER_NODE=4)"),
    ([], Path("/"), "/ has no scripts/slurm_job.sh: submit from the project's directory"),
    ([f"--chdir={ROOT}"], Path("/"), (8, 8)),
    (["--chdir=/"], ROOT, "/ has no scripts/slurm_job.sh: submit from the project's directory"),
]


def test_gpus_memory_and_place_of_a_job(cluster: slurm_cluster.SlurmCluster, tmp_path: Path) -> None:
    """A job has a GPU per task and all memory of its nodes, or says in one line what is wrong, before a rank starts."""
    python = tmp_path / "python"
    python.write_text('#!/bin/bash\necho "rank of $WORLD_SIZE sees ${SLURM_GPUS_ON_NODE:-no} GPUs"\n')
    python.chmod(0o755)
    jobs = []
    for number, (options, place, _) in enumerate(GPU_JOBS):
        command = ["sbatch", "--partition=gpu", f"--output={tmp_path}/{number}.log", "--parsable", *options]
        submitted = cluster.run([*command, f"{ROOT}/scripts/oprd_1p5b.sh"], {"PYTHON": str(python)}, cwd=place)
        assert submitted.returncode == 0, submitted.stderr
        jobs.append(submitted.stdout.strip())
    for number, ((options, _, expected), job) in enumerate(zip(GPU_JOBS, jobs, strict=True)):
        state, log = cluster.wait_for_job(job, PATIENCE_S), tmp_path / f"{number}.log"
        lines = log.read_text().splitlines()
        shown = cluster.run(["scontrol", "show", "job", job]).stdout
        assert "MinMemoryNode=0 " in shown, shown
        nodes = 2 if "--nodes=2" in options else 1
        assert f"mem={nodes * slurm_cluster.MEMORY_MB // 1024}G," in shown, shown  # all of it, and not the default
        if isinstance(expected, str):
            assert state == "FAILED" and "ExitCode=2:0" in shown, (options, lines)
            (line,) = lines
            assert expected in line
        else:
            ranks, gpus = expected
            assert state == "COMPLETED", (options, lines)
            assert lines[1:] == [f"rank of {ranks} sees {gpus} GPUs"] * ranks


# the longest first
SCENARIOS = (
    both_stages_of_a_bridge, a_job_that_is_asked_to_stop_while_it_samples,
    a_job_that_is_asked_to_stop_saves_and_queues_itself, two_nodes_and_a_second_submission,
)  # fmt: skip


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pair that has begun to learn."""
    toy = tmp_path_factory.mktemp("pair") / "toy"
    recipe = Recipe(
        seed=0, steps=30, student_step=15, layers=2, hidden=128, batch=16, warmup_steps=5,
        train_prompts=64, tune_prompts=16, heldout_prompts=16,
    )  # fmt: skip
    build_pair(recipe, toy, lambda _: None)
    return toy


@pytest.fixture(scope="module")
def running(
    cluster: slurm_cluster.SlurmCluster, toy: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[Callable, Future]]:
    """All scenarios without vLLM, begun."""
    with ThreadPoolExecutor(len(SCENARIOS)) as pool:
        begun = {}
        for number, scenario in enumerate(SCENARIOS):
            nodes = slurm_cluster.NODES[2 * number : 2 * number + 2]
            begun[scenario] = pool.submit(
                scenario, Site(cluster, nodes, toy, tmp_path_factory.mktemp(scenario.__name__))
            )
        yield begun


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
def test_scenario(running: dict[Callable, Future], scenario: Callable[[Site], None]) -> None:
    running[scenario].result()


@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.skipif(vllm_environment.missing() is not None, reason=str(vllm_environment.missing()))
def test_a_vllm_server_on_its_own_node(cluster: slurm_cluster.SlurmCluster, toy: Path, tmp_path: Path) -> None:
    """The last rank's node holds the server; weights reach it through a process group."""
    site = Site(cluster, slurm_cluster.NODES[-2:], toy, tmp_path)
    settings = ["train.steps=3", "student.parallel.tensor=1", "rollout.engine=vllm"]
    site.completes(site.submit(*settings, "rollout.vllm.placement=dedicated"))
    assert site.updates() == [1, 2, 3]
    lines = [json.loads(line) for line in (site.output / "metrics.jsonl").read_text().splitlines()]
    assert all(0 < line["rollout/logprob_gap_max"] < 1e-4 and line["rollout/server_deaths"] == 0 for line in lines)
    log = (site.output / "vllm" / "server_0.log").read_text()
    assert "--- start 1:" in log and "--- start 2:" not in log
