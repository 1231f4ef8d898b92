"""Answers of a server that samples: how its middleware packs them, and how a controller's thread takes them."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np
import pytest

from nemo_oprd.data.token_ids import TokenIds
from nemo_oprd.rollout.engine import Request, SamplingParams
from nemo_oprd.rollout.response import Response
from nemo_oprd.vllm.client import Client
from nemo_oprd.vllm.sampler import Job, Round, Sampler, Task
from nemo_oprd.vllm.server_lifecycle import Server
from nemo_oprd.vllm.worker.nemo_oprd_answers import GENERATE, PACKED, PackedAnswers, pack, unpack

IDS, LOGPROBS, VERSION = [7, 151_935, 0], [-0.25, -2, -1e-7], "1-a"


def choice(**changed: Any) -> dict[str, Any]:
    """vLLM's answer to one request, with more than the middleware reads."""
    content = [{"token_id": i, "logprob": one, "rank": 1} for i, one in zip(IDS, LOGPROBS, strict=True)]
    spans = [{"version": VERSION, "start": 0, "end": len(IDS)}]
    found = {"token_ids": IDS, "weight_versions": spans, "logprobs": {"content": content}, "finish_reason": "length"}
    return {"index": 0, **found, **changed}


def text_of(*choices: dict[str, Any]) -> bytes:
    return json.dumps({"request_id": "a", "choices": choices}).encode()


def test_an_answer_has_8_bytes_per_token_and_every_bit_of_them() -> None:
    packed = pack(text_of(choice()))
    head, ids, logprobs = unpack(packed)
    assert head == {"ids": 3, "spans": [[VERSION, 0, 3]], "finish_reason": "length"}
    np.testing.assert_array_equal(np.frombuffer(ids, np.int32), IDS)
    np.testing.assert_array_equal(np.frombuffer(logprobs, np.float32), np.array(LOGPROBS, np.float32))
    begin = len(packed) - 8 * len(IDS)
    assert begin % 4 == 0 and begin < 4 + len(json.dumps(head)) + 4


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"no JSON",
        b"{}",
        text_of(),
        text_of(choice(), choice()),
        text_of(choice(token_ids=["9"])),
        text_of(choice(token_ids=[1 << 40])),
        text_of(choice(logprobs=None)),
        text_of(choice(logprobs={"content": [{"token_id": 1}]})),
        text_of(choice(weight_versions=None)),
    ],
)
def test_an_answer_in_another_form_is_a_refusal(text: bytes) -> None:
    """Whose status makes the run end: another try would not help."""
    with pytest.raises(ValueError, match=r"choices|the answer|not enough|too many|int too large|signed"):
        pack(text)
    status, said, _ = ask(PACKED, 200, text)
    assert status == 409 and said.startswith(b"vLLM answered in another form (") and b"scripts/setup_vllm.sh" in said


def ask(path: str, status: int, content: bytes, kind: str = "http") -> tuple[int, bytes, str]:
    """(Status, content) through the middleware, of a server that answers so in two parts; the path that it sees."""
    sent, seen = list[dict[str, Any]](), list[str]()

    async def app(scope: dict[str, Any], receive: Any, send: Any) -> None:
        seen.append(scope["path"])
        await send({"type": "http.response.start", "status": status, "headers": []})
        await send({"type": "http.response.body", "body": content[:5], "more_body": True})
        await send({"type": "http.response.body", "body": content[5:]})

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    asyncio.run(PackedAnswers(app)({"type": kind, "path": path}, None, send))
    return sent[0]["status"], b"".join(message.get("body", b"") for message in sent[1:]), seen[0]


def test_only_answers_of_its_own_path_are_packed() -> None:
    """Refusals pass as vLLM says them."""
    text = text_of(choice())
    assert ask(PACKED, 200, text) == (200, pack(text), GENERATE)
    assert ask(PACKED, 400, b"too long") == (400, b"too long", GENERATE)
    for path in (GENERATE, "/health", PACKED + "/"):
        assert ask(path, 200, text) == (200, text, path)
    assert ask(PACKED, 200, text, kind="websocket") == (200, text, PACKED)


class Slow(BaseHTTPRequestHandler):
    """Answers its first `quick` requests once it has `first` of them, and the others when it is told to, or paused."""

    quick, first, asked, pauses = 0, 0, 0, 0
    go, lock = threading.Event(), threading.Lock()

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        if self.path.startswith("/pause"):
            type(self).pauses += 1
            self.go.set()
            self._send(b"")
            return
        with self.lock:
            type(self).asked += 1
            is_quick = self.asked <= self.quick
        while is_quick and self.asked < self.first:
            time.sleep(0.01)
        if not is_quick:
            self.go.wait(60)
        reason = "length" if is_quick or not self.pauses else "abort"
        self._send(pack(text_of(choice(finish_reason=reason))))

    def do_GET(self) -> None:
        self._send(b"")

    def _send(self, content: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: Any) -> None:
        """Prints nothing."""


