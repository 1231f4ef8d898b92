"""Who gets what from vLLM servers: of a run, on a Unix socket, and of `nemo-oprd serve`, behind a token and a lease.

The servers stand in for vLLM (`vllm_stand_in.py`); the sockets, the middleware, the checks of files and the users are
real.
"""

from __future__ import annotations

import ast
import json
import os
import pwd
import re
import socket
import stat
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import vllm_intruder
from pool import Pools
from tokenizers import Tokenizer as HFTokenizer
from tokenizers import models
from vllm_engine_cases import MODEL, PROMPTS, expected, flags_of, free_port, lines, make_bench, serving, settings_of

from nemo_oprd.vllm import client as client_module
from nemo_oprd.vllm import engine as engine_module
from nemo_oprd.vllm.client import Client
from nemo_oprd.vllm.endpoint import Endpoint, caller
from nemo_oprd.vllm.fleet import Fleet
from nemo_oprd.vllm.server_lifecycle import LocalServer, ServerRefused
from nemo_oprd.vllm.worker import nemo_oprd_middleware
from tests.support.align_tokenizers import write as write_tokenizer

API_KEY = "an-api-key-of-vLLM-in-the-environment"
# calls of vLLM itself, and of the middleware
OTHERS = ["/v1/completions", "/server_info", "/metrics", "/v1/models", "/abort_requests", "/health/",
          nemo_oprd_middleware.RENEW, nemo_oprd_middleware.RELEASE]  # fmt: skip


def calls_of_the_engine() -> list[str]:
    """Every path in the source of the package that talks to servers."""
    found = set()
    for file in Path(engine_module.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                found |= {node.value} if re.fullmatch(r"/[a-z_]+(/[a-z_0-9]+)*(\?.*)?", node.value) else set()
    assert {"/update_weights", "/collective_rpc", "/inference/v1/generate", "/pause?mode=wait"} <= found
    return sorted(found)


class Servers:
    """A server of a run and one of `serve`, both with VLLM_API_KEY in the environment that starts them."""

    def __init__(self, root: Path) -> None:
        self.bench, self.token_file = make_bench(root / "bench"), root / "token"
        # `serve` samples the ids with a token: all of them
        vocabulary = {"<eos>": 0} | {f"t{i}": i for i in range(1, MODEL["vocab_size"])}
        write_tokenizer(self.bench, HFTokenizer(models.WordLevel(vocabulary, unk_token="<eos>")))
        self.fleet = Fleet(60.0)
        self.serve: subprocess.Popen | None = None
        self.port, self.log = 0, root / "serve.log"

    def start(self) -> None:
        python, flags, log = self.bench / "python", flags_of(self.bench), self.bench / "server_0.log"
        settings = [*settings_of(self.bench), f"student.hf_path={self.bench}", f"teacher.hf_path={self.bench}"]

        self.fleet.client, folder = Client(), self.fleet.open_folder()
        self.fleet.add(LocalServer(0, 1, python=python, flags=flags, log=log, directory=folder))
        self.port = free_port()
        command = [sys.executable, "-m", "nemo_oprd", "serve", "--port", str(self.port)]
        command += ["--token-file", str(self.token_file), "--config-name", "verify", *settings]
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
        with self.log.open("wb") as out:
            self.serve = subprocess.Popen(command, stdout=out, stderr=out, env=environment)
        deadline, server = time.monotonic() + 60, self.server
        while not (self.client.run(self.client.is_healthy(server)) and self.status("GET", "/health")[0] == 200):
            assert time.monotonic() < deadline and self.serve.poll() is None, self.log.read_text()
            time.sleep(0.1)

    @property
    def server(self) -> LocalServer:
        (server,) = self.fleet.servers.values()
        assert isinstance(server, LocalServer)
        return server

    @property
    def client(self) -> Client:
        assert self.fleet.client is not None
        return self.fleet.client

    @property
    def folder(self) -> Path:
        assert self.fleet.folder is not None
        return self.fleet.folder.path

    @property
    def token(self) -> str:
        return self.token_file.read_text().strip()

    @property
    def processes(self) -> list[int]:
        """The two servers, as they have written themselves down, and the guard."""
        assert self.serve is not None and self.server._process is not None
        return [self.serve.pid, self.server._process.pid, *{line["pid"] for line in lines(self.bench)}]

    def status(self, method: str, path: str, **headers: str) -> tuple[int, str]:
        """The answer of the server of `serve`; 0 while nobody listens."""
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}",
            method=method,
            headers=headers,
            data=None if method == "GET" else b"{}",
        )
        try:
            with urllib.request.urlopen(request, timeout=20) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()
        except OSError:
            return 0, ""

    def close(self) -> None:
        self.fleet.close()
        if self.serve is not None:
            self.serve.kill()
            self.serve.wait()


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    root = tmp_path_factory.mktemp("access")
    made, patch = Servers(root), pytest.MonkeyPatch()
    patch.setenv("VLLM_API_KEY", API_KEY)
    try:
        made.start()
        folder = made.folder
        yield made
    finally:
        patch.undo()
        made.close()
    assert not folder.exists()


