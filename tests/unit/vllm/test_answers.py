"""What a trainer asks and what it accepts as an answer: files, headers, values."""

from __future__ import annotations

import asyncio
import os
from array import array
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from nemo_oprd.vllm.server_lifecycle import ServerRefused
from nemo_oprd.vllm.teacher_requests import TeacherAnswer, TeacherRequest
from nemo_oprd.vllm.teacher_round import TeacherRequestQueue
from nemo_oprd.vllm.worker.nemo_oprd_bridge import PROJECTED_ROWS
from nemo_oprd.vllm.worker.nemo_oprd_requests import AnswerFolder, StateRequest, weights_digest

NAME = "0123456789abcdef" * 2
STATE_REQUEST = StateRequest(NAME, [1, 3], [0, 2], [1], None)
IDS = [5, 6, 7]
WIDTH = 2
# two student layers are compared with layer 1
PROJECTED = replace(STATE_REQUEST, layers=[3, 1, 1], bridge=NAME[::-1], rank=1)


def header(state_request: StateRequest = STATE_REQUEST, ids: list[int] = IDS) -> dict[str, Any]:
    return state_request.header(ids, WIDTH, "float32", generation=1)


def read(changed: dict[str, Any], values: list[float], state_request: StateRequest = STATE_REQUEST) -> Any:
    raw = bytearray(array("f", values).tobytes())
    return TeacherRequest(IDS, state_request).read(
        {**header(state_request), **changed}, raw, "server", header(state_request)
    )


def test_an_ask_comes_through_as_it_is() -> None:
    drawn = replace(STATE_REQUEST, tokens=[4], vocabulary=5, temperature=0.7, chunk=3)
    with_gaps = replace(drawn, gaps=[[0, 1], [2, 4]])
    assert "gaps" in with_gaps.text() and "gaps" not in drawn.text()  # servers of earlier versions know none
    for state_request in (
        STATE_REQUEST,
        drawn,
        with_gaps,
        PROJECTED,
        replace(STATE_REQUEST, layers=[], rows=[], final_rows=[]),
    ):
        assert StateRequest.parse(state_request.text(), 3, 2, 9) == state_request
        assert StateRequest.parse(state_request.text(), 3, 2, 9).header(IDS, WIDTH, "float32", 1) == header(
            state_request
        )


@pytest.mark.parametrize(
    "change",
    [
        *({"name": name} for name in ("../etc/passwd", "/" + NAME[1:], NAME[1:], NAME.upper(), NAME + "\n", 7)),
        *({"rows": rows} for rows in ([2, 0], [0, 0], [-1], [3], [True], "01", [0.0])),
        *({"layers": layers} for layers in ([0], [4], [3, 1], None)),
        *({"final_rows": rows} for rows in ([3], [1, 1])),
        {"tokens": []}, {"tokens": [9], "vocabulary": 9}, {"tokens": [-1], "vocabulary": 9},
        {"tokens": [1], "vocabulary": 10}, {"tokens": [1], "vocabulary": 10**30},
        {"bridge": NAME}, {"rank": 2}, {"bridge": NAME, "rank": -1}, {"bridge": 7, "rank": 7},
        {"bridge": NAME, "rank": 2, "layers": [0, 1]}, {"bridge": NAME, "rank": 2, "layers": "1"},
        *({"tokens": [1], "vocabulary": 9, "gaps": gaps} for gaps in ([[1, 2]], [[3, 9]], [[3, 2]], [[2]], [2], "1")),
        {"tokens": [1], "vocabulary": 9, "temperature": 0}, {"tokens": [1], "vocabulary": 9, "chunk": 0},
    ],
    ids=str,
)  # fmt: skip
def test_what_no_trainer_asks_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"expected"):
        StateRequest.parse(StateRequest(**{**STATE_REQUEST.__dict__, **change}).text(), 3, 2, 9)
    with pytest.raises(ValueError, match="fields of StateRequest"):
        StateRequest.parse('{"name": 1}', 3, 2, 9)


