"""`scripts/gpu_check.sh --quick` as a user runs it, and what it says when something is missing, fails or hangs."""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
import torch

from benchmarks import gpu_check

ROOT = Path(__file__).parent.parent.parent


def run_script(project: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """The script in `project`, with this process's Python as the active one."""
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "OMP_NUM_THREADS": "1",
    }
    environment.pop("PYTHON", None)
    command = ["bash", str(project / "scripts" / "gpu_check.sh"), *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=400)


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A copy whose `.venv` stands for this process's environment, so that nothing is installed."""
    copy = tmp_path / "nemo_oprd"
    shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".git", ".venv*", "runs", "__pycache__", ".*_cache"))
    (copy / ".venv" / "bin").mkdir(parents=True)
    (copy / ".venv" / "bin" / "activate").write_text("")
    (copy / ".venv" / "ready").write_text("")
    return copy


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
    assert (code, given) == (2, "") and REASON in line and "--quick runs on CPUs" in line


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


@pytest.mark.slow
def test_quick_check(project: Path, tmp_path: Path) -> None:
    """All phases ok, in the table and in the JSON, with figures in them; nothing is left behind."""
    scratch, output = tmp_path / "scratch", tmp_path / "out"
    result = run_script(project, "--quick", "--jobs", "2", "--output", str(output), "--scratch", str(scratch))
    assert result.returncode == 0, result.stdout + result.stderr
    report = json.loads((output / "gpu_check.json").read_text())
    assert report["ok"] and report["quick"]
    assert {name: phase["status"] for name, phase in report["phases"].items()} == dict.fromkeys(gpu_check.PHASES, "ok")
    rows = [line.split() for line in result.stdout.splitlines()]
    for name, phase in report["phases"].items():
        assert [name, f"{phase['seconds']:.1f}", "s", "ok"] in rows
        assert phase["numbers"]
    numbers = {name: phase["numbers"] for name, phase in report["phases"].items()}
    assert len(numbers["golden_fp32"]) == 14
    assert {"opd_full_vocab", "mse_all_last_k"} < set(numbers["golden_fp32"]) & set(numbers["golden_bf16"])
    assert set(numbers["two_ranks"]) == {"TP2", "PP2"}
    for precision in ("fp32", "bf16"):
        assert numbers["save"][precision]["checkpoint_bytes"] > 0
        assert set(numbers["resume"][precision]["deviations"].values()) == {0.0}
    for recompute in ("none", "full"):
        step = numbers[f"step_recompute_{recompute}"]
        assert step["recompute"] == recompute
        assert all(phase["seconds"] > 0 for phase in step["phases"].values())
        assert set(step["phases"]) == {"teacher", "update", "optimizer"}
        planned = step["memory"]["plan_gb"]
        whole = planned.pop("whole")
        assert set(planned) == set(step["phases"])
        assert 0 < step["memory"]["resident_plan_gb"] < min(planned.values()) < max(planned.values()) == whole
        assert set(step["memory"]["ratio"].values()) == {None}  # memory is not measured without a GPU
    assert numbers["generation"]["tokens_per_s"] > 0
    contexts = [numbers["generation_16k"][prompt] for prompt in ("short", "long")]
    assert [each["context"] for each in contexts] == [8, 256]
    assert all(each["seconds_per_token"] > 0 and each["prompts"]["seconds"] > 0 for each in contexts)
    assert list(scratch.iterdir()) == []


def test_missing_packages_are_one_line() -> None:
    """A Python without site-packages stands for a machine without our dependencies."""
    script = ROOT / "benchmarks" / "gpu_check.py"
    result = subprocess.run([sys.executable, "-I", "-S", script, "--quick"], capture_output=True, text=True, timeout=60)
    assert result.returncode == 2
    (line,) = result.stderr.splitlines()
    assert line.startswith("not installed: torch==")
    assert " -m pip install torch==" in line and f" megatron-core=={version('megatron-core')} " in line


def test_the_wheels_to_bring_are_all_that_is_needed() -> None:
    """The commands in the script's head name every package that does not come with torch and transformers, as pinned
    for Python 3.12, whichever Python runs them."""
    head = (ROOT / "scripts" / "gpu_check.sh").read_text().replace("\\\n#", "")
    (download,) = re.findall(r"^# +pip download .*--dest DIR +(.*)$", head, flags=re.MULTILINE)
    (build,) = re.findall(r"^# +pip wheel .*--wheel-dir DIR +(.*)$", head, flags=re.MULTILINE)
    with_torch = {"torch", "numpy", "transformers", "safetensors", "packaging", "tqdm"}
    needed = {package.replace("_", "-") for package in gpu_check.REQUIRED.values()} - with_torch
    brought = dict(each.split("==") for each in (*download.split(), *build.split()))
    assert set(brought) == needed
    lines = (ROOT / "requirements-cpu.txt").read_text().splitlines()
    wanted = [line.partition(";") for line in lines if "==" in line and "python_version <" not in line]
    pinned = dict(text.strip().split("==") for text, _, _ in wanted if not text.startswith("#"))
    assert brought == {name: pinned.get(name) or pinned[name.replace("-", "_")] for name in brought}


def test_a_phase_that_fails_or_hangs_is_a_line(tmp_path: Path) -> None:
    log = tmp_path / "log"
    failed = gpu_check.run_phase("no_such_phase", 60, ["--quick"], tmp_path, log)
    assert failed["status"] == "failed: KeyError: 'no_such_phase'"
    assert "Traceback" in log.read_text()
    assert gpu_check.run_phase("guard", 0.2, [], tmp_path, log)["status"] == "timeout after 0 s"


def test_two_ranks_are_skipped_on_one_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks.outcome import Settings
    from benchmarks.two_ranks import two_ranks

    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    assert two_ranks(Settings(tmp_path, quick=False, layers=None)).skipped == "one GPU"


def test_a_skipped_phase_is_not_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run_phase(name: str, *_: object) -> dict[str, object]:
        return {"status": "skipped: one GPU" if name == "two_ranks" else "ok", "seconds": 0.0, **gpu_check.NOTHING}

    monkeypatch.setattr(gpu_check, "run_phase", run_phase)
    options = argparse.Namespace(minutes=1.0, quick=True, layers=None, output=tmp_path, jobs=1)
    assert gpu_check.check(options, tmp_path)
    shown = capsys.readouterr().out
    assert "two_ranks                0.0 s  skipped: one GPU\n" in shown
    assert f"\n{len(gpu_check.PHASES) - 1} phases ok, skipped: two_ranks; " in shown
    assert json.loads((tmp_path / "gpu_check.json").read_text())["ok"]


def test_depth_by_free_memory() -> None:
    """The whole model where the memory of a large GPU is free, fewer layers on a small one."""
    from benchmarks.real_shape import layers_that_fit

    assert layers_that_fit(139e9) == layers_that_fit(79e9) == 28
    assert 1 < layers_that_fit(23e9) < 10
    assert layers_that_fit(4e9) == 1


def test_no_time_left(project: Path, tmp_path: Path) -> None:
    """Every phase is reported as not run, and the exit status says so."""
    result = run_script(project, "--quick", "--minutes", "0", "--output", str(tmp_path / "out"))
    assert result.returncode == 1, result.stderr
    phases = json.loads((tmp_path / "out" / "gpu_check.json").read_text())["phases"]
    assert {phase["status"] for phase in phases.values()} == {"not run: no time left"}
