"""A stand-in for a vLLM server: the calls that the engine makes, without a model and with the standard library alone.

What it "samples" is a function of the digest of the weights, the seed and the prompt, so that equal weights give equal
responses on any server. It refuses calls in an order that vLLM would refuse, and computes the digest of the weights by
its definition, with code of its own. For its answers it has pydantic, as vLLM has; for weights that come over a process
group it has torch and the code of the real workers, and its workers are then threads.

It listens where vLLM would, and has the server's own middleware and its own check of files.

`STAND_IN` in the environment is a directory. `faults.json` there says what the servers do wrong, each server appends
its requests to `requests.jsonl`, and faults that happen `times` times leave a file for each time.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import random
import signal
import socket
import sys
import threading
import time
from array import array
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from door_stand_in import MiddlewareStandIn

try:
    from nemo_oprd_files import open_bucket  # of the server's own folder
except ImportError:  # this module is also imported by tests, for what it samples
    open_bucket = None  # type: ignore[assignment]

ITEM_SIZES = {"float32": 4, "bfloat16": 2}
HERE = Path(os.environ.get("STAND_IN", "."))


class Refusal(Exception):  # noqa: N818 - not an error
    """An answer with status 400."""


def digest_of(tensors: dict[str, tuple]) -> str:
    """The digest of (dtype, shape, sum of words, sum of (i + 1) * word) by name."""
    return hashlib.blake2b(repr(sorted(tensors.items())).encode(), digest_size=16).hexdigest()


def sums(words: array) -> tuple[int, int]:
    """Both sums modulo 2^64, as signed numbers."""
    exact = sum(words), sum((i + 1) * word for i, word in enumerate(words))
    return tuple((value + (1 << 63)) % (1 << 64) - (1 << 63) for value in exact)  # type: ignore[return-value]


def length_of(prompt: list[int], most: int, of: slice = slice(-1, None)) -> int:
    """The tokens of a response, the same for all responses to a prompt; depends on the ids `of` the prompt."""
    return min(most, 1 + sum(prompt[of]) % 7)


def whole_length(prompt: list[int], whole: list[int]) -> int:
    """One of the numbers, by the first ids of the prompt."""
    return whole[sum(prompt[:4]) % len(whole)]


def sample(
    digest: str,
    seed: int | None,
    prompt: list[int],
    most: int,
    known: int,
    stop: list[int],
    lengths: Sequence[int] | str | dict[str, list[int]] = (),
) -> dict[str, Any]:
    """{"ids", "logprobs", "stopped"}; a response with room left ends with a stop id.

    Its length is one of `lengths`, whatever the weights are; none, or "of whole prompts": see `length_of`; {"whole":
    NUMBERS}: prompt and response together have `whole_length` tokens, also if the prompt has some of the response.
    """
    draw = random.Random(f"{digest} {seed} {prompt}")
    if isinstance(lengths, dict):
        ends = max(1, whole_length(prompt, lengths["whole"]) - len(prompt))
        length = min(most, ends)
    elif isinstance(lengths, str) or not lengths:
        length = length_of(prompt, most, slice(None) if lengths else slice(-1, None))
    else:
        length = min(most, random.Random(f"{seed} {prompt}").choice(lengths))
    ids = [draw.choice([i for i in range(known) if i not in stop]) for _ in range(length)]
    # a whole length may be that of the last part
    stopped = (length < most or (isinstance(lengths, dict) and ends <= most)) and bool(stop)
    if stopped:
        ids[-1] = stop[0]
    return {"ids": ids, "logprobs": [-draw.random() for _ in ids], "stopped": stopped}


class Model:
    """The state of a server."""

    def __init__(self, options: argparse.Namespace, faults: dict[str, Any]) -> None:
        self.options, self.faults = options, faults
        given = json.loads(options.additional_config)
        self.known, self.gaps = given["nemo_oprd_known_ids"], given["nemo_oprd_gaps"]
        self.tensors: dict[str, tuple] = {}
        self.digest, self.version, self.earlier = "none", None, None
        self.paused = self.joined = self.updating = self.asleep = False
        self.cuts = 0  # pauses that ended what was under way
        self.workers = range(int(options.tensor_parallel_size))
        self.groups: dict[int, Any] = {}  # of each worker
        self.counts: dict[str, int] = {}
        self.lock = threading.Lock()

    def note(self, path: str, body: dict[str, Any]) -> None:
        """Records a call; dies, refuses or waits forever if that is the fault."""
        sampling = body.get("sampling_params", {})
        kind = "probe" if "seed" not in sampling and sampling else path.split("?")[0]
        with self.lock:
            self.counts[kind] = self.counts.get(kind, 0) + 1
            server = self.options.uds or self.options.port
            line = {"pid": os.getpid(), "group": os.getpgid(0), "server": server, "call": kind, "path": path}
            line["time"] = time.time()
            line |= {"prompt": body.get("token_ids"), "version": body.get("weight_version"), **sampling}
            with (HERE / "requests.jsonl").open("a") as file:
                file.write(json.dumps(line) + "\n")
            die = self.faults.get("die", {})
            if die.get("call") == kind and self.counts[kind] == die.get("at", 1) and happens("die", die):
                os.kill(os.getpid(), signal.SIGKILL)
            count = self.counts[kind]
        refuse, hang = self.faults.get("refuse", {}), self.faults.get("hang", {})
        if refuse.get("call") == kind and count >= refuse.get("at", 1) and happens("refuse", refuse):
            raise Refusal(refuse["text"])
        if hang.get("call") == kind and count >= hang.get("at", 1) and happens("hang", hang):
            time.sleep(hang.get("seconds", 3600))

    def answer(self, path: str, body: dict[str, Any]) -> Any:
        """What a call returns."""
        self.note(path, body)
        call = path.split("?")[0]
        if call == "/inference/v1/generate":
            return self.generate(body)
        if call in ("/init_weight_transfer_engine", "/update_weights"):  # whose workers note calls of their own
            return getattr(self, call[1:])(body)
        if call in ("/sleep", "/wake_up"):
            return self.sleep(path)
        if call == "/pause":
            return self.pause(path)
        if call == "/collective_rpc":
            return {"results": [getattr(self, body["method"])()] * int(self.options.tensor_parallel_size)}
        with self.lock:
            return getattr(self, call[1:])(body)

    def pause(self, path: str) -> None:
        """With mode=abort, what is under way is answered with the tokens so far."""
        self.paused = True
        self.cuts += path.endswith("mode=abort")

    def resume(self, body: dict[str, Any]) -> None:
        self.require(not self.updating, "resumed during an update")
        self.paused = False

    def sleep(self, path: str) -> None:
        """Weights that are not kept in the host's memory are lost."""
        time.sleep(self.faults.get("sleep_s", 0.0))
        self.asleep = path.startswith("/sleep")
        if "level=2" in path:
            self.digest, self.version = "lost", None

    def init_weight_transfer_engine(self, body: dict[str, Any]) -> None:
        if body["init_info"]:
            self.each_worker(lambda worker: self.join(worker, **body["init_info"]))
            self.joined = True
            return
        self.require(not self.joined and body == {"init_info": {}}, f"a second or wrong start: {body}")
        self.joined = True

    def start_weight_update(self, body: dict[str, Any]) -> None:
        joined = self.joined or "group" in self.faults  # a group is joined after this call
        self.require(joined and self.paused and not self.updating, "not joined, not paused, or begun before")
        self.updating, self.tensors = True, {}

    def each_worker(self, call: Callable[[int], None]) -> None:
        """Calls `call` for all workers at the same time; raises what the first of them that failed has raised."""
        with ThreadPoolExecutor(len(self.workers)) as pool:
            list(pool.map(call, self.workers))

    def join(
        self, worker: int, *, host: str, port: int, first_rank: int, timeout_s: float, prefix: str, **group: Any
    ) -> None:
        import datetime

        import torch
        from nemo_oprd_group import Group

        self.note(f"join {worker}", {})
        timeout = datetime.timedelta(seconds=timeout_s)
        store = torch.distributed.TCPStore(host, port, is_master=False, timeout=timeout)
        made = Group(store, prefix, first_rank + worker, device=torch.device("cpu"), timeout_s=timeout_s, **group)
        self.groups[worker] = made.open()

    def update_weights(self, body: dict[str, Any]) -> None:
        """One bucket in a file, or all of them over the process group."""
        info = body["update_info"]
        self.require(self.updating, "no update has begun")
        try:
            if info:
                self.load(self.read(info), info["entries"])
            else:
                self.each_worker(self.receive)
        except BaseException:
            self.updating = False
            raise

    def read(self, info: dict[str, Any]) -> bytes:
        try:
            with open(open_bucket(info["path"], info["bytes"]), "rb") as file:
                data = file.read()
        except ValueError as error:
            raise Refusal(str(error)) from None
        self.require(len(data) == info["bytes"], "a file of another size")
        return data

    def receive(self, worker: int) -> None:
        from nemo_oprd_buckets import receive_all

        def load(bucket: Any) -> None:
            self.note(f"bucket {worker}", {})
            self.load(bytes(bucket.data.tolist()), bucket.describe())

        receive_all(self.groups[worker], load)

    def load(self, data: bytes, entries: list[dict[str, Any]]) -> None:
        for entry in entries:
            size = math.prod(entry["shape"]) * ITEM_SIZES[entry["dtype"]]
            raw = data[entry["start"] : entry["start"] + size]
            words = array("i", raw + bytes(-size % 4))
            self.tensors[entry["name"]] = (entry["dtype"], tuple(entry["shape"]), *sums(words))

    def finish_weight_update(self, body: dict[str, Any]) -> None:
        self.require(self.updating, "no update has begun")
        self.earlier, self.updating = self.version or body["weight_version"], False
        stale = self.faults.get("stale")
        if stale is None or self.counts["/finish_weight_update"] < stale["from"] or not happens("stale", stale):
            self.version, self.digest = body["weight_version"], digest_of(self.tensors)

    def nemo_oprd_received(self) -> dict[str, Any]:
        digest = digest_of(self.tensors)
        digest = digest[::-1] if "digest" in self.faults else digest
        return {"digest": digest, "tensors": len(self.tensors), "stale": self.faults.get("untouched", [])}

    def nemo_oprd_give_up(self) -> None:
        self.updating = self.joined = False

    def nemo_oprd_describe(self) -> dict[str, Any]:
        model = json.loads((Path(self.options.model) / "config.json").read_text())
        keys = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
        found = {key: model[key] for key in (*keys, "tie_word_embeddings", "model_type", "vocab_size")}
        found["rope_parameters"] = model.get("rope_parameters") or {"rope_theta": model["rope_theta"]}
        experts = ("num_experts", "num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob")
        found["experts"] = [model[key] for key in experts] if "num_experts" in model else None
        found |= {
            "gaps": self.gaps,
            "known_ids": self.known,
            "dtype": self.options.dtype,
            "logprobs_mode": self.options.logprobs_mode,
        }
        return found | {"workers": int(self.options.tensor_parallel_size), **self.faults.get("describe", {})}

    def waits(self, seconds: float, cuts: int) -> bool:
        """Waits, at least until the server is not paused; whether it was not cut since, the time after `cuts` times."""
        until = time.monotonic() + seconds
        while self.cuts == cuts and (self.paused or time.monotonic() < until):
            time.sleep(min(0.005, max(0.0, until - time.monotonic())) if not self.paused else 0.005)
        return self.cuts == cuts

    def generate(self, body: dict[str, Any]) -> dict[str, Any]:
        self.require(not self.asleep, "asleep")
        sampling, faults, cuts = body["sampling_params"], self.faults, self.cuts
        goes_on = self.waits(faults.get("delay_s", 0.0) if "seed" in sampling else 0.0, cuts)
        stop = sampling.get("stop_token_ids", [])
        most, seed = sampling["max_tokens"], sampling.get("seed")
        found = sample(self.digest, seed, body["token_ids"], most, self.known, stop, faults.get("lengths", ()))
        ids, logprobs = found["ids"], found["logprobs"]
        tokens, asked = (0 if not goes_on else len(ids)), len(ids)
        for number in range(tokens if "seed" in sampling and "token_s" in faults else 0):
            if not self.waits(faults["token_s"], cuts):
                tokens = number
                break
        ids, logprobs = ids[:tokens], logprobs[:tokens]
        if "seed" in sampling and faults.get("outside"):
            ids[-1] = self.known
        version = "1-of-somebody-else" if "seed" in sampling and faults.get("version") else self.version
        if "seed" in sampling and ids:
            logprobs = logprobs[: faults.get("logprobs")]
            logprobs[-1] = float(faults.get("last_logprob", logprobs[-1]))
        content: Any = {"content": [{"logprob": value} for value in logprobs]}
        if "seed" in sampling and faults.get("no_logprobs"):
            content = None
        spans = [{"version": version, "start": 0, "end": len(ids)}] if ids else []
        half, wrong = len(ids) // 2, faults.get("spans", {})
        if "seed" in sampling and self.earlier != version and half and happens("spans", wrong):
            named = {"older": (self.earlier, self.earlier), "swapped": (version, self.earlier)}[wrong["kind"]]
            starts = ((named[0], 0, half), (named[1], half, len(ids)))
            spans = [{"version": of, "start": start, "end": end} for of, start, end in starts]
        choice = {
            "token_ids": ids,
            "weight_versions": spans,
            "logprobs": content,
            "finish_reason": "abort" if len(ids) < asked else "stop" if found["stopped"] else "length",
        }
        return {"choices": [choice]}

    def require(self, true: bool, what: str) -> None:
        if not true:
            raise Refusal(what)


