"""A server of a teacher dies: its requests go to the others, and the room of their answers is free again."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any

import pytest

from nemo_oprd.rollout.vllm.sampling import Sampling
from nemo_oprd.rollout.vllm.server import Server, ServerDied
from nemo_oprd.rollout.vllm.worker.nemo_oprd_asks import ASK, Ask
from nemo_oprd.teacher_servers.round import RequestQueue
from nemo_oprd.teacher_servers.wanted import Request

COUNT = 6


class Servers:
    """In place of a client: the servers `dying` die at their first request; the names of all asks are kept."""

    def __init__(self, dying: Sequence[int]) -> None:
        self.dying, self.names = dying, list[str]()

    async def watch(self, _: Server) -> str:
        await asyncio.sleep(3600)
        return ""

    async def post(self, server: Server, _: str, body: dict[str, Any], **__: Any) -> bytes:
        self.names.append(json.loads(body["sampling_params"]["extra_args"][ASK])["name"])
        await asyncio.sleep(0.01)
        if server.number in self.dying:
            raise ServerDied("killed")
        return b""


class Reader:
    def read(self, index: int, *_: Any) -> int:
        return index


def ask_all(servers: Servers, room: int, slots: int) -> tuple[list[int], Sampling, RequestQueue]:
    """(The requests in the order of their answers, the round, what it leaves) of `COUNT` answers of 100 bytes."""
    requests = [(i, Request([1, 2, 3], Ask(f"{i:032x}", [1], [0], []))) for i in range(COUNT)]
    waiting, got = RequestQueue(requests, dict.fromkeys(range(COUNT), 100), room), list[int]()

    def deliver(index: int, *_: Any) -> None:
        waiting.taken(index)
        got.append(index)

    work: Any = Sampling(servers, Reader(), 10.0, waiting.claim, slots, deliver, waiting.give_back)  # type: ignore[arg-type]

    async def run() -> None:
        await asyncio.wait_for(work.run([Server(number, slots) for number in range(2)]), 5)

    asyncio.run(run())
    return got, work, waiting


@pytest.mark.parametrize("slots", [1, 4])
@pytest.mark.parametrize("room", [100, 250, 10_000])
def test_those_of_a_dead_server_go_to_the_other_one(room: int, slots: int) -> None:
    servers = Servers([0])
    got, work, waiting = ask_all(servers, room, slots)
    assert sorted(got) == [*range(COUNT)] and [*work.died] == [0]
    assert (waiting.left, waiting.waiting, waiting.under_way) == ([], 0, {})
    assert len(set(servers.names)) == len(servers.names) > COUNT, "an answer that is asked for again has another name"


def test_without_a_server_everything_is_left() -> None:
    got, work, waiting = ask_all(Servers([0, 1]), room=100, slots=4)
    assert (got, sorted(work.died), waiting.waiting) == ([], [0, 1], 0)
    assert sorted(index for index, _ in waiting.left) == [*range(COUNT)]
