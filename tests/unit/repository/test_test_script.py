"""`scripts/test.sh`: which tests each level asks pytest for, and what its exit status says."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from lanes import read_full

ROOT = Path(__file__).parents[3]
SERVICES = "slurm or vllm or nemo or smollm or wandb or chromium or npm or recipes"
MARKED = {"test_a.py": "@pytest.mark.npm\n", "test_b.py": "@pytest.mark.slow\n", "test_c.py": "[pytest.mark.vllm]"}


def run(
    directory: Path, *arguments: str, pytest_status: int = 0, mypy_status: int = 0, other_status: int = 0
) -> tuple[int, list[str]]:
    """The script's exit status and the commands that it ran, in a copy where each command only writes itself down."""
    scripts, programs = directory / "scripts", directory / "programs"
    scripts.mkdir()
    programs.mkdir()
    shutil.copy(ROOT / "scripts" / "test.sh", scripts)
    (directory / "tests").mkdir()
    for file, text in MARKED.items():
        (directory / "tests" / file).write_text(text)
    (scripts / "test_other_python.sh").write_text(f'echo other >>"{directory}/ran"\nexit {other_status}\n')
    (scripts / "environment.sh").write_text('cd "$(dirname "${BASH_SOURCE[0]}")/.."\n')
    for name, status in (("ruff", 0), ("mypy", mypy_status), ("python", pytest_status)):
        (programs / name).write_text(f'#!/bin/bash\n(IFS="|"; echo "{name}|$*") >>"{directory}/ran"\nexit {status}\n')
        (programs / name).chmod(0o755)
    environment = {**os.environ, "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}"}
    command = ["bash", str(scripts / "test.sh"), *arguments]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True)
    return ended.returncode, (directory / "ran").read_text().splitlines()


BESIDE = [
    f"tests/functional/test_{name}.py"
    for name in (
        "nemo_rl",
        "prune_layers",
        "safe_unpickling",
        "served_teachers",
        "shared_teachers",
        "stream",
        "vllm_engine",
    )
]
DEFAULT = (
    "|".join(["tests/functional", *(f"--ignore={file}" for file in BESIDE)]),
    "|".join(["tests/unit", "tests/e2e", *BESIDE]),
)
FILES = "tests/test_a.py|tests/test_c.py"
INTEGRATION = ("vllm and not (slurm or slow)", f"({SERVICES}) and not (slow or vllm and not slurm)")
CHECKS = ["ruff|check|.", "ruff|format|--check|.", "mypy|"]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], [*CHECKS, *(f"python|-m|pytest|-m|not (full or slow or {SERVICES})|{tests}" for tests in DEFAULT)]),
        (["--full"], [*CHECKS, *(f"python|-m|pytest|-m|not (slow or {SERVICES})|{tests}" for tests in DEFAULT)]),
        (["--all"], [*CHECKS, "python|-m|pytest"]),
        (["--integration"], [*(f"python|-m|pytest|-m|{lane}|{FILES}" for lane in INTEGRATION), "other"]),
        (["--integration", "-x"], [f"python|-m|pytest|-m|({SERVICES}) and not slow|-x"]),
        (["tests/unit", "-x"], [*CHECKS, "python|-m|pytest|tests/unit|-x"]),
        (["--all", "-k", "golden"], [*CHECKS, "python|-m|pytest|-k|golden"]),
    ],
)
def test_levels(tmp_path: Path, arguments: list[str], expected: list[str]) -> None:
    status, ran = run(tmp_path, *arguments)
    assert status == 0
    two_lanes = arguments in ([], ["--full"], ["--integration"])
    assert sorted(ran) == sorted(expected) if two_lanes else ran == expected
    assert ran[:2] == expected[:2] or "--integration" in arguments


def test_services_are_marked_where_they_are_looked_for() -> None:
    """`--integration` asks for the files that name a mark of a service: none comes from another file."""
    marks = re.compile(rf"mark\.({SERVICES.replace(' or ', '|')})\b")
    named = [file for file in (ROOT / "tests").rglob("*.py") if marks.search(file.read_text())]
    assert len(named) > 20 and all(file.name.startswith("test_") for file in named), named