def happens(name: str, fault: dict[str, Any]) -> bool:
    """Whether a fault that happens `times` times, over all servers, happens once more."""
    for time_ in range(fault.get("times", 1) if fault else 0):
        try:
            (HERE / f"{name}.{time_}").touch(exist_ok=False)
        except FileExistsError:
            continue
        return True
    return False


class Handler(BaseHTTPRequestHandler):
    """All calls pass the server's middleware."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    model: Model
    middleware: MiddlewareStandIn

    def do_GET(self) -> None:
        self._through(b"")

    def do_POST(self) -> None:
        self._through(self.rfile.read(int(self.headers["Content-Length"])))

    do_PUT = do_DELETE = do_OPTIONS = do_POST

    def _through(self, body: bytes) -> None:
        self._send(*self.middleware.request(self.command, self.path, dict(self.headers.items()), body))

    def _send(self, status: int, content: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: Any) -> None:
        """Says nothing."""


class UnixServer(ThreadingHTTPServer):
    """Listens on a Unix socket."""

    address_family = socket.AF_UNIX

    def server_bind(self) -> None:
        self.socket.bind(self.server_address)


def answer(method: str, path: str, body: bytes) -> tuple[int, bytes]:
    """What the server behind its middleware answers."""
    if method == "GET":
        return 200, b""
    try:
        found = Handler.model.answer(path, json.loads(body))
    except Refusal as refusal:
        return 400, json.dumps({"error": str(refusal)}).encode()
    except Exception as error:  # as vLLM answers what its workers raise
        return 500, json.dumps({"error": str(error)}).encode()
    return 200, b"" if found is None else json.dumps(found).encode()


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("model", "dtype", "tensor-parallel-size", "additional-config", "logprobs-mode"):
        parser.add_argument(f"--{name}", required=True)
    for name in ("host", "port", "uds"):
        parser.add_argument(f"--{name}")
    parser.add_argument("--middleware", action="append", default=[])
    options, _ = parser.parse_known_args()
    faults = json.loads((HERE / "faults.json").read_text())
    if Path(faults.get("start_while", "/nowhere")).exists():
        print("ValueError: Free memory on device cuda:0 is less than desired GPU memory utilization")
        sys.exit(1)
    sys.path += os.environ["STAND_IN_SITE"].split(":")
    if faults.get("group"):
        import torch.distributed  # noqa: F401 - slow, so not while the members of a group wait for each other
    if "start" in faults and happens("start", faults["start"]):
        print("Traceback of something")
        print(f"RuntimeError: {faults['start']['text']}")
        print("and something after it")
        sys.exit(1)
    Handler.model = Model(options, faults)
    Handler.middleware = MiddlewareStandIn(options.middleware, answer)
    if options.uds:
        Handler.disable_nagle_algorithm = False
        server = UnixServer(options.uds, Handler, bind_and_activate=False)  # type: ignore[arg-type]
    else:
        server = ThreadingHTTPServer((options.host, int(options.port)), Handler, bind_and_activate=False)
    server.request_queue_size = 128  # a connection to a Unix socket with a full queue is refused
    server.server_bind()
    server.server_activate()
    server.daemon_threads = True
    server.serve_forever()


if __name__ == "__main__":
    main()
