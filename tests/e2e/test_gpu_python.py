"""Which Python the scripts for GPUs take, and what they say where its torch sees no GPU."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parent.parent.parent

# a Python whose torch is a CUDA build beside an old driver, or has no torch, or sees a GPU; writes down its calls
INTERPRETER = """#!/bin/bash
echo "$0 $*" >>"$RAN"
if [ "$1" = - ]; then
  case $KIND in
    old) echo "torch 2.14.1+cu130 sees no GPU: The NVIDIA driver on your system is too old (found version 12040)"
      exit 1 ;;
    none) echo "torch can't be imported (No module named 'torch')"; exit 3 ;;
  esac
fi
exit 0
"""


def chosen(
    folder: Path, kind: str, *arguments: str, gpu_environment: str = "", **variables: str
) -> tuple[int, str, str]:
    """Exit code, stderr, and the interpreter that was given the check, of a copy of the scripts.

    Args:
        gpu_environment: "" for none, "ready", or "half" made.
    """
    shutil.copytree(ROOT / "scripts", folder / "scripts")
    (folder / "bin").mkdir()
    (folder / "scripts" / "environment.sh").write_text("echo installs >&2\n")
    places = [folder / "bin" / name for name in ("python", "python3")]
    if gpu_environment:
        (folder / ".venv-gpu" / "bin").mkdir(parents=True)
        places.append(folder / ".venv-gpu" / "bin" / "python")
    if gpu_environment == "ready":
        (folder / ".venv-gpu" / "ready").touch()
    for place in places:
        place.write_text(INTERPRETER)
        place.chmod(0o755)
    environment = {"PATH": f"{folder / 'bin'}:/usr/bin:/bin", "RAN": str(folder / "ran"), "KIND": kind, **variables}
    command = ["bash", str(folder / "scripts" / "gpu_check.sh"), *arguments]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    ran = (folder / "ran").read_text().splitlines() if (folder / "ran").exists() else []
    given = [line.split()[0] for line in ran if "benchmarks/gpu_check.py" in line]
    return ended.returncode, ended.stderr, str(Path(given[-1]).relative_to(folder)) if given else ""


REASON = "torch 2.14.1+cu130 sees no GPU: The NVIDIA driver on your system is too old (found version 12040); expected"


@pytest.mark.parametrize("environment", ["", "ready"])
def test_no_gpu_is_said_with_torchs_reason(tmp_path: Path, environment: str) -> None:
    """One line, and nothing is installed."""
    code, said, given = chosen(tmp_path, "old", gpu_environment=environment)
    (line,) = said.splitlines()
    assert (code, given) == (2, "") and REASON in line and "--quick and --rehearse need none" in line


def test_the_interpreter_of_the_check(tmp_path: Path) -> None:
    assert chosen(tmp_path / "a", "gpu", gpu_environment="ready") == (0, "", ".venv-gpu/bin/python")
    assert chosen(tmp_path / "b", "gpu") == (0, "", "bin/python")
    assert chosen(tmp_path / "c", "old", "--quick", gpu_environment="ready") == (0, "", ".venv-gpu/bin/python")
    assert chosen(tmp_path / "d", "none") == (0, "installs\n", "bin/python")
    assert chosen(tmp_path / "e", "old", "--quick") == (0, "installs\n", "bin/python")
    assert chosen(tmp_path / "f", "old", NEMO_OPRD_CPU="1", gpu_environment="ready")[2] == ".venv-gpu/bin/python"
    named = str(tmp_path / "g" / "bin" / "python3")
    assert chosen(tmp_path / "g", "gpu", gpu_environment="ready", PYTHON=named) == (0, "", "bin/python3")
    code, said, given = chosen(tmp_path / "h", "old", gpu_environment="ready", PYTHON=f"{tmp_path}/h/bin/python3")
    assert (code, given) == (2, "") and REASON in said


def test_a_half_made_environment_is_refused(tmp_path: Path) -> None:
    code, said, given = chosen(tmp_path, "gpu", gpu_environment="half")
    (line,) = said.splitlines()
    assert (code, given) == (2, "") and line.startswith(".venv-gpu is not complete") and "scripts/setup_gpu.sh" in line


def test_the_reason_is_that_of_the_torch_that_is_asked() -> None:
    """The function that the scripts share, with this process's torch, which is built without CUDA or sees no GPU."""
    call = f'. scripts/gpu_python.sh; sees_gpu "{sys.executable}"'
    ended = subprocess.run(["bash", "-c", call], cwd=ROOT, capture_output=True, text=True, timeout=120)
    if torch.cuda.is_available():
        assert (ended.returncode, ended.stdout) == (0, "")
        return
    (line,) = ended.stdout.splitlines()
    assert ended.returncode == 1 and line.startswith(f"torch {torch.__version__} sees no GPU: ")
    assert torch.version.cuda or line.endswith("Torch not compiled with CUDA enabled")
