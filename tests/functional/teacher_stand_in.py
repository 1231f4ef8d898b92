"""A stand-in for a teacher's vLLM server: transformers computes, the real worker's code reads asks and writes files.

The server process has the standard library alone, so that it starts at once; the model is in the process of the tests
(`served_teachers.py`), which it asks over the Unix socket that `STAND_IN_MODEL` names. `STAND_IN` is as of
`vllm_stand_in.py`, whose faults "die", "start" and "describe" it knows; "answer" is the header of all of its answers,
"header" changes that of projected ones, and "bridge" what it says of a bridge that it has loaded.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import sys
import threading
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from door_stand_in import MiddlewareStandIn
from nemo_oprd_bridge import BridgeFile
from nemo_oprd_files import FOLDER, open_bucket
from nemo_oprd_requests import GENERATION, STATE_REQUEST, AnswerFolder, StateRequest, weights_digest
from vllm_stand_in import HERE, Handler, Refusal, UnixServer, answer, happens


class Teacher:
    """The state of a server; its calls are those of `vllm_stand_in.Model`."""

    def __init__(self, options: argparse.Namespace, faults: dict[str, Any]) -> None:
        self.options, self.faults = options, faults
        config = json.loads((Path(options.model) / "config.json").read_text())
        self.depth, self.width, self.vocabulary = (
            config[name] for name in ("num_hidden_layers", "hidden_size", "vocab_size")
        )
        self.folder = AnswerFolder(os.environ[FOLDER])
        self.installed, self.asked, self.lock = False, 0, threading.Lock()
        self.bridges: dict[str, BridgeFile] = {}

    def answer(self, path: str, body: dict[str, Any]) -> Any:
        """What a call returns."""
        if path == "/collective_rpc":
            return {"results": [getattr(self, body["method"])(**body.get("kwargs", {}))]}
        assert path == "/inference/v1/generate", path
        text = (body["sampling_params"].get("extra_args") or {}).get(STATE_REQUEST)
        if text is not None:
            self.teach(body["token_ids"], text)
        return {"choices": [{"token_ids": [0], "finish_reason": "length"}]}

    def nemo_oprd_install(self) -> None:
        self.installed = True

    def nemo_oprd_load_bridge(self, file: dict[str, Any]) -> dict[str, Any]:
        found = BridgeFile(**file)
        found.read(open_bucket(found.path, found.size))
        self.bridges[found.digest] = found
        return {"digest": found.digest} | self.faults.get("bridge", {})

    def nemo_oprd_describe(self) -> dict[str, Any]:
        found = {"num_hidden_layers": self.depth, "hidden_size": self.width, "vocab_size": self.vocabulary}
        found |= {"dtype": self.options.dtype, "eager": True, "runner_v1": True, "prefix_caching": False, "tensor": 1}
        found |= {"pipeline": 1, "lora": False, "speculative": False, "weights": weights_digest(self.options.model)}
        found |= {"chunk": 2048, "version": "stand-in", "longest": self.options.max_model_len - 1}
        found |= {"generation": int(os.environ[GENERATION])}
        found |= {"quantization": None, "kv_cache_dtype": "auto"}
        found |= {"load_format": "auto", "float32_matmul": "highest"}
        return found | self.faults.get("describe", {})

    def teach(self, ids: list[int], text: str) -> None:
        """Answers a state request as the worker does."""
        if not self.installed:
            raise Refusal("the capture is not installed")
        with self.lock:
            self.asked += 1
            die = self.faults.get("die", {})
            dies = die.get("at") == self.asked and happens("die", die)
            with (HERE / "asks.jsonl").open("a") as file:
                line = {"pid": os.getpid(), "server": self.options.uds, "folder": os.environ[FOLDER]}
                line |= {"tokens": len(ids), "ask": json.loads(text)}
                file.write(json.dumps(line) + "\n")
        state_request = StateRequest.parse(text, len(ids), self.depth, self.vocabulary)
        if dies:  # in the middle of an answer
            (Path(os.environ[FOLDER]) / f"{state_request.name}.part").write_bytes(b"half")
            os.kill(os.getpid(), signal.SIGKILL)
        header = state_request.header(ids, self.width, self.options.dtype, int(os.environ[GENERATION]))
        bridge = None
        if state_request.bridge:
            bridge, header["bridge"] = (
                vars(self.bridges[state_request.bridge]),
                self.bridges[state_request.bridge].digest,
            )
            header |= self.faults.get("header", {})
        asked = {"model": self.options.model, "ids": ids, "ask": text, "dtype": self.options.dtype, "bridge": bridge}
        values = computed({**asked, "server": self.options.uds, "generation": int(os.environ[GENERATION])})
        self.folder.write(state_request.name, self.faults.get("answer", header), values)


def computed(task: dict[str, Any]) -> bytes:
    """What the process of the tests computes."""
    with socket.socket(socket.AF_UNIX) as caller:
        caller.connect(os.environ["STAND_IN_MODEL"])
        caller.sendall(json.dumps(task).encode() + b"\n")
        with caller.makefile("rb") as answer:
            values = answer.read()
    if not values:
        raise RuntimeError("the process of the tests computed nothing")
    return values[1:]  # a byte that says that it did


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("model", "dtype"):
        parser.add_argument(f"--{name}", required=True)
    for name in ("uds", "host", "port"):
        parser.add_argument(f"--{name}")
    parser.add_argument("--middleware", action="append", default=[])
    parser.add_argument("--max-model-len", type=int, required=True)
    options, _ = parser.parse_known_args()
    faults = json.loads((HERE / "faults.json").read_text())
    if "start" in faults and happens("start", faults["start"]):
        print(f"RuntimeError: {faults['start']['text']}")
        sys.exit(1)
    Handler.model = Teacher(options, faults)  # type: ignore[assignment]
    Handler.middleware = MiddlewareStandIn(options.middleware, answer)
    server: ThreadingHTTPServer
    if options.uds:
        Handler.disable_nagle_algorithm = False
        server = UnixServer(options.uds, Handler, bind_and_activate=False)  # type: ignore[arg-type]
    else:
        server = ThreadingHTTPServer((options.host, int(options.port)), Handler, bind_and_activate=False)
    server.request_queue_size = 128
    server.server_bind()
    server.server_activate()
    server.daemon_threads = True
    server.serve_forever()


if __name__ == "__main__":
    main()
