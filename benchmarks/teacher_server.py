"""Tokens per second of a teacher's vLLM server with and without capture, and of a plain transformers forward pass.

    python -m benchmarks.teacher_server [--json FILE] [--sequences N] [--tokens T] [--rows R] [--layers L] [--repeats K]

All ways compute the same sequences with the same float32 weights and one compute thread on a CPU, and take turns, so
that all of them see the same changes of a busy machine; the first turn does not count. The server computes

    no capture       the requests alone, without a state request
    states           the last R rows of L layers, through shared memory: what a run's own server does
    log-probability  the same, and log-probability and entropy of these rows' next tokens, by the server's head
    states by HTTP   as `states`, from a server of `nemo-oprd serve --role teacher`, as the HTTP answers of requests

and transformers the final states of all tokens, eight sequences at a time. Needs vLLM's environment
(scripts/setup_vllm.sh).
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from nemo_oprd.batch.layout import Layout
from nemo_oprd.config.loading import load_config
from nemo_oprd.config.schema import Config
from nemo_oprd.megatron.parallel import init_distributed
from nemo_oprd.models.served import read_served_spec
from nemo_oprd.vllm.launch import TEACHER_SEQUENCES
from nemo_oprd.vllm.request_round import Claimed, RequestRound
from nemo_oprd.vllm.teacher_canary import Canary
from nemo_oprd.vllm.teacher_requests import TeacherRequest
from nemo_oprd.vllm.teacher_servers import TeacherServers
from nemo_oprd.vllm.worker.nemo_oprd_requests import StateRequest
from tests.support.random_pair import Shape, save_random_model

SHAPE = Shape(12, 384, 1024, 6, 2, 4096, 1024)
# sequences of a forward pass of transformers
BATCH = 8
PATIENCE_S = 600.0


def arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", metavar="FILE", type=Path, help="also write all measurements there")
    parser.add_argument("--sequences", metavar="N", type=int, default=48, help="requests of a turn (48)")
    parser.add_argument("--tokens", metavar="T", type=int, default=256, help="of a sequence (256)")
    parser.add_argument("--rows", metavar="R", type=int, default=192, help="whose states are asked for (192)")
    parser.add_argument("--layers", metavar="L", type=int, default=5, help="whose states are asked for (5)")
    parser.add_argument("--repeats", metavar="K", type=int, default=5, help="measured turns (5)")
    options = parser.parse_args(given)
    if not 0 < options.rows < options.tokens or not 0 < options.layers <= SHAPE.num_hidden_layers:
        parser.error(f"expected 0 < --rows < --tokens and 0 < --layers <= {SHAPE.num_hidden_layers}")
    return options


@dataclass(frozen=True)
class Turn:
    """The sequences of a turn, [N][T], and what is asked of them."""

    ids: list[list[int]]
    rows: list[int]
    layers: list[int]

    @staticmethod
    def of(options: argparse.Namespace, number: int) -> Turn:
        """Others in every turn."""
        draw = torch.Generator().manual_seed(number)
        ids = torch.randint(3, SHAPE.vocab_size, (options.sequences, options.tokens), generator=draw).tolist()
        rows = [*range(options.tokens - options.rows - 1, options.tokens - 1)]
        layers = [round((i + 1) * SHAPE.num_hidden_layers / options.layers) for i in range(options.layers)]
        return Turn(ids, rows, [*layers[:-1], SHAPE.num_hidden_layers + 1])  # the last one after the final norm

    def requests(self, *, logprobs: bool) -> list[TeacherRequest]:
        """One per sequence."""

        def state_request(ids: list[int]) -> StateRequest:
            name, final = uuid.uuid4().hex, self.rows if logprobs else []
            tokens = [ids[row + 1] for row in final] if logprobs else None
            return StateRequest(name, self.layers, self.rows, final, tokens, vocabulary=SHAPE.vocab_size, chunk=256)

        return [TeacherRequest(ids, state_request(ids)) for ids in self.ids]

    def answer_bytes(self, *, logprobs: bool) -> int:
        """Bytes of all answers, without their headers."""
        return sum(
            sum(each.state_request.sizes(SHAPE.hidden_size, "float32")) for each in self.requests(logprobs=logprobs)
        )


class _Ignored:
    """A `Reader` of answers that nobody needs."""

    def read(self, index: int, answer: bytes, most: int, server: str) -> None:
        """See `Reader`."""


def without_capture(servers: TeacherServers, turn: Turn) -> None:
    """The requests of a turn without a state request, as many at a time as with one."""
    bodies = [request.body() for request in turn.requests(logprobs=False)]
    for body in bodies:
        del body["sampling_params"]["extra_args"]
    left: list[Claimed] = [*enumerate(bodies)]
    answered: list[int] = []

    async def claim() -> Claimed | None:
        return left.pop() if left else None

    client = servers._client
    assert client is not None
    work = RequestRound(
        client, _Ignored(), PATIENCE_S, claim, TEACHER_SEQUENCES, lambda index, _, __: answered.append(index)
    )
    client.run(work.run([*servers._servers.values()]))
    if work.error is not None or len(answered) != len(bodies):
        raise RuntimeError(f"{len(answered)} of {len(bodies)} requests were answered: {work.error or work.died}")


def with_capture(servers: TeacherServers, turn: Turn, *, logprobs: bool = False) -> None:
    """The requests of a turn; every answer is read and checked, as in a run."""
    requests, found = turn.requests(logprobs=logprobs), dict[int, Any]()
    servers.gather(requests, found.__setitem__)
    assert len(found) == len(requests)


def plain_forward(model: Any, turn: Turn) -> None:
    """Final states of all tokens."""
    ids = torch.tensor(turn.ids)
    with torch.no_grad():
        for part in ids.split(BATCH):
            model(part, use_cache=False)


def settings_of(source: Path, scratch: Path, *more: str) -> Config:
    """Of a run whose teacher is the model."""
    paths = ["student.hf_path=none", f"teacher.hf_path={source}", f"output={scratch}", "precision=fp32"]
    return load_config("verify", [*paths, "teacher.engine=vllm", *more])


@contextmanager
def opened(config: Config, source: Path) -> Iterator[TeacherServers]:
    """Servers that have proven themselves."""
    canary = Canary(read_served_spec(source), source, "float32", None)
    with closing(TeacherServers(config, 0, canary, Layout())) as servers:
        servers.wait()
        yield servers


@contextmanager
def serving(source: Path, scratch: Path) -> Iterator[list[str]]:
    """`nemo-oprd serve --role teacher` on a Unix socket: the settings of a run that uses it."""
    at, token = scratch / "socket", scratch / "token"
    config = ["student.hf_path=none", f"teacher.hf_path={source}", f"output={scratch}", "precision=fp32"]
    command = [sys.executable, "-m", "nemo_oprd", "serve", "--role", "teacher", "--uds", str(at)]
    command += ["--token-file", str(token), "--config-name", "verify", *config, "teacher.engine=vllm"]
    with (scratch / "serve.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        deadline = time.monotonic() + PATIENCE_S
        while not (token.exists() and at.exists()):
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"no server: {(scratch / 'serve.log').read_text()[-2000:]}")
            time.sleep(0.2)
        yield [f"teacher.vllm.endpoints=[unix://{at}]", f"teacher.vllm.token_file={token}"]
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait()


def measure(options: argparse.Namespace, scratch: Path) -> list[dict[str, Any]]:
    """One row per way: seconds of every turn, bytes per token, and medians of ratios within turns."""
    from transformers import AutoModel

    source = scratch / "model"
    for name in ("own", "shared"):
        (scratch / name).mkdir()
    save_random_model(source, SHAPE, seed=0, std=0.02, dtype=torch.float32, model_type="qwen2", tied=True)
    with ExitStack() as open_ones:
        own = open_ones.enter_context(opened(settings_of(source, scratch / "own"), source))
        given = open_ones.enter_context(serving(source, scratch / "shared"))
        shared = open_ones.enter_context(opened(settings_of(source, scratch / "shared", *given), source))
        model = AutoModel.from_pretrained(source, dtype=torch.float32, local_files_only=True).eval()
        ways: dict[str, Callable[[Turn], None]] = {
            "no capture": lambda turn: without_capture(own, turn),
            "states": lambda turn: with_capture(own, turn),
            "log-probability": lambda turn: with_capture(own, turn, logprobs=True),
            "states by HTTP": lambda turn: with_capture(shared, turn),
            "transformers": lambda turn: plain_forward(model, turn),
        }
        seconds: dict[str, list[float]] = {name: [] for name in ways}
        for number in range(options.repeats + 1):
            turn = Turn.of(options, number)
            for name, way in ways.items():
                start = time.perf_counter()
                way(turn)
                if number:
                    seconds[name].append(time.perf_counter() - start)
    return rows_of(options, seconds)


def rows_of(options: argparse.Namespace, seconds: dict[str, list[float]]) -> list[dict[str, Any]]:
    """The measurements as rows."""
    turn, tokens = Turn.of(options, 0), options.sequences * options.tokens
    sent = {"states": False, "states by HTTP": False, "log-probability": True}
    rows = []
    for name, own in seconds.items():
        ratios = {
            other: statistics.median(theirs / mine for mine, theirs in zip(own, seconds[other], strict=True))
            for other in ("no capture", "transformers")
        }
        answered = turn.answer_bytes(logprobs=sent[name]) if name in sent else 0
        rows.append(
            {
                "way": name,
                "sequences": options.sequences,
                "tokens": options.tokens,
                "rows": options.rows,
                "layers": options.layers,
                "seconds": own,
                "tokens_per_second": tokens / statistics.median(own),
                "bytes_per_token": answered / tokens,
                "speed_of_no_capture": ratios["no capture"],
                "speed_of_transformers": ratios["transformers"],
            }
        )
    return rows


def lines(rows: list[dict[str, Any]]) -> Iterator[str]:
    """The table."""
    yield "| way | tokens/s | bytes per token | speed, no capture = 1 | transformers = 1 |"
    yield "|---|---|---|---|---|"
    for row in rows:
        yield (
            f"| {row['way']} | {row['tokens_per_second']:,.0f} | {row['bytes_per_token']:,.0f} | "
            f"{row['speed_of_no_capture']:.2f} | {row['speed_of_transformers']:.2f} |"
        )


def main(given: Sequence[str] | None = None) -> None:
    """Prints the table."""
    options = arguments(given)
    torch.set_num_threads(1)
    os.environ["NEMO_OPRD_VLLM_THREADS"] = "1"
    init_distributed()
    with tempfile.TemporaryDirectory() as place:
        rows = measure(options, Path(place))
    print(*lines(rows), sep="\n", flush=True)
    if options.json is not None:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
