"""The teacher's side of a bridge, as a trainer hands it to a server: a file of numbers in the run's own folder.

The file holds float32 numbers (little endian), one map after the other: the mean [D], then the basis [R, D], row by
row. A server applies a map as (h - mean) basis^T, so R numbers per row leave it instead of D. The digest covers all
that a projection depends on, and names the bridge in asks and in the headers of their answers.

The trainer, the server and the tests' stand-in all import this module, so it needs the standard library alone.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

# Rows that are projected at a time, from the first one that is asked for. A row's neighbours, which change its
# rounding, are then those of its sequence, in whatever company, chunks and pieces the server computes it.
PROJECTED_ROWS = 1024
_FLOAT_BYTES = 4


@dataclass(frozen=True)
class BridgeFile:
    """Where the maps are, and what they are.

    Attributes:
        digest: see `bridge_digest`.
        rank, width: R and D.
        layers: of each map, the layer whose states it projects, numbered as in an `Ask`.
    """

    path: str
    digest: str
    rank: int
    width: int
    layers: list[int]

    @property
    def floats_per_map(self) -> int:
        """Numbers of one map in the file."""
        return self.width * (1 + self.rank)

    @property
    def size(self) -> int:
        """Bytes of the file."""
        return len(self.layers) * self.floats_per_map * _FLOAT_BYTES

    def read(self, opened: int) -> bytearray:
        """The numbers, from the file's descriptor, which is closed.

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
    """Digest (32 hexadecimal digits) of maps whose numbers are in the buffers `parts`, one after the other."""
    digest = hashlib.blake2b(json.dumps([rank, width, [*layers]]).encode(), digest_size=16)
    for part in parts:
        digest.update(part)
    return digest.hexdigest()
