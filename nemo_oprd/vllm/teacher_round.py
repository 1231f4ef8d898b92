"""Requests to a teacher's servers: prefetching while responses are sampled, and the rounds that fetch the rest."""

from __future__ import annotations

import asyncio
import hashlib
import io
import json
import logging
import queue
import threading
import time
from array import array
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Any

from nemo_oprd.config.rollout_schema import TeacherServerConfig
from nemo_oprd.config.schema import Config
from nemo_oprd.vllm.client import CALL_TIMEOUT_S, Client
from nemo_oprd.vllm.endpoint import Endpoint, guest
from nemo_oprd.vllm.fleet import Failures
from nemo_oprd.vllm.launch import TEACHER_KEY, TEACHER_SEQUENCES
from nemo_oprd.vllm.request_round import Claimed, RequestRound
from nemo_oprd.vllm.server_lifecycle import Server, ServerDied, ServerRefused
from nemo_oprd.vllm.teacher_requests import TeacherAnswer, TeacherRequest
from nemo_oprd.vllm.worker.nemo_oprd_answers import GENERATE
from nemo_oprd.vllm.worker.nemo_oprd_requests import ROOM, STATES, AnswerFolder, read_answer

# Servers of a teacher that others run (`teacher.vllm.endpoints`), which several runs may use at the same time.
#
# `nemo-oprd serve --role teacher` starts them. States come back as HTTP answers, through the middleware in
# `vllm/worker/nemo_oprd_teacher_middleware.py`, so a server may be on any machine. A server that was started anew has
# another generation: it counts as dead, and has to pass the canary before the next request.


logger = logging.getLogger(__name__)

# the share of a machine's free memory that the answers of its ranks may take
HOST_SHARE = 0.25


def shared_endpoint(config: Config, number: int, url: str) -> Endpoint:
    """Makes the client side of a server at `url`, without a lease.

    Raises:
        ValueError: the token file holds no token.
    """
    settings = config.teacher.vllm
    return Endpoint(
        number,
        TEACHER_SEQUENCES,
        settings.max_restarts,
        generation=1,
        key=TEACHER_KEY,
        role="the teacher's vLLM server",
        url=url,
        headers=guest(str(settings.token_file), config.output),
    )


@dataclass(frozen=True)
class AnswerBodies:
    """Parses the answers in HTTP bodies; a `Reader` of `RequestRound`.

    Attributes:
        requests: those under way, by index.
        width, dtype: of the teacher's states.
        generations: server's name -> the generation that has passed the canary.
        sizes: bytes of the answers, by index.
    """

    requests: Mapping[int, TeacherRequest]
    width: int
    dtype: str
    generations: Mapping[str, int]
    sizes: Mapping[int, int]

    def path_of(self, index: int) -> str:
        """Returns the path of a request."""
        return f"{STATES}/{self.requests[index].state_request.name}?bytes={self.sizes[index]}"

    def read(self, index: int, answer: bytes, most: int, server: str) -> TeacherAnswer:
        """See `Reader`."""
        request = self.requests[index]
        header, values = read_answer(io.BytesIO(answer), len(answer), f"what {server} sent")
        known = self.generations[server]
        if "error" not in header and header.get("generation") != known:
            raise ServerDied(f"{server} was started anew")
        expected = request.state_request.header(request.ids, self.width, self.dtype, known)
        return request.read(header, values, server, expected)


def server_room(client: Client, server: Server) -> int:
    """Reads how many bytes of answers a server can hold; raises ServerDied or ServerRefused as `Client.post`."""
    return int(client.run(client.post(server, ROOM, timeout=CALL_TIMEOUT_S, read=int)))


