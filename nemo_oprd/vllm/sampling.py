"""One controller's part of a round, in its client process: requests go to its servers as fast as these finish others.

Imports neither torch nor Megatron, as all that a client process imports.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeAlias, TypeVar

from nemo_oprd.vllm.client import CALL_TIMEOUT_S, Client, ConnectionBroken
from nemo_oprd.vllm.server import Server, ServerDied, ServerRefused

GENERATE = "/inference/v1/generate"
# ends what a server samples, so that it answers with the tokens so far, and lets it begin nothing else
PAUSE_AND_CUT = "/pause?mode=abort"
# a request may be on its way while its server is paused: it waits there, and is ended by the next pause
CUT_TRIES, CUT_GRACE_S = 20, 0.5
# of a request whose connection broke although its server was well
REPETITIONS = 3
# (index of a request, what to post)
Claimed: TypeAlias = "tuple[int, dict[str, Any]]"
# what an answer is read as: a response, or what a teacher's server was asked for
T = TypeVar("T")
Read = TypeVar("Read", covariant=True)


class Reader(Protocol[Read]):
    """What reads and checks answers."""

    def read(self, index: int, answer: bytes, most: int, server: str) -> Read:
        """What is in the answer to request `index`, which asked for at most `most` tokens.

        Raises:
            ServerDied: the server gave the request up.
            ServerRefused: the answer is none to this request.
        """
        ...


@dataclass
class Sampling(Generic[T]):
    """`run` samples until nothing is left to claim, no server is left, or somebody stops or cuts it.

    Attributes:
        claim: the next request; None if there are no more. Other controllers claim from the same queue.
        slots: the most requests that a server gets at a time, so that no server takes what another one has room for.
        deliver: called with every answer: the index of its request, what was read, and the number of the server.
        path_of: where a request is posted, by its index; None: GENERATE.
        take_back: called with a request that was claimed for a server which has died; `claim` gives it again. None: it
            is kept here, and asked of a server that is left.
        died: per server, why it counts as dead.
        error: what makes further sampling pointless.
        busy_s: per server, the seconds until its last response.
        stopped: is set to end the round; requests under way are given up and their connections closed.
        is_cut: nothing else is claimed, see `cut`.
    """

    client: Client
    check: Reader[T]
    timeout_s: float
    claim: Callable[[], Awaitable[Claimed | None]]
    slots: int
    deliver: Callable[[int, T, int], None]
    take_back: Callable[[Claimed], None] | None = None
    path_of: Callable[[int], str] | None = None
    died: dict[int, str] = field(default_factory=dict)
    error: str | None = None
    busy_s: dict[int, float] = field(default_factory=dict)
    stopped: asyncio.Event = field(default_factory=asyncio.Event)
    is_cut: bool = False
    _pauses: asyncio.Future | None = None
    _slots: dict[int, tuple[Server, asyncio.Future]] = field(default_factory=dict)  # by the number of their server
    _again: list[Claimed] = field(default_factory=list)  # claimed by a server that died
    _deaths: dict[int, asyncio.Event] = field(default_factory=dict)
    _started: float = field(default_factory=time.monotonic)

    async def run(self, servers: list[Server]) -> None:
        """Samples on `servers`, which have the weights. Afterwards no call is on its way."""
        await self._run(servers)
        if self._pauses is not None:  # a pause that came late would end what is sampled next
            await asyncio.wait([self._pauses])

    async def _run(self, servers: list[Server]) -> None:
        self._deaths = {server.number: asyncio.Event() for server in servers}
        alive = [server for server in servers if server.number not in self.died]
        while alive and not self.stopped.is_set():
            await asyncio.gather(*(self._serve(server) for server in alive))
            alive = [server for server in alive if server.number not in self.died]
            if not self._again or self.is_cut:
                return

    async def cut(self) -> None:
        """Ends the round with what there is: servers answer requests under way with the tokens so far, and pause."""
        if not self.is_cut:
            self.is_cut = True
            self._pauses = asyncio.gather(
                *(self._cut(*at) for at in self._slots.values() if at[0].number not in self.died)
            )
            await asyncio.wait([self._pauses])

    async def _cut(self, server: Server, slots: asyncio.Future) -> None:
        try:
            for _ in range(CUT_TRIES):
                await self.client.post_watched(server, PAUSE_AND_CUT, timeout=CALL_TIMEOUT_S)
                if not (await asyncio.wait([slots], timeout=CUT_GRACE_S))[1]:
                    return
            self.note_death(server.number, f"{server.name} did not end the responses under way")
        except ServerDied as death:
            self.note_death(server.number, str(death))
        except ServerRefused as refusal:
            self.error = self.error or str(refusal)
            self.stopped.set()

    def give_back(self, claimed: Claimed) -> None:
        """Takes a request back that was claimed for a server which has died meanwhile."""
        (self.take_back or self._again.append)(claimed)

    def note_death(self, number: int, why: str) -> None:
        """Takes a server for dead, so that nothing waits for it any more."""
        self.died.setdefault(number, why)
        if number in self._deaths:
            self._deaths[number].set()

    async def _serve(self, server: Server) -> None:
        """Keeps a server busy until there is nothing left to claim, it dies, or the round is stopped."""
        watch = asyncio.create_task(self.client.watch(server))
        dead = asyncio.create_task(self._deaths[server.number].wait())
        stop = asyncio.create_task(self.stopped.wait())
        slots = asyncio.gather(*(self._slot(server) for _ in range(min(self.slots, server.in_flight))))
        self._slots[server.number] = server, slots
        waiting: list[asyncio.Future] = [slots, watch, dead, stop]
        try:
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            if slots.done():
                slots.result()  # raises what went wrong in our own code
            if watch.done():
                self.died.setdefault(server.number, watch.result())
        finally:
            for unfinished in waiting:
                unfinished.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)

    async def _slot(self, server: Server) -> None:
        """One request after the other."""
        while not (self.stopped.is_set() or self.is_cut or server.number in self.died):
            claimed = self._again.pop() if self._again else await self.claim()
            if claimed is None:
                return
            if self.is_cut or server.number in self.died:  # while this waited
                self.give_back(claimed)
                return
            index, body = claimed
            try:
                answer = await self._ask(server, index, body)
                found = self.check.read(index, answer, body["sampling_params"]["max_tokens"], server.name)
                self.deliver(index, found, server.number)
                self.busy_s[server.number] = time.monotonic() - self._started
            except ServerDied as death:
                self.died.setdefault(server.number, str(death))
                self.give_back(claimed)
            except ServerRefused as refusal:
                self.error = self.error or str(refusal)
                self.stopped.set()
            except asyncio.CancelledError:
                self.give_back(claimed)
                raise

    async def _ask(self, server: Server, index: int, body: dict[str, Any]) -> bytes:
        """The answer to one request, which is repeated if its connection broke and the server is well."""
        path = GENERATE if self.path_of is None else self.path_of(index)
        for _ in range(REPETITIONS):
            try:
                return await self.client.post(server, path, body, timeout=self.timeout_s, read=bytes)
            except ConnectionBroken:
                if not await self.client.stays_healthy(server):
                    raise
        return await self.client.post(server, path, body, timeout=self.timeout_s, read=bytes)
