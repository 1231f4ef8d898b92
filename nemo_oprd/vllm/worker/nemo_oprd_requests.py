"""The rows that a trainer requests from a teacher's server, and the file with the answer; see `nemo_oprd_teacher.py`.

A `StateRequest` travels as JSON in a request's `extra_args`. Its answer is a file in the run's own folder, which this
user alone can enter: the length of a header (8 bytes, little endian), the header (JSON), and the values. The
server writes it under another name and then links it to its own, so that it is whole or absent. The trainer, the server
and the tests' stand-in all import this module, so it needs the standard library alone.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import stat
import time
from array import array
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO

# the key of a `StateRequest` in `extra_args`
STATE_REQUEST = "nemo_oprd_ask"
# variable in a server's environment: the number of its start, a random one for servers that several runs share
GENERATION = "NEMO_OPRD_GENERATION"
NAME = re.compile(r"[0-9a-f]{32}")
# calls of a server that several runs share: STATES/NAME?bytes=N, with a state request, whose HTTP answer is the file
# of that name; ROOM, which returns the bytes of answers that the server can hold
STATES, ROOM = "/nemo_oprd/states", "/nemo_oprd/room"
# values per row in place of a final state: log-probability of a token, entropy
LOGPROB_COLUMNS = 2
ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_PARTIAL = ".part"
_LENGTH_BYTES = 8
_MOST_HEADER_BYTES = 1 << 26
# length of a stretch of a weight file, and the bytes of it that the digest reads: other weights differ everywhere
_STRETCH_BYTES, _READ_BYTES = 64 << 20, 64 << 10


@dataclass(frozen=True)
class StateRequest:
    """The rows of one sequence that a trainer requests.

    Attributes:
        name: of the file with the answer, 32 hexadecimal digits.
        layers: ascending; 1..L is the residual stream after that many blocks, L + 1 the state after the final norm.
        rows: positions in the sequence, ascending, whose states of all `layers` to return.
        final_rows: positions, ascending, whose states after the final norm to return for an output loss.
        tokens: one id per final row; the answer then has its log-probability and the entropy in place of the state.
        vocabulary, gaps, temperature: parameters of that distribution: over the ids below `vocabulary` without those
            in `gaps`, runs of ids (first, end), of the logits divided by `temperature`.
        chunk: rows whose logits are in memory at a time.
        bridge: digest of the maps that project the states (`nemo_oprd_bridge.py`), empty without a projection. Then
            `layers` are those of the maps, one by one, in their order.
        rank: values per row of a projection, 0 without one.
    """

    name: str
    layers: list[int]
    rows: list[int]
    final_rows: list[int]
    tokens: list[int] | None = None
    vocabulary: int = 0
    temperature: float = 1.0
    chunk: int = 1
    bridge: str = ""
    rank: int = 0
    gaps: list[list[int]] = field(default_factory=list)

    def text(self) -> str:
        """Returns the text that `parse` reads. Without gaps, servers of earlier versions read it, too."""
        fields = {name: value for name, value in asdict(self).items() if name != "gaps" or value}
        return json.dumps(fields, separators=(",", ":"))

    @staticmethod
    def parse(text: str, length: int, depth: int, vocabulary: int) -> StateRequest:
        """Parses the state request in a request of `length` tokens to a model of `depth` layers and `vocabulary` ids.

        Raises:
            ValueError: the text is no valid state request.
        """
        given = json.loads(text)
        if not isinstance(given, dict) or {*given, "gaps"} != set(StateRequest.__dataclass_fields__):
            raise ValueError("expected an object with the fields of StateRequest")
        asked = StateRequest(**given)
        if not isinstance(asked.name, str) or not NAME.fullmatch(asked.name):
            raise ValueError(f"name={asked.name!r:.60}; expected 32 hexadecimal digits")
        if (
            not isinstance(asked.bridge, str)
            or type(asked.rank) is not int
            or asked.rank < 0
            or bool(asked.bridge) != bool(asked.rank)
        ):
            raise ValueError(
                f"bridge={asked.bridge!r:.60}, rank={asked.rank!r:.60}; expected a digest and a size, or none"
            )
        layers = asked.layers
        if asked.bridge and _are_integers(layers):
            layers = sorted({*layers})  # several layers of the student may match one of the teacher
        for what, values, low, high in (
            ("layers", layers, 1, depth + 1),
            ("rows", asked.rows, 0, length - 1),
            ("final_rows", asked.final_rows, 0, length - 1),
        ):
            if not _ascends(values) or (values and not low <= values[0] <= values[-1] <= high):
                raise ValueError(f"{what}={values!r:.60}; expected ascending whole numbers in {low}..{high}")
        if asked.tokens is not None:
            drawn = _are_integers(asked.tokens) and len(asked.tokens) == len(asked.final_rows)
            if not drawn or not _are_integers([asked.vocabulary, asked.chunk]) or asked.chunk < 1:
                raise ValueError("tokens: expected one id per final row, and whole numbers vocabulary and chunk")
            if not 0 < asked.vocabulary <= vocabulary:
                raise ValueError(f"vocabulary={asked.vocabulary}; expected at most {vocabulary}, the model's")
            if not all(0 <= token < asked.vocabulary for token in asked.tokens):
                raise ValueError(f"tokens: expected ids below vocabulary={asked.vocabulary}")
            asked._check_gaps()
            if not isinstance(asked.temperature, int | float) or not 0 < asked.temperature < math.inf:
                raise ValueError(f"temperature={asked.temperature!r:.60}; expected a number above 0")
        return asked

    def _check_gaps(self) -> None:
        """Raises ValueError unless the gaps are ascending runs of ids that hold no drawn token."""
        gaps = self.gaps
        if not isinstance(gaps, list) or not all(isinstance(gap, list) and len(gap) == 2 for gap in gaps):
            raise ValueError(f"gaps={gaps!r:.60}; expected pairs of ids")
        bounds = [bound for gap in gaps for bound in gap]
        if not _ascends(bounds) or (bounds and not 0 <= bounds[0] <= bounds[-1] < self.vocabulary):
            raise ValueError(f"gaps={gaps!r:.60}; expected ascending runs of ids below vocabulary={self.vocabulary}")
        if any(start <= token < end for token in self.tokens or () for start, end in gaps):
            raise ValueError(f"tokens: expected ids outside gaps={gaps!r:.60}")

    def header(self, ids: Sequence[int], width: int, dtype: str, generation: int) -> dict[str, Any]:
        """Makes the header of the whole answer for a sequence of `ids`, of a model of `width` that computes in `dtype`.

        Projected states are float32, whatever `dtype` is.
        """
        asked = hashlib.blake2b(self.text().encode(), digest_size=16)
        asked.update(array("q", ids).tobytes())
        return {
            "asked": asked.hexdigest(),
            "dtype": dtype,
            "bridge": self.bridge,
            "states": [len(self.layers), len(self.rows), self.rank or width],
            "final": [len(self.final_rows), width if self.tokens is None else LOGPROB_COLUMNS],
            "filled": len(self.layers) * len(self.rows) + len(self.final_rows),
            "generation": generation,
        }

    def sizes(self, width: int, dtype: str) -> tuple[int, int]:
        """Returns (bytes of the states, bytes of the final rows, which follow them)."""
        item = ITEM_BYTES[dtype]
        final = width * item if self.tokens is None else LOGPROB_COLUMNS * ITEM_BYTES["float32"]
        row = self.rank * ITEM_BYTES["float32"] if self.bridge else width * item
        return len(self.layers) * len(self.rows) * row, len(self.final_rows) * final


def _are_integers(values: Any) -> bool:
    return isinstance(values, list) and all(type(value) is int for value in values)


def _ascends(values: Any) -> bool:
    return _are_integers(values) and all(one < other for one, other in pairwise(values))


class AnswerFolder:
    """The folder of a run for answers.

    Raises:
        ValueError: the path is a link, belongs to another user, or others can enter it.
        OSError: the folder does not exist.
    """

    def __init__(self, path: str) -> None:
        self._path, self._folder = path, os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        found = os.fstat(self._folder)
        if found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & 0o077:
            raise ValueError(f"{path} can be entered by others; expected a folder of this user with mode 0700")

    def write(self, name: str, header: dict[str, Any], *values: Any) -> None:
        """Writes an answer whose values are in buffers.

        Raises:
            ValueError: `name` is no name of an answer.
            OSError: an answer of that name exists, or the folder has no room; the partial file is removed.
        """
        if not NAME.fullmatch(name):
            raise ValueError(f"{name!r:.60} is no name of an answer")
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        file = os.open(name + _PARTIAL, flags, 0o600, dir_fd=self._folder)
        try:
            with os.fdopen(file, "wb") as stream:
                text = json.dumps(header).encode()
                stream.write(len(text).to_bytes(_LENGTH_BYTES, "little") + text)
                for part in values:
                    stream.write(part)
            # unlike a rename, a link replaces nothing
            os.link(name + _PARTIAL, name, src_dir_fd=self._folder, dst_dir_fd=self._folder)
        finally:
            os.unlink(name + _PARTIAL, dir_fd=self._folder)

    def open(self, name: str) -> int | None:
        """Opens an answer for reading and removes its name; returns the descriptor, or None if there is no answer."""
        try:
            file = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=self._folder)
        except FileNotFoundError:
            return None
        with suppress(FileNotFoundError):  # another rank takes it at the same time
            os.unlink(name, dir_fd=self._folder)
        return file

    def take(self, name: str) -> tuple[dict[str, Any], bytearray] | None:
        """Reads and removes an answer; returns (header, values), or None if there is no answer."""
        file = self.open(name)
        if file is None:
            return None
        with os.fdopen(file, "rb") as stream:
            return read_answer(stream, os.fstat(file).st_size, f"{self._path}/{name}")

    def clear(self, older_s: float = 0.0) -> None:
        """Removes all answers, including unfinished ones of a dead server.

        Args:
            older_s: the least age of an answer to remove, in seconds since its last change.
        """
        for name in os.listdir(self._folder):
            if NAME.fullmatch(name.removesuffix(_PARTIAL)):
                with suppress(FileNotFoundError):  # taken meanwhile
                    begun = os.stat(name, dir_fd=self._folder, follow_symlinks=False).st_ctime
                    if time.time() - begun >= older_s:
                        os.unlink(name, dir_fd=self._folder)

    def room(self) -> int:
        """Returns the free bytes of the folder's file system."""
        free = os.fstatvfs(self._folder)
        return free.f_bavail * free.f_frsize

    def close(self) -> None:
        """Closes the folder."""
        os.close(self._folder)


