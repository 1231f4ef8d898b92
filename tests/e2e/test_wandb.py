"""A training run that logs to W&B offline: what its file holds is what metrics.jsonl holds."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import wandb_files

ROOT = Path(__file__).parent.parent.parent
PYTHON = ROOT / ".venv-wandb" / "bin" / "python"
GOLDEN = ROOT / "tests" / "golden"
SETTINGS = [f"{role}.hf_path={GOLDEN / role}" for role in ("student", "teacher")]
SETTINGS += [f"rollout.replay={GOLDEN / 'rollouts.jsonl'}", "logging.wandb=offline-test", "train.steps=3"]
pytestmark = pytest.mark.wandb


@pytest.fixture(scope="module")
def python() -> Path:
    if not (PYTHON.parent.parent / "ready").is_file():
        pytest.skip(f"{PYTHON.parent.parent} is missing or incomplete: bash scripts/setup_wandb.sh makes it")
    return PYTHON


def run(python: Path, *arguments: str) -> str:
    paths = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH", ""))))
    environment = {**os.environ, "WANDB_MODE": "offline", "WANDB_SILENT": "true", "PYTHONPATH": paths}
    ended = subprocess.run(
        [str(python), *arguments], env=environment, capture_output=True, text=True, timeout=300, cwd=ROOT
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    return ended.stdout


def logged(python: Path, output: Path) -> list[dict[str, Any]]:
    """What each `.wandb` file of the run holds, in the order in which they were made."""
    files = sorted(output.glob("wandb/offline-run-*/*.wandb"))
    return [json.loads(run(python, wandb_files.__file__, str(file))) for file in files]


def test_offline(python: Path, tmp_path: Path) -> None:
    output = tmp_path / "run"
    train = ["-m", "torch.distributed.run", "--nproc-per-node", "1", "--standalone", "-m", "nemo_oprd", "train"]
    run(python, *train, "--config-name", "verify", *SETTINGS, f"output={output}")
    (found,) = logged(python, output)
    assert found["project"] == "offline-test" and found["id"] == (output / "wandb_id").read_text()
    assert found["config"]["train"]["steps"] == 3 and found["config"]["logging"]["wandb"] == "offline-test"
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert len(found["history"]) == len(lines)
    for line, record in zip(lines, found["history"], strict=True):
        metrics = {name: value for name, value in line.items() if name != "time"}
        assert len(metrics) > 20
        assert {name: value for name, value in record.items() if not name.startswith("_")} == metrics
