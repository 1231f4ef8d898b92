"""Who may call a vLLM server, which files it opens, and where the weights' process group listens."""

from __future__ import annotations

import argparse
import asyncio
import os
import shutil
import socket
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from nemo_oprd.commands import serve
from nemo_oprd.vllm import weight_group
from nemo_oprd.vllm.endpoint import LEASE_FILE, caller
from nemo_oprd.vllm.server_lifecycle import server_environment
from nemo_oprd.vllm.transport import SharedFolder
from nemo_oprd.vllm.weight_group import open_store, own_address
from nemo_oprd.vllm.worker import nemo_oprd_middleware
from nemo_oprd.vllm.worker.nemo_oprd_files import FOLDER, open_bucket
from nemo_oprd.vllm.worker.nemo_oprd_group import Group, address_towards
from nemo_oprd.vllm.worker.nemo_oprd_middleware import LEASE, LEASE_S, RELEASE, RENEW, RUN, Middleware, read_tokens

ONE, OTHER = "1" * 40, "2" * 40
FOR_THIS_USER = "expected a file of this user with mode 0600 and lines of at least 32 letters, digits, - and _: "


def token_file(directory: Path, text: str = f"{ONE}\n{OTHER}\n", mode: int = 0o600) -> Path:
    file = directory / "token"
    file.write_text(text)
    file.chmod(mode)
    return file


