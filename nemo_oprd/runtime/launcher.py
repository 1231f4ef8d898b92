"""Limits `torchrun`'s summary of a failed job to the error of the rank that reports it, without its neighbours.

torchrun reads the file that each rank writes its error to, and lists every rank of its machine whose exit code isn't 0,
in eight lines each. So the rank that reports an error writes its line into that file, and its neighbours, which end
because of it, exit with code 0; the launcher exits with 1 because of that rank. Without torchrun nothing here has an
effect. Imports only the standard library.
"""

from __future__ import annotations

import json
import os
import time
from contextlib import suppress
from pathlib import Path

# how long the reporting rank waits for its neighbours to exit: torchrun warns of each that it must end
NEIGHBOURS_LEAVE_S = 2.0
_LOOK_EVERY_S = 0.05
_LEFT = "left"  # a file beside the error file of a rank that has exited


class NeighbourFailed(Exception):  # noqa: N818 - not an error of this rank
    """Another rank of this machine has reported an error, which ends the job."""


def report(message: str) -> None:
    """Writes `message` into torchrun's error file of this rank, for the summary at the end of the job."""
    if (file := _error_file()) is None:
        return
    # the summary shows "py_callstack"; other readers of the file, such as schedulers, take "message"
    more = {"timestamp": str(int(time.time())), "py_callstack": message}
    partial = file.with_suffix(".partial")
    with suppress(OSError):  # the reason is on stderr, and a full disk must not hide it
        partial.write_text(json.dumps({"message": {"message": message, "extraInfo": more}}))
        partial.replace(file)


def neighbour_reported(within_s: float = 0.0) -> bool:
    """Returns whether a neighbour writes an error file within `within_s` seconds; sleeps that long without torchrun."""
    file, deadline = _error_file(), time.monotonic() + within_s
    while True:
        others = set() if file is None else set(file.parent.parent.glob(f"*/{file.name}")) - {file}
        left_s = deadline - time.monotonic()
        if others or left_s <= 0:
            return bool(others)
        time.sleep(left_s if file is None else min(_LOOK_EVERY_S, left_s))


def exit_code_after_neighbour() -> int:
    """Returns the exit code after another rank's failure: 0 if torchrun shows a neighbour's error, 1 otherwise.

    The caller ends the process right afterwards.
    """
    file = _error_file()
    if file is None or not neighbour_reported():
        return 1
    with suppress(OSError):
        file.with_name(_LEFT).touch()
    return 0


def wait_for_neighbours() -> None:
    """Waits, after `report`, until the neighbours have exited, at most `NEIGHBOURS_LEAVE_S` seconds."""
    file, deadline = _error_file(), time.monotonic() + NEIGHBOURS_LEAVE_S
    if file is None:
        return
    neighbours = int(os.environ.get("LOCAL_WORLD_SIZE", "1")) - 1
    while len([*file.parent.parent.glob(f"*/{_LEFT}")]) < neighbours and time.monotonic() < deadline:
        time.sleep(_LOOK_EVERY_S)


def _error_file() -> Path | None:
    """Returns this rank's error file, in a folder beside those of its neighbours; None without torchrun."""
    name = os.environ.get("TORCHELASTIC_ERROR_FILE")
    return Path(name) if name and name != os.devnull else None
