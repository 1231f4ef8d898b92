"""A teacher's server that several runs share: `serve --role teacher` and `teacher.vllm.endpoints`.

The server is a stand-in (`teacher_stand_in.py`) behind the real middleware. Commands, sockets, tokens and folders are
real.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from default_signals import default_signals
from layout_cases import LAYERS, Workbench, read_result
from pool import Pools, WorkerError
from served_teachers import ServedTeachers, state_requests, through_a_bridge
from vllm_engine_cases import free_port

from nemo_oprd.distillation.reference import agreement

SMALL = "train.tokens_per_microbatch=120"
OTHER_TOKEN = "x" * 40


class Serve:
    """`nemo-oprd serve --role teacher`, which is started again when it ends, until `close`."""

    def __init__(self, bench: Path, settings: list[str], root: Path, *, unix: bool = False) -> None:
        self.bench, self.token_file, self.log = bench, root / "token", root / "serve.log"
        self.port, self.socket, self._unix = free_port(), root / "socket", unix
        self.url = f"unix://{self.socket}" if unix else f"http://127.0.0.1:{self.port}"
        listen = ["--uds", str(self.socket)] if unix else ["--port", str(self.port)]
        settings = [*settings, "teacher.engine=vllm", f"teacher.vllm.python={bench / 'python'}"]
        self._command = [sys.executable, "-m", "nemo_oprd", "serve", "--role", "teacher", *listen]
        self._command += ["--token-file", str(self.token_file), "--config-name", "verify", *settings]
        self.codes: list[int] = []
        self._closing = threading.Event()
        self.process = self._start()
        self._keeper = threading.Thread(target=self._keep, daemon=True)
        self._keeper.start()

    def _start(self) -> subprocess.Popen:
        self.socket.unlink(missing_ok=True)
        with self.log.open("ab") as out:
            environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
            return subprocess.Popen(self._command, stdout=out, stderr=out, env=environment, preexec_fn=default_signals)

    def _keep(self) -> None:
        while True:
            self.codes.append(self.process.wait())
            if self._closing.is_set():
                return
            self.process = self._start()

    @property
    def settings(self) -> list[str]:
        """Of a run that uses the server."""
        given = [f"teacher.vllm.endpoints=[{self.url}]", f"teacher.vllm.token_file={self.token_file}"]
        return ["teacher.engine=vllm", "teacher.vllm.start_timeout=60", *given]

    def wait(self) -> None:
        """Until it takes calls."""
        deadline = time.monotonic() + 60
        while not (self.token_file.exists() and self._listens()):
            assert time.monotonic() < deadline, self.log.read_text()
            time.sleep(0.1)

    def _listens(self) -> bool:
        family, at = (socket.AF_UNIX, str(self.socket)) if self._unix else (socket.AF_INET, ("127.0.0.1", self.port))
        with suppress(OSError), socket.socket(family) as caller:
            caller.connect(at)
            return True
        return False

    def status(self, method: str, path: str, body: Any = None) -> tuple[int, str]:
        """The answer to a call with the token, over TCP; 0 while nobody listens."""
        token = self.token_file.read_text().strip() if self.token_file.exists() else ""
        data = None if method == "GET" else json.dumps(body or {}).encode()
        headers = {"Authorization": f"Bearer {token}"}
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}", method=method, data=data, headers=headers
        )
        try:
            with urllib.request.urlopen(request, timeout=20) as answer:
                return answer.status, answer.read().decode(errors="replace")
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()
        except OSError:
            return 0, ""

    def close(self, how: int = signal.SIGINT) -> None:
        """Ends it as Ctrl-C does, or kills it; then its folder goes with its guard."""
        self._closing.set()
        self.process.send_signal(how)
        self._keeper.join(60)
        deadline = time.monotonic() + 60
        while {Path(line["folder"]).name for line in state_requests(self.bench)} & folders():
            assert time.monotonic() < deadline and how == signal.SIGKILL, "its folder is left"
            time.sleep(0.1)


def folders() -> set[str]:
    """What is in shared memory of servers of this machine."""
    return {name for name in os.listdir("/dev/shm") if name.startswith("nemo_oprd_")}


@pytest.fixture(scope="module")
def shared(
    workbench: Workbench, served_teachers: ServedTeachers, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Serve]:
    made = Serve(served_teachers.bench(), workbench.settings("qwen3"), tmp_path_factory.mktemp("serve"))
    try:
        made.wait()
        yield made
    finally:
        made.close()
    assert made.codes == [0]


def test_two_runs_share_a_server(
    pools: Pools, workbench: Workbench, served_teachers: ServedTeachers, shared: Serve, tmp_path: Path
) -> None:
    """At the same time: the first request of each waits for the other's. Gradients are those of Megatron teachers."""
    objectives = {1: "qwen3", 2: "qwen3-sparse"}
    layouts = {1: [], 2: ["student.parallel.tensor=2", "student.parallel.sequence=true"]}
    arrived = {ranks: threading.Event() for ranks in objectives}

    def together(task: dict[str, Any]) -> None:
        own = {LAYERS: 1, 2: 2}.get(len(json.loads(task["ask"])["layers"]))  # those of the canary are LAYERS + 1
        if own is not None:
            arrived[own].set()
            assert arrived[3 - own].wait(60), "the other run never asked"

    def verify(ranks: int, engine: str, *more: str) -> tuple[Any, Any]:
        output = tmp_path / f"{engine}_{ranks}"
        settings = [*workbench.settings(objectives[ranks]), SMALL, *layouts[ranks], f"output={output}", *more]
        pools[ranks].run("cases:run_verify", overrides=settings)
        return read_result(output)

    _ = [pools[ranks] for ranks in objectives]  # are started one after the other
    served_teachers.choose = together
    try:
        with ThreadPoolExecutor(2) as both_at_once:
            runs = {both_at_once.submit(verify, ranks, "vllm", *shared.settings): ranks for ranks in objectives}
            served = {runs[run]: run.result() for run in as_completed(runs)}
    finally:
        served_teachers.choose = None
    for ranks, (losses, gradients) in served.items():
        expected_losses, expected = verify(ranks, "megatron")
        assert losses["loss/total"] == pytest.approx(expected_losses["loss/total"], rel=1e-5)
        largest = max(float(gradient.norm()) for gradient in expected.values())
        for name, gradient in expected.items():
            assert float((gradients[name] - gradient).norm()) <= 1e-5 * max(float(gradient.norm()), 1e-3 * largest), (
                name
            )


