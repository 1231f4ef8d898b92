"""One round of asking a teacher's servers: until every answer is there, or no server is left."""

from __future__ import annotations

import asyncio
import queue
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from nemo_oprd.rollout.vllm.client import Client
from nemo_oprd.rollout.vllm.sampling import Claimed, Sampling
from nemo_oprd.rollout.vllm.server import Server, ServerDied, ServerRefused
from nemo_oprd.rollout.vllm.weight_push import Failures
from nemo_oprd.rollout.vllm.worker.nemo_oprd_asks import AnswerFolder
from nemo_oprd.teacher_servers.endpoints import AnswerBodies
from nemo_oprd.teacher_servers.wanted import Answer, Request


@dataclass
class RequestQueue:
    """The requests that are still to be asked, and the bytes of answers that wait for this rank.

    Attributes:
        left: claimed from the end.
        sizes: bytes of the answer to each request.
        room: bytes of answers that may wait at a time.
        waiting: bytes of the answers of requests that are under way.
        under_way: claimed and neither taken nor given back.
    """

    left: list[tuple[int, Request]]
    sizes: dict[int, int]
    room: int
    waiting: int = 0
    under_way: dict[int, Request] = field(default_factory=dict)
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    async def claim(self) -> Claimed | None:
        """The next request, once there is room for its answer, or nothing else waits; None if there are no more.

        It is not over while requests are under way, because a dead server's come back.
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

    def taken(self, index: int) -> None:
        """Its answer is here, and out of shared memory."""
        self._end(index)

    def give_back(self, claimed: Claimed) -> None:
        """Its server died. Another one answers it under another name: half an answer may have the first one."""
        index, _ = claimed
        self.left.append((index, self._end(index).renamed()))

    def _end(self, index: int) -> Request:
        self.waiting -= self.sizes[index]
        self._changed.set()
        return self.under_way.pop(index)


class _Whole:
    """Joins the answers to the pieces of requests."""

    def __init__(self, requests: Sequence[Request], owners: Sequence[int], take: Callable[[int, Answer], None]) -> None:
        """`owners`: of each piece, the index of its request; those of a request stand together, in order."""
        self._requests, self._owners, self._take = requests, owners, take
        self._found: dict[int, dict[int, Answer]] = {}
        self._pieces = Counter(owners)

    def take(self, piece: int, answer: Answer) -> None:
        """Takes the answer to a piece, and hands the whole one over when it is the last."""
        index = self._owners[piece]
        found = self._found.setdefault(index, {})
        found[piece] = answer
        if len(found) == self._pieces[index]:
            del self._found[index]
            self._take(index, self._requests[index].joined([each for _, each in sorted(found.items())]))


@dataclass(frozen=True)
class AnswerFiles:
    """Reads the answers in a folder; a `Reader` of `Sampling`."""

    folder: AnswerFolder
    requests: Mapping[int, Request]  # those under way
    width: int
    dtype: str
    generations: Mapping[str, int]  # server's name -> which start of it has proven itself

    def read(self, index: int, answer: bytes, most: int, server: str) -> Answer:
        """See `Reader`; what the server says by HTTP is a token that nobody needs."""
        request = self.requests[index]
        found = self.folder.take(request.ask.name)
        if found is None:
            raise ServerRefused(
                f"{server} gave no states for a sequence of {len(request.ids)} tokens; expected a file in the run's "
                "folder: the server's log says why there is none"
            )
        expected = request.ask.header(request.ids, self.width, self.dtype, self.generations[server])
        return request.read(*found, server, expected)


@dataclass(frozen=True)
class Round:
    """How a rank asks.

    Attributes:
        folder: where the servers write answers; None: they send them (`endpoints.py`).
        generations: server's name -> which start of it has proven itself.
        width, dtype: of the teacher's states.
        room: bytes of answers that may wait for this rank, in shared memory or in its own.
        slots: requests that are with a server at a time.
        limit_s: seconds for a request.
    """

    client: Client
    folder: AnswerFolder | None
    generations: Mapping[str, int]
    width: int
    dtype: str
    room: int
    slots: int
    limit_s: float

    def ask(
        self,
        requests: Sequence[Request],
        missing: list[int],
        take: Callable[[int, Answer], None],
        failures: Failures,
        servers: list[Server],
    ) -> None:
        """Asks `servers` for what is missing until it is there or none of them is left; adds to `failures`.

        `take` is called in this thread.
        """
        pieces = [(i, piece) for i in missing for piece in requests[i].pieces(self.room, self.width, self.dtype)]
        sizes = {at: sum(piece.ask.sizes(self.width, self.dtype)) for at, (_, piece) in enumerate(pieces)}
        left = [(at, piece) for at, (_, piece) in reversed([*enumerate(pieces)])]  # claimed from the end
        waiting, whole = RequestQueue(left, sizes, self.room), _Whole(requests, [i for i, _ in pieces], take)
        reader = self._reader(waiting)
        path_of = reader.path_of if isinstance(reader, AnswerBodies) else None
        arrived: queue.SimpleQueue[tuple[int, Answer] | None] = queue.SimpleQueue()

        def deliver(index: int, answer: Answer, _: int) -> None:
            waiting.taken(index)
            arrived.put((index, answer))

        how = waiting.claim, self.slots, deliver, waiting.give_back, path_of
        work = Sampling(self.client, reader, self.limit_s, *how)
        under_way = self.client.start(work.run(servers))
        under_way.add_done_callback(lambda _: arrived.put(None))
        while (found := arrived.get()) is not None:
            whole.take(*found)
        under_way.result()  # raises what went wrong in our own code
        failures.died |= work.died
        if work.error is not None:
            failures.refused.append(work.error)

    def answers(self, requests: list[Request], server: Server) -> list[Answer]:
        """One server's answers to all requests.

        Raises:
            ServerDied: it ended.
            ServerRefused: it gives no states.
        """
        failures, found = Failures(), dict[int, Answer]()
        self.ask(requests, [*range(len(requests))], found.__setitem__, failures, [server])
        failures.check()
        for why in failures.died.values():
            raise ServerDied(why)
        return [found[i] for i in range(len(requests))]

    def _reader(self, waiting: RequestQueue) -> AnswerBodies | AnswerFiles:
        about = waiting.under_way, self.width, self.dtype, self.generations
        if self.folder is None:
            return AnswerBodies(*about, waiting.sizes)
        return AnswerFiles(self.folder, *about)
