"""What a rank asks for before a batch is complete: names, the budget, and answers that are not used."""

from __future__ import annotations

import asyncio
import json
from array import array
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from nemo_oprd.config.rollout_schema import TeacherServerConfig
from nemo_oprd.vllm.client import Client
from nemo_oprd.vllm.server_lifecycle import Server, ServerDied, ServerRefused
from nemo_oprd.vllm.teacher_requests import TeacherAnswer, TeacherRequest
from nemo_oprd.vllm.teacher_round import Prefetcher, named
from nemo_oprd.vllm.worker.nemo_oprd_requests import STATE_REQUEST, AnswerFolder, StateRequest

WIDTH, IDS = 2, [5, 6, 7]
REQUESTS = [TeacherRequest([*IDS, i], StateRequest(f"{i:032x}", [1], [0, 2], [])) for i in range(4)]
BYTES = 2 * WIDTH * 4  # of an answer


class Posting(Client):
    """Counts posts, and fails as it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.posted: list[tuple[int, dict[str, Any]]] = []
        self.fails: Exception | None = None

    async def post(self, server: Server, path: str, body: Any = None, **_: Any) -> Any:
        """See `Client`."""
        self.posted.append((server.number, body))
        if self.fails is not None:
            raise self.fails


@pytest.fixture
def client() -> Iterator[Posting]:
    made = Posting()
    yield made
    made.close()


@pytest.fixture
def folder(tmp_path: Path) -> AnswerFolder:
    tmp_path.chmod(0o700)
    return AnswerFolder(str(tmp_path))


SERVERS = [Server(0, 1), Server(1, 1)]


def made(client: Client, answers: float, readers: int = 1) -> Prefetcher:
    """With room for so many answers of each reader."""
    settings = TeacherServerConfig(ahead_gib=answers * readers * BYTES / (1 << 30))
    return Prefetcher(client, settings, WIDTH, "float32", readers, slots=2)


def taken(prefetcher: Prefetcher, folder: AnswerFolder) -> dict[int, TeacherAnswer]:
    """What is there of all requests."""
    found: dict[int, TeacherAnswer] = {}
    prefetcher.take_all(REQUESTS, folder, {3}, found.__setitem__)
    return found


def answer(folder: AnswerFolder, request: TeacherRequest, generation: int = 3, **changes: Any) -> None:
    """What a server writes."""
    state_request = named(request).state_request
    header = state_request.header(request.ids, WIDTH, "float32", generation) | changes
    folder.write(state_request.name, header, array("f", range(2 * WIDTH)).tobytes())


def test_names_tell_what_an_answer_depends_on() -> None:
    request = REQUESTS[0]
    assert named(request) == named(request.renamed()) and named(request) == named(named(request))
    others = [TeacherRequest([*IDS, 9], request.state_request)] + [
        TeacherRequest(request.ids, replace(request.state_request, **change))
        for change in ({"rows": [0]}, {"layers": [2]}, {"bridge": "0" * 32, "rank": 1}, {"temperature": 0.5})
    ]
    assert len({named(each).state_request.name for each in [request, *others]}) == 6
    assert StateRequest.parse(named(request).state_request.text(), 4, 2, 9) == named(request).state_request


@pytest.mark.parametrize("readers", [1, 4])
def test_answers_fit_the_budget(client: Posting, folder: AnswerFolder, readers: int) -> None:
    prefetcher = made(client, 2.5, readers)
    prefetcher.offer(1, [REQUESTS[0], REQUESTS[0].renamed()], SERVERS)
    prefetcher.offer(2, REQUESTS, SERVERS)
    prefetcher.settle()
    asked = [json.loads(body["sampling_params"]["extra_args"][STATE_REQUEST])["name"] for _, body in client.posted]
    assert sorted(asked) == sorted(named(each).state_request.name for each in REQUESTS[:2])
    assert {number for number, _ in client.posted} == {0, 1}
    began, ended = prefetcher.span(1) or (0.0, 0.0)
    assert 0 < began <= ended and prefetcher.span(3) is None
    prefetcher.forget(2, folder)
    prefetcher.offer(2, REQUESTS, SERVERS)
    prefetcher.settle()
    assert len(client.posted) == 3 and prefetcher.span(1) is None, "the room of a step that is over"


def test_only_answers_of_servers_as_they_run_are_used(client: Posting, folder: AnswerFolder) -> None:
    prefetcher = made(client, 9)
    answer(folder, REQUESTS[0])
    answer(folder, REQUESTS[1], generation=2)
    answer(folder, REQUESTS[2], error="off")
    found = taken(prefetcher, folder)
    assert [*found] == [0] and prefetcher.used == 1
    assert found[0].states.tolist() == [[[0, 1], [2, 3]]]
    assert taken(prefetcher, folder) == {}, "once"
    answer(folder, REQUESTS[3], asked="another one")
    with pytest.raises(ServerRefused, match="asked=another one instead of"):
        taken(prefetcher, folder)


@pytest.mark.parametrize("fails", [ServerDied("killed"), ServerRefused("no")])
def test_a_server_that_fails_is_the_business_of_the_round(
    client: Posting, folder: AnswerFolder, fails: Exception
) -> None:
    prefetcher, client.fails = made(client, 9), fails
    prefetcher.offer(0, REQUESTS, SERVERS)
    prefetcher.settle()
    assert len(client.posted) == 4 and prefetcher.span(0) is None and taken(prefetcher, folder) == {}
    prefetcher.forget(1, folder)
    prefetcher.close()


def test_what_nobody_took_is_removed(client: Posting, folder: AnswerFolder, tmp_path: Path) -> None:
    prefetcher = made(client, 9)
    for step in (0, 1):
        prefetcher.offer(step, [REQUESTS[step]], SERVERS)
    prefetcher.settle()
    for request in REQUESTS[:3]:
        answer(folder, request)
    prefetcher.forget(1, folder)
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {named(each).state_request.name for each in REQUESTS[1:3]}


class Hanging(Posting):
    """A client of a server whose engine is gone: it answers nothing, and its health says so."""

    async def post(self, server: Server, path: str, body: Any = None, **_: Any) -> Any:
        """See `Client`."""
        await asyncio.sleep(5)
        raise AssertionError("nobody looked at the server's health")

    async def watch(self, server: Server) -> str:
        """See `Client`."""
        return "it is not well"


class Lingering(Posting):
    """A client whose watches take a while to end, longer than the next request to the server takes to begin."""

    async def post(self, server: Server, path: str, body: Any = None, **_: Any) -> Any:
        """See `Client`."""
        await asyncio.sleep(0.2 * len(self.posted))
        self.posted.append((server.number, body))

    async def watch(self, server: Server) -> str:
        """See `Client`."""
        try:
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0.1)
        return ""


def test_a_watch_that_is_ending_watches_no_new_request() -> None:
    client = Lingering()
    prefetcher = made(client, 9)
    for step, request in enumerate(REQUESTS[:2]):
        prefetcher.offer(step, [request], SERVERS[:1])
        prefetcher.settle()
    assert len(client.posted) == 2
    client.close()


def test_a_server_that_hangs_is_given_up() -> None:
    client = Hanging()
    prefetcher = made(client, 9)
    prefetcher.offer(1, REQUESTS, SERVERS)
    prefetcher.settle()
    assert prefetcher.used == 0
    client.close()
