"""Runs a function in a process that is forked off a part, which must not have touched CUDA yet."""

from __future__ import annotations

import os
import pickle
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")


class ForkedError(RuntimeError):
    """A forked function raised an error, whose traceback is in the part's log, or its process died."""


def run_forked(function: Callable[[], T]) -> T:
    """What `function` returns in a process of its own.

    Raises:
        ForkedError: the function raised an error.
    """
    return run_all_forked([function])[0]


def run_all_forked(functions: Sequence[Callable[[], T]]) -> list[T]:
    """What the functions return, each in a process of its own, at the same time.

    Raises:
        ForkedError: a function raised an error; the others have ended by then.
    """
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder) / str(number) for number in range(len(functions))]
        processes = [_fork(function, file) for function, file in zip(functions, files, strict=True)]
        codes = [os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) for process in processes]
        found, errors = [], []
        for number, (code, file) in enumerate(zip(codes, files, strict=True)):
            died = True, f"process {number} ended with {code}"
            is_error, value = pickle.loads(file.read_bytes()) if file.exists() else died
            (errors if is_error else found).append(value)
    if errors:
        raise ForkedError("; ".join(dict.fromkeys(errors)))
    return found


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
    file.write_bytes(pickle.dumps(result))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
