"""Teachers behind servers, for tests: the models of stand-in servers, and the settings with which a run starts one."""

from __future__ import annotations

import json
import shutil
import socketserver
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from tiny_models import edit_tensors, save_random_bridge

from nemo_oprd.vllm.worker.nemo_oprd_requests import StateRequest
from tests.support.served_states import project, states_of

# what the verdict of a stand-in depends on
DESCRIBED = {"tensor": 1, "chunk": 2048, "version": "stand-in"}
# of a case whose teacher is behind servers; `ServedTeachers.of` adds where they are
SERVED = ("teacher.engine=vllm",)
# the same on the last rank of the job
DEDICATED = (*SERVED, "teacher.vllm.placement=dedicated")
STAND_IN = Path(__file__).with_name("teacher_stand_in.py")


def through_a_bridge(models: Path, root: Path) -> list[str]:
    """Overrides of a run through a random bridge, which is written to `root`: its maps read layers 3, 3, 6 and 8."""
    configs = [json.loads((models / role / "config.json").read_text()) for role in ("student", "teacher")]
    pairs = {1: 3, 2: 3, 5: 6, 8: 8}
    save_random_bridge(root / "bridge", *configs, pairs, 5, "token")
    return [f"bridge.path={root / 'bridge'}", f"loss.representation.layers=[{','.join(map(str, pairs))}]"]


class _Handler(socketserver.StreamRequestHandler):
    def handle(self) -> None:
        """Answers a server, unless that has died."""
        line = self.rfile.readline()
        if line:
            with suppress(BrokenPipeError):
                self.answer(json.loads(line))

    def answer(self, task: dict[str, Any]) -> None:
        """Computes, and sends the bytes."""
        state_request = StateRequest(**json.loads(task["ask"]))
        owner = self.server.owner  # type: ignore[attr-defined]
        model = (owner.choose and owner.choose(task)) or owner.instead.get(task["model"], task["model"])
        with self.server.lock:  # type: ignore[attr-defined]
            parts = states_of(str(model), task["dtype"], task["ids"], state_request)
        if task["bridge"] is not None:
            parts[0] = project(parts[0], task["bridge"])
        self.wfile.write(b"!" + b"".join(part.contiguous().view(torch.uint8).numpy().tobytes() for part in parts))


class ServedTeachers:
    """Computes for stand-in servers in threads of this process; `settings` start them."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._socket = root / "model"
        self._server = socketserver.ThreadingUnixStreamServer(str(self._socket), _Handler)
        self._server.daemon_threads = True
        self._server.lock = threading.Lock()  # type: ignore[attr-defined]
        self.instead: dict[str, Path] = {}  # a model -> the one that is computed in its place
        self.choose: Callable[[dict[str, Any]], Path | None] | None = None  # the model for one ask; None: the right one
        self._server.owner = self  # type: ignore[attr-defined]
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        self._made = 0

    def bench(self, **faults: Any) -> Path:
        """A directory with these faults and an interpreter whose `vllm` is the stand-in."""
        self._made += 1
        root = self.root / str(self._made)
        package = root / "path" / "vllm" / "entrypoints" / "openai"
        package.mkdir(parents=True)
        (root / "faults.json").write_text(json.dumps(faults))
        (package / "api_server.py").write_text(
            f"import runpy\nrunpy.run_path({str(STAND_IN)!r}, run_name='__main__')\n"
        )
        python = root / "python"
        variables = f"STAND_IN={root} STAND_IN_MODEL={self._socket} PYTHONPATH={root}/path"
        python.write_text(f'#!/bin/sh\n{variables} exec {sys.executable} -S "$@"\n')
        python.chmod(0o700)
        return root

    def changed_copy(self, model: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> Path:
        """A copy of a model, whose tensors `change` changes in place."""
        self._made += 1
        copy = self.root / f"copy_{self._made}"
        shutil.copytree(model, copy)
        edit_tensors(copy, change)
        return copy

    def settings(self, **faults: Any) -> list[str]:
        """Overrides for a teacher behind a stand-in with these faults."""
        return settings_of(self.bench(**faults))

    def of(self, overrides: list[str], **faults: Any) -> list[str]:
        """The overrides of a run; where its teachers, or some of several, are behind servers, with a stand-in."""
        if not any(each.startswith("teacher") and each.endswith(".engine=vllm") for each in overrides):
            return overrides
        made = self.settings(**faults)
        return [*overrides, *made] if {*SERVED} <= {*overrides} else [*overrides, *made[1:]]

    def close(self) -> None:
        """Ends the threads."""
        self._server.shutdown()
        self._server.server_close()


def settings_of(bench: Path) -> list[str]:
    """Overrides for a teacher behind the stand-in of a bench."""
    return ["teacher.engine=vllm", f"teacher.vllm.python={bench / 'python'}", "teacher.vllm.start_timeout=60"]


def state_requests(bench: Path) -> list[dict[str, Any]]:
    """What the servers of a bench were asked, in order."""
    file = bench / "asks.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


@contextmanager
def serving_teachers(root: Path) -> Iterator[ServedTeachers]:
    """`ServedTeachers` for the time of a `with`."""
    made = ServedTeachers(root)
    try:
        yield made
    finally:
        made.close()
