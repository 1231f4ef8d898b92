"""Middleware of a server that samples: it answers with ids and log-probabilities in 8 bytes per token.

vLLM answers a request with some 150 bytes of JSON per token. A trainer's rank that parsed them would compute nothing
meanwhile, so the server packs them. `PackedAnswers` is ASGI middleware that a server loads by
`--middleware nemo_oprd_answers.PackedAnswers`. It sends a request to PACKED on to vLLM's GENERATE, with the same body,
and packs the answer by `pack`; others pass unchanged. The trainer and the server both import this module, so it needs
the standard library and, in the environment of vLLM, pydantic.
"""

from __future__ import annotations

import json
import struct
from array import array
from functools import cache
from typing import Any

GENERATE, PACKED = "/inference/v1/generate", "/nemo_oprd/generate"
_LENGTH = struct.Struct("<I")


@cache
def _answers() -> Any:
    """Returns a parser of the needed parts of an answer: compiled code, which takes a quarter of `json.loads`' time."""
    from pydantic import TypeAdapter
    from typing_extensions import TypedDict

    class Token(TypedDict):
        logprob: float

    class Logprobs(TypedDict):
        content: list[Token]

    class Span(TypedDict):
        version: str | None
        start: int
        end: int

    class Choice(TypedDict):
        token_ids: list[int]
        weight_versions: list[Span]
        finish_reason: str | None
        logprobs: Logprobs

    class Answer(TypedDict):
        choices: list[Choice]

    return TypeAdapter(Answer)


def pack(answer: bytes) -> bytes:
    """Packs vLLM's answer: the length of a head, the head as JSON, ids as int32, and log-probabilities as float32.

    The head has the number of `ids`, the `spans` of weights' versions as [version, first token, end], and the
    `finish_reason`. Numbers have the byte order of the machine, little-endian on all that vLLM supports.

    Raises:
        ValueError: the answer has another form.
    """
    try:
        (choice,) = _answers().validate_json(answer, strict=True)["choices"]
        ids = array("i", choice["token_ids"])
    except (ValueError, OverflowError) as error:
        raise ValueError(_first(error)) from error
    logprobs = array("f", [token["logprob"] for token in choice["logprobs"]["content"]])
    spans = [[span["version"], span["start"], span["end"]] for span in choice["weight_versions"]]
    head = {"ids": len(ids), "spans": spans, "finish_reason": choice["finish_reason"]}
    text = json.dumps(head).encode()
    text += b" " * (-len(text) % _LENGTH.size)  # aligns the numbers
    return b"".join((_LENGTH.pack(len(text)), text, ids.tobytes(), logprobs.tobytes()))


def _first(error: Exception) -> str:
    """Returns the first problem and its place, without values of the answer."""
    found = getattr(error, "errors", None)
    if found is None:
        return str(error)
    first = found(include_url=False, include_input=False)[0]
    return f"{'.'.join(map(str, first['loc'])) or 'the answer'}: {first['msg']}"


def unpack(packed: bytes) -> tuple[dict[str, Any], memoryview, memoryview]:
    """Returns (head, bytes of the ids, bytes of the log-probabilities) of a packed answer.

    Raises:
        ValueError: `packed` is something else.
    """
    try:
        end = _LENGTH.size + _LENGTH.unpack_from(packed)[0]
        head = json.loads(packed[_LENGTH.size : end])
        middle = end + array("i").itemsize * head["ids"]
    except (struct.error, ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{type(error).__name__}: {error}") from error
    return head, memoryview(packed)[end:middle], memoryview(packed)[middle:]


class PackedAnswers:
    """The middleware of the module's docstring; `app` is the server behind it."""

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        """Passes a request to the server; packs the answer if the request asks for that."""
        if scope["type"] != "http" or scope["path"] != PACKED:
            await self._app(scope, receive, send)
            return
        inner = {**scope, "path": GENERATE, "raw_path": GENERATE.encode()}
        status, content = await whole_answer(self._app, inner, receive)
        if status == 200:
            try:
                content = pack(content)
            except ValueError as error:
                text = (
                    f"vLLM answered in another form ({error}); expected ids, their log-probabilities and the version "
                )
                text += "of the weights: does the server run the vLLM of scripts/setup_vllm.sh?"
                status, content = 409, text.encode()
        await send_answer(send, status, content)


async def whole_answer(app: Any, scope: dict[str, Any], receive: Any) -> tuple[int, bytes]:
    """Returns (status, content) of what the ASGI application `app` answers to a request."""
    status, parts = 500, list[bytes]()

    async def keep(message: dict[str, Any]) -> None:
        nonlocal status
        if message["type"] == "http.response.start":
            status = message["status"]
        else:
            parts.append(message.get("body", b""))

    await app(scope, receive, keep)
    return status, b"".join(parts)


async def send_answer(send: Any, status: int, content: bytes) -> None:
    """Sends an answer of text, or of bytes that the caller knows how to read."""
    headers = [(b"content-type", b"text/plain; charset=utf-8"), (b"content-length", str(len(content)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": content})
