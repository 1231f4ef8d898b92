"""docs/nemo.md, "I have a NeMo-RL recipe": every command from the recipe to the report, on a hardly trained pair."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from nemo_environment import ROOT, documented, environment, make_pair

SHORT = ["train.steps=3", "train.prompts_per_step=4", "evaluation.every=0", "rollout.max_new_tokens=8"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A working directory with the toy pair and the examples."""
    root = tmp_path_factory.mktemp("recipe")
    make_pair(root / "runs" / "toy")
    (root / "examples").symlink_to(ROOT / "examples")
    return root


def run(folder: Path, start: str, *more: str) -> str:
    """Runs the command of the page that starts so; returns what it printed."""
    command = [*documented(start), *more]
    if command[0] == "nemo-oprd":
        command[:1] = ["python", "-m", "nemo_oprd"]
    ended = subprocess.run(
        command, cwd=folder, env=environment(None), capture_output=True, text=True, timeout=300, check=False
    )
    assert ended.returncode == 0, f"{ended.stdout[-2000:]}\n{ended.stderr[-3000:]}"
    return ended.stdout


def test_recipe_and_plan(folder: Path) -> None:
    printed = run(folder, "nemo-oprd from-nemo-rl")
    assert "next: nemo-oprd plan --config-dir runs/recipe --config-name nemo_rl_toy --ranks 2" in printed
    assert "unknown here" not in printed
    assert "nemo_rl_toy" in run(folder, "nemo-oprd plan --config-dir runs/recipe")


# two ranks that train
@pytest.mark.slow
def test_training_and_report(folder: Path) -> None:
    run(folder, "nemo-oprd from-nemo-rl")
    run(folder, "torchrun --nproc-per-node 2 --standalone -m nemo_oprd train --config-dir runs/recipe", *SHORT)
    run(folder, "nemo-oprd report runs/nemo_rl_toy")
    assert "<svg" in (folder / "runs" / "nemo_rl_toy" / "report.html").read_text()