def test_the_run_itself_gets_everything(servers: Servers) -> None:
    """With VLLM_API_KEY in its environment, too; otherwise the refusals below would show nothing."""
    assert servers.client.run(servers.client.post(servers.server, "/pause?mode=wait", timeout=20)) is None
    bearer = {"Authorization": f"Bearer {servers.token}"}
    assert servers.status("POST", "/pause", **bearer) == (200, "")
    assert servers.status("GET", "/metrics", **bearer)[0] == 200


def test_a_server_of_a_run_answers_on_no_port(servers: Servers) -> None:
    """Its socket and the folder of it are its user's alone."""
    (process,) = {line["pid"] for line in lines(servers.bench) if line["server"] == str(servers.server.socket)}
    own = {os.readlink(entry) for entry in Path(f"/proc/{process}/fd").iterdir()}
    tables = [Path(f"/proc/net/{name}").read_text().splitlines()[1:] for name in ("tcp", "tcp6")]
    assert not own & {f"socket:[{line.split()[9]}]" for table in tables for line in table}
    assert stat.S_IMODE(servers.folder.stat().st_mode) == 0o700
    assert servers.server.socket is not None and stat.S_IMODE(servers.server.socket.stat().st_mode) == 0o700
    assert len(os.fsencode(servers.server.socket)) <= 107


