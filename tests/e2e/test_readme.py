"""The README's commands, as written, in a copy of the project: a newcomer's path from the two commands on.

The copy gets a tiny model pair in place of the toy pair (a minute of training) and a stand-in for `.venv` (this
process's environment is already the right one); everything else is what a user runs.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
README = (ROOT / "README.md").read_text()
COMMANDS = [
    line.strip()
    for block in re.findall(r"```bash\n(.*?)```", README, flags=re.DOTALL)
    for line in block.splitlines()
    if line.strip()
]
# run elsewhere: the test command is what runs this file; sbatch has tests/e2e/test_slurm.py
ELSEWHERE = ("bash scripts/test.sh", "sbatch ")
SHORT = "train.steps=4 train.prompts_per_step=4 evaluation.every=2 evaluation.limit=4 train.save_every=2"


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    copy = tmp_path_factory.mktemp("clone") / "nemo_oprd"
    ignored = shutil.ignore_patterns(".git", ".venv", "runs", "__pycache__", ".*_cache")
    shutil.copytree(ROOT, copy, ignore=ignored)
    (copy / ".venv" / "bin").mkdir(parents=True)
    (copy / ".venv" / "bin" / "activate").write_text("")
    from nemo_oprd.toy.pair import make_tiny_pair

    make_tiny_pair(copy / "runs" / "toy", log=lambda _: None)
    (copy / ".venv" / "ready").write_text("")
    yield copy
    shutil.rmtree(copy)


def run(command: str, project: Path) -> subprocess.CompletedProcess[str]:
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(project),
        "OMP_NUM_THREADS": "1",
    }
    result = subprocess.run(
        command,
        shell=True,
        executable="/bin/bash",
        cwd=project,
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert result.returncode == 0, f"$ {command}\n{result.stdout[-2000:]}\n{result.stderr[-4000:]}"
    return result


def test_readme_has_the_two_commands() -> None:
    assert COMMANDS[:2] == ["bash scripts/quickstart.sh", "bash scripts/test.sh"]


def test_quickstart(project: Path) -> None:
    """The script, on the tiny pair and with few steps: conversion, training at two ranks, table, export, curves."""
    result = run(f"bash scripts/quickstart.sh {SHORT}", project)
    assert [line.split()[:3] for line in result.stdout.splitlines() if line.startswith("heldout")] == [
        ["heldout", "student", "before"],
        ["heldout", "student", "after"],
        ["heldout", "teacher", result.stdout.split("heldout  teacher")[1].split()[0]],
    ]
    quickstart = project / "runs" / "quickstart"
    steps = [json.loads(line) for line in (quickstart / "metrics.jsonl").open()]
    assert [line["step"] for line in steps if "rep/loss" in line] == [1, 2, 3, 4]
    for name in ("rep/cosine_similarity", "actor/grad_norm", "response_length/mean", "perf/tokens_per_s"):
        assert name in next(line for line in steps if "rep/loss" in line)
    assert (quickstart / "checkpoints" / "latest_checkpointed_iteration.txt").read_text() == "4\n"
    assert list((quickstart / "tensorboard").iterdir())
    assert "<svg" in (quickstart / "report.html").read_text()

    from transformers import AutoModelForCausalLM, AutoTokenizer

    AutoModelForCausalLM.from_pretrained(quickstart / "hf")
    assert AutoTokenizer.from_pretrained(quickstart / "hf").decode([3, 4]) == "01"


@pytest.mark.parametrize("command", [c for c in COMMANDS[1:] if not c.startswith(ELSEWHERE)])
def test_command(project: Path, command: str) -> None:
    """Every other command of the README, after the quickstart."""
    if not (project / "runs" / "quickstart").exists():
        pytest.skip("the quickstart did not run")
    result = run(command, project)
    if "--against reference" in command:
        last = result.stdout.strip().splitlines()[-1]
        assert "largest gradient deviation" in last
        assert float(last.split()[-1]) < 1e-5


def test_a_mistake_is_one_line(project: Path) -> None:
    """Two ranks, one message, exit code 2, nothing written."""
    command = "torchrun --nproc-per-node 2 -m nemo_oprd train --config-name quickstart train.lrr=1 output=runs/none"
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(project),
    }
    result = subprocess.run(command.split(), cwd=project, env=environment, capture_output=True, text=True, timeout=60)
    errors = [line for line in result.stderr.splitlines() if line.startswith("error:")]
    assert errors == ["error: command line: unknown key 'train.lrr'; did you mean 'train.lr'?"]
    assert "Traceback (most recent call last):\n  File" not in result.stderr.split("error:")[0]
    assert not (project / "runs" / "none").exists()
