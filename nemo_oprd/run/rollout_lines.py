"""A separate process that writes rollouts as JSON lines, so that the run makes no Python object for each token.

Reads rollouts from stdin to its end and writes one line for each to stdout. A rollout is a line of JSON, [record,
{field: [type code, shape]}], followed by the bytes of these fields' arrays in this order; `record` has all fields in
the written order. `step_recorder.py` runs this file as a script of its own and opens its stdout. If the run dies,
stdin ends in the middle of a rollout, and this process exits. After a disk error it reports the error's number.

Imports the standard library alone.
"""

from __future__ import annotations

import json
import math
import struct
import sys
from typing import Any, BinaryIO


def write_lines(source: BinaryIO, target: BinaryIO) -> None:
    """Converts all rollouts. Raises EOFError if the last one is incomplete, OSError if a line can't be written."""
    while line := source.readline():
        record, arrays = json.loads(line)
        for name, (code, shape) in arrays.items():
            record[name] = _numbers(source, code, shape)
        target.write((json.dumps(record, ensure_ascii=False) + "\n").encode())
    target.flush()


def _numbers(source: BinaryIO, code: str, shape: list[int]) -> list[Any]:
    size = math.prod(shape) * struct.calcsize(code)
    data = source.read(size)
    if len(data) != size:
        raise EOFError(f"{len(data)} bytes of an array of {size}")
    return list(memoryview(data).cast(code, shape).tolist()) if size else []  # type: ignore[call-overload]


if __name__ == "__main__":
    try:
        write_lines(sys.stdin.buffer, sys.stdout.buffer)
    except OSError as error:
        sys.stderr.write(str(error.errno))
        sys.stderr.flush()
        sys.stdout = None  # type: ignore[assignment]  # what is left in its buffer can't be written either
        raise SystemExit(1) from None
