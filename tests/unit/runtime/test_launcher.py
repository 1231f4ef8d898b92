"""What torchrun shows of a job whose ranks fail: torchelastic's own reader on the files that the ranks leave."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from nemo_oprd.runtime import launcher

ROOT = Path(__file__).parents[3]
MISTAKE = "train.lr=-1.0: expected more than 0; choose a larger number"
FAIL = """
from nemo_oprd.runtime.exits import run_as_command
def work():
    raise {error}
run_as_command(work)
"""


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    """The error files of three ranks of a machine, where torchrun puts them."""
    folders = [tmp_path / "attempt_0" / str(rank) for rank in range(3)]
    for folder in folders:
        folder.mkdir(parents=True)
    return [folder / "error.json" for folder in folders]


def start(files: list[Path], rank: int, error: str) -> subprocess.Popen[str]:
    """A rank that finds an error."""
    of_rank = {"RANK": str(rank), "LOCAL_WORLD_SIZE": "3", "TORCHELASTIC_ERROR_FILE": str(files[rank])}
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **of_rank}
    command = [sys.executable, "-c", FAIL.format(error=error)]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


@pytest.mark.parametrize(
    ("error", "code", "shown"),
    [(f"ValueError({MISTAKE!r})", 2, MISTAKE), ("RuntimeError('a bug')", 1, "RuntimeError: a bug")],
)
def test_one_rank_speaks_and_is_listed(files: list[Path], error: str, code: int, shown: str) -> None:
    """The others end as soon as it has spoken, and with the one code that torchrun does not list."""
    began = time.monotonic()
    others = [start(files, rank, "ValueError('found by another rank, too')") for rank in (1, 2)]
    first = start(files, 0, error)
    said = [rank.communicate(timeout=60)[0] for rank in (first, *others)]
    assert time.monotonic() - began < 20  # of the 30 s that a rank waits for the first one to speak
    assert [rank.returncode for rank in (first, *others)] == [code, 0, 0]
    assert said[0].splitlines()[-1] == (f"error: {shown}" if code == 2 else shown) and said[1:] == ["", ""]
    failure = ProcessFailure(local_rank=0, pid=1, exitcode=code, error_file=str(files[0]))
    summary = str(ChildFailedError("nemo_oprd", {0: failure}))
    assert f"  traceback : {shown}\n" in summary and len(summary.splitlines()) <= 17


def test_a_rank_without_torchrun_keeps_its_code(monkeypatch: pytest.MonkeyPatch) -> None:
    for value in ("", os.devnull):  # torchrun's own ways to say that there is no file
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", value)
        launcher.report(MISTAKE)
        assert not launcher.neighbour_reported() and launcher.exit_code_after_neighbour() == 1
        launcher.wait_for_neighbours()


def test_ranks_of_another_machine_keep_their_codes(files: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Their torchrun shows nothing of the failure, so it must not take their end for a success."""
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(files[1]))
    launcher.report("another error")  # its own file is not that of a neighbour
    assert launcher.exit_code_after_neighbour() == 1
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(files[2]))
    assert launcher.exit_code_after_neighbour() == 0