@pytest.fixture
def slow() -> Iterator[Server]:
    Slow.quick, Slow.first, Slow.asked, Slow.pauses = 2, 0, 0, 0
    Slow.go.clear()
    http = ThreadingHTTPServer(("127.0.0.1", 0), Slow)
    http.daemon_threads = True
    threading.Thread(target=http.serve_forever, daemon=True).start()
    yield Server(0, 4, pushed=VERSION, base_url=f"http://127.0.0.1:{http.server_port}")
    Slow.go.set()
    http.shutdown()
    http.server_close()


class Sampling:
    """A round at servers, 4 requests at a time at each; `claim` returns the 5 requests unless another one is given."""

    def __init__(self, *servers: Server, keep: Any = None, claim: Any = None, result: Round | None = None) -> None:
        self.client, self.result = Client(), result or Round()
        self.sampler, order = Sampler(self.client), iter(range(5))
        params = SamplingParams(1.0, 1.0, 3, (0, 1, 2))
        task = Task([Request([5])] * 20, params, 100, (1,), TokenIds(151_936), 60.0)
        job = Job(task, VERSION, 6, claim or (lambda: next(order, None)), 4, keep)
        self.future: Future[None] = self.sampler.start(job, [*servers], self.result)

    def wait_for(self, count: int) -> None:
        """Until so many responses are there, and all slots have asked."""
        deadline = time.monotonic() + 20
        while len(self.result.sampled) < count or Slow.asked < 5:
            assert time.monotonic() < deadline
            time.sleep(0.01)

    def close(self) -> None:
        self.sampler.close()
        self.client.close()


def test_responses_of_a_round(slow: Server) -> None:
    """With the version of their weights; they are kept first. Seconds count from the round, not from its thread."""
    kept = dict[int, Response]()
    sampling = Sampling(slow, keep=kept.update, result=Round(began=time.monotonic() - 3600))
    sampling.wait_for(2)
    assert not sampling.future.done()
    Slow.go.set()
    sampling.future.result(20)
    found = sampling.result
    assert (found.error, found.died, found.cut) == (None, {}, {}) and found.busy_s.keys() == {0}
    assert 3600 < found.busy_s[0] < 3660
    assert sorted(found.sampled) == sorted(kept) == [*range(5)]
    for one in found.sampled.values():
        assert (one.ids.tolist(), one.finished, one.cut) == (IDS, False, False)
        assert one.versions is not None and one.versions.tolist() == [[6, 0, 3]]
        assert not one.ids.flags.writeable
    sampling.close()


def test_a_cut_round_has_the_first_tokens_of_the_others(slow: Server) -> None:
    sampling = Sampling(slow)
    sampling.wait_for(2)
    sampling.sampler.cut(sampling.result)
    sampling.future.result(20)
    assert (sampling.result.error, sampling.result.died, Slow.pauses) == (None, {}, 1)
    assert sampling.result.sampled.keys() | sampling.result.cut.keys() == {*range(5)}
    assert {(one.cut, one.finished, len(one.ids)) for one in sampling.result.cut.values()} == {(True, False, 3)}
    sampling.close()


@pytest.mark.parametrize("how", ["stop", "close", "keep fails"])
def test_a_round_ends_without_its_answers(slow: Server, how: str) -> None:
    """No wait for the server, which never answers."""
    kept = dict[int, Response]()

    def keep(found: dict[int, Response]) -> None:
        if how == "keep fails":
            while Slow.asked < 5:
                time.sleep(0.01)
            raise ValueError("the disk is full")
        kept.update(found)

    sampling, began = Sampling(slow, keep=keep), time.monotonic()
    if how == "keep fails":
        with pytest.raises(ValueError, match="the disk is full"):
            sampling.future.result(20)
        assert sampling.result.sampled == {}
    else:
        sampling.wait_for(2)
        getattr(sampling.sampler, how)()
        sampling.future.result(20)
        assert sorted(sampling.result.sampled) == sorted(kept) and len(kept) == 2
    assert (sampling.result.error, sampling.result.died) == (None, {})
    sampling.close()
    assert time.monotonic() - began < 20


def test_a_server_without_the_weights_of_the_round_takes_no_part(slow: Server) -> None:
    slow.pushed = None
    sampling = Sampling(slow)
    sampling.future.result(20)
    assert (sampling.result, Slow.asked) == (Round(), 0)
    sampling.close()


def test_an_error_of_this_program_at_one_server_ends_the_round_at_all(slow: Server) -> None:
    """Of two servers, whose 8 slots have a request each; the only one that gets an answer finds the error."""
    claims, began = iter(range(8)), time.monotonic()
    Slow.quick, Slow.first = 1, 8

    def claim() -> int:
        for index in claims:
            return index
        raise RuntimeError("planted")

    sampling = Sampling(slow, replace(slow, number=1), claim=claim)
    with pytest.raises(RuntimeError, match="planted"):
        sampling.future.result(20)
    under_way = [task for task in asyncio.all_tasks(sampling.client._loop) if "_serve" in str(task.get_coro())]
    assert under_way == [] and Slow.asked == 8
    sampling.close()
    assert time.monotonic() - began < 20