def host_room(ranks: int) -> int:
    """Computes how many bytes of answers each of this machine's `ranks` ranks may hold."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    free: dict[str, Any] = {name: rest.split()[0] for name, _, rest in (line.partition(":") for line in lines)}
    return int(int(free["MemAvailable"]) * 1024 * HOST_SHARE) // ranks


# Prefetching: a teacher's servers compute states of complete responses while others are still being sampled.
#
# An answer depends on weights, ids and rows only, so its file has a name derived from them. It stays in shared memory
# until the round in which any rank needs it. That rank reads the file if it exists, and sends the request if not, so
# results do not depend on timing. A budget limits the files.


def named(request: TeacherRequest) -> TeacherRequest:
    """Returns the request with a new name for its answer: a digest of the ids and of everything that it asks for."""
    content = {**asdict(request.state_request), "name": ""}
    digest = hashlib.blake2b(json.dumps(content, sort_keys=True).encode(), digest_size=16)
    digest.update(array("q", request.ids).tobytes())
    return replace(request, state_request=replace(request.state_request, name=digest.hexdigest()))


@dataclass
class _Early:
    """The prefetching of one step: names and bytes of the answers, its start and end in seconds since the epoch."""

    bytes: int = 0
    names: set[str] = field(default_factory=set)
    began: float = 0.0
    ended: float = 0.0


class Prefetcher:
    """The prefetching requests of one rank.

    Args:
        width, dtype: of the teacher's states.
        readers: ranks that share the budget.
        slots: requests at the servers at a time.
    """

    def __init__(
        self, client: Client, settings: TeacherServerConfig, width: int, dtype: str, readers: int, slots: int
    ) -> None:
        self._client, self._of_model, self._limit_s = client, (width, dtype), settings.request_timeout
        self._room = int(settings.ahead_gib * (1 << 30)) // readers
        self._slots, self._turn = asyncio.Semaphore(slots), count()
        self._lock = threading.Lock()
        self._steps: dict[int, _Early] = {}
        self._under_way: list[Future[None]] = []
        # by server, in the client's thread: the watch of its health, and the number of its requests
        self._watches: dict[int, tuple[asyncio.Future[str], int]] = {}
        self.used = 0  # the number of prefetched answers that this rank has taken

    def offer(self, step: int, requests: list[TeacherRequest], servers: list[Server]) -> None:
        """Sends as many requests as the budget allows; any thread may call this."""
        for request in map(named, requests):
            size = sum(request.state_request.sizes(*self._of_model))
            with self._lock:
                early = self._steps.setdefault(step, _Early(began=time.time()))
                is_known = any(request.state_request.name in each.names for each in self._steps.values())
                if is_known or sum(each.bytes for each in self._steps.values()) + size > self._room:
                    continue
                early.names.add(request.state_request.name)
                early.bytes += size
                server = servers[next(self._turn) % len(servers)]
                self._under_way.append(self._client.start(self._request(early, request, server)))

    async def _request(self, early: _Early, request: TeacherRequest, server: Server) -> None:
        async with self._slots:
            try:
                await self._post(server, request)
            except (ServerDied, ServerRefused):
                return  # the round that needs the answer requests it again, and reports the error
            early.ended = time.time()

    async def _post(self, server: Server, request: TeacherRequest) -> None:
        """Posts a request; raises ServerDied once the server's health, watched for all of them, says so."""
        watch, open_calls = self._watches.get(server.number, (None, 0))
        if watch is None or watch.done():
            watch = asyncio.ensure_future(self._client.watch(server))
        self._watches[server.number] = watch, open_calls + 1
        body, limit_s = request.body(), self._limit_s
        call = asyncio.ensure_future(self._client.post(server, GENERATE, body, timeout=limit_s, read=bytes))
        try:
            await asyncio.wait((call, watch), return_when=asyncio.FIRST_COMPLETED)
            if not call.done():
                raise ServerDied(watch.result())
            call.result()
        finally:
            call.cancel()
            newest, open_calls = self._watches[server.number]
            self._watches[server.number] = newest, open_calls - 1
            if open_calls == 1:
                del self._watches[server.number]  # it takes a while to end, and must watch no later request
                newest.cancel()
            await asyncio.gather(call, return_exceptions=True)

    def settle(self) -> None:
        """Waits until no request is under way."""
        with self._lock:
            under_way, self._under_way = self._under_way, []
        for each in under_way:
            each.result()

    def take_all(
        self,
        requests: Sequence[TeacherRequest],
        folder: AnswerFolder,
        generations: Collection[int],
        take: Callable[[int, TeacherAnswer], None],
    ) -> None:
        """Calls `take` with each answer that exists and comes from a current process of a server, one of `generations`.

        Raises:
            ServerRefused: a file does not answer its request.
        """
        for i, request in enumerate(requests):
            if (answer := self._found(request, folder, generations)) is not None:
                take(i, answer)

    def _found(
        self, request: TeacherRequest, folder: AnswerFolder, generations: Collection[int]
    ) -> TeacherAnswer | None:
        request = named(request)
        found = folder.take(request.state_request.name)
        if found is None or "error" in found[0] or found[0].get("generation") not in generations:
            return None
        expected = request.state_request.header(request.ids, *self._of_model, found[0]["generation"])
        self.used += 1
        return request.read(*found, "a server of the teacher", expected)

    def forget(self, step: int, folder: AnswerFolder) -> None:
        """Removes the answers left over from the steps before `step`."""
        with self._lock:
            over = [self._steps.pop(each) for each in [*self._steps] if each < step]
        for name in (name for early in over for name in early.names):
            folder.take(name)

    def span(self, step: int) -> tuple[float, float] | None:
        """Returns when the first request of a step was sent, and when its last answer arrived; None without answers."""
        early = self._steps.get(step)
        return (early.began, early.ended) if early is not None and early.ended else None

    def close(self) -> None:
        """Drops the requests under way."""
        for each in self._under_way:
            each.cancel()


