"""What of a vLLM server's answers, or of their absence, is taken for its death."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from nemo_oprd.data.token_ids import TokenIds
from nemo_oprd.rollout.engine import Weights
from nemo_oprd.rollout.schedule import WeightDigests
from nemo_oprd.runtime.signals import StoppedWaiting
from nemo_oprd.vllm import client, engine, weight_transfer
from nemo_oprd.vllm.client import Client
from nemo_oprd.vllm.fleet import Fleet
from nemo_oprd.vllm.placement import ServerPlacement
from nemo_oprd.vllm.sampler import AnswerCheck, Round
from nemo_oprd.vllm.server_lifecycle import Server, ServerDied, ServerRefused
from nemo_oprd.vllm.weight_transfer import UpdateCalls
from nemo_oprd.vllm.worker.nemo_oprd_answers import pack


class Ending(BaseHTTPRequestHandler):
    """An API server whose engine has died during a call: it is not well, and does not answer that call."""

    gone = threading.Event()

    def do_POST(self) -> None:
        self.gone.wait(60)

    def do_GET(self) -> None:
        self.send_error(503)

    def log_message(self, *_: Any) -> None:
        """Prints nothing."""


CHECK = AnswerCheck("1-a", TokenIds(10), Round())


def answer(reason: str) -> bytes:
    """vLLM's response of two tokens, with more than the engine reads."""
    spans = [{"version": "1-a", "start": 0, "end": 2}]
    logprobs = {"content": [{"logprob": -1.0, "rank": 1, "top_logprobs": []}, {"logprob": -2, "token_id": 7}]}
    choice = {"token_ids": [1, 9], "weight_versions": spans, "logprobs": logprobs, "finish_reason": reason, "index": 0}
    return json.dumps({"choices": [choice], "request_id": "a"}).encode()


@pytest.fixture
def ending() -> Iterator[Server]:
    http = ThreadingHTTPServer(("127.0.0.1", 0), Ending)
    http.daemon_threads = True
    threading.Thread(target=http.serve_forever, daemon=True).start()
    yield Server(0, 1, base_url=f"http://127.0.0.1:{http.server_port}")
    Ending.gone.set()
    http.shutdown()
    http.server_close()


def test_a_call_ends_when_its_server_dies(ending: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "HEALTH_EVERY_S", 0.05)
    calls, began = Client(), time.monotonic()
    with pytest.raises(ServerDied, match="not well.*during /update_weights"):
        calls.run(calls.post_watched(ending, "/update_weights", timeout=50))
    assert time.monotonic() - began < 10
    calls.close()


class Sampling(Ending):
    """A server that samples for somebody else, and pauses once it has ended that."""

    has_ended: Callable[[], bool]

    def do_POST(self) -> None:
        while not type(self).has_ended():
            time.sleep(0.02)
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()


