"""The process group over which the world's first rank broadcasts weights to servers' workers (transport `group`).

The trainer and vLLM are not one job, so this module builds the group: a store on the first rank, and torch's
process group on top of it. After every restart of a server, all servers and the first rank make a new group.
`vllm/worker/nemo_oprd_group.py` holds the member's side. The group has not been run over NCCL.
"""

from __future__ import annotations

import datetime
import ipaddress
import json
import os
import secrets
import socket
import threading
import time
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import suppress
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from nemo_oprd.megatron.parallel import everyones, first_ranks
from nemo_oprd.vllm.placement import ServerPlacement
from nemo_oprd.vllm.server_lifecycle import ServerDied
from nemo_oprd.vllm.worker.nemo_oprd_buckets import Bucket, send
from nemo_oprd.vllm.worker.nemo_oprd_group import LOOK_EVERY_S, Group, TransferEnded, address_towards

# limit of joining, and of one broadcast: meanwhile a worker loads the last bucket, and the trainer gathers the next
TIMEOUT_S = 300.0
# limit within which a server leaves a transfer that is over: it may be loading a bucket
LEAVE_S = 30.0
_TIMEOUT = datetime.timedelta(seconds=TIMEOUT_S)


@dataclass(frozen=True)
class Rendezvous:
    """Address and size of a group for its members; a worker receives them as `nemo_oprd_worker.InitInfo`.

    `key`: (server, generation) of all servers in the group; `first_ranks`: per server, the rank of its first worker.
    """

    key: tuple[tuple[int, int], ...]
    host: str
    port: int
    prefix: str
    size: int
    backend: str
    first_ranks: dict[int, int]

    def init_info(self, server: int) -> dict[str, Any]:
        """Returns the fields of the call that lets a server join the group."""
        info = {name: getattr(self, name) for name in ("host", "port", "prefix", "size", "backend")}
        return {**info, "first_rank": self.first_ranks[server], "timeout_s": TIMEOUT_S}


@dataclass(frozen=True)
class Ended:
    """The reason why a transfer ended early, and the server that caused it; None if that server is not known."""

    server: int | None
    why: str


