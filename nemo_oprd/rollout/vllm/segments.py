"""Responses in memory that a client process fills and its controller maps: files without a name, so none can be left.

A segment holds one response after another, each as its ids, int32 [tokens], and then their log-probabilities, float32
[tokens]. The files are made by `memfd_create`, for which the size of /dev/shm is no limit, and end with their last
mapping.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable

import numpy as np

# a segment takes memory only as far as it is filled
SEGMENT_BYTES = 32 << 20


class SegmentWriter:
    """Appends responses. `announce` is called with the descriptor of every new segment, which closes with the next."""

    def __init__(self, announce: Callable[[int], None]) -> None:
        self._announce = announce
        self._file, self._count, self._used, self._size = -1, 0, 0, 0

    def write(self, ids: np.ndarray, logprobs: np.ndarray) -> tuple[int, int]:
        """Where a response is: (index of the segment, offset in bytes)."""
        size = ids.nbytes + logprobs.nbytes
        if self._used + size > self._size:
            self._begin(max(size, SEGMENT_BYTES))
        written = os.pwritev(self._file, [ids.data, logprobs.data], self._used)
        if written != size:
            raise OSError(f"{written} of {size} bytes of a response could be written to memory")
        offset, self._used = self._used, self._used + size
        return self._count - 1, offset

    def _begin(self, size: int) -> None:
        self.close()
        self._file = os.memfd_create("nemo_oprd_responses", os.MFD_CLOEXEC)
        os.ftruncate(self._file, size)
        self._used, self._size = 0, size
        self._count += 1
        self._announce(self._file)

    def close(self) -> None:
        """Closes the last segment; whoever has mapped it keeps it."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


class SegmentReader:
    """The segments of a round, in their order, mapped by the controller."""

    def __init__(self) -> None:
        self._mapped: list[mmap.mmap] = []

    def add(self, file: int) -> None:
        """Maps the next segment and closes its descriptor."""
        self._mapped.append(mmap.mmap(file, 0, access=mmap.ACCESS_READ))
        os.close(file)

    def response(self, segment: int, offset: int, tokens: int) -> tuple[np.ndarray, np.ndarray]:
        """(ids, log-probabilities) as views, which keep the segment's memory."""
        data = self._mapped[segment]
        ids = np.frombuffer(data, np.int32, tokens, offset)
        return ids, np.frombuffer(data, np.float32, tokens, offset + ids.nbytes)
