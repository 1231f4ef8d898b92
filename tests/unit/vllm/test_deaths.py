"""A server of a teacher dies: its requests go to the others, and the room of their answers is free again."""

from __future__ import annotations

import asyncio
import json
import threading
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from nemo_oprd.vllm.fleet import Failures
from nemo_oprd.vllm.request_round import RequestRound
from nemo_oprd.vllm.server_lifecycle import Server, ServerDied
from nemo_oprd.vllm.teacher_requests import TeacherAnswer, TeacherRequest
from nemo_oprd.vllm.teacher_round import TeacherRequestQueue, TeacherRound
from nemo_oprd.vllm.worker.nemo_oprd_requests import STATE_REQUEST, AnswerFolder, StateRequest

COUNT = 6
WIDTH = 2


class Servers:
    """In place of a client: the servers `dying` die at their first request; the names of all asks are kept."""

    def __init__(self, dying: Sequence[int]) -> None:
        self.dying, self.names = dying, list[str]()

    async def watch(self, _: Server) -> str:
        await asyncio.sleep(3600)
        return ""

    async def post(self, server: Server, _: str, body: dict[str, Any], **__: Any) -> bytes:
        self.names.append(json.loads(body["sampling_params"]["extra_args"][STATE_REQUEST])["name"])
        await asyncio.sleep(0.01)
        if server.number in self.dying:
            raise ServerDied("killed")
        return b""


class Computing(Servers):
    """Servers that write answers: of each row, its position times the layer. The first `dies` requests end one."""

    def __init__(self, folder: AnswerFolder, dies: int) -> None:
        super().__init__([])
        self.folder, self.dies, self.loop = folder, dies, asyncio.new_event_loop()
        self.answered = 0
        threading.Thread(target=self.loop.run_forever, daemon=True).start()

    def start(self, work: Any) -> Any:
        """As `Client`."""
        return asyncio.run_coroutine_threadsafe(work, self.loop)

    async def post(self, server: Server, _: str, body: dict[str, Any], **__: Any) -> bytes:
        ids, text = body["token_ids"], body["sampling_params"]["extra_args"][STATE_REQUEST]
        state_request = StateRequest.parse(text, len(ids), 9, 9)
        await asyncio.sleep(0)
        if server.number == 0 and len(self.names) < self.dies:
            self.names.append(state_request.name)
            raise ServerDied("killed")
        self.names.append(state_request.name)
        states = [
            float(layer * row) for layer in state_request.layers for row in state_request.rows for _ in range(WIDTH)
        ]
        final = [float(row) for row in state_request.final_rows for _ in range(WIDTH)]
        self.answered += 1
        self.folder.write(
            state_request.name, state_request.header(ids, WIDTH, "float32", 1), array("f", states + final).tobytes()
        )
        return b""


@pytest.mark.parametrize("dies", [0, 3])
@pytest.mark.parametrize("room", [40, 100, 10_000])
def test_a_round_joins_the_pieces_of_answers(tmp_path: Path, room: int, dies: int) -> None:
    """The same answers in whatever room; the pieces of a server that dies come from the other one."""
    tmp_path.chmod(0o700)
    folder = AnswerFolder(str(tmp_path))
    client: Any = Computing(folder, dies)
    servers = [Server(number, 2) for number in range(2)]
    state_requests = [StateRequest(f"{i:032x}", [1, 3], [*range(i + 1)], [*range(i)]) for i in range(COUNT)]
    requests, found, failures = (
        [TeacherRequest([5] * 9, state_request) for state_request in state_requests],
        dict[int, TeacherAnswer](),
        Failures(),
    )
    generations = {server.name: 1 for server in servers}
    asked = TeacherRound(client, folder, generations, WIDTH, "float32", room, slots=2, limit_s=10.0)
    asked.request_states(requests, [0, 2, 3, 5], found.__setitem__, failures, servers)
    client.loop.call_soon_threadsafe(client.loop.stop)
    assert sorted(found) == [0, 2, 3, 5] and not failures.refused and len(failures.died) == (dies > 0)
    for i, answer in found.items():
        rows = torch.arange(i + 1.0)[None, :, None].expand(2, -1, WIDTH) * torch.tensor([1.0, 3.0])[:, None, None]
        assert torch.equal(answer.states, rows)
        assert torch.equal(answer.final, torch.arange(float(i))[:, None].expand(-1, WIDTH))
    assert client.answered == {40: 11, 100: 5, 10_000: 4}[room] and not [*tmp_path.iterdir()]


class Reader:
    def read(self, index: int, *_: Any) -> int:
        return index


def ask_all(servers: Servers, room: int, slots: int) -> tuple[list[int], RequestRound, TeacherRequestQueue]:
    """(The requests in the order of their answers, the round, what it leaves) of `COUNT` answers of 100 bytes."""
    requests = [(i, TeacherRequest([1, 2, 3], StateRequest(f"{i:032x}", [1], [0], []))) for i in range(COUNT)]
    waiting, got = TeacherRequestQueue(requests, dict.fromkeys(range(COUNT), 100), room), list[int]()

    def deliver(index: int, *_: Any) -> None:
        waiting.taken(index)
        got.append(index)

    work: Any = RequestRound(servers, Reader(), 10.0, waiting.claim, slots, deliver, waiting.give_back)  # type: ignore[arg-type]

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
