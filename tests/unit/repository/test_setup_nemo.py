"""`scripts/setup_nemo.sh` and `scripts/setup_nemo_run.sh` with an interpreter that records what it is asked to do."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
# script: folder, requirements, packages whose versions the documents name
SCRIPTS = {
    "setup_nemo.sh": (".venv-nemo", "requirements-nemo-cpu.txt", ("nemo-toolkit",)),
    "setup_nemo_run.sh": (".venv-nemo-run", "requirements-nemo-run-cpu.txt", ("nemo_run", "leptonai")),
}
PIP = "-m|pip|install|--quiet|--disable-pip-version-check|--no-deps"
# writes its arguments down; `-m venv` puts itself into the environment
INTERPRETER = """#!/bin/bash
(IFS='|'; echo "${*:1:8}" | head -1) >>"$RAN"
if [ "$2" = venv ]; then mkdir -p "$3/bin"; cp "$0" "$3/bin/python"; fi
case $* in *"$FAIL"*) exit 1 ;; esac
"""


def run(folder: Path, script: str, fail: str = "nothing") -> tuple[int, list[str]]:
    """Exit status and what the interpreter was given, in a copy of the project."""
    project, interpreter, ran = folder / "project", folder / "interpreter", folder / "ran"
    (project / "scripts").mkdir(parents=True, exist_ok=True)
    for name in (f"scripts/{script}", "scripts/pinned_environment.sh", "pyproject.toml", SCRIPTS[script][1]):
        if not (project / name).exists():
            shutil.copy(ROOT / name, project / name)
    interpreter.write_text(INTERPRETER)
    interpreter.chmod(0o755)
    ran.write_text("")
    environment = {"PATH": "/usr/bin:/bin", "PYTHON_FOR_NEMO": str(interpreter), "RAN": str(ran), "FAIL": fail}
    ended = subprocess.run(["bash", str(project / "scripts" / script)], env=environment, capture_output=True, text=True)
    return ended.returncode, ran.read_text().splitlines()


@pytest.mark.parametrize("script", SCRIPTS)
def test_made_once_and_again_if_its_pins_change(script: str, tmp_path: Path) -> None:
    folder, requirements, _ = SCRIPTS[script]
    steps = [f"-m|venv|{folder}", f"{PIP}|--requirement|{requirements}", f"{PIP}|--no-build-isolation|--editable"]
    status, ran = run(tmp_path, script)
    assert status == 0 and ran[:3] == steps and ran[3].startswith("-c|") and len(ran) == 4
    assert run(tmp_path, script) == (0, [])
    with (tmp_path / "project" / requirements).open("a") as file:
        file.write("another==1\n")
    assert run(tmp_path, script)[1][:3] == steps


@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize("fail", ["--requirement", "--editable", "import"])
def test_what_fails_is_not_kept(script: str, fail: str, tmp_path: Path) -> None:
    assert run(tmp_path, script, fail)[0] != 0
    assert len(run(tmp_path, script)[1]) == 4


@pytest.mark.parametrize("script", SCRIPTS)
def test_every_package_is_pinned(script: str) -> None:
    _, requirements, named = SCRIPTS[script]
    lines = [line for line in (ROOT / requirements).read_text().splitlines() if line and not line.startswith("#")]
    assert [line for line in lines if not re.fullmatch(r"[\w.-]+==[\w.]+", line)] == []
    names = [line.split("==")[0].lower().replace("_", "-") for line in lines]
    assert len(names) == len(set(names)) > 100
    page = (ROOT / "docs" / "nemo.md").read_text()
    pinned = dict(line.split("==") for line in lines)
    assert f"{named[0].replace('_', '-')} {pinned[named[0]]}" in page
