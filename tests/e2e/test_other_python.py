"""Whole runs under the supported Python and Megatron-core that the default environment does not have.

The environment is Megatron-Bridge's (scripts/setup_nemo_bridge.sh), without its stand-in for Transformer Engine.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
import torch
from golden_runs import BASE, weights
from megatron_bridge_environment import PYTHON, make_environment
from nemo_environment import STEPS, settings

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
pytestmark = pytest.mark.nemo


@cache
def environments() -> tuple[str, str]:
    """Interpreters of the environments with the older and with the newer Megatron-core; skips if both have one."""
    make_environment()
    code = "from importlib.metadata import version; print(version('megatron-core'))"
    found = {}
    for python in (sys.executable, str(PYTHON)):
        core = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout
        found[tuple(map(int, core.strip().split(".")))] = python
    if len(found) == 1:
        pytest.skip(f"both environments have Megatron-core {next(iter(found))}: one with the other version is missing")
    return found[min(found)], found[max(found)]


def run(python: str, *arguments: str, status: int = 0) -> str:
    """The output of `python ARGUMENTS`, which must end with `status`."""
    kept = {name: value for name, value in os.environ.items() if name not in ("VIRTUAL_ENV", "PYTHONHOME")}
    done = subprocess.run(
        [python, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=580,
        env={**kept, "PYTHONPATH": f"{ROOT}:{HERE}", "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"},
    )  # fmt: skip
    assert done.returncode == status, f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return done.stdout + done.stderr


def oprd(python: str, ranks: int, *arguments: str, status: int = 0) -> str:
    """The same of `torchrun -m nemo_oprd ARGUMENTS` on `ranks` ranks; without torchrun for 0 ranks."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks else []
    return run(python, *torchrun, "-m", "nemo_oprd", *arguments, status=status)


def train(output: Path, *overrides: str) -> list[str]:
    return ["train", "--config-name", "verify", *BASE, "train.save_every=2", f"output={output}", *overrides]


@pytest.mark.slow
def test_a_run_of_the_older_megatron_goes_on_under_the_newer(tmp_path: Path) -> None:
    """At another layout, too. The other way is refused, in one line, and loses nothing."""
    old, new = environments()
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    oprd(old, 1, *train(whole, "train.steps=4"))
    oprd(old, 1, *train(parts, "train.steps=2"))
    shutil.rmtree(parts / "hf")
    layout = ["student.parallel.tensor=2", "teacher.placement=dedicated", "teacher.ranks=1"]
    said = oprd(new, 3, *train(parts, "train.steps=4", *layout))
    assert "deprecated" not in said and "common state" not in said, said
    expected, got = weights(whole / "hf"), weights(parts / "hf")
    assert set(got) == set(expected)
    for name, value in expected.items():
        # as between two layouts of one version (tests/functional/test_step.py)
        torch.testing.assert_close(got[name], value, rtol=1e-5, atol=2e-5)
    curves = [[json.loads(line)["rep/loss"] for line in (each / "metrics.jsonl").open()] for each in (whole, parts)]
    assert len(curves[1]) == 4 and curves[0] == pytest.approx(curves[1], rel=1e-5)

    checkpoint = parts / "checkpoints" / "iter_0000004"
    before = {file.name: file.stat().st_mtime_ns for file in checkpoint.iterdir()}
    assert ".metadata" in before and "common.pt" not in before
    refused = oprd(old, 0, *train(parts, "train.steps=6"), status=2)
    (line,) = [line for line in refused.splitlines() if "0.19" in line]
    assert str(checkpoint) in line and "expected a version that is not older" in line and "megatron_to_hf.py" in line
    assert {file.name: file.stat().st_mtime_ns for file in checkpoint.iterdir()} == before


def test_quickstart(tmp_path: Path) -> None:
    """The commands of scripts/quickstart.sh under the newer Megatron, with a pair that is hardly trained."""
    _, new = environments()
    pair, output = tmp_path / "toy", tmp_path / "run"
    make = (
        "import sys; from pathlib import Path; import nemo_environment; nemo_environment.make_pair(Path(sys.argv[1]))"
    )
    run(new, "-c", make, str(pair))
    for role in ("student", "teacher"):
        paths = ["--hf-path", str(pair / role), "--output", str(pair / f"{role}-megatron")]
        run(new, "checkpoint_tools/hf_to_megatron.py", *paths)
    models = [f"{role}.checkpoint={pair / f'{role}-megatron'}" for role in ("student", "teacher")]
    held_out = f"data.validation={{heldout:{pair / 'prompts' / 'heldout.jsonl'}}}"
    more = [held_out, "evaluation.every=2", f"output={output}"]
    oprd(new, 2, "train", "--config-name", "quickstart", *settings(pair), *models, *more)
    lines = [json.loads(line) for line in (output / "metrics.jsonl").open()]
    assert len([line for line in lines if "rep/loss" in line]) == STEPS
    assert any("val/heldout/avg@2" in line for line in lines)
    assert (output / "hf" / "model.safetensors").is_file()
    oprd(new, 0, "report", str(output))
    assert (output / "report.html").is_file()