@dataclass
class TeacherRequestQueue:
    """The requests still to send, and the bytes of answers that wait for this rank.

    Attributes:
        left: open requests; `claim` takes the last one.
        sizes: bytes of the answer to each request.
        room: bytes of answers that may wait at a time.
        waiting: bytes of the answers of requests under way.
        under_way: requests claimed and neither taken nor given back, by index.
    """

    left: list[tuple[int, TeacherRequest]]
    sizes: dict[int, int]
    room: int
    waiting: int = 0
    under_way: dict[int, TeacherRequest] = field(default_factory=dict)
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    async def claim(self) -> Claimed | None:
        """Returns the next request, once its answer has room or no other one is under way; None if none is left.

        It waits while requests are under way, because those of a dead server come back.
        """
        while self.left or self.under_way:
            if self.left:
                index, request = self.left[-1]
                if not self.waiting or self.waiting + self.sizes[index] <= self.room:
                    self.left.pop()
                    self.waiting += self.sizes[index]
                    self.under_way[index] = request
                    return index, request.body()
            self._changed.clear()
            await self._changed.wait()
        return None

    def taken(self, index: int) -> TeacherRequest:
        """Ends a request under way, because its answer has left shared memory or will not come; returns the request."""
        self.waiting -= self.sizes[index]
        self._changed.set()
        return self.under_way.pop(index)

    def give_back(self, claimed: Claimed) -> None:
        """Takes back a request without an answer, and renames it: a partial answer may still have the old name."""
        index, _ = claimed
        self.left.append((index, self.taken(index).renamed()))


class _Whole:
    """Joins the answers to the pieces of a request into one answer to the request."""

    def __init__(
        self, requests: Sequence[TeacherRequest], owners: Sequence[int], take: Callable[[int, TeacherAnswer], None]
    ) -> None:
        """Begins without answers. `owners`: for each piece, the index of its request, whose pieces are adjacent."""
        self._requests, self._owners, self._take = requests, owners, take
        self._found: dict[int, dict[int, TeacherAnswer]] = {}
        self._pieces = Counter(owners)

    def take(self, piece: int, answer: TeacherAnswer) -> None:
        """Stores the answer to a piece; after a request's last piece, passes the joined answer to the given `take`."""
        index = self._owners[piece]
        found = self._found.setdefault(index, {})
        found[piece] = answer
        if len(found) == self._pieces[index]:
            del self._found[index]
            self._take(index, self._requests[index].joined([each for _, each in sorted(found.items())]))


