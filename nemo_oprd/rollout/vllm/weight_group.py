"""The process group over which the world's first rank broadcasts weights to the workers of servers (`group`).

The trainer and vLLM are not one job, so the group is made by hand: a store on the first rank, and torch's
process group on top of it. Whenever a server was restarted, all servers and the first rank make a new group.
`worker/nemo_oprd_worker.py` is the other side. Over NCCL it was not yet run.
"""

from __future__ import annotations

import datetime
import ipaddress
import os
import secrets
import socket
import threading
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import torch
import torch.distributed as dist

from nemo_oprd.models.megatron.parallel import everyones, first_ranks
from nemo_oprd.rollout.vllm.placement import Place
from nemo_oprd.rollout.vllm.worker.nemo_oprd_buckets import Bucket, address_towards, open_group, send

# between two buckets a worker loads the last one, and the trainer gathers the next one
TIMEOUT_S = 600.0
_TIMEOUT = datetime.timedelta(seconds=TIMEOUT_S)


@dataclass(frozen=True)
class Rendezvous:
    """Where the members of a group meet, and how many they are; `nemo_oprd_worker.InitInfo` on the other side.

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
        """What a server is told to join the group."""
        info = {name: getattr(self, name) for name in ("host", "port", "prefix", "size", "backend")}
        return {**info, "first_rank": self.first_ranks[server], "timeout_s": TIMEOUT_S}


class WeightGroup:
    """The group of a run. Every rank has one; only the first rank is a member, its methods do nothing elsewhere."""

    def __init__(self, places: list[Place], device: torch.device) -> None:
        self._workers = {place.number: place.workers for place in places if place.transport == "group"}
        urls = [urlsplit(place.url) for place in places if place.transport == "group" and place.url is not None]
        self._hosts = [url.hostname for url in urls if url.hostname is not None]
        self._host = ""
        self._device = device if device.type == "cuda" else torch.device("cpu")
        self._key: tuple = ()
        self._store: Any = None
        self._group: Any = None

    def meet(self, generations: dict[int, int]) -> Rendezvous | None:
        """Where a new group meets, the same on every rank; None if none is needed. Every rank calls this.

        `generations` are those of the servers of this rank.
        """
        if not self._workers:
            return None
        everyone = everyones((generations, address_towards(os.environ.get("MASTER_ADDR", "127.0.0.1"))))
        known = {number: generation for part, _ in everyone for number, generation in part.items()}
        key = tuple((number, known[number]) for number in self._workers)
        is_needed = dist.get_rank() == 0 and (self._group is None or self._key != key)
        hosts = [*self._hosts, *(address for _, address in everyone)]
        return first_ranks(self._rendezvous(key, hosts) if is_needed else None)

    def _rendezvous(self, key: tuple, hosts: list[str]) -> Rendezvous:
        if self._store is None:
            self._host = own_address(hosts)
            self._store = open_store(self._host)
        first_ranks, size = {}, 1
        for number, workers in self._workers.items():
            first_ranks[number] = size
            size += workers
        # whoever reaches the store can still list its keys; see docs/security.md
        prefix = f"weights/{secrets.token_hex(16)}"
        backend = "nccl" if self._device.type == "cuda" else "gloo"
        return Rendezvous(key, self._host, self._store.port, prefix, size, backend, first_ranks)

    def open(self, meeting: Rendezvous) -> Future | None:
        """Begins to open the group; the others must join meanwhile. None on ranks that are not in it."""
        if dist.get_rank() != 0:
            return None
        self._key = meeting.key
        future: Future = Future()

        def run() -> None:
            try:
                group = open_group(self._store, meeting.prefix, 0, meeting.size, meeting.backend, TIMEOUT_S)
                future.set_result(group)
            except BaseException as error:  # raised where the result is asked for
                future.set_exception(error)

        threading.Thread(target=run, name="weight-group", daemon=True).start()
        return future

    def opened(self, future: Future | None) -> dict[int, str]:
        """Waits for the group; why each server failed if it did not come about."""
        if future is None:
            return {}
        try:
            self._group = future.result()
        except RuntimeError as error:
            return self._broken("did not come about", error)
        return {}

    def send(self, bucket: Bucket | None) -> dict[int, str]:
        """Broadcasts a bucket, or None for the end; why each server failed if the group broke."""
        if self._group is None:
            return {}
        try:
            send(self._group, bucket, self._device)
        except RuntimeError as error:
            return self._broken("broke", error)
        return {}

    def _broken(self, how: str, error: RuntimeError) -> dict[int, str]:
        self._group = None
        reason = " ".join(str(error).split())[:200]
        return dict.fromkeys(self._workers, f"the process group of the weights {how}: {reason}")


def own_address(hosts: list[str]) -> str:
    """The one address of this machine at which all `hosts` reach it: a loopback address if they are all this machine.

    OSError if a host has no address.
    """
    for host in hosts:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0]
        address = address_towards(host)
        if address != found and not ipaddress.ip_address(address).is_loopback:
            return address
    return "127.0.0.1"


def open_store(address: str) -> Any:
    """A key-value store that listens at `address` and nowhere else, at a port of its own."""
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