class Visitor:
    """Knocks at a middleware; time goes on by `clock.now`."""

    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.clock, self.let_in = SimpleNamespace(now=1000.0), list[str]()
        monkeypatch.setenv(nemo_oprd_middleware.TOKEN_FILE, str(token_file(directory)))
        clock = SimpleNamespace(monotonic=lambda: self.clock.now, strftime=time.strftime, gmtime=time.gmtime)
        monkeypatch.setattr(nemo_oprd_middleware, "time", clock)
        self._door = Middleware(self._behind)

    async def _behind(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        self.let_in.append(scope.get("path", ""))

    def knock(self, path: str, lease: str = "", token: str = ONE, method: str = "POST", **more: Any) -> tuple[int, str]:
        """(Status, text) of the middleware's answer; (0, "") if it lets in."""
        headers = [(b"Authorization", f"Bearer {token}".encode()), (RUN.encode(), b"run\x07 of " + lease.encode())]
        headers += [(LEASE.title().encode(), lease.encode())] if lease else []
        scope = {"type": "http", "method": method, "path": path, "headers": headers, **more}
        sent: list[dict[str, Any]] = []

        async def send(message: dict[str, Any]) -> None:
            sent.append(message)

        asyncio.run(self._door(scope, None, send))
        return (sent[0].get("status", -1), sent[-1].get("body", b"").decode()) if sent else (0, "")


@pytest.fixture
def visitor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Visitor:
    return Visitor(tmp_path, monkeypatch)


def test_every_token_of_the_file_is_good_and_no_other(visitor: Visitor) -> None:
    for token in (ONE, OTHER):
        assert visitor.knock("/a", token=token)[0] == 0
    for token in ("", ONE[:-1], ONE + "1", OTHER[:20], f"{ONE}\n{OTHER}"):
        assert visitor.knock("/a", token=token)[0] == 401
    assert visitor.let_in == ["/a", "/a"]


def test_only_health_is_for_everybody(visitor: Visitor) -> None:
    assert visitor.knock("/health", token="", method="GET")[0] == 0
    for method, path in (("POST", "/health"), ("GET", "/health/"), ("GET", "/metrics"), ("OPTIONS", "/pause")):
        assert visitor.knock(path, token="", method=method)[0] == 401
    assert visitor.knock("/v1/realtime", token="", type="websocket", method=None)[0] == -1  # closed
    visitor.knock("", type="lifespan")
    assert visitor.let_in == ["/health", ""]


def test_one_run_has_the_lease(visitor: Visitor) -> None:
    """Another run, and a call of none, change nothing; reading needs the token alone."""
    assert visitor.knock("/pause", "first") == (0, "")
    for lease in ("second", ""):
        status, said = visitor.knock("/update_weights", lease)
        assert status == 423 and said.startswith("since 20") and "UTC it is leased by run of first; expected" in said
        assert "if it is dead, 120 s" in said and said.isprintable()
    assert visitor.knock("/metrics", method="GET")[0] == 0
    assert visitor.knock("/resume", "first") == (0, "")
    assert visitor.let_in == ["/pause", "/metrics", "/resume"]


def test_a_lease_ends(visitor: Visitor) -> None:
    """Some time after the last call, or at once; the server behind the middleware hears of neither call."""
    visitor.knock("/pause", "first")
    for _ in range(3):
        visitor.clock.now += LEASE_S - 1
        assert visitor.knock(RENEW, "first") == (200, "")
    visitor.clock.now += LEASE_S - 1
    assert visitor.knock(RELEASE, "second")[0] == 423
    visitor.clock.now += 2
    assert visitor.knock("/pause", "second")[0] == 0
    assert visitor.knock("/pause", "first")[0] == 423
    assert visitor.knock(RELEASE, "second") == (200, "")
    assert visitor.knock("/pause", "first")[0] == 0
    assert visitor.let_in == ["/pause"] * 3


def test_a_late_call_takes_no_lease_that_was_given_back(visitor: Visitor) -> None:
    """A request whose round was ended may arrive after the controller has given the lease back."""
    visitor.knock("/pause", "first")
    assert visitor.knock(RELEASE, "first") == (200, "")
    status, said = visitor.knock("/inference/v1/generate", "first")
    assert status == 423 and said.startswith("the run that makes the call has given its lease back; expected ")
    assert visitor.knock(RELEASE, "first")[0] == 423
    assert visitor.knock(RENEW, "first") == (200, "")
    assert visitor.knock("/pause", "second")[0] == 0
    assert visitor.let_in == ["/pause"] * 2


def test_a_later_start_of_a_run_takes_its_lease_over(visitor: Visitor) -> None:
    """At once, as often as the run is started; what an earlier start has left behind can't use it, or give it back."""
    for number in ("1", "2", "3"):
        assert visitor.knock("/pause", f"first.{number}")[0] == 0
    for lease in ("first.1", "first.2", "second.3", ".3", ""):
        assert visitor.knock(RELEASE, lease)[0] == visitor.knock(RENEW, lease)[0] == 423
    assert "it is leased by run of first.3; expected" in visitor.knock("/resume", "first.1")[1]
    assert visitor.knock("/resume", "first.3")[0] == 0
    assert visitor.knock(RELEASE, "first.3")[0] == 200
    assert visitor.knock("/pause", "second.1")[0] == 0 and visitor.knock("/pause", "first.4")[0] == 423
    visitor.clock.now += LEASE_S + 1
    assert visitor.knock("/pause", "first.4")[0] == 0
    assert visitor.let_in == [*["/pause"] * 3, "/resume", "/pause", "/pause"]


class TestLease:
    def leases(self, directory: Path, url: str = "http://a:1") -> tuple[str, str]:
        """(Of the run, of the start.)"""
        file = token_file(directory.parent)
        lease, start = caller(str(file), str(directory), url)[LEASE].split(".")
        return lease, start

    def test_it_is_that_of_the_run_directory(self, tmp_path: Path) -> None:
        """And of the endpoint, which does not learn those of others; a copy of the directory is another run."""
        first, again = self.leases(tmp_path / "run"), self.leases(tmp_path / "run")
        assert first[0] == again[0] and first[1] != again[1]
        shutil.copytree(tmp_path / "run", tmp_path / "copy")
        others = [self.leases(tmp_path / name, url) for name, url in (("run", "http://a:2"), ("copy", "http://a:1"))]
        assert len({lease for lease, _ in (first, *others)}) == 3
        secret = (tmp_path / "run" / LEASE_FILE).read_text().strip()
        assert len(secret) == 64 and secret not in (first[0], again[0], others[0][0])

    def test_nobody_else_reads_its_secret(self, tmp_path: Path) -> None:
        """A file that others could read is replaced, and so is what a killed start has left of one."""
        file, umask = tmp_path / "run" / LEASE_FILE, os.umask(0)
        try:
            found = [self.leases(tmp_path / "run")[0]]
            for spoil in (lambda: file.chmod(0o644), lambda: file.write_text("")):
                spoil()
                found.append(self.leases(tmp_path / "run")[0])
                assert stat.S_IMODE(file.stat().st_mode) == 0o600
        finally:
            os.umask(umask)
        assert len({*found}) == 3 and [path.name for path in file.parent.iterdir()] == ["lease"]


def test_a_call_of_no_run_takes_no_lease(visitor: Visitor) -> None:
    """Neither does one that keeps a lease, if there is none: another client of a run may have given it back."""
    assert visitor.knock("/pause")[0] == 0
    assert visitor.knock(RENEW, "second") == (200, "")
    assert visitor.knock("/pause", "first")[0] == 0


@pytest.mark.parametrize(
    ("text", "mode", "message"),
    [
        (ONE, 0o640, "has mode 0640, which lets others in"),
        (ONE, 0o602, "has mode 0602, which lets others in"),
        ("", 0o600, "holds no token, or something else"),
        ("too-short", 0o600, "holds no token, or something else"),
        (f"{ONE}\nanother line of some file", 0o600, "holds no token, or something else"),
    ],
)
def test_token_files_that_are_refused(tmp_path: Path, text: str, mode: int, message: str) -> None:
    file = token_file(tmp_path, text, mode)
    with pytest.raises(ValueError, match=message) as refused:
        read_tokens(str(file))
    assert str(refused.value).startswith(f"{file} {message}; {FOR_THIS_USER}")
    assert "\n" not in str(refused.value) and ONE not in str(refused.value)


def test_what_is_no_token_file(tmp_path: Path) -> None:
    """Nothing that somebody has put there is followed or waited for."""
    (tmp_path / "link").symlink_to(token_file(tmp_path))
    os.mkfifo(tmp_path / "pipe", 0o600)
    for name in ("link", "pipe", "nowhere", "."):
        with pytest.raises(ValueError, match="expected a file of this user"):
            read_tokens(str(tmp_path / name))


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a file away")
def test_a_token_file_of_another_user_is_refused(tmp_path: Path) -> None:
    os.chown(token_file(tmp_path), 65534, 65534)
    with pytest.raises(ValueError, match="belongs to user 65534, this process to 0"):
        read_tokens(str(tmp_path / "token"))


class TestFiles:
    @pytest.fixture
    def folder(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
        made = SharedFolder()
        (made.path / "bucket_1").write_bytes(b"1234")
        monkeypatch.setenv(FOLDER, str(made.path))
        yield made.path
        made.close()

    @pytest.mark.parametrize("known", [True, False])
    def test_files_of_the_folder_are_opened(self, folder: Path, known: bool, monkeypatch: pytest.MonkeyPatch) -> None:
        """Also by a server that no run has started."""
        if not known:
            monkeypatch.delenv(FOLDER)
        with open(open_bucket(f"{folder}/bucket_1", 4), "rb") as file:
            assert file.read() == b"1234"

    @pytest.mark.parametrize("known", [True, False])
    @pytest.mark.parametrize(
        "path",
        [
            "/etc/passwd", "bucket_1", "", "{folder}", "{folder}/", "{folder}/..", "{folder}/../x",
            "{folder}/./bucket_1", "{folder}//bucket_1", "{folder}/sub/bucket", "{folder}/link",
            "{folder}/pipe", "{folder}/sub", "{folder}/nowhere", "{linked}/bucket_1", "/proc/self/fd/0",
        ],
    )  # fmt: skip
    def test_others_are_not(self, folder: Path, path: str, known: bool, monkeypatch: pytest.MonkeyPatch) -> None:
        linked = folder.with_name(f"{folder.name}_linked")
        linked.symlink_to(folder)
        (folder / "sub").mkdir()
        (folder / "sub" / "bucket").write_bytes(b"1234")
        (folder / "link").symlink_to("/etc/passwd")
        os.mkfifo(folder / "pipe")
        if not known:
            monkeypatch.delenv(FOLDER)
        try:
            with pytest.raises(ValueError, match="expected a file of weights in the run's own folder"):
                open_bucket(path.format(folder=folder, linked=linked), 4)
        finally:
            linked.unlink()

    def test_a_file_that_is_too_short_or_open_to_others_is_not(self, folder: Path) -> None:
        with pytest.raises(ValueError, match="no plain file of this user with 5 bytes"):
            open_bucket(f"{folder}/bucket_1", 5)
        folder.chmod(0o755)
        with pytest.raises(ValueError, match="others can enter"):
            open_bucket(f"{folder}/bucket_1", 4)

    def test_the_folder_of_another_run_is_not(self, folder: Path) -> None:
        other = SharedFolder()
        (other.path / "bucket_1").write_bytes(b"1234")
        with pytest.raises(ValueError, match="is elsewhere"):
            open_bucket(f"{other.path}/bucket_1", 4)
        other.close()

    @pytest.mark.skipif(os.getuid() != 0, reason="only root can give a file away")
    def test_a_file_of_another_user_is_not(self, folder: Path) -> None:
        os.chown(folder / "bucket_1", 65534, 65534)
        with pytest.raises(ValueError, match="no plain file of this user"):
            open_bucket(f"{folder}/bucket_1", 4)


def test_the_path_of_a_socket_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the machine is called; 37 more bytes for the sockets between a server's own processes."""
    monkeypatch.setattr(socket, "gethostname", lambda: "a" * 60 + "/..")
    folder = SharedFolder()
    assert stat.S_IMODE(folder.path.stat().st_mode) == 0o700
    assert len(str(folder.path)) + 37 <= 107 and folder.path.parent == Path("/dev/shm")
    folder.close()


def listening() -> set[str]:
    """The addresses (without ports) and the inodes at which this process listens over TCP."""
    own = {os.readlink(entry) for entry in Path("/proc/self/fd").iterdir() if entry.is_symlink()}
    lines = [
        line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]
    ]
    return {
        f"{line[1].partition(':')[0]} {line[9]}" for line in lines if f"socket:[{line[9]}]" in own and line[3] == "0A"
    }


def test_the_group_of_the_weights_listens_at_one_address() -> None:
    """Its store, and each member over gloo; a client of the store knows where it is, too."""
    before = listening()
    store = open_store("127.0.0.1")
    client = dist.TCPStore(store.host, store.port, is_master=False)
    here = torch.device("cpu")
    groups = [Group(member, f"p{n}", 0, 1, "gloo", here, 10.0).open() for n, member in enumerate((store, client))]
    found = {place.split()[0] for place in listening() - before}
    assert found == {"0100007F"} and len(listening() - before) == 3
    del groups


def test_the_one_address_is_loopback_where_all_are_on_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the address from which the others are reached."""
    assert own_address([]) == own_address(["localhost", socket.gethostname()]) == "127.0.0.1"
    assert address_towards("127.0.0.1") == "127.0.0.1"
    monkeypatch.setattr(weight_group, "address_towards", {"127.0.0.1": "127.0.0.1", "10.0.0.7": "10.0.0.5"}.__getitem__)
    assert own_address(["127.0.0.1", "10.0.0.7"]) == "10.0.0.5"


def test_a_server_does_not_get_the_key_of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    monkeypatch.setenv("VLLM_HOST_IP", "10.0.0.5")
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "DEBUG")
    environment = server_environment(None)
    assert "secret" not in environment.values()
    assert environment["VLLM_HOST_IP"] == "127.0.0.1" and environment["VLLM_LOGGING_LEVEL"] == "DEBUG"


class TestServe:
    def test_a_token_file_is_made_once(self, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
        file = tmp_path / "token"
        umask = os.umask(0)
        try:
            serve._token_file(file)
        finally:
            os.umask(umask)
        (token,) = read_tokens(str(file))
        assert stat.S_IMODE(file.stat().st_mode) == 0o600 and len(token) == 43
        serve._token_file(file)
        assert read_tokens(str(file)) == [token]
        said = capsys.readouterr().out
        assert [line.startswith("token file, made now: ") for line in said.splitlines()] == [True, False]
        assert token not in said

    def test_where_none_can_be_made(self, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match=r"--token-file .*/no/token can't be made \(No such file or directory\)"):
            serve._token_file(tmp_path / "no" / "token")
        (tmp_path / "open").write_text(ONE)
        with pytest.raises(ValueError, match="--token-file .*open has mode 0644, which lets others in"):
            serve._token_file(tmp_path / "open")
        (tmp_path / "dangling").symlink_to(tmp_path / "elsewhere")
        with pytest.raises(ValueError, match="--token-file .*dangling can't be read"):
            serve._token_file(tmp_path / "dangling")
        assert not (tmp_path / "elsewhere").exists()

    def test_paths_of_sockets(self, tmp_path: Path) -> None:
        assert serve._socket_path(tmp_path / "s") == tmp_path / "s"
        (tmp_path / "there").touch()
        for path, message in (
            (tmp_path / ("s" * 107), "bytes, expected at most 107, as for any Unix socket: choose a shorter path"),
            (tmp_path / "there", "exists; expected a new name in a directory"),
            (tmp_path / "no" / "s", "is in no directory; expected a new name in a directory"),
        ):
            with pytest.raises(ValueError, match=message):
                serve._socket_path(path)

    def test_there_is_no_server_without_a_token(self, capsys: pytest.CaptureFixture) -> None:
        parser = argparse.ArgumentParser()
        serve.add_arguments(parser)
        with pytest.raises(SystemExit):
            parser.parse_args(["--port", "1"])
        assert "--token-file" in capsys.readouterr().err