def test_the_default_runs_all_folders(pytestconfig: pytest.Config) -> None:
    folders = {file.parent.relative_to(ROOT).parts[1] for file in (ROOT / "tests").rglob("test_*.py")}
    asked = [folder for lane in DEFAULT for folder in lane.split("|")]
    assert {f"tests/{folder}" for folder in folders} == {each for each in asked if "test_" not in each}


def test_files_of_the_other_lane_are_in_one_lane() -> None:
    """Each is left out of the first lane and asked for in the second, and is there."""
    for file in BESIDE:
        assert (ROOT / file).is_file()
        assert [lane.count(file) for lane in DEFAULT] == [1, 1]
        assert f"--ignore={file}" in DEFAULT[0] and f"--ignore={file}" not in DEFAULT[1]


def test_a_type_error_fails_the_script(tmp_path: Path) -> None:
    """It is found beside the functional tests, and nothing else of its lane runs."""
    status, ran = run(tmp_path, mypy_status=1)
    assert status == 1
    assert [line for line in ran if line.startswith("python")] == [
        f"python|-m|pytest|-m|not (full or slow or {SERVICES})|{DEFAULT[0]}"
    ]


@pytest.mark.parametrize("arguments", [[], ["--all"], ["--integration"], ["tests/unit"]])
def test_a_failed_test_fails_the_script(tmp_path: Path, arguments: list[str]) -> None:
    assert run(tmp_path, *arguments, pytest_status=1)[0] == 1


def test_a_failure_under_the_other_python_fails_the_script(tmp_path: Path) -> None:
    assert run(tmp_path, "--integration", other_status=1)[0] == 1


def test_tests_of_the_other_python_exist() -> None:
    """All files that scripts/test_other_python.sh names; a mistake would be an error of the long run only."""
    text = (ROOT / "scripts" / "test_other_python.sh").read_text()
    groups = re.findall(r"tests/([\w/]+)/test_\{?([\w,]+)\}?\.py", text)
    files = [ROOT / "tests" / folder / f"test_{name}.py" for folder, names in groups for name in names.split(",")]
    assert len(files) > 10 and all(file.is_file() for file in files), files


@pytest.mark.parametrize(("arguments", "status"), [(["--integration"], 0), ([], 5), (["--all"], 5), (["-k", "x"], 5)])
def test_no_test_found(tmp_path: Path, arguments: list[str], status: int) -> None:
    """Pytest's status 5: a checkout may have no integration tests; anywhere else the selection is a mistake."""
    assert run(tmp_path, *arguments, pytest_status=5)[0] == status


def test_each_test_of_a_level_is_marked(pytestconfig: pytest.Config) -> None:
    known = {line.split(":")[0] for line in pytestconfig.getini("markers")}
    assert {"full", "slow", *SERVICES.split(" or ")} <= known


def test_what_is_left_to_the_full_tests_exists() -> None:
    """A test that was renamed would come back into the default command unseen."""
    for name in read_full(ROOT / "tests" / "full.txt"):
        file, *names = name.split("::")
        text = (ROOT / file).read_text()
        for each in names:
            assert re.search(rf"^\s*(def|class) {each}\b", text, re.MULTILINE), name


@pytest.mark.parametrize("line", ["a.py after 2", "a.py::b after x", "a.py::b every 0", "a.py::b\na.py::b after 2"])
def test_a_malformed_line_is_refused(tmp_path: Path, line: str) -> None:
    (tmp_path / "full.txt").write_text(f"# comment\n\n{line}\n")
    with pytest.raises(ValueError, match="expected FILE, FILE::TEST"):
        read_full(tmp_path / "full.txt")


def test_cases_that_stay(tmp_path: Path) -> None:
    (tmp_path / "full.txt").write_text("a.py\nb.py::c after 2\nb.py::d every 3\n")
    kept = read_full(tmp_path / "full.txt")
    assert {name: [n for n in range(8) if n in numbers] for name, numbers in kept.items()} == {
        "a.py": [],
        "b.py::c": [0, 1],
        "b.py::d": [0, 3, 6],
    }
