"""`scripts/setup_gpu.sh` with an interpreter that records what it is asked to install, and the check at its end."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
CHECK = ROOT / "scripts" / "check_gpu_environment.py"
ENGINE = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]["te"]
PIP = "-m|pip|install|--disable-pip-version-check|--constraint|.venv-gpu/constraints.txt"
# the order that works: torch, what builds, Transformer Engine against that torch, this project
STEPS = [
    "-m|venv|--clear|.venv-gpu",
    f"{PIP}|torch==2.14.*",
    f"{PIP}|setuptools>=61|wheel|packaging|ninja|pybind11|cmake|hatchling|editables",
    f"{PIP}|--no-build-isolation|{'|'.join(ENGINE)}",
    f"{PIP}|--no-build-isolation|--editable|.[te]",
    "scripts/check_gpu_environment.py|--without-gpu",
]
# writes its arguments down; `-m venv` puts itself into the environment, and `-c` is asked for torch's version
INTERPRETER = """#!/bin/bash
if [ "$1" = -c ]; then echo torch==2.14.0; exit; fi
(IFS='|'; echo "$*") >>"$RAN"
if [ "$2" = venv ]; then
  mkdir -p .venv-gpu/bin .venv-gpu/lib/python3.12/site-packages/nvidia/{cudnn,nccl}/include
  cp "$0" .venv-gpu/bin/python