def read_answer(stream: BinaryIO, size: int, where: str) -> tuple[dict[str, Any], bytearray]:
    """Reads (header, values) of an answer of `size` bytes.

    Raises:
        ValueError: the content, named `where` in the message, is no answer.
    """
    length = int.from_bytes(stream.read(_LENGTH_BYTES), "little")
    left = size - _LENGTH_BYTES - length
    if not 0 < length <= _MOST_HEADER_BYTES or left < 0:
        raise ValueError(f"{where} has no header; expected an answer of a server of this run")
    header, values = json.loads(stream.read(length)), bytearray(left)
    stream.readinto(values)  # type: ignore[attr-defined]
    return header, values


def weights_digest(directory: str) -> str:
    """Computes a digest of a model's config.json and weight files: names, sizes, the first bytes of each stretch."""
    digest = hashlib.blake2b(digest_size=16)
    for file in sorted([*Path(directory).glob("*.safetensors"), *Path(directory).glob("config.json")]):
        with file.open("rb") as stream:
            size = os.fstat(stream.fileno()).st_size
            digest.update(f"{file.name} {size}\n".encode())
            for start in range(0, size, _STRETCH_BYTES):
                stream.seek(start)
                digest.update(stream.read(_READ_BYTES))
    return digest.hexdigest()
