"""States that are asked for before a batch is complete: a teacher's servers compute while responses are sampled.

An answer depends on weights, ids and rows only, so its file gets a name that depends on them, too. It waits in shared
memory until the round in which a rank needs it, whichever rank that is. Then the rank reads the file if it is there,
and asks as ever if not: results do not depend on what came early enough. The files are within a budget.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import threading
import time
from array import array
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass, field, replace
from itertools import count

from nemo_oprd.config.server_schema import TeacherServerConfig
from nemo_oprd.rollout.vllm.client import Client
from nemo_oprd.rollout.vllm.sampling import GENERATE
from nemo_oprd.rollout.vllm.server import Server, ServerDied, ServerRefused
from nemo_oprd.rollout.vllm.worker.nemo_oprd_asks import AnswerFolder
from nemo_oprd.teacher_servers.wanted import Answer, Request


def named(request: Request) -> Request:
    """The same request for an answer whose name is a digest of all that the answer depends on."""
    content = {**asdict(request.ask), "name": ""}
    digest = hashlib.blake2b(json.dumps(content, sort_keys=True).encode(), digest_size=16)
    digest.update(array("q", request.ids).tobytes())
    return replace(request, ask=replace(request.ask, name=digest.hexdigest()))


@dataclass
class _Early:
    """What was asked for of one step: names and bytes of the answers, and when, in seconds since the epoch."""

    bytes: int = 0
    names: set[str] = field(default_factory=set)
    began: float = 0.0
    ended: float = 0.0


class Ahead:
    """What one rank asks for early.

    Args:
        width, dtype: of the teacher's states.
        readers: ranks that share the budget.
        slots: requests that are with the servers at a time.
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
        self.used = 0  # answers that this rank has taken

    def offer(self, step: int, requests: list[Request], servers: list[Server]) -> None:
        """Asks for what fits the budget; from any thread."""
        for request in map(named, requests):
            size = sum(request.ask.sizes(*self._of_model))
            with self._lock:
                early = self._steps.setdefault(step, _Early(began=time.time()))
                is_known = any(request.ask.name in each.names for each in self._steps.values())
                if is_known or sum(each.bytes for each in self._steps.values()) + size > self._room:
                    continue
                early.names.add(request.ask.name)
                early.bytes += size
                server = servers[next(self._turn) % len(servers)]
                self._under_way.append(self._client.start(self._ask(early, request, server)))

    async def _ask(self, early: _Early, request: Request, server: Server) -> None:
        async with self._slots:
            try:
                await self._client.post(server, GENERATE, request.body(), timeout=self._limit_s, read=bytes)
            except (ServerDied, ServerRefused):
                return  # the round that needs the answer asks for it, and tells what is wrong
            early.ended = time.time()

    def settle(self) -> None:
        """Waits until nothing is under way."""
        with self._lock:
            under_way, self._under_way = self._under_way, []
        for each in under_way:
            each.result()

    def take_all(
        self,
        requests: Sequence[Request],
        folder: AnswerFolder,
        generations: Collection[int],
        take: Callable[[int, Answer], None],
    ) -> None:
        """Calls `take` with the answers that are there, of servers as they run now: of these `generations`.

        Raises:
            ServerRefused: a file is no answer to its request.
        """
        for i, request in enumerate(requests):
            if (answer := self._found(request, folder, generations)) is not None:
                take(i, answer)

    def _found(self, request: Request, folder: AnswerFolder, generations: Collection[int]) -> Answer | None:
        request = named(request)
        found = folder.take(request.ask.name)
        if found is None or "error" in found[0] or found[0].get("generation") not in generations:
            return None
        expected = request.ask.header(request.ids, *self._of_model, found[0]["generation"])
        self.used += 1
        return request.read(*found, "a server of the teacher", expected)

    def forget(self, step: int, folder: AnswerFolder) -> None:
        """Removes what is left of the steps before `step`."""
        with self._lock:
            over = [self._steps.pop(each) for each in [*self._steps] if each < step]
        for name in (name for early in over for name in early.names):
            folder.take(name)

    def span(self, step: int) -> tuple[float, float] | None:
        """When the first answer of a step was asked for, and when the last one that is there came."""
        early = self._steps.get(step)
        return (early.began, early.ended) if early is not None and early.ended else None

    def close(self) -> None:
        """Gives up what is under way."""
        for each in self._under_way:
            each.cancel()
