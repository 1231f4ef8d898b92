"""Runs a server in a process group of its own, and ends the group and removes its shared memory afterwards.

`python nemo_oprd_guard.py --remove DIRECTORY --ignore SIGNALS -- COMMAND...`, started in a new session with its stdin
connected to the parent, the process that uses the server. When the command ends or stdin is closed, which happens
however the parent ends, the guard ends the group and removes the shared memory that its processes had mapped. If stdin
was closed without a byte, the guard also removes `DIRECTORY`, which belongs to the parent. A parent that only ends the
server writes a byte before.

If this guard is killed, `nemo_oprd_serve.py` ends the group, and the parent calls `clean_up`. Processes
that were all killed at once leave no record of their mappings; the names of the semaphores and the shared memory that
Python made for them begin with the value of NEMO_OPRD_SHARED_NAMES, and the parent finds them by that.

The module imports the standard library alone, because the guard starts before anything else.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

GRACE_S = 10.0
SHARED_MEMORY = "/dev/shm/"
SHARED_NAMES = "NEMO_OPRD_SHARED_NAMES"


def start(command: list[str], directory: Path, ignored: Iterable[int], **process: Any) -> subprocess.Popen:
    """Starts a guard that runs `command`, and removes `directory` if this process ends; `process`: see `Popen`.

    Only this user can open the command's sockets and temporary files. The guard ignores the signals `ignored`, those to
    a whole job, which this process handles.
    """
    guarded = guarded_command(command, directory, ignored)
    return subprocess.Popen(guarded, stdin=subprocess.PIPE, start_new_session=True, umask=0o077, **process)


def guarded_command(command: list[str], directory: Path, ignored: Iterable[int]) -> list[str]:
    """Returns the command line of a guard."""
    numbers = ",".join(str(int(number)) for number in ignored)
    return [sys.executable, __file__, "--remove", str(directory), "--ignore", numbers, "--", *command]


def group_members(group: int) -> list[int]:
    """Returns the process ids of a group, without processes that have ended and wait for their parent."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # ended meanwhile
            fields = stat.read_text(errors="replace").rsplit(")", 1)[1].split()  # a name may hold any bytes
            if int(fields[2]) == group and fields[0] not in "ZX":
                found.append(int(stat.parent.name))
    return found


def mapped_shared_memory(processes: list[int]) -> set[str]:
    """Lists the files in shared memory that processes have mapped."""
    found = set()
    for process in processes:
        with suppress(OSError):
            maps = os.fsdecode(Path(f"/proc/{process}/maps").read_bytes()).splitlines()
            found |= {line[line.index(SHARED_MEMORY) :] for line in maps if SHARED_MEMORY in line}
    return {path for path in found if not path.endswith(" (deleted)")}


def named_shared_memory(names: str) -> set[str]:
    """Lists the files in shared memory whose names begin with `names`; none if `names` is empty."""
    folder = Path(SHARED_MEMORY)
    return {str(path) for start in ("", "sem.") for path in folder.glob(f"{start}{names}*")} if names else set()


def clean_up(group: int, shared_memory: set[str], keep: str | None = None, names: str = "") -> None:
    """Kills what is left of a group; removes the files in shared memory that its processes have mapped or made.

    `shared_memory`: files mapped earlier; `names`: see `named_shared_memory`. Files in the folder `keep` stay.
    """
    shared_memory = shared_memory | mapped_shared_memory(group_members(group))
    if keep is not None:
        shared_memory = {path for path in shared_memory if not path.startswith(f"{keep}/")}
    deadline = time.monotonic() + GRACE_S
    while (left := {*group_members(group)} - {os.getpid()}) and time.monotonic() < deadline:
        for process in left:
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        time.sleep(0.02)
    for path in shared_memory | named_shared_memory(names):
        Path(path).unlink(missing_ok=True)


def main() -> None:
    """Runs the guard; see the module's docstring."""
    _, directory, _, ignored, _, *command = sys.argv[1:]
    assert os.getpgrp() == os.getpid(), "start this in a new session, see `start`"
    for number in ignored.split(","):
        # only closing stdin ends this process; a handler, unlike SIG_IGN, is not inherited by the command
        signal.signal(int(number), lambda *_: None)
    environment = {**os.environ, "NEMO_OPRD_GUARD": str(os.getpid())}
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL, env=environment, restore_signals=True)
    over, parent_gone = threading.Event(), threading.Event()

    def wait_for_parent() -> None:
        if not os.read(0, 1):
            parent_gone.set()
        over.set()

    def wait_for_command() -> None:
        child.wait()
        over.set()

    threading.Thread(target=wait_for_parent, daemon=True).start()
    threading.Thread(target=wait_for_command, daemon=True).start()
    shared_memory: set[str] = set()
    while not over.wait(1.0):
        shared_memory |= mapped_shared_memory(group_members(os.getpid()))
    shared_memory |= mapped_shared_memory(group_members(os.getpid()))  # before a process with some of it ends
    if child.poll() is None:
        child.send_signal(signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            child.wait(GRACE_S)
    clean_up(os.getpid(), shared_memory, directory, os.environ.get(SHARED_NAMES, ""))
    if parent_gone.is_set():
        shutil.rmtree(directory, ignore_errors=True)


if __name__ == "__main__":
    main()
