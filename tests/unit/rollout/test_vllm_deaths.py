"""What of a vLLM server's answers, or of their absence, is taken for its death."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from nemo_oprd.rollout.engine import Request, SamplingParams
from nemo_oprd.rollout.vllm import client
from nemo_oprd.rollout.vllm.client import Client
from nemo_oprd.rollout.vllm.sampling import Task
from nemo_oprd.rollout.vllm.server import Server, ServerDied


class Ending(BaseHTTPRequestHandler):
    """An API server whose engine has died during a call: it is not well, and does not answer that call."""

    gone = threading.Event()

    def do_POST(self) -> None:
        self.gone.wait(60)

    def do_GET(self) -> None:
        self.send_error(503)

    def log_message(self, *_: Any) -> None:
        """Prints nothing."""


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


@pytest.mark.parametrize(("reason", "finished"), [("stop", True), ("length", False)])
def test_complete_responses_are_taken(reason: str, finished: bool) -> None:
    assert task().check(0, answer(reason), "1-a", "server").finished is finished


def test_a_response_that_was_given_up_is_not_taken() -> None:
    with pytest.raises(ServerDied, match="gave response 0 up"):
        task().check(0, answer("abort"), "1-a", "server")


def task() -> Task:
    return Task([Request([1])], SamplingParams(1.0, 1.0, 2, (0,)), 16, (9,), 10, 60.0)


def answer(reason: str) -> dict[str, Any]:
    spans = [{"version": "1-a", "start": 0, "end": 2}]
    logprobs = {"content": [{"logprob": -1.0}, {"logprob": -2.0}]}
    return {"choices": [{"token_ids": [1, 9], "weight_versions": spans, "logprobs": logprobs, "finish_reason": reason}]}