@dataclass(frozen=True)
class AnswerFiles:
    """Parses the answers in a folder; a `Reader` of `RequestRound`."""

    folder: AnswerFolder
    requests: Mapping[int, TeacherRequest]  # those under way
    width: int
    dtype: str
    generations: Mapping[str, int]  # server's name -> the start that has passed the canary

    def read(self, index: int, answer: bytes, most: int, server: str) -> TeacherAnswer:
        """See `Reader`; ignores the HTTP answer, which holds one sampled token."""
        request = self.requests[index]
        found = self.folder.take(request.state_request.name)
        if found is None:
            raise ServerRefused(
                f"{server} gave no states for a sequence of {len(request.ids)} tokens; expected a file in the run's "
                "folder: the server's log says why there is none"
            )
        expected = request.state_request.header(request.ids, self.width, self.dtype, self.generations[server])
        return request.read(*found, server, expected)


@dataclass(frozen=True)
class TeacherRound:
    """Sends a rank's requests to servers.

    Attributes:
        folder: where the servers write answers; None: they send them in HTTP bodies.
        generations: server's name -> the start that has passed the canary.
        width, dtype: of the teacher's states.
        room: bytes of answers that may wait for this rank, in shared memory or in its own memory.
        slots: requests at a server at a time.
        limit_s: time limit of a request in seconds.
    """

    client: Client
    folder: AnswerFolder | None
    generations: Mapping[str, int]
    width: int
    dtype: str
    room: int
    slots: int
    limit_s: float

    def request_states(
        self,
        requests: Sequence[TeacherRequest],
        missing: list[int],
        take: Callable[[int, TeacherAnswer], None],
        failures: Failures,
        servers: list[Server],
    ) -> None:
        """Sends the `missing` requests until all are answered or no server is left; adds errors to `failures`.

        The calling thread calls `take`, with the index of a request and its answer.
        """
        pieces = [(i, piece) for i in missing for piece in requests[i].pieces(self.room, self.width, self.dtype)]
        sizes = {at: sum(piece.state_request.sizes(self.width, self.dtype)) for at, (_, piece) in enumerate(pieces)}
        left = [(at, piece) for at, (_, piece) in reversed([*enumerate(pieces)])]  # `claim` takes the last one
        waiting, whole = TeacherRequestQueue(left, sizes, self.room), _Whole(requests, [i for i, _ in pieces], take)
        reader = self._reader(waiting)
        path_of = reader.path_of if isinstance(reader, AnswerBodies) else None
        arrived: queue.SimpleQueue[tuple[int, TeacherAnswer] | None] = queue.SimpleQueue()

        def deliver(index: int, answer: TeacherAnswer, _: int) -> None:
            waiting.taken(index)
            arrived.put((index, answer))

        how = waiting.claim, self.slots, deliver, waiting.give_back, path_of
        work = RequestRound(self.client, reader, self.limit_s, *how)
        under_way = self.client.start(work.run(servers))
        under_way.add_done_callback(lambda _: arrived.put(None))
        while (found := arrived.get()) is not None:
            whole.take(*found)
        under_way.result()  # raises errors of this program
        failures.died |= work.died
        if work.error is not None:
            failures.refused.append(work.error)

    def answers(self, requests: list[TeacherRequest], server: Server) -> list[TeacherAnswer]:
        """Returns one server's answers to all requests.

        Raises:
            ServerDied: the server ended.
            ServerRefused: the server gives no states.
        """
        failures, found = Failures(), dict[int, TeacherAnswer]()
        self.request_states(requests, [*range(len(requests))], found.__setitem__, failures, [server])
        failures.check()
        for why in failures.died.values():
            raise ServerDied(why)
        return [found[i] for i in range(len(requests))]

    def _reader(self, waiting: TeacherRequestQueue) -> AnswerBodies | AnswerFiles:
        about = waiting.under_way, self.width, self.dtype, self.generations
        if self.folder is None:
            return AnswerBodies(*about, waiting.sizes)
        return AnswerFiles(self.folder, *about)
