"""`scripts/interpreter.sh`: which Python makes an environment, and `scripts/environment.sh`, which asks it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
# stands for an interpreter; `-m venv` makes an environment of it
RUNS = """#!/bin/bash
case "$*" in
  *version_info*) echo {version}; exit {status} ;;
  *"venv --clear"*) mkdir -p .venv/bin; cp "$0" .venv/bin/python; touch .venv/bin/activate; echo "{version}" >>made ;;
esac
"""
# what a version manager leaves for a version that is not chosen
SHIM = "#!/bin/bash\necho 'command not found' >&2\nexit 127\n"


def programs(folder: Path, **contents: str) -> Path:
    folder.mkdir(exist_ok=True)
    for name in ("bash", "dirname", "mkdir", "cp", "rm", "touch", "echo"):
        if not (folder / name).exists():
            (folder / name).symlink_to(shutil.which(name) or "/bin/false")
    for name, content in contents.items():
        (folder / name.replace("_", ".")).write_text(content)
        (folder / name.replace("_", ".")).chmod(0o755)
    return folder


def python(version: str, status: int = 0) -> str:
    return RUNS.format(version=version, status=status)


def ask(path: Path, chosen: str = "") -> tuple[int, str, str]:
    code = f". {ROOT}/scripts/interpreter.sh; newest_python {chosen}"
    done = subprocess.run(["/bin/bash", "-c", code], env={"PATH": str(path)}, capture_output=True, text=True)
    return done.returncode, done.stdout.strip(), done.stderr.strip()


def test_the_newest_that_runs(tmp_path: Path) -> None:
    """A shim that stands for no interpreter is passed over."""
    path = programs(tmp_path / "bin", python3_13=SHIM, python3_12=python("3.12"), python3_11=python("3.11"))
    assert ask(path) == (0, "python3.12", "")
    (path / "python3.12").write_text(SHIM)
    assert ask(path) == (0, "python3.11", "")
    (path / "python3.11").unlink()
    status, out, said = ask(path)
    assert status == 1 and not out and len(said.splitlines()) == 1
    assert "python3.13, python3.12 and python3.11" in said and "PYTHON=" in said


def test_a_chosen_one_must_be_supported(tmp_path: Path) -> None:
    path = programs(tmp_path / "bin", python3_12=python("3.12"), mine=python("3.11"), old=python("3.10", status=1))
    assert ask(path, "mine") == (0, "mine", "")
    for name in ("old", "nowhere"):
        status, _, said = ask(path, name)
        assert status == 1 and said.startswith(f"PYTHON={name}: expected") and len(said.splitlines()) == 1


def test_the_range_is_the_one_that_is_checked() -> None:
    """The check itself, by the Python that runs this test, which is a supported one."""
    status, out, said = ask(Path("/usr/bin"), sys.executable)
    assert (status, out, said) == (0, sys.executable, "")


def sourced(project: Path, path: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    command = ["/bin/bash", "-ec", ". scripts/environment.sh"]
    return subprocess.run(command, cwd=project, env={"PATH": str(path), **variables}, capture_output=True, text=True)


@pytest.fixture
def project(tmp_path: Path) -> Path:
    project = tmp_path / "project"
    (project / "scripts").mkdir(parents=True)
    for name in ("scripts/environment.sh", "scripts/interpreter.sh", "requirements-cpu.txt", "pyproject.toml"):
        shutil.copyfile(ROOT / name, project / name)
    return project


def test_a_wrong_interpreter_destroys_nothing(tmp_path: Path, project: Path) -> None:
    path = programs(tmp_path / "bin", python3_12=python("3.12"))
    assert sourced(project, path).returncode == 0
    ended = sourced(project, path, PYTHON="/of/a/container/python")
    assert ended.returncode == 1 and len(ended.stderr.splitlines()) == 1 and "PYTHON=/of/a" in ended.stderr
    assert (project / ".venv" / "ready").exists()


def test_an_outdated_environment_keeps_its_python(tmp_path: Path, project: Path) -> None:
    path = programs(tmp_path / "bin", python3_11=python("3.11"))
    assert sourced(project, path).returncode == 0
    programs(tmp_path / "bin", python3_13=python("3.13"))
    os.utime(project / ".venv" / "ready", (1, 1))
    assert sourced(project, path).returncode == 0
    assert (project / "made").read_text().split() == ["3.11", "3.11"]


@pytest.mark.parametrize("chosen, made", [("", ["3.12"]), ("python3.12", ["3.12"]), ("python3.11", ["3.12", "3.11"])])
def test_environment_is_kept_unless_another_python_is_asked_for(
    tmp_path: Path, project: Path, chosen: str, made: list[str]
) -> None:
    path = programs(tmp_path / "bin", python3_12=python("3.12"), python3_11=python("3.11"))
    first = sourced(project, path)
    assert first.returncode == 0 and "with Python 3.12" in first.stderr and "5 GB" in first.stderr
    again = sourced(project, path, **({"PYTHON": chosen} if chosen else {}))
    assert again.returncode == 0, again.stderr
    assert (project / "made").read_text().split() == made
    assert ("it is made again" in again.stderr) == (len(made) == 2)


@pytest.mark.parametrize("change", ["outdated", "another Python"])
def test_an_environment_behind_a_link_is_not_cleared(tmp_path: Path, project: Path, change: str) -> None:
    path = programs(tmp_path / "bin", python3_12=python("3.12"), python3_11=python("3.11"))
    assert sourced(project, path).returncode == 0
    shared = (project / ".venv").rename(tmp_path / "shared")
    (project / ".venv").symlink_to(shared)
    assert sourced(project, path).returncode == 0
    if change == "outdated":
        os.utime(shared / "ready", (1, 1))
    ended = sourced(project, path, **({} if change == "outdated" else {"PYTHON": "python3.11"}))
    assert ended.returncode == 1 and ".venv is a link" in ended.stderr.splitlines()[-1]
    assert (shared / "ready").exists() and (shared / "bin" / "python").exists()
    assert (project / "made").read_text().split() == ["3.12"]
