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
