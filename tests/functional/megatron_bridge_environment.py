"""Runs functions of this directory's modules in Megatron-Bridge's environment (scripts/setup_nemo_bridge.sh)."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent.parent
HERE = ROOT / "tests" / "functional"
PYTHON = ROOT / ".venv-nemo-bridge" / "bin" / "python"
_LIST = """
import json, sys
from pathlib import Path
from tests.support.published_models import make_directories, rows_of
root = Path(sys.argv[1])
print(json.dumps(rows_of(root) if make_directories(root) else []))
"""


def make_environment() -> dict[str, str]:
    """The variables of a process in the environment, which is made where it is missing; else skips the test."""
    made = subprocess.run(["bash", "scripts/setup_nemo_bridge.sh"], cwd=ROOT, capture_output=True, text=True)
    if made.returncode:
        pytest.skip(f"scripts/setup_nemo_bridge.sh failed: {made.stderr.strip().splitlines()[-1:]}")
    path = os.pathsep.join(map(str, (ROOT, HERE, HERE / "te_stand_in")))
    kept = {name: value for name, value in os.environ.items() if name not in ("VIRTUAL_ENV", "PYTHONHOME")}
    return {**kept, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONWARNINGS": "ignore"}


def run(environment: dict[str, str], ranks: int, script: str, case: str, **arguments: Any) -> None:
    """Runs the function `case` of `script` on `ranks` ranks, which torchrun starts; 0: without torchrun."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks else []
    command = [str(PYTHON), *torchrun, str(HERE / script), case, json.dumps(arguments)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=580)
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-6000:]}"


def published_rows(root: Path) -> list[dict[str, Any]]:
    """ROOT/MODEL/config.json of the published models; returns the rows of `nemo-oprd families`, else skips the test."""
    environment = make_environment()
    if "version = 3.11" in (PYTHON.parent.parent / "pyvenv.cfg").read_text():
        pytest.skip("Megatron-Bridge 0.3 (Python 3.11) has fewer families")
    command = [str(PYTHON), "-W", "ignore", "-c", _LIST, str(root)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=580)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    if not found:
        pytest.skip("the wheel aiconfigurator-core is not installed in .venv-nemo-bridge")
    return found
