"""The servers that one rank controls, its client and sampler, and its folder in shared memory."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field

import torch

from nemo_oprd.megatron.parallel import everyones
from nemo_oprd.rollout.exchange import machine_name
from nemo_oprd.vllm.client import Client
from nemo_oprd.vllm.placement import ServerPlacement
from nemo_oprd.vllm.sampler import Sampler
from nemo_oprd.vllm.server import LocalServer, Server
from nemo_oprd.vllm.transport import SharedFolder


@dataclass
class Controlled:
    """The servers of this rank, by number; everything is empty on ranks that control none.

    `client` makes all calls, `sampler` decides on those that sample. `sleepers` are those servers that share GPUs with
    the trainer and sleep between the calls that sample.
    """

    servers: dict[int, Server] = field(default_factory=dict)
    client: Client | None = None
    sampler: Sampler | None = None
    folder: SharedFolder | None = None
    sleepers: list[int] = field(default_factory=list)

    def start(self, places: list[ServerPlacement], make_server: Callable[[ServerPlacement], Server]) -> None:
        """Starts the servers at this rank's `places` that are of this run, without waiting for them."""
        if not places:
            return
        self.client, self.folder = Client(), SharedFolder()
        self.sampler = Sampler(self.client)
        for place in places:
            server = self.servers[place.number] = make_server(place)
            if place.sleeps:
                self.sleepers.append(place.number)
            if isinstance(server, LocalServer):
                server.start()
        # a server's guard ends with it; between its death and its restart no other process would remove the folder
        self.folder.guard()

    def close(self) -> None:
        """Ends the servers of this run, releases endpoints, and removes the servers' files in shared memory."""
        with ExitStack() as ends:  # the last one first, and all of them, whatever fails
            if self.folder is not None:
                ends.callback(self.folder.close)
            if self.client is not None:
                ends.callback(self.client.close)
                ends.callback(self.client.release, list(self.servers.values()))
            for server in self.servers.values():
                ends.callback(server.close)
            if self.sampler is not None:
                ends.callback(self.sampler.close)


def machines_and_devices(cuda: bool) -> tuple[list[str], list[str | None]]:
    """Returns (machine name, CUDA device) of every rank as two lists; every rank calls this."""
    own = None
    if cuda:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
        index = torch.cuda.current_device()
        own = visible.split(",")[index] if visible else str(index)
    everyone = everyones((machine_name(), own))
    return [name for name, _ in everyone], [gpu for _, gpu in everyone]
