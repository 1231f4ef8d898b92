"""Channel between a controller and its client process: JSON messages, open files, and responses in shared segments."""

from __future__ import annotations

import json
import mmap
import os
import socket
import struct
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np

# Segments of shared memory, which a client process fills with responses and its controller maps.
#
# A segment holds one response after another, each as its ids, int32 [tokens], and then their log-probabilities, float32
# [tokens]. `memfd_create` makes the files without a name, so none is left over. The size of /dev/shm does not limit
# them, and the kernel frees each with its last mapping.


# a segment takes memory only as far as it is filled
SEGMENT_BYTES = 32 << 20


class SegmentWriter:
    """Appends responses. It calls `announce` with the descriptor of every new segment, and closes that one later."""

    def __init__(self, announce: Callable[[int], None]) -> None:
        self._announce = announce
        self._file, self._count, self._used, self._size = -1, 0, 0, 0

    def write(self, ids: np.ndarray, logprobs: np.ndarray) -> tuple[int, int]:
        """Writes a response; returns (index of the segment, offset in bytes)."""
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
        """Closes the last segment; its mappings stay valid."""
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
        """Returns (ids, log-probabilities) as views, which keep the segment's memory."""
        data = self._mapped[segment]
        ids = np.frombuffer(data, np.int32, tokens, offset)
        return ids, np.frombuffer(data, np.float32, tokens, offset + ids.nbytes)


_LENGTH = struct.Struct("<I")
_MOST_FILES = 16


class Channel:
    """One end of the channel. Any thread may send; one thread receives."""

    def __init__(self, end: socket.socket) -> None:
        self._socket, self._lock = end, threading.Lock()
        self._received, self._files = bytearray(), deque[int]()

    def send(self, message: dict[str, Any], file: int | None = None) -> None:
        """Sends a message, with a file of which the other end gets its own descriptor.

        Raises:
            OSError: the other end is closed.
        """
        data = json.dumps(message, separators=(",", ":")).encode()
        data = _LENGTH.pack(len(data)) + data
        with self._lock:
            sent = 0 if file is None else socket.send_fds(self._socket, [data], [file])
            self._socket.sendall(data[sent:])

    def receive(self) -> dict[str, Any] | None:
        """Returns the next message; None once the other end is closed."""
        while (message := self._next()) is None:
            try:
                data, files, *_ = socket.recv_fds(self._socket, 1 << 16, _MOST_FILES, socket.MSG_CMSG_CLOEXEC)
            except ConnectionResetError:
                return None
            if not data:
                return None
            self._received += data
            self._files.extend(files)
        return message

    def _next(self) -> dict[str, Any] | None:
        if len(self._received) < _LENGTH.size:
            return None
        end = _LENGTH.size + _LENGTH.unpack_from(self._received)[0]
        if len(self._received) < end:
            return None
        message = json.loads(self._received[_LENGTH.size : end])
        del self._received[:end]
        return message

    def take_file(self) -> int:
        """Returns the descriptor of the file that came with the last received message; the caller closes it."""
        return self._files.popleft()

    def close(self) -> None:
        """Closes this end and the received files that the caller has not taken."""
        self._socket.close()
        while self._files:
            os.close(self._files.popleft())
