"""The servers that one rank starts or checks, restarts if they die, and ends: servers that sample, or a teacher's.

All ranks share the failures of an attempt, so that all of them try again, or end with the same error.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Coroutine
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from nemo_oprd.megatron.parallel import everyones
from nemo_oprd.rollout.exchange import machine_name
from nemo_oprd.runtime.signals import StoppedWaiting
from nemo_oprd.vllm.client import Client
from nemo_oprd.vllm.server_lifecycle import LocalServer, Server, ServerDied, ServerRefused
from nemo_oprd.vllm.transport import SharedFolder
from nemo_oprd.vllm.worker.nemo_oprd_answers import GENERATE

# a request that every server answers
_PROBE_SAMPLING = {"max_tokens": 2, "temperature": 0.0, "logprobs": 0, "detokenize": False}
PROBE = {"token_ids": [1, 2], "sampling_params": _PROBE_SAMPLING}


@dataclass
class Failures:
    """Servers that died in an attempt, and refusals, which a retry is not expected to cure.

    `left`: servers that left an unfinished transfer of the group, with their errors. Some of these are refusals, and
    some follow from another member's failure; see `WeightPush`. `stopped`: the message of a signal that ended a wait.
    """

    died: dict[int, str] = field(default_factory=dict)
    refused: list[str] = field(default_factory=list)
    left: dict[int, str] = field(default_factory=dict)
    stopped: str | None = None

    def note(self, server: int, error: BaseException) -> None:
        """Records why a call to a server failed; raises `error` again if it is an error of this program."""
        if isinstance(error, ServerDied):
            self.died.setdefault(server, str(error))
        elif isinstance(error, ServerRefused | ValueError):
            self.refused.append(str(error))
        elif isinstance(error, StoppedWaiting):
            self.stopped = str(error)
        else:
            raise error

    def __bool__(self) -> bool:
        """Returns whether a server died or refused, or a signal ended a wait."""
        return bool(self.died or self.refused or self.stopped)

    def shared(self) -> Failures:
        """Returns the failures of all ranks, merged and without `left`. Every rank calls this."""
        parts = everyones(self)
        died = {number: why for part in parts for number, why in part.died.items()}
        stopped = next((part.stopped for part in parts if part.stopped), None)
        return Failures(died, [refusal for part in parts for refusal in part.refused], stopped=stopped)

    def check(self) -> None:
        """Raises StoppedWaiting if a signal ended a wait, or ServerRefused with the first refusal, if there is one."""
        if self.stopped:
            raise StoppedWaiting(self.stopped)
        if self.refused:
            raise ServerRefused(self.refused[0])


@dataclass
class Fleet:
    """The servers that this rank starts or checks, by number; empty if it starts and checks none.

    Attributes:
        start_timeout: seconds until a server answers after its start.
        client: makes all calls to servers, including those of other ranks; None on a rank that calls no server.
        folder: this rank's folder in shared memory.
        deaths: how many servers of all ranks have died.
    """

    start_timeout: float
    client: Client | None = None
    servers: dict[int, Server] = field(default_factory=dict)
    folder: SharedFolder | None = None
    deaths: int = 0

    def open_folder(self) -> Path:
        """Returns the path of the folder in shared memory; makes it at the first call."""
        if self.folder is None:
            self.folder = SharedFolder()
            # a server's guard ends with it; between its death and its restart no other process would remove the folder
            self.folder.guard()
        return self.folder.path

    def add(self, server: Server) -> None:
        """Adds a server, and starts it if it is one of this run; does not wait for it."""
        self.servers[server.number] = server
        if isinstance(server, LocalServer):
            server.start()

    async def prove(
        self,
        server: Server,
        describe: Callable[[dict[str, Any], str], None],
        prepare: Callable[[Server], Coroutine[Any, Any, None]],
    ) -> dict[str, Any]:
        """Waits until a server is healthy, fits the run and survives a request; returns its description.

        Args:
            describe: raises ValueError unless a worker's description fits this run.
            prepare: makes the calls before the request.

        Raises:
            ServerDied, ServerRefused, StoppedWaiting, ValueError: the server is not ready.
        """
        assert self.client is not None
        await self.client.wait_until_healthy(server, self.start_timeout)
        described = await self.client.call_workers(server, "nemo_oprd_describe")
        for found in described:
            describe(found, server.name)
        await prepare(server)
        # a server whose kernels don't fit the model is healthy until its first request
        await self.client.post_watched(server, GENERATE, PROBE, timeout=self.start_timeout)
        await asyncio.to_thread(server.check_alive)  # which notes what its processes have mapped
        return described[0]  # type: ignore[no-any-return]

    def revive(self, died: dict[int, str]) -> None:
        """Restarts dead servers, or leaves that to their owners. Every rank calls this.

        Args:
            died: per server of any rank, why; the same on every rank.

        Raises:
            ServerRefused: a server died too often, or twice before it was ready.
        """
        failures = Failures()
        self.deaths += len(died)
        for number, why in died.items():
            if (server := self.servers.get(number)) is not None:
                try:
                    server.revive(why)
                except ServerRefused as refusal:
                    failures.refused.append(str(refusal))
        failures.shared().check()

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
        self.servers, self.client, self.folder = {}, None, None


def machines_and_devices(cuda: bool) -> tuple[list[str], list[str | None]]:
    """Returns (machine name, CUDA device) of every rank as two lists; every rank calls this."""
    own = None
    if cuda:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
        index = torch.cuda.current_device()
        own = visible.split(",")[index] if visible else str(index)
    everyone = everyones((machine_name(), own))
    return [name for name, _ in everyone], [gpu for _, gpu in everyone]
