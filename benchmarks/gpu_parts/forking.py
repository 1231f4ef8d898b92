"""Runs a function in a process that is forked off a part, which must not have touched CUDA yet."""

from __future__ import annotations

import math
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")
POLL_SECONDS = 0.02
# in which the others may still say what they have seen
GRACE_SECONDS = 5.0


class ForkedError(RuntimeError):
    """A forked function raised an error, whose traceback is in the part's log, or its process died."""


def run_forked(function: Callable[[], T], limit: float = math.inf) -> T:
    """What `function` returns in a process of its own, which is killed after `limit` seconds.

    Raises:
        ForkedError: the function raised an error, or did not end.
    """
    return run_all_forked([function], limit)[0]


def run_all_forked(functions: Sequence[Callable[[], T]], limit: float = math.inf) -> list[T]:
    """What the functions return, each in a process of its own, at the same time.

    Raises:
        ForkedError: a function raised an error, or did not end in `limit` seconds; then all of them are killed.
    """
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder) / str(number) for number in range(len(functions))]
        processes = [_fork(function, file) for function, file in zip(functions, files, strict=True)]
        codes = _wait(processes, files, time.monotonic() + limit)
        found: list[T] = []
        errors: list[str] = []
        for number, (code, file) in enumerate(zip(codes, files, strict=True)):
            if file.exists():
                is_error, value = pickle.loads(file.read_bytes())
                if is_error:
                    errors.append(value)
                else:
                    found.append(value)
            elif code is not None:
                errors.append(f"process {number} ended with {code}")
    if errors or len(found) < len(functions):
        raise ForkedError("; ".join(dict.fromkeys(errors)) or f"not done after {limit:.0f} s")
    return found


def _wait(processes: list[int], files: list[Path], deadline: float) -> list[int | None]:
    """Exit codes, in order; None of a process that is killed because it is late, or because another one has failed."""
    codes: dict[int, int | None] = {}
    while len(codes) < len(processes):
        for process, file in zip(processes, files, strict=True):
            ended, status = (0, 0) if process in codes else os.waitpid(process, os.WNOHANG)
            if ended:
                codes[process] = os.waitstatus_to_exitcode(status)
                failed = not file.exists() or pickle.loads(file.read_bytes())[0]
                if failed:
                    deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
        if time.monotonic() > deadline:
            for process in processes:
                if process not in codes:
                    os.kill(process, signal.SIGKILL)
                    os.waitpid(process, 0)
                    codes[process] = None
        time.sleep(POLL_SECONDS)
    return [codes[process] for process in processes]


def _fork(function: Callable[[], object], file: Path) -> int:
    sys.stdout.flush()
    process = os.fork()
    if process:
        return process
    try:
        result: tuple[bool, object] = (False, function())
    except BaseException as error:
        traceback.print_exc()
        first_line = str(error).strip().partition("\n")[0]
        result = (True, f"{type(error).__name__}: {first_line}")
    written = file.with_suffix(".part")
    written.write_bytes(pickle.dumps(result))
    written.replace(file)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