class WeightGroup:
    """The group of a run. Every rank has one; only the first rank is a member.

    The controllers see the answers of their servers, but only the first rank can end the transfer for all. A key in
    the job's store tells all ranks the reason: the first one reported, until the first rank knows the server at fault.
    """

    def __init__(self, places: list[ServerPlacement], device: torch.device) -> None:
        self._workers = {place.number: place.workers for place in places if place.transport == "group"}
        urls = [urlsplit(place.url) for place in places if place.transport == "group" and place.url is not None]
        self._hosts = [url.hostname for url in urls if url.hostname is not None]
        self._host = ""
        self._device = device if device.type == "cuda" else torch.device("cpu")
        self._meeting: Rendezvous | None = None  # of the newest group, on every rank
        self._store: Any = None
        self._group: Group | None = None
        # a connection of its own: while one waits, it serves no other call
        self._job: Any = _get_default_store().clone() if self._workers else None  # type: ignore[attr-defined]

    def meet(self, generations: dict[int, int]) -> Rendezvous | None:
        """Returns the rendezvous of a new group, equal on every rank; None if none is needed. Every rank calls this.

        `generations`: of this rank's servers, by number.
        """
        if not self._workers:
            return None
        everyone = everyones((generations, address_towards(os.environ.get("MASTER_ADDR", "127.0.0.1"))))
        known = {number: generation for part, _ in everyone for number, generation in part.items()}
        key = tuple((number, known[number]) for number in self._workers)
        is_open = self._group is not None and self._meeting is not None and self._meeting.key == key
        hosts = [*self._hosts, *(address for _, address in everyone)]
        meeting = first_ranks(None if dist.get_rank() != 0 or is_open else self._rendezvous(key, hosts))
        self._meeting = meeting or self._meeting
        return meeting

    def _rendezvous(self, key: tuple, hosts: list[str]) -> Rendezvous:
        if self._store is None:
            self._host = own_address(hosts)
            self._store = open_store(self._host)
        first_ranks, size = {}, 1
        for number, workers in self._workers.items():
            first_ranks[number] = size
            size += workers
        # every client that reaches the store can still list its keys; see docs/security.md
        prefix = f"weights/{secrets.token_hex(16)}"
        backend = "nccl" if self._device.type == "cuda" else "gloo"
        return Rendezvous(
            key, self._host, port=self._store.port, prefix=prefix, size=size, backend=backend, first_ranks=first_ranks
        )

    def open(self, meeting: Rendezvous) -> Future | None:
        """Begins to open the group while the workers join; returns its future on the first rank, None on the others."""
        if dist.get_rank() != 0:
            return None
        self._group = None
        place = self._store, meeting.prefix, 0, meeting.size, meeting.backend, self._device, TIMEOUT_S
        group, future = Group(*place, ended_elsewhere=self._raise_if_ended), Future[Group]()

        def run() -> None:
            try:
                future.set_result(group.open())
            except BaseException as error:  # raised where the caller reads the result
                self._end(group, f"the process group of the weights did not come about: {error}")
                future.set_exception(error)

        threading.Thread(target=run, name="weight-group", daemon=True).start()
        return future

    def opened(self, future: Future | None) -> None:
        """Waits until the group is open, or its opening has failed; then `ended` gives the reason."""
        if future is not None:
            with suppress(RuntimeError, OSError):
                self._group = future.result()

    def send(self, bucket: Bucket | None) -> None:
        """Broadcasts a bucket, or None for the end. Once the group is broken, does nothing: `ended` has the reason."""
        if self._group is None:
            return
        try:
            send(self._group, bucket)
        except RuntimeError as error:
            group, self._group = self._group, None
            self._end(group, f"the process group of the weights broke: {error}")

    def watch(self, server: int, received: Future) -> None:
        """Reports to all ranks if the call in which a server receives the weights fails."""

        def look(answered: Future) -> None:
            if not answered.cancelled() and (error := answered.exception()) is not None:
                self.report(server, str(error))

        received.add_done_callback(look)

    def wait_for(self, name: str, received: Future) -> None:
        """Waits until a server has received all buckets, or has left an ended transfer; raises the server's error.

        Raises ServerDied if the server does not leave within LEAVE_S.
        """
        leave_by = None
        while True:
            with suppress(FutureTimeout):
                received.result(LOOK_EVERY_S)
                return
            if leave_by is None and (ended := self.ended()) is not None:
                leave_by, why = time.monotonic() + LEAVE_S, ended.why
            if leave_by is not None and time.monotonic() > leave_by:
                received.cancel()
                raise ServerDied(
                    f"{name} did not leave the transfer within {LEAVE_S:.0f} s of its end, which was because: {why}"
                )

    def report(self, server: int | None, why: str) -> None:
        """Reports that a server ended the transfer; the first reason stays. Any rank and thread may call this."""
        with suppress(RuntimeError):  # the job's store ends with the first rank
            self._job.compare_set(self._key, "", json.dumps([server, why]))

    def ended(self) -> Ended | None:
        """Returns why the transfer ended early; None if it did not."""
        if self._meeting is None or not self._job.check([self._key]):
            return None
        return Ended(*json.loads(self._job.get(self._key)))

    def _raise_if_ended(self) -> None:
        if (ended := self.ended()) is not None:
            raise TransferEnded(ended.why)

    def _end(self, group: Group, why: str) -> None:
        """Ends the transfer for the members, and reports the server that ended it, if one did."""
        group.end(why)
        assert self._meeting is not None
        by, said = group.over() or (None, why)
        owners = [n for n, first in self._meeting.first_ranks.items() if by is not None and first <= by]
        server = max(owners, default=None)
        why = " ".join(said.split())[:500]
        if server is None:
            self.report(None, why)
        else:  # the answer of another server, which left because of this one, may have been reported before
            self._job.set(self._key, json.dumps([server, why]))

    @property
    def _key(self) -> str:
        assert self._meeting is not None
        return f"nemo_oprd/{self._meeting.prefix}"


def own_address(hosts: list[str]) -> str:
    """Returns this machine's address towards the first of `hosts` on another machine; a loopback one if there is none.

    The store listens at this address alone, so all hosts have to reach it. OSError if a host has no address.
    """
    for host in hosts:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0]
        address = address_towards(host)
        if address != found and not ipaddress.ip_address(address).is_loopback:
            return address
    return "127.0.0.1"


def open_store(address: str) -> Any:
    """Opens the key-value store of a group, which listens at `address` only, on a free port; returns the store."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.create_server((address, 0), family=family, backlog=128) as listening:
        port = listening.getsockname()[1]
        return dist.TCPStore(
            address,
            port,
            is_master=True,
            wait_for_workers=False,
            timeout=_TIMEOUT,
            master_listen_fd=listening.detach(),
        )
