"""The calls of a weight update to one server: wait until it is there, begin, receive, compare, sample again."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from nemo_oprd.rollout.vllm.client import CALL_TIMEOUT_S, Client
from nemo_oprd.rollout.vllm.placement import Place
from nemo_oprd.rollout.vllm.sampling import GENERATE
from nemo_oprd.rollout.vllm.server import Server, ServerDied, ServerRefused
from nemo_oprd.runtime.messages import ON_STDOUT

logger = logging.getLogger(__name__)

# a bucket of 256 MB takes seconds; rebuilding a large layer takes longer
LOAD_TIMEOUT_S = 900.0
# a whole model over a slow network
RECEIVE_TIMEOUT_S = 4 * 3600.0
# of a pause; then the log says what it waits for
SAY_AFTER_S = 10.0
_PROBE_SAMPLING = {"max_tokens": 2, "temperature": 0.0, "logprobs": 0, "detokenize": False}
PROBE = {"token_ids": [1, 2], "sampling_params": _PROBE_SAMPLING}


@dataclass
class UpdateCalls:
    """The calls of one controller, and how far each of its servers is. All calls raise ServerDied and ServerRefused.

    Attributes:
        client: None on ranks that control no server; no call is made there.
        tensors: number of tensors of the model.
        describe: raises ServerRefused unless a server's description is that of a server for this run.
        start_timeout: seconds until a server answers after its start.
        response_timeout: seconds that a response may take, also one of somebody else.
    """

    client: Client | None
    places: list[Place]
    tensors: int
    describe: Callable[[dict[str, Any], str], None]
    start_timeout: float
    response_timeout: float
    _ready: dict[int, int] = field(default_factory=dict)  # server -> the generation that was found ready
    _joined: set[int] = field(default_factory=set)  # servers that have a transport
    _begun: set[int] = field(default_factory=set)  # servers with an update that has begun and received nothing
    _broken: set[int] = field(default_factory=set)  # servers with an update that failed while they received it

    @property
    def _client(self) -> Client:
        assert self.client is not None
        return self.client

    def forget(self, server: Server) -> bool:
        """Forgets a server that died; whether it had been ready."""
        self._joined.discard(server.number)
        self._begun.discard(server.number)
        self._broken.discard(server.number)
        return self._ready.pop(server.number, None) is not None

    def updates_begin(self) -> None:
        """From here on the servers receive something: an update that is given up can't be begun again."""
        self._begun.clear()

    async def prepare(self, server: Server) -> None:
        """Waits until the server is there, pauses it, and begins an update."""
        if self._ready.get(server.number) != server.generation:
            await self._wait_until_ready(server)
        if server.number in self._begun:
            return
        if self.places[server.number].sleeps:
            await self._client.post_watched(server, "/wake_up?tags=weights")
        await self._pause(server)
        if self.places[server.number].transport != "group" and server.number not in self._joined:
            await self._client.post_watched(server, "/init_weight_transfer_engine", {"init_info": {}})
            self._joined.add(server.number)
        if server.number in self._broken:
            await self._client.ask_workers(server, "nemo_oprd_give_up")
            self._broken.discard(server.number)
        await self._client.post_watched(server, "/start_weight_update")
        self._begun.add(server.number)

    async def _pause(self, server: Server) -> None:
        """Lets the server end what it samples, and begin nothing else.

        An endpoint may be in the middle of long responses of somebody else. It is watched while it ends them, so that
        the wait is no death. The mode "wait" aborts nothing, and resets the prefix cache, which has keys of the old
        weights.
        """
        own = self.places[server.number].url is None
        limit = CALL_TIMEOUT_S if own else self.response_timeout
        call = asyncio.create_task(
            self._client.post_watched(server, "/pause?mode=wait", timeout=limit + CALL_TIMEOUT_S)
        )
        if not own and (await asyncio.wait([call], timeout=SAY_AFTER_S))[1]:
            logger.warning(f"{server.name} samples for somebody else; the update waits for that", extra=ON_STDOUT)
        if not (await asyncio.wait([call], timeout=limit))[1]:
            call.result()
            return
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
        waited = f"{server.name} did not end the responses under way within {limit:.0f} s"
        if own:  # nobody else uses it
            raise ServerDied(waited)
        raise ServerRefused(
            f"{waited}, expected it to be within rollout.vllm.request_timeout: does somebody else use this server?"
        )

    async def _wait_until_ready(self, server: Server) -> None:
        """Waits until the server is healthy, is the right one and survives a request."""
        client = self._client
        await client.wait_until_healthy(server, self.start_timeout)
        for found in await client.ask_workers(server, "nemo_oprd_describe"):
            self.describe(found, server.name)
        # an endpoint may have been left in the middle of an update, and paused
        await self._client.ask_workers(server, "nemo_oprd_give_up")
        await client.post_watched(server, "/resume")
        # a server whose kernels don't fit the model is healthy until its first request
        await client.post_watched(server, GENERATE, PROBE, timeout=self.start_timeout)
        self._ready[server.number] = server.generation

    async def settle(self, server: Server) -> None:
        """Waits until the server is there, and lets it give the memory of its GPUs back."""
        await self._wait_until_ready(server)
        await self._client.post_watched(server, "/sleep?level=2&mode=wait")

    async def join(self, server: Server, init_info: dict[str, Any]) -> None:
        """Lets the workers join the process group of the weights; returns once all members have joined."""
        path, body = "/init_weight_transfer_engine", {"init_info": init_info}
        # members who wait for the others have a deadline of their own
        await self._client.post_watched(server, path, body, timeout=init_info["timeout_s"] + CALL_TIMEOUT_S)

    async def update(self, server: Server, info: dict[str, Any]) -> None:
        """Lets the workers load one bucket; see `nemo_oprd_worker.UpdateInfo`."""
        await self._load(server, info, LOAD_TIMEOUT_S)

    async def receive(self, server: Server) -> None:
        """Lets the workers receive all buckets of the group, whose members have a deadline for each of them."""
        await self._load(server, {}, RECEIVE_TIMEOUT_S)

    async def _load(self, server: Server, info: dict[str, Any], timeout: float) -> None:
        self._broken.add(server.number)  # unless it succeeds: workers may be in the middle of it
        await self._client.post_watched(server, "/update_weights", {"update_info": info}, timeout=timeout)
        self._broken.discard(server.number)

    async def finish(self, server: Server, digest: str, version: str) -> None:
        """Compares what all workers received, and lets the server sample from it."""
        received = await self._client.ask_workers(server, "nemo_oprd_received", timeout=LOAD_TIMEOUT_S)
        for worker, found in enumerate(received):
            stale = found.pop("stale", [])
            if found != {"digest": digest, "tensors": self.tensors}:
                raise ServerRefused(
                    f"{server.name}, worker {worker}: received {found['tensors']} tensors with the digest "
                    f"{found['digest']}, expected {self.tensors} with {digest}: the weights did not "
                    "arrive as sent; restart the server"
                )
            if stale:
                raise ServerRefused(
                    f"{server.name}, worker {worker}: {len(stale)} module(s) such as {stale[0]!r} took none of the "
                    "weights that came, and would keep the old ones; expected all of them: this vLLM can't reload the "
                    "model, choose another version or rollout.engine=megatron"
                )
        body = {"weight_version": version}
        await self._client.post_watched(server, "/finish_weight_update", body, timeout=LOAD_TIMEOUT_S)
        if self.places[server.number].sleeps:
            await self._client.post_watched(server, "/wake_up?tags=kv_cache")
        await self._client.post_watched(server, "/resume")
        server.pushed = version
