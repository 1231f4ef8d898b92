"""The commands of README.md and docs/features.md, as written, in a copy of the project: a newcomer's path.

The copy gets a tiny model pair in place of the toy pair (a minute of training) and a stand-in for `.venv` (this
process's environment is already the right one); everything else is what a user runs. Two commands run at a time: a
launcher's start and the conversions keep one core busy. A command waits for those that made what it reads.

The quickstart's script is a real start of everything. The ranks of the other `torchrun` commands, and the Python
scripts, are forked off a process that has imported what they need (forked_commands.py).
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
import vllm_environment
from forked_commands import python
from pool import Pools

Completed = subprocess.CompletedProcess[str]
ROOT = Path(__file__).parent.parent.parent
README = (ROOT / "README.md").read_text()
FEATURES, MY_MODELS = ((ROOT / "docs" / name).read_text() for name in ("features.md", "my_models.md"))


def blocks(kind: str, document: str) -> list[str]:
    """The fenced blocks of a kind, such as "yaml"."""
    return re.findall(rf"```{kind}\n(.*?)```", document, flags=re.DOTALL)


def commands(document: str) -> list[str]:
    return [line.strip() for block in blocks("bash", document) for line in block.splitlines() if line.strip()]


COMMANDS = commands(README) + commands(FEATURES)
# run elsewhere: the test command is what runs this file; sbatch has tests/e2e/test_slurm.py
ELSEWHERE = ("bash scripts/test.sh", "sbatch ")
WITH_VLLM = [command for command in COMMANDS if "rollout.engine=vllm" in command and not command.startswith(ELSEWHERE)]
QUICKSTART, *OTHERS = [
    command for command in COMMANDS if not command.startswith(ELSEWHERE) and command not in WITH_VLLM
]
BRIDGE = [command for command in commands(MY_MODELS) if command not in COMMANDS]
# settings with which the page's commands are short; and of its `doctor`
QUICK = "rollout.max_new_tokens=40 train.steps=2 train.prompts_per_step=4 evaluation.every=0 evaluation.samples=1"
FEW = "--prompts 4 --problems 4"
SHORT = "train.steps=4 train.prompts_per_step=4 evaluation.every=2 evaluation.limit=4 train.save_every=2"


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    copy = tmp_path_factory.mktemp("clone") / "nemo_oprd"
    make_project(copy, hidden=32)
    yield copy
    shutil.rmtree(copy)


def make_project(copy: Path, hidden: int) -> None:
    """A copy of the project with a hardly trained pair of this width in place of the quickstart's."""
    from nemo_oprd.commands.toy.pair import Recipe, build_pair

    patterns = shutil.ignore_patterns(".git", ".venv*", "runs", "__pycache__", ".*_cache")

    def ignored(folder: str, names: list[str]) -> set[str]:
        """Also what other commands have put beside the project's own folders."""
        return patterns(folder, names) | ({"models", "data"} if Path(folder) == ROOT else set())

    shutil.copytree(ROOT, copy, ignore=ignored)
    (copy / ".venv" / "bin").mkdir(parents=True)
    (copy / ".venv" / "bin" / "activate").write_text("")
    recipe = Recipe(
        seed=0, steps=30, student_step=15, layers=2, hidden=hidden, batch=16, warmup_steps=5,
        train_prompts=64, tune_prompts=16, heldout_prompts=16,
    )  # fmt: skip
    build_pair(recipe, copy / "runs" / "toy", lambda _: None)
    write_settings(copy / "runs" / "toy" / "toy.json", hidden=128)
    (copy / ".venv" / "ready").write_text("")
    toy = {"models": "", "data/prompts.jsonl": "prompts/train.jsonl", "data/problems.jsonl": "prompts/heldout.jsonl"}
    for place, file in toy.items():
        (copy / place).parent.mkdir(exist_ok=True)
        (copy / place).symlink_to(copy / "runs" / "toy" / file)
    (copy / "my_models.yaml").write_text(blocks("yaml", README)[0])


@pytest.fixture(scope="module")
def running(project: Path, pools: Pools, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Future[str]]]:
    """What all commands print, begun in the order of the pages."""
    begun: dict[str, Future[str]] = {}
    logs = tmp_path_factory.mktemp("logs")

    def in_turn(command: str) -> str:
        for earlier in waits_for(command):
            begun[earlier].result()
        return forked(command, pools, project, logs / str(OTHERS.index(command)))

    threads = ThreadPoolExecutor(2)
    begun[QUICKSTART] = threads.submit(lambda: run(f"{QUICKSTART} {SHORT}", project).stdout)
    for command in OTHERS:
        begun[command] = threads.submit(in_turn, command)
    yield begun
    threads.shutdown(cancel_futures=True)