@pytest.mark.skipif(os.getuid() != 0, reason="only root can start a process as another user")
def test_another_user_gets_nothing(servers: Servers) -> None:
    """Every call that the engine makes, and more; sockets, folder, token file, memory, environment, command line."""
    inside = servers.folder / "bucket_of_weights"
    inside.write_bytes(b"weights")
    inside.chmod(0o644)  # the folder alone has to hold others off
    given = [{}, {"Authorization": ""}, {"Authorization": "Bearer wrong"}, {"Authorization": f"Bearer {API_KEY}"},
             {"Authorization": "Bearer " + "A" * 43}, {"X-Nemo-Oprd-Lease": "0" * 32}]  # fmt: skip
    paths = [*calls_of_the_engine(), *OTHERS]
    goal = {
        "sockets": [str(servers.server.socket)],
        "folders": [str(servers.folder)],
        "files": [str(servers.token_file), str(inside)],
        "processes": servers.processes,
        "ports": [servers.port],
        "calls": [
            [method, path] for path in paths for method in ("POST", "GET", "PUT", "OPTIONS") if path != "/health"
        ],
        "headers": given,
    }
    intruder = [sys.executable, "-S", vllm_intruder.__file__, str(pwd.getpwnam("nobody").pw_uid)]
    done = subprocess.run(intruder, input=json.dumps(goal), capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    tried = json.loads(done.stdout)
    got = [line for line in tried if line["what"] != "cmdline" and line["got"] != "refused"]
    assert not got and len(tried) > 200
    for line in tried:
        assert servers.token not in line["got"] and API_KEY not in line["got"]
    inside.unlink()


def test_secrets_are_in_no_log_and_no_command(servers: Servers) -> None:
    """Neither the token nor VLLM_API_KEY, which no server gets."""
    for file in (servers.log, servers.bench / "server_0.log", servers.bench / "requests.jsonl"):
        assert file.stat().st_size and not {servers.token, API_KEY} & set(re.split(r"[^\w-]+", file.read_text()))
    for process in servers.processes:
        for name in ("cmdline", "environ"):
            said = Path(f"/proc/{process}/{name}").read_text()
            assert servers.token not in said
            # the guard has the environment of the server that it starts
            assert API_KEY not in said
    assert stat.S_IMODE(servers.token_file.stat().st_mode) == 0o600
    assert f"token file, made now: {servers.token_file}" in servers.log.read_text()


@pytest.mark.parametrize(
    "path",
    ["/etc/passwd", "{folder}/../passwd", "{folder}/link", "{folder}/sub/bucket", "{folder}/sub", "bucket", "{folder}"],
)
def test_a_server_opens_files_of_the_runs_folder_only(servers: Servers, path: str) -> None:
    """What else it is told to open is refused with an answer, and the server lives."""
    folder, post = servers.folder, servers.client.post
    (folder / "sub").mkdir(exist_ok=True)
    (folder / "sub" / "bucket").write_bytes(b"1234")
    if not (folder / "link").is_symlink():
        (folder / "link").symlink_to("/etc/passwd")
    init = "/init_weight_transfer_engine", {"init_info": {}}

    def update(file: str) -> None:
        for call, body in (("/pause", {}), init, ("/start_weight_update", {})):
            with suppress(ServerRefused):  # begun before
                servers.client.run(post(servers.server, call, body, timeout=20))
        info = {"path": file, "bytes": 4, "entries": []}
        servers.client.run(post(servers.server, "/update_weights", {"update_info": info}, timeout=20))

    with pytest.raises(ServerRefused, match="expected a file of weights in the run's own folder"):
        update(path.format(folder=folder))
    (folder / "bucket_1").write_bytes(b"1234")
    update(f"{folder}/bucket_1")


def test_the_weights_group_meets_on_loopback_by_a_secret(pools: Pools) -> None:
    """Where all of its members are on one machine; the secret is another one for every group."""
    first, second = (pools[2].run("vllm_engine_cases:weights_meet") for _ in range(2))
    assert first["host"] == second["host"] == "127.0.0.1" and first["size"] == 3
    assert re.fullmatch("weights/[0-9a-f]{32}", first["prefix"]) and first["prefix"] != second["prefix"]


class TestEndpoint:
    """A run on a server of `serve`."""

    @pytest.fixture(params=["tcp", "unix"])
    def endpoint(self, request: Any, tmp_path: Path) -> Iterator[dict[str, Any]]:
        with serving(make_bench(tmp_path / "bench"), unix=request.param == "unix") as found:
            yield found

    @staticmethod
    def run(pools: Pools, endpoint: dict[str, Any], **changes: Any) -> dict[str, Any]:
        overrides = [f"rollout.vllm.endpoints=[{endpoint['url']}]", f"rollout.vllm.token_file={endpoint['token_file']}"]
        arguments = {"root": endpoint["root"], "overrides": overrides, "plan": ["load 1", "generate"], **changes}
        return pools[1].run("vllm_engine_cases:run", timeout=60, **arguments)

    def test_one_run_after_the_other(self, pools: Pools, endpoint: dict[str, Any]) -> None:
        """Each gives its lease back."""
        for _ in range(2):
            found = self.run(pools, endpoint)
            assert (found["error"], found["sampled"]) == (None, [expected(1, PROMPTS)])

    @staticmethod
    def leasing(endpoint: dict[str, Any], output: Path) -> Endpoint:
        """The endpoint as a run in the directory `output` sees it."""
        url = endpoint["url"]
        return Endpoint(0, 1, url=url, generation=1, headers=caller(endpoint["token_file"], str(output), url))

    def test_a_killed_run_is_started_again_at_once(self, pools: Pools, endpoint: dict[str, Any]) -> None:
        """In its directory."""
        killed, server = Client(), self.leasing(endpoint, Path(endpoint["root"]) / "run")
        killed.run(killed.post(server, "/pause", timeout=20))
        found = self.run(pools, endpoint, plan=["load 1", "generate"])
        assert (found["error"], found["sampled"]) == (None, [expected(1, PROMPTS)])
        killed.close()

    def test_a_second_run_is_refused_at_the_door(self, pools: Pools, endpoint: dict[str, Any], tmp_path: Path) -> None:
        """Before anything of the server changes, with one line that says who has it."""
        first, calls = Client(), len(lines(endpoint["root"]))
        server = self.leasing(endpoint, tmp_path / "the first\n")
        first.run(first.post(server, "/pause", timeout=20))
        found = self.run(pools, endpoint)
        said = found["error"]
        assert f"vLLM server 0 ({endpoint['url']}) refuses /collective_rpc with status 423: since 20" in said
        assert f"UTC it is leased by the first\\n (process {os.getpid()} on {socket.gethostname()}); expected" in said
        assert "start another server" in said and "\n" not in said
        assert [line["call"] for line in lines(endpoint["root"])[calls:]] == ["/pause"]
        first.release([server])
        assert self.run(pools, endpoint)["error"] is None
        first.close()

    def test_a_signal_ends_the_wait_for_it_on_all_ranks(self, pools: Pools, tmp_path: Path) -> None:
        """Then nothing is sampled: a run that is asked to stop saves and ends."""
        token, bench = tmp_path / "token", make_bench(tmp_path / "bench")
        token.touch(0o600)
        token.write_text("t" * 40)
        closed = f"http://127.0.0.1:{free_port()}"
        gone = [f"rollout.vllm.endpoints=[{closed}]", f"rollout.vllm.token_file={token}"]
        given = {"root": str(bench), "overrides": gone, "plan": ["stop", "update 1", "cancel"], "say_after": 0.3}
        found = pools[2].run("vllm_engine_cases:run", timeout=60, **given)
        assert found["error"] is None and found["completed"] == [0] and max(found["seconds"]) < 5
        name = f"vLLM server 0 ({closed})"
        assert list(dict.fromkeys(found["said"])) == [
            f"waiting for {name}, limit 30 s", f"stopped by SIGTERM while waiting for {name}"
        ]  # fmt: skip

    def test_a_wrong_token_is_one_line(self, pools: Pools, endpoint: dict[str, Any], tmp_path: Path) -> None:
        other = tmp_path / "other_token"
        other.touch(0o600)
        other.write_text("x" * 40)
        calls = len(lines(endpoint["root"]))
        said = self.run(pools, endpoint | {"token_file": str(other)})["error"]
        assert "refuses /collective_rpc with status 401: the call has no token, or another one; expected" in said
        assert "x" * 40 not in said and len(lines(endpoint["root"])) == calls

    def test_an_idle_run_keeps_its_lease(
        self, endpoint: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """While the trainer computes, nothing else asks the server."""
        monkeypatch.setattr(client_module, "LEASE_S", 0.3)
        idle = Client()
        server = self.leasing(endpoint, tmp_path / "idle")
        asked: list[str] = []
        post = idle.post

        async def noting(to: Any, path: str, body: Any = None, *, timeout: float) -> Any:
            asked.append(path)
            assert path != nemo_oprd_middleware.RENEW or timeout < 0.3, "a renewal that hangs would lose the lease"
            return await post(to, path, body, timeout=timeout)

        monkeypatch.setattr(idle, "post", noting)
        idle.run(idle.post(server, "/pause", timeout=20))
        deadline = time.monotonic() + 20
        while asked.count(nemo_oprd_middleware.RENEW) < 3:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        idle.close()
