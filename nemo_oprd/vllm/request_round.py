"""The scheduler of requests: it sends a controller's requests to its servers when they have room."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeAlias, TypeVar

from nemo_oprd.vllm.client import CALL_TIMEOUT_S, Client, ConnectionBroken
from nemo_oprd.vllm.server_lifecycle import Server, ServerDied, ServerRefused
from nemo_oprd.vllm.worker.nemo_oprd_answers import GENERATE

# makes a server answer its requests with the tokens so far, and hold back new ones
PAUSE_AND_CUT = "/pause?mode=abort"
# a request may arrive while its server is paused: it waits there until the next pause aborts it
CUT_TRIES, CUT_GRACE_S = 20, 0.5
# repetitions of a request whose connection broke although its server was healthy
REPETITIONS = 3
# (index of a request, its body)
Claimed: TypeAlias = "tuple[int, dict[str, Any]]"
# the parsed answer: a response, or the rows from a teacher's server
T = TypeVar("T")
Read = TypeVar("Read", covariant=True)


class Reader(Protocol[Read]):
    """An object that parses and checks answers."""

    def read(self, index: int, answer: bytes, most: int, server: str) -> Read:
        """Parses the answer to request `index`, which asked for at most `most` tokens.

        Raises:
            ServerDied: the server aborted the request, or was restarted.
            ServerRefused: the answer does not belong to this request.
        """
        ...


@dataclass
class RequestRound(Generic[T]):
    """One round of requests: `run` sends them until none is left to claim, no server is left, or it is stopped or cut.

    Attributes:
        claim: returns the next request; None if none is left. Other controllers claim from the same queue.
        slots: the most requests at a server at a time, so that no server takes requests for which another one has room.
        deliver: called with every answer: the index of its request, the parsed answer, and the server's number.
        path_of: returns the path of a request by its index; None: GENERATE.
        take_back: called with a claimed request that got no answer; `claim` returns it again later. None: this object
            keeps the request and sends it to another server.
        died: per server, why it counts as dead.
        error: an error that makes further requests pointless.
        busy_s: per server, the seconds from `began`, a time.monotonic(), until its last response.
        stopped: set it to end the round, which drops requests under way and closes their connections.
        is_cut: whether to claim no more requests, see `cut`.
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
    began: float = field(default_factory=time.monotonic)
    stopped: asyncio.Event = field(default_factory=asyncio.Event)
    is_cut: bool = False
    _pauses: asyncio.Future | None = None
    _slots: dict[int, tuple[Server, asyncio.Future]] = field(default_factory=dict)  # by the number of their server
    _again: list[Claimed] = field(default_factory=list)  # claimed requests that got no answer
    _deaths: dict[int, asyncio.Event] = field(default_factory=dict)

    async def run(self, servers: list[Server]) -> None:
        """Sends the requests to `servers`, which have the weights. Returns once no call is under way."""
        await self._run(servers)
        if self._pauses is not None:  # a late pause would abort the requests of the next round
            await asyncio.wait([self._pauses])

    async def _run(self, servers: list[Server]) -> None:
        self._deaths = {server.number: asyncio.Event() for server in servers}
        alive = [server for server in servers if server.number not in self.died]
        while alive and not self.stopped.is_set():
            serving = [asyncio.create_task(self._serve(server)) for server in alive]
            try:
                await asyncio.gather(*serving)
            finally:  # an error of this program in one of them ends all
                for each in serving:
                    each.cancel()
                await asyncio.gather(*serving, return_exceptions=True)
            alive = [server for server in alive if server.number not in self.died]
            if not self._again or self.is_cut:
                return

    async def cut(self) -> None:
        """Stops the round now: pauses the servers, which answer requests under way with the tokens so far."""
        if not (self.is_cut or self.stopped.is_set()):
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

    def abandon(self) -> None:
        """Ends the round without waiting for its servers, which no later round uses."""
        self.stopped.set()
        if self._pauses is not None:
            self._pauses.cancel()

    def give_back(self, claimed: Claimed) -> None:
        """Takes back a claimed request without an answer: its server died, or the round was stopped or cut."""
        (self.take_back or self._again.append)(claimed)

    def note_death(self, number: int, why: str) -> None:
        """Marks a server as dead, so that no request waits for it any more."""
        self.died.setdefault(number, why)
        if number in self._deaths:
            self._deaths[number].set()

    async def _serve(self, server: Server) -> None:
        """Keeps a server busy until no request is left to claim, the server dies, or the round is stopped."""
        watch = asyncio.create_task(self.client.watch(server))
        dead = asyncio.create_task(self._deaths[server.number].wait())
        stop = asyncio.create_task(self.stopped.wait())
        slots = asyncio.gather(*(self._slot(server) for _ in range(min(self.slots, server.in_flight))))
        self._slots[server.number] = server, slots
        waiting: list[asyncio.Future] = [slots, watch, dead, stop]
        try:
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            if slots.done():
                slots.result()  # raises errors of this program
            if watch.done():
                self.died.setdefault(server.number, watch.result())
        finally:
            for unfinished in waiting:
                unfinished.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)

    async def _slot(self, server: Server) -> None:
        """Sends one request after the other to the server."""
        while not (self.stopped.is_set() or self.is_cut or server.number in self.died):
            claimed = self._again.pop() if self._again else await self.claim()
            if claimed is None:
                return
            if self.is_cut or server.number in self.died:  # it may have died while this waited
                self.give_back(claimed)
                return
            index, body = claimed
            try:
                answer = await self._post(server, index, body)
                found = self.check.read(index, answer, body["sampling_params"]["max_tokens"], server.name)
                self.deliver(index, found, server.number)
                self.busy_s[server.number] = time.monotonic() - self.began
            except ServerDied as death:
                self.died.setdefault(server.number, str(death))
                self.give_back(claimed)
            except ServerRefused as refusal:
                self.error = self.error or str(refusal)
                self.stopped.set()
            except asyncio.CancelledError:
                self.give_back(claimed)
                raise

    async def _post(self, server: Server, index: int, body: dict[str, Any]) -> bytes:
        """Returns the answer to one request; repeats it if its connection broke and the server is healthy."""
        path = GENERATE if self.path_of is None else self.path_of(index)
        for _ in range(REPETITIONS):
            try:
                return await self.client.post(server, path, body, timeout=self.timeout_s, read=bytes)
            except ConnectionBroken:
                if not await self.client.stays_healthy(server):
                    raise
        return await self.client.post(server, path, body, timeout=self.timeout_s, read=bytes)
