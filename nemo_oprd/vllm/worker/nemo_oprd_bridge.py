"""The file in which a trainer hands the teacher's side of a bridge to a server, in the run's own folder.

The file holds float32 numbers (little endian), one map after the other: the mean [D], then the basis [R, D], row by
row. A server applies a map as (h - mean) basis^T, so it sends R numbers per row instead of D. The digest covers all
that a projection depends on, and names the bridge in state requests and in the headers of their answers.

The trainer, the server and the tests' stand-in all import this module, so it needs the standard library alone.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

# Rows that a server projects at a time, from the first requested one. A row's neighbours, which change its rounding,
# are then those of its sequence, whatever other sequences, chunks and pieces the server computes with it.
PROJECTED_ROWS = 1024
_FLOAT_BYTES = 4


@dataclass(frozen=True)
class BridgeFile:
    """Description of the file: its path and the properties of its maps.

    Attributes:
        digest: see `bridge_digest`.
        rank, width: R and D.
        layers: for each map, the layer whose states it projects, numbered as in a `StateRequest`.
    """

    path: str
    digest: str
    rank: int
    width: int
    layers: list[int]

    @property
    def floats_per_map(self) -> int:
        """The number of values of one map."""
        return self.width * (1 + self.rank)

    @property
    def size(self) -> int:
        """Bytes of the file."""
        return len(self.layers) * self.floats_per_map * _FLOAT_BYTES

    def read(self, opened: int) -> bytearray:
        """Reads the numbers from the file's descriptor, and closes it.

        Raises:
            ValueError: the file holds another bridge.
        """
        with os.fdopen(opened, "rb") as stream:
            values = bytearray(stream.read())
        found = bridge_digest(self.rank, self.width, self.layers, [values])
        if found != self.digest:
            raise ValueError(f"{self.path} holds bridge {found}; expected {self.digest}: another trainer's, perhaps")
        return values


def bridge_digest(rank: int, width: int, layers: Sequence[int], parts: Sequence[Any]) -> str:
    """Computes the digest (32 hexadecimal digits) of maps, whose numbers are in the buffers `parts`, in order."""
    digest = hashlib.blake2b(json.dumps([rank, width, [*layers]]).encode(), digest_size=16)
    for part in parts:
        digest.update(part)
    return digest.hexdigest()
