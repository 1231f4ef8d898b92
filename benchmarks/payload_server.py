"""A stand-in for a vLLM server that computes nothing and answers with what the middleware of a real one sends.

A few answers are prepared once, so that a process of its own serves them at next to no cost. They are packed from bytes
of vLLM 0.32 with `--tokens-only` and `logprobs: 0`: per token its id, and once more its id, its log-probability and its
rank, twice; 120 to 150 bytes of JSON.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from nemo_oprd.vllm.worker.nemo_oprd_answers import pack

VOCABULARY = 151_936  # ids of Qwen2.5, of which most have six digits
_ANSWERS = 4


def answer_bytes(tokens: int, version: str, seed: int) -> bytes:
    """The JSON of one answer to `/inference/v1/generate`: `tokens` random ids, sampled from the weights `version`."""
    random = np.random.default_rng(seed)
    ids = random.integers(VOCABULARY, size=tokens).tolist()
    logprobs = (-random.exponential(0.5, tokens)).astype(np.float32).tolist()  # vLLM's are float32, too
    ranks = random.geometric(0.8, tokens).tolist()
    content = []
    for token_id, logprob, rank in zip(ids, logprobs, ranks, strict=True):
        token = {"token_id": token_id, "logprob": logprob, "rank": rank}
        content.append(token | {"top_logprobs": [token]})
    choice = {"index": 0, "finish_reason": "length", "stop_reason": None, "token_ids": ids, "routed_experts": None}
    choice |= {"sampling_mask": None, "weight_versions": [{"version": version, "start": 0, "end": tokens}]}
    usage: dict[str, Any] = {"prompt_tokens": 128, "total_tokens": 128 + tokens, "completion_tokens": tokens}
    usage |= {"prompt_tokens_details": None, "completion_tokens_details": None}
    answer: dict[str, Any] = {"request_id": "generate-tokens-" + 32 * "0", "model": "model", "created": 1_790_000_000}
    answer |= {"usage": usage, "prompt_logprobs": None, "prompt_token_id_logprobs": None, "prompt_token_ids": None}
    answer |= {"mm_placeholders": None, "metrics": None, "kv_transfer_params": None, "ec_transfer_params": None}
    answer |= {"output_mode": "tokens", "choices": [choice | {"logprobs": {"content": content}}]}
    return json.dumps(answer, ensure_ascii=False, separators=(",", ":")).encode()


class _Connection(asyncio.Protocol):
    """Answers the requests of one connection: GET with nothing, POST with the next of the prepared answers."""

    def __init__(self, answers: Iterator[bytes]) -> None:
        self._answers, self._received = answers, b""

    def connection_made(self, transport: Any) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._received += data
        head, found, body = self._received.partition(b"\r\n\r\n")
        lines = [line.partition(b":") for line in head.lower().split(b"\r\n")]
        length = next((int(value) for name, _, value in lines if name == b"content-length"), 0)
        if not found or len(body) < length:
            return
        self._received = body[length:]
        answer = next(self._answers) if head.startswith(b"POST") else b""
        head = b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\nContent-Length: %d\r\n\r\n" % len(answer)
        self._transport.write(head)
        self._transport.write(answer)


def _serve(tokens: int, version: str, path: Path, told: Connection, cores: list[int]) -> None:
    """What the process runs; when it listens, it sends the bytes of vLLM's answer and the seconds of packing it."""
    os.sched_setaffinity(0, cores)
    texts = [answer_bytes(tokens, version, seed) for seed in range(_ANSWERS)]
    began = time.thread_time()
    answers = [pack(text) for text in texts]
    pack_seconds = (time.thread_time() - began) / _ANSWERS

    def turns() -> Iterator[bytes]:
        while True:
            yield from answers

    async def run() -> None:
        loop, next_answer = asyncio.get_running_loop(), turns()
        server = await loop.create_unix_server(lambda: _Connection(next_answer), path, backlog=4096)
        told.send((len(texts[0]), pack_seconds))
        await server.serve_forever()

    asyncio.run(run())


@contextmanager
def payload_server(tokens: int, version: str, cores: list[int]) -> Iterator[tuple[Path, int, float]]:
    """A server that answers with `tokens` tokens of the weights `version`.

    Yields (its Unix socket, the bytes of vLLM's answer, CPU seconds in which a server packs one).
    """
    here, there = multiprocessing.Pipe(duplex=False)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "server"
        arguments = tokens, version, path, there, cores
        process = multiprocessing.get_context("fork").Process(target=_serve, args=arguments, daemon=True)
        process.start()
        there.close()
        try:
            yield path, *here.recv()
        finally:
            process.kill()
            process.join()
