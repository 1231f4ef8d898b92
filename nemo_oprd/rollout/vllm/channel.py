"""Messages between a controller and its client process: JSON and open files over a Unix socket pair."""

from __future__ import annotations

import json
import os
import socket
import struct
import threading
from collections import deque
from typing import Any

_LENGTH = struct.Struct("<I")
_MOST_FILES = 16


class Channel:
    """One end. Any thread may send; one thread receives."""

    def __init__(self, end: socket.socket) -> None:
        self._socket, self._lock = end, threading.Lock()
        self._received, self._files = bytearray(), deque[int]()

    def send(self, message: dict[str, Any], file: int | None = None) -> None:
        """Sends a message, with a file of which the other end gets a descriptor of its own.

        Raises:
            OSError: the other end is closed.
        """
        data = json.dumps(message, separators=(",", ":")).encode()
        data = _LENGTH.pack(len(data)) + data
        with self._lock:
            sent = 0 if file is None else socket.send_fds(self._socket, [data], [file])
            self._socket.sendall(data[sent:])

    def receive(self) -> dict[str, Any] | None:
        """The next message; None once the other end is closed."""
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
        """The descriptor of the file that came with the message just received; the caller closes it."""
        return self._files.popleft()

    def close(self) -> None:
        """Closes this end and the files that nobody has taken."""
        self._socket.close()
        while self._files:
            os.close(self._files.popleft())