@pytest.mark.parametrize(
    ("own", "limit", "expected"),
    [
        (False, 60.0, None),
        (False, 0.4, (ServerRefused, r"within 0 s, expected it to be within rollout.vllm.request_timeout: does some")),
        (True, 60.0, (ServerDied, "did not end the responses under way within 0 s")),
    ],
    ids=["endpoint", "endpoint that never ends", "own server"],
)
def test_waiting_for_responses_of_somebody_else_is_no_death(
    own: bool, limit: float, expected: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Nobody else uses a server of the run's own: one that does not pause has a fault."""
    monkeypatch.setattr(weight_transfer, "CALL_TIMEOUT_S", 0.3)
    monkeypatch.setattr(weight_transfer, "SAY_AFTER_S", 0.1)
    over = threading.Event()

    def has_ended() -> bool:
        return over.is_set() or (expected is None and "samples for somebody else" in caplog.text)

    monkeypatch.setattr(Sampling, "has_ended", staticmethod(has_ended), raising=False)
    http = ThreadingHTTPServer(("127.0.0.1", 0), Sampling)
    http.daemon_threads = True
    threading.Thread(target=http.serve_forever, daemon=True).start()
    server, client = Server(0, 1, base_url=f"http://127.0.0.1:{http.server_port}"), Client()
    places = [ServerPlacement(0, 0, 1, "file", url=None if own else server.base_url)]
    calls = UpdateCalls(Fleet(60.0, client=client), places, 1, lambda *_: None, limit)
    try:
        if expected is None:
            client.run(calls._pause(server))
        else:
            with pytest.raises(expected[0], match=expected[1]):
                client.run(calls._pause(server))
    finally:
        over.set()
        client.close()
        http.shutdown()
        http.server_close()
    assert ("samples for somebody else" in caplog.text) is not own


class Recording:
    """In place of a client: the names of all calls."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    async def post_watched(self, server: Server, path: str, body: Any = None, **_: Any) -> Any:
        self.calls.append(path)

    async def call_workers(self, server: Server, name: str, **_: Any) -> Any:
        self.calls.append(name)
        return [{"digest": "d", "tensors": 1}]

    async def watch(self, server: Server) -> str:
        await asyncio.sleep(3600)
        return ""

    post = post_watched


def recorded(transport: Any = "file", *, sleeps: bool = False) -> tuple[UpdateCalls, Recording, Server]:
    client, server = Recording(), Server(0, 1, is_ready=True)
    places = [ServerPlacement(0, 0, 1, transport, sleeps=sleeps)]
    return UpdateCalls(Fleet(60.0, client=client), places, 1, lambda *_: None, 60.0), client, server  # type: ignore


def test_an_update_that_was_not_finished_is_given_up_before_the_next() -> None:
    """Although this server has loaded all of it: another server's failure ended it. vLLM would refuse a second one."""
    calls, client, server = recorded()

    async def retried() -> None:
        await calls.prepare(server)
        await calls.update(server, {})
        calls.updates_begin()
        await calls.prepare(server)
        await calls.update(server, {})
        await calls.finish(server, "d", "1-d")
        calls.updates_begin()
        await calls.prepare(server)

    asyncio.run(retried())
    starts = [at for at, name in enumerate(client.calls) if name == "/start_weight_update"]
    assert [client.calls[at - 1] == "nemo_oprd_give_up" for at in starts] == [False, True, False]


def test_a_server_that_sleeps_is_left_asleep() -> None:
    """Where another server died while both started; without weights and cache this one could answer no request."""
    calls, client, server = recorded("ipc", sleeps=True)
    asyncio.run(calls.settle(server))
    assert client.calls == []


def test_weights_that_no_server_has_have_no_digest(monkeypatch: pytest.MonkeyPatch) -> None:
    """A signal ended the wait for the servers: responses of an interrupted run keep their digest, and their file."""
    made = object.__new__(engine.VllmEngine)
    made._any_sleeps, made._push = False, SimpleNamespace(push=stopped)  # type: ignore[assignment]
    made.update_weights(list, 3)
    assert made.weights == Weights(3)
    digests = WeightDigests()
    digests.note(made.weights.steps, made.weights.digest, "this run")
    digests.note(3, "abc", "pending.safetensors")


def stopped(*_: Any) -> str:
    raise StoppedWaiting("SIGTERM")


@pytest.mark.parametrize(("reason", "finished"), [("stop", True), ("length", False)])
def test_complete_responses_are_taken(reason: str, finished: bool) -> None:
    response = CHECK.read(0, pack(answer(reason)), 2, "server")
    assert (response.ids.tolist(), response.finished) == ([1, 9], finished)
    assert response.logprobs is not None and response.logprobs.tolist() == [-1.0, -2.0]
    assert (response.ids.dtype, response.logprobs.dtype) == (np.int32, np.float32)


def test_a_response_that_was_given_up_is_not_taken() -> None:
    with pytest.raises(ServerDied, match="gave response 0 up"):
        CHECK.read(0, pack(answer("abort")), 2, "server")


@pytest.mark.parametrize(
    "text",
    [b"", b"no JSON", answer("stop"), pack(answer("stop"))[:20], pack(answer("stop"))[:-1], b"\2\0\0\0{}"],
)
def test_answers_in_another_form(text: bytes) -> None:
    with pytest.raises(ServerRefused, match="server answered response 0 in another form"):
        CHECK.read(0, text, 2, "server")
