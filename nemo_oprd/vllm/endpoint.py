"""Servers that others run (`rollout.vllm.endpoints`, `teacher.vllm.endpoints`): address, token, lease, start check."""

from __future__ import annotations

import hmac
import logging
import os
import secrets
import socket
import threading
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from nemo_oprd.runtime.files import replacing
from nemo_oprd.runtime.messages import ON_STDOUT
from nemo_oprd.runtime.waiting import wait_for
from nemo_oprd.vllm.server_lifecycle import Server
from nemo_oprd.vllm.worker.nemo_oprd_middleware import LEASE, RUN, read_tokens

logger = logging.getLogger(__name__)

UNIX = "unix://"
# limit of the path of a Unix socket on Linux
MOST_SOCKET_BYTES = 107
# limit of one health check in `wait_for_servers`, which then checks the other servers before it tries again
_ANSWER_S = 10.0
# a file in a run directory: a secret of mode 0600, by which endpoints recognise a later start of the run
LEASE_FILE = Path("vllm", "lease")


@dataclass
class Endpoint(Server):
    """A server that another user or program runs; the run never restarts it, but waits for it.

    Attributes:
        url: as `rollout.vllm.endpoints` or `teacher.vllm.endpoints` names it.
    """

    url: str = ""

    def __post_init__(self) -> None:
        """Derives the address from `url`."""
        if self.url.startswith(UNIX):
            self.socket = Path(self.url.removeprefix(UNIX))
        else:
            self.base_url = self.url.rstrip("/")

    @property
    def name(self) -> str:
        """The name of the server in messages."""
        return f"{super().name} ({self.url})"

    def restart(self, why: str) -> None:
        """Counts a death; the next call that uses the server waits until it is back."""
        self.check_deaths(why)
        logger.warning(f"{self.name} is waited for: {why}", extra=ON_STDOUT)
        self.generation += 1


def caller(token_file: str, output: str, url: str) -> dict[str, str]:
    """Makes the headers by which an endpoint recognises this run: token, lease, and a description for other runs.

    The first part of a lease is equal for all starts in the directory `output`, whose lock admits one run at a time.
    It differs between endpoints, and between copies of the directory. The second part names the start.

    Raises:
        ValueError: `token_file` holds no token.
        OSError: `output` can't be written.
    """
    of_endpoint = f"{os.path.realpath(output)} {url}".encode()
    lease = hmac.digest(_secret(Path(output) / LEASE_FILE), of_endpoint, "sha256").hex()
    return guest(token_file, output) | {LEASE: f"{lease}.{secrets.token_hex(16)}"}


def guest(token_file: str, output: str) -> dict[str, str]:
    """Makes the headers of `caller` without a lease, for servers that several runs share; every rank may call this.

    Raises:
        ValueError: `token_file` holds no token.
    """
    return {
        "authorization": f"Bearer {read_tokens(token_file)[0]}",
        RUN: ascii(f"{Path(output).name} (process {os.getpid()} on {socket.gethostname()})")[1:-1],
    }


def _secret(file: Path) -> bytes:
    """Returns the secret in the file; makes a new one if `read_tokens` refuses it, as a copy open to other users."""
    try:
        return read_tokens(str(file))[0].encode()
    except ValueError:
        secret = secrets.token_hex(32)
        file.parent.mkdir(parents=True, exist_ok=True)
        with replacing(file) as partial:
            partial.unlink(missing_ok=True)
            with open(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as stream:
                stream.write(f"{secret}\n")
        return secret.encode()


def check_endpoints(
    urls: list[str], token_file: str | None, key: str = "rollout.vllm.endpoints", group: str = "rollout.vllm"
) -> None:
    """Raises ValueError unless `urls` are addresses of servers, and `token_file` holds their token.

    Args:
        key, group: the configuration key of `urls`, and the group that has `token_file`.
    """
    for number, url in enumerate(urls):
        if url.startswith(f"{UNIX}/") and (length := len(os.fsencode(url.removeprefix(UNIX)))) > MOST_SOCKET_BYTES:
            raise ValueError(
                f"{key}: the path in {url!r} has {length} bytes, expected at most {MOST_SOCKET_BYTES}, as for any Unix "
                "socket: let the server listen at a shorter path"
            )
        if not _is_address(url):
            given = "an address with an @ (not shown)" if "@" in url else repr(url)  # a password may stand before it
            raise ValueError(
                f"{key}: {given} is not the address of a server; expected e.g. http://127.0.0.1:8000 or unix:///PATH"
            )
        if url.rstrip("/") in [earlier.rstrip("/") for earlier in urls[:number]]:
            raise ValueError(f"{key}: address {number + 1} is there twice; expected each server once: remove one")
    if urls and token_file is None:
        raise ValueError(
            f"{key}={urls} without {group}.token_file; expected the file with the servers' "
            "token: set it to the FILE of `nemo-oprd serve --token-file FILE`"
        )
    if urls:
        try:
            read_tokens(str(token_file))
        except ValueError as error:
            raise ValueError(f"{group}.token_file={error}") from None


def _is_address(url: str) -> bool:
    """Returns whether a client can call the address."""
    if url.startswith(f"{UNIX}/"):
        return True
    try:
        parts = urlsplit(url)
        _ = parts.port  # raises ValueError unless it is a number of a port
    except ValueError:
        return False
    return parts.scheme in ("http", "https") and bool(parts.hostname)


def wait_for_servers(key: str, urls: list[str], limit_s: float) -> None:
    """Waits until all servers at `urls` pass a health check.

    Args:
        key: the configuration key of `urls`.
        limit_s: the longest wait in seconds.

    Raises:
        ValueError: a server did not pass one within the limit.
        Stopped: SIGTERM or SIGUSR1 arrived.
    """
    from nemo_oprd.vllm.client import READY_EVERY_S, Client

    missing, client, over = list(urls), Client(), threading.Event()

    def look() -> None:
        try:
            while missing and not over.is_set():
                for number, url in enumerate(list(missing)):
                    if client.run(client.is_healthy(Endpoint(number, 1, url=url), timeout=_ANSWER_S)):
                        missing.remove(url)
                if missing:
                    over.wait(READY_EVERY_S)
        finally:
            client.close()

    def what() -> str:
        return (
            f"endpoint {', '.join(missing)} of {key}: it does not answer /health; start it with `nemo-oprd serve`, or "
            "correct its address"
        )

    try:
        wait_for(look, what, limit_s)
    finally:
        over.set()
