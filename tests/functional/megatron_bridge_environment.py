"""Runs functions of this directory's modules in Megatron-Bridge's environment (scripts/setup_nemo_bridge.sh)."""

from __future__ import annotations

import atexit
import json
import os
import select
import signal
import subprocess
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent.parent
HERE = ROOT / "tests" / "functional"
PYTHON = ROOT / ".venv-nemo-bridge" / "bin" / "python"
TIMEOUT_S = 580
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
    other = ("VIRTUAL_ENV", "PYTHONHOME", "PYTEST_CURRENT_TEST")
    kept = {name: value for name, value in os.environ.items() if name not in other}
    # compiling Megatron's small functions took a third of a training case; test_toy_families.py still compiles them
    own = {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONWARNINGS": "ignore"}
    return {**kept, **own, "TORCHDYNAMO_DISABLE": "1"}


class Host:
    """A process of bridge_host.py, with an environment of its own; it ends with this one, at the latest."""

    def __init__(self, environment: dict[str, str]) -> None:
        command = [str(PYTHON), str(HERE / "bridge_host.py")]
        self._log = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115 - open as long as the process
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": self._log}
        self._process = subprocess.Popen(command, cwd=ROOT, env=environment, text=True, start_new_session=True, **pipes)

    def run(self, ranks: int, script: Path, arguments: list[str]) -> tuple[int, str]:
        """Returns the exit status and what was printed."""
        assert self._process.stdin is not None and self._process.stdout is not None
        with tempfile.TemporaryDirectory() as folder:
            output = Path(folder) / "output"
            asked = {"ranks": ranks, "script": str(script), "arguments": arguments, "output": str(output)}
            self._process.stdin.write(json.dumps(asked) + "\n")
            self._process.stdin.flush()
            ready, _, _ = select.select([self._process.stdout], [], [], TIMEOUT_S)
            answer = self._process.stdout.readline() if ready else ""
            printed = output.read_text(errors="replace") if output.exists() else ""
        if answer:
            return json.loads(answer), printed
        self.close()  # the next call starts another one
        self._log.seek(0)
        why = f"{self._log.read()[-4000:]}\nit ended" if ready else f"no answer within {TIMEOUT_S} s"
        return 1, f"{printed}\n{why}"

    def is_alive(self) -> bool:
        return self._process.poll() is None

    def close(self) -> None:
        """Ends the process and its ranks."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


_hosts: dict[frozenset[tuple[str, str]], Host] = {}


def run(environment: dict[str, str], ranks: int, script: str, case: str, **arguments: Any) -> None:
    """Runs the function `case` of `script` on `ranks` ranks; 0: in a process that is no rank.

    Their processes are forks of one that has imported Megatron-Bridge, because that takes 20 seconds.
    """
    key = frozenset(environment.items())
    if key not in _hosts or not _hosts[key].is_alive():
        _hosts[key] = Host(environment)
        atexit.register(_hosts[key].close)
    status, printed = _hosts[key].run(ranks, HERE / script, [case, json.dumps(arguments)])
    assert status == 0, printed[-8000:]


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