def test_a_file_is_whole_or_absent_and_taken_once(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    folder = AnswerFolder(str(tmp_path))
    assert folder.take(NAME) is None
    folder.write(NAME, {"a": 1}, b"12", b"345")
    assert os.listdir(tmp_path) == [NAME] and (tmp_path / NAME).stat().st_mode & 0o777 == 0o600
    with pytest.raises(FileExistsError):
        folder.write(NAME, {"a": 2})
    assert os.listdir(tmp_path) == [NAME]
    assert folder.take(NAME) == ({"a": 1}, bytearray(b"12345"))
    assert folder.take(NAME) is None
    (tmp_path / f"{NAME}.part").write_bytes(b"half")
    (tmp_path / "socket").touch()
    folder.clear()
    assert os.listdir(tmp_path) == ["socket"]


def test_two_ranks_may_take_the_same_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal sequences have one answer; here another rank removes its name after this one has opened it."""
    tmp_path.chmod(0o700)
    folder, open_file = AnswerFolder(str(tmp_path)), os.open
    folder.write(NAME, {"a": 1}, b"12")

    def open_and_lose(name: str, *args: Any, **more: Any) -> int:
        file = open_file(name, *args, **more)
        if name == NAME:
            (tmp_path / NAME).unlink()
        return file

    monkeypatch.setattr(os, "open", open_and_lose)
    assert folder.take(NAME) == ({"a": 1}, bytearray(b"12"))
    assert folder.take(NAME) is None


def test_files_are_written_in_the_folder_alone(tmp_path: Path) -> None:
    inside, outside = tmp_path / "inside", tmp_path / "outside"
    inside.mkdir(mode=0o700)
    folder = AnswerFolder(str(inside))
    for name in (f"../{NAME}", f"{outside}", "..", NAME[:-1]):
        with pytest.raises(ValueError, match="no name of an answer"):
            folder.write(name, {})
    for link in (NAME, f"{NAME}.part"):
        (inside / link).symlink_to(outside)
        with pytest.raises(FileExistsError):
            folder.write(NAME, {}, b"1")
        (inside / link).unlink()
    (inside / NAME).symlink_to(outside)
    outside.write_bytes(b"another file")
    with pytest.raises(OSError, match="symbolic"):
        folder.take(NAME)
    assert outside.read_bytes() == b"another file"


def test_a_folder_that_others_can_enter_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o750)
    with pytest.raises(ValueError, match="can be entered by others; expected a folder of this user with mode 0700"):
        AnswerFolder(str(tmp_path))
    link = tmp_path / "link"
    link.symlink_to(tmp_path)
    with pytest.raises(OSError, match="Not a directory|symbolic"):
        AnswerFolder(str(link))


def test_a_folder_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tmp_path.chmod(0o700)
    monkeypatch.setattr(os, "geteuid", lambda: tmp_path.stat().st_uid + 1)
    with pytest.raises(ValueError, match="expected a folder of this user with mode 0700"):
        AnswerFolder(str(tmp_path))


def test_values_of_an_answer() -> None:
    answer = read({}, [*range(10)])
    assert answer.states.tolist() == [[[0, 1], [2, 3]], [[4, 5], [6, 7]]] and answer.final.tolist() == [[8, 9]]
    drawn = read({}, [*range(10)], replace(STATE_REQUEST, tokens=[1], vocabulary=9))
    assert drawn.final.tolist() == [[8, 9]]
    projected = read({}, [*range(8)], PROJECTED)
    assert projected.states.tolist() == [[[0], [1]], [[2], [3]], [[4], [5]]] and projected.final.tolist() == [[6, 7]]
    assert sum(PROJECTED.sizes(WIDTH, "bfloat16")) == 3 * 2 * 1 * 4 + 1 * WIDTH * 2, (
        "float32, and of final rows bfloat16"
    )


@pytest.mark.parametrize(
    ("changed", "values", "said"),
    [
        ({"filled": 4}, [0.0] * 10, "filled=4 instead of 5"),
        ({"asked": "other ids"}, [0.0] * 10, "asked=other ids instead of "),
        ({"generation": 2}, [0.0] * 10, "generation=2 instead of 1"),
        ({"dtype": "bfloat16"}, [0.0] * 10, "dtype=bfloat16 instead of float32"),
        ({}, [0.0] * 9, "36 bytes; expected 40 bytes"),
        ({}, [*[0.0] * 9, float("nan")], "are not finite; expected numbers"),
        ({}, [float("inf"), *[0.0] * 9], "are not finite; expected numbers"),
        ({"error": "ValueError: off"}, [], "could not give the teacher's states: ValueError: off"),
    ],
)
def test_other_answers_are_refused(changed: dict[str, Any], values: list[float], said: str) -> None:
    with pytest.raises(ServerRefused, match=said):
        read(changed, values)


def test_the_projection_of_another_bridge_is_refused() -> None:
    for said in ("", NAME):
        with pytest.raises(ServerRefused, match=f"bridge={said} instead of {PROJECTED.bridge}"):
            read({"bridge": said}, [0.0] * 8, PROJECTED)


def test_other_ids_have_another_header() -> None:
    headers = [
        header(),
        header(ids=[5, 6, 8]),
        header(replace(STATE_REQUEST, rows=[0, 1])),
        header(replace(STATE_REQUEST, layers=[1, 2])),
    ]
    assert len({each["asked"] for each in headers}) == 4


def test_answers_wait_for_room_in_shared_memory() -> None:
    """At most `room` bytes at a time, but one answer in any case, in the order of the requests."""

    async def claimed() -> list[int]:
        left = [(i, TeacherRequest(IDS, STATE_REQUEST)) for i in (2, 1, 0)]
        waiting, got = TeacherRequestQueue(left, {0: 60, 1: 50, 2: 200}, room=100), list[int]()
        for _ in range(3):
            claim = asyncio.ensure_future(waiting.claim())
            done, _ = await asyncio.wait([claim], timeout=0.01)
            if not done:
                assert got, "nothing else waits"
                waiting.taken(got[-1])
            found = await claim
            assert found is not None
            got.append(found[0])
        assert waiting.waiting == 200
        waiting.taken(2)
        assert await waiting.claim() is None
        return got

    assert asyncio.run(claimed()) == [0, 1, 2]


@pytest.mark.parametrize(
    ("changes", "room", "sizes"),
    [
        ({}, 10**6, [(2500, 70)]),
        ({}, 2 * WIDTH * 4 * 1000, [(1000, 0), (1000, 0), (500, 0), (0, 70)]),
        ({}, 2 * WIDTH * 4 * 2500, [(2500, 0), (0, 70)]),
        ({}, 1, [(1, 0)] * 2500 + [(0, 1)] * 70),
        # cut where servers cut, too
        ({"bridge": NAME, "rank": 1}, 8 * 2100, [(2048, 0), (452, 0), (0, 70)]),
        ({"bridge": NAME, "rank": 1}, 8 * 20, [(1024, 0), (1024, 0), (452, 0), *[(0, 20)] * 3, (0, 10)]),
        ({"rows": [], "tokens": [*range(70)], "vocabulary": 70}, 8 * 50, [(0, 50), (0, 20)]),
        ({"final_rows": []}, 16 * 2000, [(2000, 0), (500, 0)]),
    ],
)
def test_an_answer_without_room_comes_in_pieces(
    changes: dict[str, Any], room: int, sizes: list[tuple[int, int]]
) -> None:
    """They are joined to the same answer, and each one that needs more than a row fits."""
    state_request = StateRequest(NAME, [1, 3], [*range(0, 5000, 2)], [*range(0, 210, 3)])
    request = TeacherRequest([0] * 5000, replace(state_request, **changes))
    pieces = request.pieces(room, WIDTH, "float32")
    assert [(len(each.state_request.rows), len(each.state_request.final_rows)) for each in pieces] == sizes
    assert len({each.state_request.name for each in pieces}) == len(pieces)
    for each in pieces:
        assert StateRequest.parse(each.state_request.text(), 5000, 2, 99) == each.state_request
        smallest = PROJECTED_ROWS if each.state_request.bridge else 1
        assert (
            sum(each.state_request.sizes(WIDTH, "float32")) <= room
            or len(each.state_request.rows + each.state_request.final_rows) <= smallest
        )
    columns = WIDTH if request.state_request.tokens is None else 2

    def answer(asked: StateRequest) -> TeacherAnswer:
        rows = torch.tensor(asked.rows, dtype=torch.float32)[None, :, None]
        scale = torch.tensor(asked.layers)[:, None, None] * (1 + torch.arange(asked.rank or WIDTH))
        drawn = torch.tensor(asked.tokens or asked.final_rows, dtype=torch.float32)[:, None]
        return TeacherAnswer(rows * scale, drawn.expand(-1, columns) + torch.tensor(asked.final_rows)[:, None])

    joined, whole = request.joined([answer(each.state_request) for each in pieces]), answer(request.state_request)
    assert torch.equal(joined.states, whole.states) and torch.equal(joined.final, whole.final)


def test_digest_of_weights(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    digests = {weights_digest(str(tmp_path))}
    for name, content in (("model.safetensors", b"Weights"), ("config.json", b"{ }"), ("more.safetensors", b"")):
        (tmp_path / name).write_bytes(content)
        digests.add(weights_digest(str(tmp_path)))
    assert len(digests) == 4