def test_whole_states_leave_a_shared_server_where_a_run_has_a_bridge(
    pools: Pools, workbench: Workbench, served_teachers: ServedTeachers, shared: Serve, tmp_path: Path
) -> None:
    """The ranks that asked project them, also from answers in pieces; gradients are those of the Megatron teacher."""
    bridged = through_a_bridge(workbench.root / "qwen3", tmp_path)
    common = [*workbench.settings("qwen3"), SMALL, *bridged, "student.parallel.tensor=2", f"output={tmp_path / 'out'}"]
    before, found, counts = len(state_requests(shared.bench)), [], []
    for case, engine in (
        ("cases:run_verify", shared.settings),
        ("little_room:run_verify", shared.settings),
        ("cases:run_verify", []),
    ):
        pools[2].run(case, overrides=[*common, *engine])
        found.append(read_result(tmp_path / "out"))
        counts.append(len(state_requests(shared.bench)))
    (losses, gradients), (again, gradients_again), (expected, theirs) = found
    assert losses["rep/loss"] == pytest.approx(expected["rep/loss"], rel=1e-5)
    assert max(agreement(gradients, theirs).values()) < 1e-5
    assert again == losses and counts[1] - counts[0] > counts[0] - before + 10
    assert all(bool((gradients_again[name] == gradient).all()) for name, gradient in gradients.items())
    of_runs = [each["ask"] for each in state_requests(shared.bench)[before:]]
    assert {(each["bridge"], each["rank"]) for each in of_runs} == {("", 0)}
    assert (3, 6, 9) in {tuple(each["layers"]) for each in of_runs}


