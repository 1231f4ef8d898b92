"""Middleware of a teacher's server that several runs share: checks tokens and calls, and answers requests with states.

`TeacherMiddleware` is ASGI middleware like `Middleware`, without a lease: what the server computes depends on its
weights and the request alone, so that runs can't disturb each other. Therefore it refuses calls that would change the
server, and all collective calls but those that describe the model and install the capture.

The body of a request to `STATES/NAME?bytes=N` is that of vLLM's `GENERATE`, with a state request of that name. Its HTTP
answer is the file that the worker wrote, byte for byte, so a run needs no folder in common with the server. A request
waits here while the answers under way would exceed their share of shared memory. The module needs the standard library
alone.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import parse_qs

from nemo_oprd_answers import GENERATE, send_answer, whole_answer
from nemo_oprd_files import FOLDER
from nemo_oprd_middleware import Middleware
from nemo_oprd_requests import NAME, ROOM, STATES, AnswerFolder

COLLECTIVE = "/collective_rpc"
METHODS = ("nemo_oprd_describe", "nemo_oprd_install")
# share of the free bytes in shared memory, at the server's start, that answers may take
ROOM_SHARE = 0.5
_CHUNK_BYTES = 4 << 20
_MOST_DIGITS = 15
# an answer that was not fetched by then belongs to an aborted request
_LEFT_S = 600.0


class TeacherMiddleware(Middleware):
    """The middleware of the module's docstring.

    Raises:
        ValueError: as `Middleware`, and if others can enter the folder of answers.
    """

    def __init__(self, app: Any) -> None:
        super().__init__(app)
        self._folder = AnswerFolder(os.environ[FOLDER])
        self._room = _Room(int(self._folder.room() * ROOM_SHARE))
        self._cleared = time.monotonic()

    def _check_call(self, path: str, headers: dict[bytes, bytes]) -> tuple[int, str] | None:
        if path in (GENERATE, COLLECTIVE, ROOM) or path.startswith(f"{STATES}/"):
            return None
        return 403, f"a teacher's server takes no call of {path}; expected one that computes states"

    async def _pass(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        path = scope.get("path", "")
        if path == ROOM:
            await send_answer(send, 200, str(self._room.limit).encode())
        elif path == COLLECTIVE:
            await self._collective(scope, receive, send)
        elif path.startswith(f"{STATES}/"):
            await self._states(path.removeprefix(f"{STATES}/"), scope, receive, send)
        else:
            await self._app(scope, receive, send)

    async def _collective(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        """Passes on a collective call of the workers if its method is one of METHODS; refuses others."""
        content = await _body(receive)
        try:
            asked = json.loads(content)
            method = asked.get("method") if set(asked) == {"method"} else None
        except (ValueError, AttributeError, TypeError):
            method = None
        if method not in METHODS:
            await send_answer(send, 403, f"expected one of the methods {', '.join(METHODS)}, and nothing else".encode())
            return
        await self._app(scope, _replayed(content, receive), send)

    async def _states(self, name: str, scope: dict[str, Any], receive: Any, send: Any) -> None:
        """Lets the server compute, and sends the answer; always removes the answer's file."""
        size = parse_qs(scope.get("query_string", b"").decode("latin-1")).get("bytes", [""])[0]
        if not NAME.fullmatch(name) or not (size.isdecimal() and len(size) <= _MOST_DIGITS):
            await send_answer(send, 400, b"expected the name of an answer, and ?bytes= with its size")
            return
        if time.monotonic() > self._cleared + _LEFT_S / 10:
            self._cleared = time.monotonic()
            self._folder.clear(_LEFT_S)
        async with self._room.of(int(size)):
            try:
                inner = {**scope, "path": GENERATE, "raw_path": GENERATE.encode(), "query_string": b""}
                status, content = await whole_answer(self._app, inner, receive)
                file = self._folder.open(name) if status == 200 else None
                if file is not None:
                    await _send_file(send, file)
                elif status == 200:
                    text = (
                        "no states of this name were computed; expected a state request for them: read the server's log"
                    )
                    await send_answer(send, 409, text.encode())
                else:
                    await send_answer(send, status, content)
            finally:
                if (left := self._folder.open(name)) is not None:
                    os.close(left)


class _Room:
    """The free bytes for answers; a single answer always fits."""

    def __init__(self, limit: int) -> None:
        self.limit, self.taken = limit, 0
        self._changed = asyncio.Event()

    @asynccontextmanager
    async def of(self, size: int) -> AsyncIterator[None]:
        """Waits for room, and holds it within the context."""
        while self.taken and self.taken + size > self.limit:
            self._changed.clear()
            await self._changed.wait()
        self.taken += size
        try:
            yield
        finally:
            self.taken -= size
            self._changed.set()


async def _body(receive: Any) -> bytes:
    """Reads the body of a request."""
    parts, more = list[bytes](), True
    while more:
        message = await receive()
        parts.append(message.get("body", b""))
        more = message.get("more_body", False)
    return b"".join(parts)


def _replayed(content: bytes, receive: Any) -> Any:
    """Returns a `receive` that gives the server a request's body that was read before."""
    given = False

    async def again() -> dict[str, Any]:
        nonlocal given
        if given:
            return await receive()  # type: ignore[no-any-return]
        given = True
        return {"type": "http.request", "body": content, "more_body": False}

    return again


async def _send_file(send: Any, file: int) -> None:
    """Sends the content of a file as the answer, and closes the file."""
    with os.fdopen(file, "rb") as stream:
        left = os.fstat(file).st_size
        headers = [(b"content-type", b"application/octet-stream"), (b"content-length", str(left).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        while left > 0:
            part = stream.read(_CHUNK_BYTES)
            left -= len(part)
            await send({"type": "http.response.body", "body": part, "more_body": left > 0})
