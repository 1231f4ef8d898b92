"""Writes rollouts as JSON lines, aside: a thread sends arrays to a process, which makes the text and writes it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import numpy as np

from nemo_oprd.batch import weight_spans
from nemo_oprd.batch.types import Rollout
from nemo_oprd.runtime.aside import Aside
from nemo_oprd.runtime.files import replacing

_WRITER = Path(__file__).with_name("rollout_lines.py")
# type codes of the standard library, by those of numpy
_CODES = {"int32": "i", "float32": "f", "int16": "h", "bool": "B"}


@dataclass(frozen=True)
class RolloutFile:
    """A file to write: `columns` are further fields, a value per rollout."""

    path: Path
    rollouts: Sequence[Rollout]
    columns: Mapping[str, Sequence[Any]] = field(default_factory=dict)


class RolloutFiles:
    """Writes files as `rollout.replay.write_rollouts` does, byte for byte, while the run goes on.

    Args:
        decode: makes the field `response`; None: it stays as it is.
    """

    def __init__(self, decode: Callable[[np.ndarray], str] | None) -> None:
        self._decode = decode
        self._aside = Aside("files of rollouts")

    def write(self, files: list[RolloutFile]) -> None:
        """Starts writing, after the files of the previous call are complete. Raises OSError if one of those is not."""
        self._aside.finish()
        if files:
            self._aside.start(lambda: self._write(files))

    def finish(self, *, failed: bool = False) -> None:
        """Waits until all files are complete; `failed`: another error is on its way, see `Aside.abandon`."""
        (self._aside.abandon if failed else self._aside.finish)()

    def _write(self, files: list[RolloutFile]) -> None:
        for file in files:
            self._write_one(file)

    def _write_one(self, file: RolloutFile) -> None:
        file.path.parent.mkdir(parents=True, exist_ok=True)
        # not flushed to disk, because a file is written in every step
        with replacing(file.path, durable=False) as partial, partial.open("wb") as target:
            command = [sys.executable, "-I", str(_WRITER)]
            with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=target, stderr=subprocess.PIPE) as writer:
                assert writer.stdin is not None and writer.stderr is not None
                try:
                    with suppress(BrokenPipeError), writer.stdin:
                        for i, rollout in enumerate(file.rollouts):
                            _send(writer.stdin, self._record(rollout) | {k: v[i] for k, v in file.columns.items()})
                    said = writer.stderr.read().decode(errors="replace").strip()
                except BaseException:
                    writer.kill()
                    raise
            if said.isdigit():
                raise OSError(int(said), os.strerror(int(said)), str(file.path))
            if writer.returncode:
                reason = said.splitlines()[-1] if said else "it was killed"
                raise RuntimeError(
                    f"{file.path} could not be written, its writer ended with {writer.returncode}: {reason}"
                )

    def _record(self, rollout: Rollout) -> dict[str, Any]:
        text = {} if self._decode is None else {"response": self._decode(rollout.response_ids)}
        spans = {} if rollout.weight_versions is None else weight_spans.as_json(rollout.weight_versions)
        told = vars(rollout) | spans | text
        return {name: value for name, value in told.items() if value is not None}


def _send(writer: IO[bytes], record: dict[str, Any]) -> None:
    """Sends one rollout in the form of `rollout_lines.py`."""
    arrays = {name: value for name, value in record.items() if isinstance(value, np.ndarray)}
    types = {name: [_CODES[value.dtype.name], value.shape] for name, value in arrays.items()}
    writer.write(json.dumps([record | dict.fromkeys(arrays), types]).encode() + b"\n")
    for value in arrays.values():
        writer.write(np.ascontiguousarray(value).data.cast("B") if value.size else b"")