@pytest.mark.slow
def test_a_server_that_is_started_again_proves_itself_again(
    pools: Pools, workbench: Workbench, served_teachers: ServedTeachers, tmp_path: Path
) -> None:
    """It dies in the middle of an answer, on a Unix socket; the run waits for it, and no bit changes. Killed, it leaves
    nothing."""
    common = [*workbench.settings("qwen3"), SMALL]
    results = []
    for die in ({}, {"die": {"at": 9, "times": 1}}):
        (root := tmp_path / f"serve{len(results)}").mkdir()
        bench, output = served_teachers.bench(**die), root / "out"
        server = Serve(bench, common, root, unix=True)
        try:
            server.wait()
            pools[1].run("cases:run_verify", overrides=[*common, *server.settings, f"output={output}"])
        finally:
            server.close(signal.SIGKILL if die else signal.SIGINT)
        assert server.codes == ([1, -signal.SIGKILL] if die else [0])
        results.append(read_result(output))
        found = state_requests(bench)
        assert len({each["pid"] for each in found}) == (2 if die else 1)
    (losses, gradients), (again, gradients_again) = results
    assert again == losses
    assert all(bool((gradients_again[name] == gradient).all()) for name, gradient in gradients.items())


def refused(pools: Pools, overrides: list[str]) -> str:
    """The line that ends a run."""
    with pytest.raises(WorkerError) as error:
        pools[1].run("cases:run_verify", overrides=overrides)
    return str(error.value)


def test_a_run_that_the_server_is_not_for_gets_one_line(
    pools: Pools, workbench: Workbench, served_teachers: ServedTeachers, shared: Serve, tmp_path: Path
) -> None:
    """A wrong token; other weights of the same shape; another depth; longer sequences."""
    common = [*workbench.settings("qwen3"), *shared.settings, f"output={tmp_path / 'out'}"]
    before = len(state_requests(shared.bench))
    other = tmp_path / "token"
    other.touch(0o600)
    other.write_text(OTHER_TOKEN)
    said = refused(pools, [*common, f"teacher.vllm.token_file={other}"])
    assert (
        f"the teacher's vLLM server 0 ({shared.url}) refuses /collective_rpc with status 401: the call has no" in said
    )
    assert OTHER_TOKEN not in said
    changed = served_teachers.changed_copy(
        workbench.root / "qwen3" / "teacher", lambda tensors: tensors["lm_head.weight"].mul_(1.5)
    )
    said = refused(pools, [*common, f"teacher.hf_path={changed}"])
    assert re.search(
        rf"server 0 \({shared.url}\) computes another model .*: weights=\w+ instead of \w+; expected", said
    )
    student = workbench.root / "pruned" / "student"
    shallow = [f"student.hf_path={student}", f"teacher.hf_path={student}"]
    assert "num_hidden_layers=8 instead of 6" in refused(pools, [*common, *shallow])
    assert len(state_requests(shared.bench)) == before, "nothing was computed for any of them"


def test_no_call_changes_the_server(shared: Serve) -> None:
    """With the right token, too; which calls it takes is in tests/unit/vllm/test_teacher_middleware.py."""
    for path in ("/pause", "/sleep?level=2", "/update_weights", "/reset_prefix_cache", "/nemo_oprd/renew"):
        assert shared.status("POST", path)[0] == 403, path
    code, said = shared.status("POST", "/collective_rpc", {"method": "save_model"})
    assert code == 403 and "nemo_oprd_describe" in said
    assert shared.status("POST", "/collective_rpc", {"method": "nemo_oprd_describe"})[0] == 200
