"""The middleware of a teacher's server that several runs share: which calls it takes, and what answers it sends."""

from __future__ import annotations

import asyncio
import io
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nemo_oprd.vllm.server_lifecycle import WORKER_FOLDER
from nemo_oprd.vllm.worker import nemo_oprd_middleware
from nemo_oprd.vllm.worker.nemo_oprd_files import FOLDER
from nemo_oprd.vllm.worker.nemo_oprd_requests import ROOM, STATES, AnswerFolder, read_answer

TOKEN, NAME, OTHER = "1" * 40, "a" * 32, "b" * 32
GENERATE = "/inference/v1/generate"
VALUES = bytes(range(256)) * 20


class Server:
    """A middleware, and behind it an application that writes the answer which `writes` names."""

    def __init__(self, folder: Path, middleware: Any) -> None:
        self.folder, self.calls, self.bodies = AnswerFolder(str(folder)), list[str](), list[bytes]()
        self.writes: str | None = NAME
        self.status, self.hold = 200, asyncio.Event()
        self.hold.set()
        self.middleware = middleware(self._app)

    async def _app(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        self.calls.append(scope["path"])
        self.bodies.append((await receive()).get("body", b""))
        await self.hold.wait()
        if self.writes is not None:
            self.folder.write(self.writes, {"dtype": "float32"}, VALUES)
        await send({"type": "http.response.start", "status": self.status, "headers": []})
        await send({"type": "http.response.body", "body": b"of vLLM"})

    async def ask(self, path: str, body: bytes = b"{}", token: str = TOKEN, method: str = "POST") -> tuple[int, bytes]:
        path, _, query = path.partition("?")
        headers = [(b"authorization", f"Bearer {token}".encode())]
        scope = {"type": "http", "method": method, "path": path, "query_string": query.encode(), "headers": headers}
        sent: list[dict[str, Any]] = []

        async def receive() -> dict[str, Any]:
            return {"type": "http.request", "body": body, "more_body": False}

        async def send(message: dict[str, Any]) -> None:
            sent.append(message)

        await self.middleware(scope, receive, send)
        return sent[0]["status"], b"".join(message.get("body", b"") for message in sent[1:])


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    token, folder = tmp_path / "token", tmp_path / "folder"
    token.touch(0o600)
    token.write_text(TOKEN)
    folder.mkdir(mode=0o700)
    monkeypatch.setenv(nemo_oprd_middleware.TOKEN_FILE, str(token))
    monkeypatch.setenv(FOLDER, str(folder))
    monkeypatch.syspath_prepend(str(WORKER_FOLDER))
    before = set(sys.modules)
    import nemo_oprd_teacher_middleware  # type: ignore[import-not-found]

    yield Server(folder, nemo_oprd_teacher_middleware.TeacherMiddleware)
    for name in set(sys.modules) - before:
        if name.startswith("nemo_oprd_"):
            del sys.modules[name]


def left(server: Server) -> list[str]:
    return sorted(os.listdir(server.folder._folder))


def test_the_answer_to_a_request_is_the_file(server: Server) -> None:
    """Byte by byte, of the very request that vLLM gets; it is gone afterwards."""
    status, content = asyncio.run(server.ask(f"{STATES}/{NAME}?bytes={len(VALUES)}", b'{"token_ids": [1]}'))
    assert (status, server.calls, server.bodies) == (200, [GENERATE], [b'{"token_ids": [1]}'])
    assert read_answer(io.BytesIO(content), len(content), "it") == ({"dtype": "float32"}, bytearray(VALUES))
    assert left(server) == []


@pytest.mark.parametrize(("writes", "status", "expected"), [(None, 200, 409), (OTHER, 200, 409), (NAME, 400, 400)])
def test_no_answer_of_another_name_and_none_after_an_error(
    server: Server, writes: str | None, status: int, expected: int
) -> None:
    """What was written for this request is removed in any case; the file of another one stays for its own."""
    server.writes, server.status = writes, status
    found, content = asyncio.run(server.ask(f"{STATES}/{NAME}?bytes=1"))
    assert found == expected and (content == b"of vLLM") == (status == 400)
    assert left(server) == ([OTHER] if writes == OTHER else [])


@pytest.mark.parametrize(
    "asked",
    [
        f"..%2F{NAME}?bytes=1",
        f"../{NAME}?bytes=1",
        NAME,
        f"{NAME}?bytes=-1",
        f"{'C' * 32}?bytes=1",
        f"{NAME}?bytes=1e3",
    ],
)
def test_other_names_and_sizes_do_not_reach_the_server(server: Server, asked: str) -> None:
    assert asyncio.run(server.ask(f"{STATES}/{asked}"))[0] == 400
    assert server.calls == []


@pytest.mark.parametrize("path", ["/pause", "/update_weights", "/sleep", "/v1/completions", "/nemo_oprd/renew", "/"])
def test_calls_that_change_something_are_refused(server: Server, path: str) -> None:
    status, said = asyncio.run(server.ask(path))
    assert status == 403 and path.encode() in said and server.calls == []


def test_collective_calls(server: Server) -> None:
    """Two methods, without arguments, as the body that vLLM then reads."""
    server.writes = None
    for method in ("nemo_oprd_describe", "nemo_oprd_install"):
        body = json.dumps({"method": method}).encode()
        assert asyncio.run(server.ask("/collective_rpc", body))[0] == 200
        assert server.bodies[-1] == body
    for other in ({"method": "save"}, {"method": "nemo_oprd_install", "kwargs": {}}, [], "x", {"method": ["a"]}):
        assert asyncio.run(server.ask("/collective_rpc", json.dumps(other).encode()))[0] == 403, other
    assert asyncio.run(server.ask("/collective_rpc", b"no JSON"))[0] == 403
    assert len(server.calls) == 2


def test_every_call_but_health_needs_the_token(server: Server) -> None:
    server.writes = None
    for path in (f"{STATES}/{NAME}?bytes=1", ROOM, GENERATE, "/collective_rpc", "/metrics"):
        for method in ("POST", "GET"):
            assert asyncio.run(server.ask(path, token="2" * 40, method=method))[0] == 401, path
    assert server.calls == []
    assert asyncio.run(server.ask("/health", token="", method="GET"))[0] == 200


def test_answers_wait_for_room(server: Server) -> None:
    """One that is larger than the room alone, others together as far as they fit; the next one when one has ended."""
    room = server.middleware._room
    room.limit, server.writes = 100, None

    async def visit() -> list[int]:
        server.hold.clear()
        asked, seen = [], []
        for size in (60, 30, 30, 500):
            asked.append(asyncio.create_task(server.ask(f"{STATES}/{NAME}?bytes={size}")))
            await asyncio.sleep(0.01)
            seen.append(len(server.calls))
        asked[0].cancel()  # the caller has gone
        await asyncio.sleep(0.01)
        seen.append(len(server.calls))
        server.hold.set()
        await asyncio.gather(*asked[1:])
        return [*seen, len(server.calls)]

    assert asyncio.run(visit()) == [1, 2, 2, 2, 3, 4]
    assert room.taken == 0
    assert asyncio.run(server.ask(ROOM, method="POST")) == (200, b"100")