fi
case $* in *"$FAIL"*) exit 1 ;; esac
echo "$CPATH" >"$RAN.cpath"
"""


def run(folder: Path, *arguments: str, fail: str = "nothing", **variables: str) -> tuple[int, list[str], str]:
    """Exit status, what the interpreter was given, and stderr; nvidia-smi is not found."""
    project, interpreter, ran = folder / "project", folder / "interpreter", folder / "ran"
    (project / "scripts").mkdir(parents=True)
    for name in ("scripts/setup_gpu.sh", "scripts/interpreter.sh", "pyproject.toml", "requirements-cpu.txt"):
        shutil.copy(ROOT / name, project / name)
    interpreter.write_text(INTERPRETER)
    interpreter.chmod(0o755)
    ended = subprocess.run(
        ["bash", str(project / "scripts" / "setup_gpu.sh"), *arguments],
        env={"PATH": "/usr/bin:/bin", "PYTHON_FOR_GPU": str(interpreter), "RAN": str(ran), "FAIL": fail, **variables},
        capture_output=True, text=True,
    )  # fmt: skip
    return ended.returncode, ran.read_text().splitlines() if ran.exists() else [], ended.stderr


def test_the_order(tmp_path: Path) -> None:
    """Torch stays the one that was installed first; the headers that come with it are found by the compiler."""
    status, ran, _ = run(tmp_path)
    assert status == 0 and ran == STEPS
    assert (tmp_path / "project" / ".venv-gpu" / "ready").exists()
    constraints = (tmp_path / "project" / ".venv-gpu" / "constraints.txt").read_text().splitlines()
    assert constraints[-1] == "torch==2.14.0" and "torch==2.13.0" not in constraints
    assert "transformers==5.23.0" in constraints
    assert "nvidia/cudnn/include" in (tmp_path / "ran.cpath").read_text()


def test_other_torch_and_apex(tmp_path: Path) -> None:
    _, ran, said = run(tmp_path, TORCH="torch==2.10.0", APEX="/src/apex")
    expected = [STEPS[0], f"{PIP}|torch==2.10.0", *STEPS[2:4], f"{PIP}|--no-build-isolation|/src/apex", *STEPS[4:]]
    assert ran == expected
    assert "+ env APEX_CPP_EXT=1 APEX_CUDA_EXT=1 .venv-gpu/bin/python -m pip install" in said


def test_dry_run_prints_the_same_commands(tmp_path: Path) -> None:
    status, ran, said = run(tmp_path, "--dry-run")
    assert status == 0 and ran == [] and not (tmp_path / "project" / ".venv-gpu").exists()
    shown = [line.split()[2:] for line in said.splitlines() if line.startswith("+ ")]
    assert ["|".join(words) for words in shown] == STEPS


@pytest.mark.parametrize("step", [1, 3, 5])
def test_a_step_that_fails_ends_it(tmp_path: Path, step: int) -> None:
    status, ran, _ = run(tmp_path, fail=STEPS[step].split("|")[-1])
    assert status != 0 and ran == STEPS[: step + 1]
    assert not (tmp_path / "project" / ".venv-gpu" / "ready").exists()  # jobs refuse such an environment


def test_an_unknown_argument(tmp_path: Path) -> None:
    status, ran, said = run(tmp_path, "--dryrun")
    assert (status, ran, said) == (2, [], "--dryrun: expected --dry-run or nothing\n")


def check(folder: Path, installed: dict[str, str], *arguments: str, cuda: str = "'13.0'", gpu: bool = True) -> str:
    """What the check says with these versions of packages: its last line, which is an error or about the device."""
    for name, version in installed.items():
        information = folder / f"{name.replace('-', '_')}-{version}.dist-info"
        information.mkdir(parents=True)
        (information / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    device = f"is_available=lambda: {gpu}, device_count=lambda: 8, get_device_name=lambda: 'H100'"
    torch = f"from types import SimpleNamespace as S\n__version__ = 'x'\nversion, cuda = S(cuda={cuda}), S({device})"
    modules = {"torch": torch, "megatron/core": "", "transformer_engine/pytorch": ""}
    for module, text in modules.items():
        (folder / module).mkdir(parents=True)
        (folder / module / "__init__.py").write_text(text)
    shutil.copytree(Path(pytest.__file__).parent.parent / "packaging", folder / "packaging")
    environment = {"PYTHONPATH": str(folder), "PATH": "/usr/bin:/bin"}
    ended = subprocess.run([sys.executable, "-S", CHECK, *arguments], env=environment, capture_output=True, text=True)
    assert (ended.returncode == 0) == (not ended.stderr), ended.stderr
    if ended.stderr:
        assert ended.returncode == 1 and len(ended.stderr.splitlines()) == 1
    return (ended.stderr or ended.stdout).splitlines()[-1]


GOOD = {"torch": "2.11.0", "megatron-core": "0.16.1", "transformer-engine": "2.11.0"}


# what NVIDIA's containers have are builds before or after a release
BUILDS = {"torch": "2.10.0a0+b558c986e8.nv25.11", "transformer-engine": "2.9.0.dev0+70f53666"}


@pytest.mark.parametrize("installed", [GOOD, {**GOOD, **BUILDS}])
def test_a_good_environment(tmp_path: Path, installed: dict[str, str]) -> None:
    assert check(tmp_path, installed).startswith("8 x H100")


# what pyproject.toml asks of the Python that runs the tests
CORES, ENGINES = ("<0.20,>=0.16.1", ">=2.9") if sys.version_info >= (3, 12) else ("<0.17,>=0.16.1", "<2.12,>=2.9")


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"transformer-engine": "2.8.0"}, f"error: transformer-engine 2.8.0: expected {ENGINES} "),
        ({"megatron-core": "0.20.0"}, f"error: megatron-core 0.20.0: expected {CORES} "),
        ({"torch": "2.7.1"}, "error: torch 2.7.1: expected >=2.8 "),
        (
            {"transformer-engine": None},
            f"error: transformer-engine is not installed; expected transformer-engine{ENGINES}",
        ),
    ],
)
def test_other_versions(tmp_path: Path, changed: dict[str, str | None], said: str) -> None:
    installed = {name: version for name, version in {**GOOD, **changed}.items() if version is not None}
    assert check(tmp_path, installed).startswith(said)


def test_torch_without_cuda_or_gpu(tmp_path: Path) -> None:
    assert "is a build without CUDA" in check(tmp_path / "a", GOOD, cuda="None")
    assert "torch.cuda.is_available() is False" in check(tmp_path / "b", GOOD, gpu=False)
    assert check(tmp_path / "c", GOOD, "--without-gpu", gpu=False) == "CUDA 13.0"