def forked(command: str, pools: Pools, project: Path, logs: Path, *more: str) -> str:
    """What a command prints, with further arguments; its processes are forked if it is one of Python or torchrun."""
    program, *words = shlex.split(command, comments=True)
    if program not in ("python", "torchrun"):
        return run(command, project).stdout
    ranks = 1
    if program == "torchrun":
        assert words[:4] == ["--nproc-per-node", "2", "-m", "nemo_oprd"]
        ranks, words = 2, words[2:]
    if "my_models" in words:
        words += [*QUICK.split(), *(FEW.split() if "doctor" in words else ()), *more]
    return python(pools, words, project, logs, ranks)


def write_settings(file: Path, hidden: int) -> None:
    """The settings of the quickstart's pair, or of one of another width: the quickstart takes no other pair."""
    from nemo_oprd.commands.toy.pair import Recipe

    recipe = Recipe(seed=0, steps=400, student_step=None, layers=4, hidden=hidden)
    file.write_text(json.dumps({"settings": recipe.settings()}))


def waits_for(command: str) -> list[str]:
    """Commands before it whose output it names; the quickstart's are the quickstart's configuration and run, those of
    my_models.yaml the ones before."""
    words = re.split(r"[\s=]", command)
    needed = [QUICKSTART] if "quickstart" in command else []
    for earlier in OTHERS[: OTHERS.index(command)]:
        needed += [earlier] if "my_models" in command and "my_models" in earlier else []
        needed += [earlier for output in re.findall(r"output[= ](\S+)", earlier) if output in words]
    return needed


def environment_of(project: Path) -> dict[str, str]:
    return {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(project),
    }


def run(command: str, project: Path, patience_s: float = 240) -> Completed:
    environment = {
        **environment_of(project),
        "OMP_NUM_THREADS": "1",
        "PET_MASTER_PORT": str(free_port()),  # torchrun's own default is one for all
    }
    result = subprocess.run(
        command,
        shell=True,
        executable="/bin/bash",
        cwd=project,
        env=environment,
        capture_output=True,
        text=True,
        timeout=patience_s,
    )
    assert result.returncode == 0, f"$ {command}\n{result.stdout[-2000:]}\n{result.stderr[-4000:]}"
    return result


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.mark.vllm
@pytest.mark.skipif(vllm_environment.missing() is not None, reason=str(vllm_environment.missing()))
@pytest.mark.parametrize("command", WITH_VLLM)
def test_the_quickstart_with_vllm(command: str, tmp_path: Path) -> None:
    """Beside a run of the in-process engine, in a directory of its own; the environment is this project's."""
    project = tmp_path / "nemo_oprd"
    make_project(project, hidden=128)  # vLLM on a CPU has no heads of 8 dimensions
    (project / ".venv-vllm").symlink_to(ROOT / ".venv-vllm")
    result = run(f"{command} {SHORT}", project, patience_s=600)
    assert "heldout  student after" in result.stdout
    output = project / "runs" / "quickstart_vllm"
    steps = [line for line in map(json.loads, (output / "metrics.jsonl").open()) if "rep/loss" in line]
    assert [line["step"] for line in steps] == [1, 2, 3, 4]
    assert all(0 < line["rollout/logprob_gap_max"] < 1e-4 for line in steps)
    assert (output / "report.html").exists() and (output / "hf" / "model.safetensors").exists()
    assert "is complete (cpu)" in result.stderr  # the environment was kept, not made anew


def test_readme_has_the_two_commands() -> None:
    assert COMMANDS[:2] == ["bash scripts/quickstart.sh", "bash scripts/test.sh"]


