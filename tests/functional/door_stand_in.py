"""Lets a stand-in's requests pass the real ASGI middleware of a server, in one event loop as in vLLM.

Imported in processes that have the standard library alone.
"""

from __future__ import annotations

import asyncio
import importlib
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

# (method, path, body) -> (status, content), in a thread of its own
Answers = Callable[[str, str, bytes], "tuple[int, bytes]"]


class MiddlewareStandIn:
    """ASGI middleware, each `MODULE.CLASS`, before what `answer` answers; the last one is the outermost, as in vLLM."""

    def __init__(self, middleware: list[str], answer: Answers) -> None:
        self._answer, self._loop = answer, asyncio.new_event_loop()
        self._threads = ThreadPoolExecutor(1024)  # a request that waits must not keep another one from its answer
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        self._door: Any = self._app
        for each in middleware:
            module, _, name = each.rpartition(".")
            self._door = getattr(importlib.import_module(module), name)(self._door)

    async def _app(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        """Stands in for vLLM's application."""
        body = (await receive())["body"]
        query = scope["query_string"].decode()
        path = f"{scope['path']}?{query}" if query else scope["path"]
        asked = self._answer, scope["method"], path, body
        status, content = await self._loop.run_in_executor(self._threads, *asked)
        await send({"type": "http.response.start", "status": status, "headers": []})
        await send({"type": "http.response.body", "body": content})

    def request(self, method: str, path: str, headers: dict[str, str], body: bytes) -> tuple[int, bytes]:
        """(Status, content) of what the caller gets."""
        path, _, query = path.partition("?")
        scope = {"type": "http", "method": method, "path": path, "query_string": query.encode()}
        scope["headers"] = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
        sent: list[dict[str, Any]] = []

        async def receive() -> dict[str, Any]:
            return {"type": "http.request", "body": body, "more_body": False}

        async def send(message: dict[str, Any]) -> None:
            sent.append(message)

        asyncio.run_coroutine_threadsafe(self._door(scope, receive, send), self._loop).result()
        assert sent[0]["type"] == "http.response.start"
        return sent[0]["status"], b"".join(message.get("body", b"") for message in sent[1:])
