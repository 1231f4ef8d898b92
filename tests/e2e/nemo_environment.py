"""What the tests with nemo-toolkit and nemo-run share: environments, a toy pair, and a plain run to compare with."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

from nemo_oprd.tools.toy.pair import Recipe, build_pair

ROOT = Path(__file__).parent.parent.parent
TOOLKIT, RUN = ROOT / ".venv-nemo", ROOT / ".venv-nemo-run"
PAGE = ROOT / "docs" / "nemo.md"
STEPS = 30
PATIENCE_S = 600


def missing(folder: Path) -> str | None:
    """Why nothing can be run in the environment `folder`, None if something can."""
    if (folder / "ready").exists():
        return None
    script = {TOOLKIT: "setup_nemo.sh", RUN: "setup_nemo_run.sh"}[folder]
    return f"{folder.name} is missing: bash scripts/{script} makes it"


def make_pair(directory: Path) -> Path:
    """A student and a teacher that have hardly learned anything, and prompts."""
    recipe = Recipe(
        seed=0, steps=30, student_step=15, layers=2, hidden=128, batch=16, warmup_steps=5,
        train_prompts=64, tune_prompts=16, heldout_prompts=16,
    )  # fmt: skip
    build_pair(recipe, directory, lambda _: None)
    return directory


def settings(pair: Path) -> list[str]:
    """Overrides of the configuration `quickstart`, for a run on two ranks that takes seconds. Models: see `models`."""
    return [
        f"data.train={pair / 'prompts' / 'train.jsonl'}", "evaluation.every=0", f"train.steps={STEPS}",
        "train.prompts_per_step=4", "train.save_every=2", "rollout.max_new_tokens=16", "logging.tensorboard=false",
    ]  # fmt: skip


def models(pair: Path) -> list[str]:
    return [f"student.hf_path={pair / 'student'}", f"teacher.hf_path={pair / 'teacher'}"]


def environment(folder: Path | None, **more: str) -> dict[str, str]:
    """Of commands in the environment `folder`, as if it were activated (None: this one)."""
    programs = Path(sys.executable).parent if folder is None else folder / "bin"
    inherited = {name: value for name, value in os.environ.items() if name != "VIRTUAL_ENV"}
    return {
        **inherited, "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}", "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", "HF_HUB_OFFLINE": "1", **more,
    }  # fmt: skip


def documented(start: str) -> list[str]:
    """The words of the command in docs/nemo.md that starts with `start`."""
    blocks = re.findall(r"```bash\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)
    lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    (command,) = (line for line in lines if line.startswith(start))
    return shlex.split(command)


def plain_run(pair: Path, output: Path) -> Path:
    """The same training by `nemo-oprd train`, uninterrupted, in the project's own environment."""
    command = ["torchrun", "--nproc-per-node", "2", "--standalone", "-m", "nemo_oprd", "train"]
    command += ["--config-name", "quickstart", *settings(pair), *models(pair), f"output={output}"]
    ended = subprocess.run(command, env=environment(None), capture_output=True, text=True, timeout=PATIENCE_S)
    assert ended.returncode == 0, ended.stderr[-3000:]
    return output


def updates(output: Path) -> list[int]:
    """The steps of which a run has written metrics."""
    file = output / "metrics.jsonl"
    return [json.loads(line)["step"] for line in file.read_text().splitlines()] if file.exists() else []
