"""`scripts/setup_nemo_bridge.sh`: what it pins, and that a complete environment is kept."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
PINS = "requirements-nemo-bridge-cpu.txt"


def pins(file: str) -> dict[str, str]:
    lines = [line for line in (ROOT / file).read_text().splitlines() if line and not line.startswith("#")]
    assert all(re.fullmatch(r"[\w.-]+==[\w.]+( ?;.*)?", line) for line in lines), lines
    return {name.lower(): version for name, version in (line.partition(";")[0].strip().split("==") for line in lines)}


def test_pins() -> None:
    """What Megatron-Bridge 0.3 asks for, with the Megatron-core and torch that this project is tested with."""
    theirs, ours = pins(PINS), pins("requirements-cpu.txt")
    assert theirs["megatron-bridge"].startswith("0.3.") and theirs["transformers"].startswith("4.")
    assert theirs["hydra-core"] == "1.3.2"
    assert all(theirs[name] == ours[name] for name in ("megatron-core", "torch", "pydantic", "omegaconf"))


def test_a_complete_environment_is_kept(tmp_path: Path) -> None:
    """And one that was made from other pins is made again: here, by an interpreter that only says so."""
    for file in ("scripts/setup_nemo_bridge.sh", PINS):
        (tmp_path / file).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / file, tmp_path / file)
    sums = subprocess.run(["cksum"], stdin=(tmp_path / PINS).open(), capture_output=True, text=True).stdout
    (tmp_path / ".venv-nemo-bridge").mkdir()
    (tmp_path / ".venv-nemo-bridge" / "ready").write_text(sums)
    (tmp_path / "python").write_text("#!/bin/bash\necho made again\nexit 7\n")
    (tmp_path / "python").chmod(0o755)
    command = ["bash", str(tmp_path / "scripts" / "setup_nemo_bridge.sh")]
    environment = {"PATH": "/usr/bin:/bin", "PYTHON_FOR_NEMO_BRIDGE": str(tmp_path / "python")}
    kept = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert (kept.returncode, kept.stdout) == (0, "") and "is complete" in kept.stderr
    with (tmp_path / PINS).open("a") as file:
        file.write("# changed\n")
    again = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert (again.returncode, again.stdout) == (7, "made again\n")
    assert not (tmp_path / ".venv-nemo-bridge").exists()
