"""Responses kept on disk: what is read of parts, and which directories are refused."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import pytest

from nemo_oprd.batch.types import Rollout
from nemo_oprd.evaluation.generations import Generations, SetKey, model_identity, trained_identity
from nemo_oprd.rollout.engine import Request

OF = SetKey("sums", samples=2, key=(0, 2, 1), model="m@0")
REQUESTS = [Request([5, problem], answer=str(problem)) for problem in range(3) for _ in range(2)]
ABOUT: dict[str, Any] = {"model": {"directory": "m", "name": "m@0"}, "samples": 2, "sampling": {"top_p": 1.0}}


def response(index: int, ids: list[int] | None = None) -> tuple[int, Rollout, str]:
    rollout = Rollout(REQUESTS[index].prompt_ids, ids or [index, 1], finish_reason="stop")
    return index, rollout, f"text {index}"


def place_in(directory: Path, **changes: Any) -> Generations:
    return Generations(directory, {**ABOUT, **changes})


@pytest.fixture
def place(tmp_path: Path) -> Generations:
    place = place_in(tmp_path)
    place.begin(afresh=False)
    return place


def part(tmp_path: Path, rank: int) -> Path:
    return tmp_path / "generations" / f".sums.part_{rank}.jsonl"


def test_responses_come_back_from_the_parts_of_all_ranks(place: Generations, tmp_path: Path) -> None:
    place.keep(OF, 0, [response(4), response(0)])
    place.keep(OF, 0, [response(2)])
    place.keep(OF, 11, [response(1)])
    (tmp_path / "generations" / ".sums.part_x.jsonl").write_text(part(tmp_path, 0).read_text())
    found = place.kept(OF, REQUESTS)
    assert sorted(found) == [0, 1, 2, 4]
    assert found[4] == Rollout([5, 2], [4, 1], answer="2", finish_reason="stop")  # answers come from the requests


def test_a_damaged_last_line_is_ignored_and_swallows_nothing(place: Generations, tmp_path: Path) -> None:
    place.keep(OF, 0, [response(0), response(1)])
    file = part(tmp_path, 0)
    whole = file.read_bytes()
    for cut in (1, 2, 30, 60):
        file.write_bytes(whole[:-cut])
        assert sorted(place.kept(OF, REQUESTS)) == ([0, 1] if cut == 1 else [0])
        place.keep(OF, 0, [response(3)])
        assert sorted(place.kept(OF, REQUESTS)) == ([0, 1, 3] if cut == 1 else [0, 3])


def test_lines_that_are_no_responses_are_ignored(place: Generations, tmp_path: Path) -> None:
    place.keep(OF, 0, [response(0)])
    line = json.loads(part(tmp_path, 0).read_text())
    wrong = [
        {**line, "prompt_ids": [7]},
        {**line, "problem": 9},
        {**line, "problem": -1},
        {**line, "response_ids": 3},
        [],
        {},
    ]
    texts = [json.dumps(each) for each in wrong] + ["\0\0\0", "\ufffd"]
    part(tmp_path, 1).write_text("".join(f"{text}\n" for text in texts))
    assert place.kept(OF, REQUESTS) == {0: Rollout([5, 0], [0, 1], answer="0", finish_reason="stop")}


def test_a_later_line_replaces_an_earlier_one(place: Generations) -> None:
    place.keep(OF, 0, [response(0, [8]), response(1), response(0, [9])])
    assert place.kept(OF, REQUESTS)[0].response_ids.tolist() == [9]
    assert len(place.kept(OF, REQUESTS)) == 2


def test_the_whole_set_replaces_the_parts(place: Generations, tmp_path: Path) -> None:
    place.keep(OF, 3, [response(5)])
    place.keep(SetKey("sums2", 2, (0, 2, 0), "m@0"), 0, [response(5)])
    assert place.has_parts("sums")
    rollouts = [response(i)[1] for i in range(6)]
    place.finish(OF, rollouts, [f"text {i}" for i in range(6)])
    assert not place.has_parts("sums") and place.has_parts("sums2")
    written = [json.loads(line) for line in (tmp_path / "generations" / "sums.jsonl").read_text().splitlines()]
    assert [(line["problem"], line["sample"], line["seed"]) for line in written] == [
        (i // 2, i % 2, [0, 2, 1, i]) for i in range(6)
    ]
    assert [r.response_ids.tolist() for r in place.kept(OF, REQUESTS).values()] == [
        r.response_ids.tolist() for r in rollouts
    ]


def test_lines_say_what_grading_needs_and_are_renewed_when_the_data_change(place: Generations, tmp_path: Path) -> None:
    facts = [{"answer": str(problem), "data_source": "toy"} for problem in range(3)]
    of = dataclasses.replace(OF, facts=facts)
    rollouts, texts = [response(i)[1] for i in range(6)], [f"text {i}" for i in range(6)]
    place.finish(of, rollouts, texts)
    written = [json.loads(line) for line in (tmp_path / "generations" / "sums.jsonl").read_text().splitlines()]
    assert [(line["answer"], line["data_source"]) for line in written] == [(str(i // 2), "toy") for i in range(6)]
    assert place.is_current(of)
    corrected = dataclasses.replace(OF, facts=[facts[0], {**facts[1], "answer": "7"}, facts[2]])
    assert not place.is_current(corrected) and not place.is_current(OF)
    place.finish(corrected, rollouts, texts)
    assert place.is_current(corrected) and len(place.kept(corrected, REQUESTS)) == 6


def test_a_set_without_a_whole_file_is_not_current(place: Generations) -> None:
    """Responses that other machines sampled beside a step may be known before their parts are seen here."""
    assert not place.has_parts("sums") and not place.is_current(OF)
    place.finish(OF, [response(i)[1] for i in range(6)], [f"text {i}" for i in range(6)])
    assert place.is_current(OF)


def test_other_settings_are_refused_with_the_value_the_expectation_and_the_fix(
    place: Generations, tmp_path: Path
) -> None:
    place.check()
    place_in(tmp_path / "elsewhere").check()
    for changes, words in (
        ({"sampling": {"top_p": 0.5}}, "holds responses with sampling.top_p=1.0, expected 0.5; "),
        ({"samples": 3}, "holds responses with samples=2, expected 3; "),
        ({"model": {"directory": "other", "name": "o@1"}}, 'with model.directory="m", expected "other"; '),
        ({"more": 1}, "with more=null, expected 1; "),
    ):
        with pytest.raises(ValueError) as refused:
            place_in(tmp_path, **changes).check()
        assert words in str(refused.value) and "\n" not in str(refused.value)
        assert str(refused.value).endswith("; remove that directory, or choose another output")


def test_responses_of_unknown_origin_are_refused(place: Generations, tmp_path: Path) -> None:
    about = tmp_path / "generations" / "about.json"
    about.write_text("{")
    with pytest.raises(ValueError, match="not valid JSON .* remove that directory"):
        place.check()
    about.unlink()
    place.check()  # there are no responses
    place.keep(OF, 0, [response(0)])
    with pytest.raises(ValueError, match=r"about.json: no such file, expected how the responses .* remove"):
        place.check()


def test_begun_afresh_nothing_is_left(place: Generations, tmp_path: Path) -> None:
    place.keep(OF, 0, [response(0)])
    for name in (
        "grades/sums.jsonl",
        "grades/.sums.part.jsonl",
        "disagreements/sums.jsonl",
        "evaluation.json",
        "differences.json",
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("{}\n")
    other = place_in(tmp_path, samples=3)
    other.begin(afresh=True)
    other.check()
    assert [str(f.relative_to(tmp_path)) for f in tmp_path.rglob("*") if f.is_file()] == ["generations/about.json"]


def test_an_identity_changes_with_the_weights_and_the_step(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    for name in ("config.json", "a.safetensors", "README.md"):
        (model / name).write_text("{}")
    before = model_identity(model)
    assert sorted(before["files"]) == ["a.safetensors", "config.json"]
    (model / "README.md").write_text("more")
    assert model_identity(model) == before
    os.utime(model / "a.safetensors", ns=(10**9, 10**9 + 5))
    after = model_identity(model)
    assert after["files"]["a.safetensors"] == "2 bytes of 1970-01-01T00:00:01.000000005Z"
    assert after["name"] != before["name"] and after["name"].startswith("model@")
    names = {trained_identity(model, step, weights)["name"] for step in (1, 2) for weights in ("x", "y")}
    assert len(names) == 4