def test_quickstart(project: Path, running: dict[str, Future[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    """The script, on the tiny pair and with few steps: conversion, training at two ranks, table, export, curves."""
    printed = running[QUICKSTART].result()
    rows = [line.split()[:3] for line in printed.splitlines() if line.startswith("heldout")]
    assert rows[:3] == [
        ["heldout", "student", "before"],
        ["heldout", "student", "after"],
        ["heldout", "teacher", printed.split("heldout  teacher")[1].split()[0]],
    ]
    quickstart = project / "runs" / "quickstart"
    steps = [json.loads(line) for line in (quickstart / "metrics.jsonl").open()]
    assert [line["step"] for line in steps if "rep/loss" in line] == [1, 2, 3, 4]
    for name in ("rep/cosine_similarity", "actor/grad_norm", "response_length/mean", "perf/tokens_per_s"):
        assert name in next(line for line in steps if "rep/loss" in line)
    assert (quickstart / "checkpoints" / "latest_checkpointed_iteration.txt").read_text() == "4\n"
    assert list((quickstart / "tensorboard").iterdir())
    assert "<svg" in (quickstart / "report.html").read_text()

    from transformers import AutoTokenizer

    *_, report, export, own, page = printed.splitlines()
    assert report.startswith("next: nemo-oprd report runs/quickstart ") and page == "runs/quickstart/report.html"
    assert own.split()[0] == "docs/my_models.md"
    monkeypatch.chdir(project)
    exec(f"import transformers; {export.strip()}")  # as the run has printed it
    assert AutoTokenizer.from_pretrained(quickstart / "hf").decode([3, 4]) == "01"


@pytest.mark.slow
def test_quickstart_refuses_a_pair_of_another_version(project: Path, tmp_path: Path) -> None:
    """Such a pair and its conversions stay as they are, and one command that removes them is named."""
    for name in (".venv", "scripts"):
        shutil.copytree(project / name, tmp_path / name)
    pair = tmp_path / "runs" / "toy"
    (pair / "student-megatron").mkdir(parents=True)
    write_settings(pair / "toy.json", hidden=96)
    before = sorted(tmp_path.rglob("*"))
    command = ["bash", str(tmp_path / "scripts" / "quickstart.sh")]
    result = subprocess.run(command, env=environment_of(project), capture_output=True, text=True, timeout=120)
    assert result.returncode == 2
    assert result.stderr.splitlines() == [
        "1/4 making a small student-teacher pair (addition with scratch digits)",
        "error: runs/toy: holds a pair with other settings (hidden is 96, expected 128); remove it or choose another "
        "output",
        "If an earlier version made runs/toy, its runs are outdated, too: rm -r runs/toy runs/quickstart",
    ]
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("command", OTHERS)
def test_command(running: dict[str, Future[str]], command: str) -> None:
    """Every other command of the two pages, after those whose output it reads."""
    printed = running[command].result()
    if "doctor" in command:
        assert printed.splitlines()[-1].startswith("0 wrong"), printed
    if "from transformers" in command:
        assert "'role': 'assistant'" in printed
    if "--against reference" in command:
        last = printed.strip().splitlines()[-1]
        assert "largest gradient deviation" in last
        assert float(last.split()[-1]) < 1e-5


def test_the_page_of_my_models_is_the_readmes_section() -> None:
    """One file and four commands; the page's others are about bridges."""
    assert blocks("yaml", MY_MODELS)[0] == blocks("yaml", README)[0]
    assert len(blocks("yaml", README)[0].splitlines()) == 15
    assert [command in COMMANDS for command in commands(MY_MODELS)] == [True] * 4 + [False] * 2


@pytest.mark.slow
@pytest.mark.parametrize("reads", ["ids", "text"])
def test_a_teacher_of_another_width(project: Path, pools: Pools, tmp_path: Path, reads: str) -> None:
    """The page's two commands; with a teacher that reads text, one of another tokenizer, too."""
    from bpe_teacher import make_bpe_teacher

    from nemo_oprd.commands.toy.pair import Recipe, build_pair

    teacher, more = tmp_path / "teacher", ["bridge.prompts=32", f"teacher.reads={reads}"]
    if reads == "text":
        make_bpe_teacher(teacher, steps=2, layers=2, hidden=48, batch=4)
        more.append("alignment.min_coverage=0")
    else:
        one = {"steps": 2, "student_step": 1, "layers": 2, "hidden": 48, "batch": 4, "warmup_steps": 1}
        few = {"train_prompts": 4, "tune_prompts": 4, "heldout_prompts": 4}
        build_pair(Recipe(seed=1, **one, **few), tmp_path, lambda _: None)
    for number, command in enumerate(BRIDGE):
        outputs = [f"output=runs/wide_{reads}"] if " train " in command else []
        own = command.replace("runs/my_bridge", f"runs/my_bridge_{reads}")
        forked(own, pools, project, tmp_path / str(number), *more, f"teacher.hf_path={teacher}", *outputs)
    assert (project / "runs" / f"wide_{reads}" / "hf" / "model.safetensors").exists()


def test_a_mistake_is_one_line(project: Path) -> None:
    """Two ranks, one message, exit code 2, nothing written."""
    command = "torchrun --nproc-per-node 2 -m nemo_oprd train --config-name quickstart train.lrr=1 output=runs/none"
    environment = environment_of(project)
    result = subprocess.run(command.split(), cwd=project, env=environment, capture_output=True, text=True, timeout=60)
    errors = [line for line in result.stderr.splitlines() if line.startswith("error:")]
    assert errors == ["error: command line: unknown key 'train.lrr'; did you mean 'train.lr'?"]
    assert "Traceback (most recent call last):\n  File" not in result.stderr.split("error:")[0]
    assert "exitcode  : 2 " in result.stderr
    assert not (project / "runs" / "none").exists()
