"""Prompts: both file kinds, both row shapes, errors that lead to the row, and an order that resumes exactly."""

from __future__ import annotations

import json
from decimal import Decimal
from pathlib import Path

import pytest

from nemo_oprd.data.order import prompt_order
from nemo_oprd.data.prompts import Prompt, load_prompts

DATA = Path(__file__).resolve().parents[3] / "../shared/data"
CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is 2+3?"}]
NESTED = {"prompt": CHAT, "data_source": "toy", "reward_model": {"ground_truth": "5", "style": "rule"}, "extra": 1}


def jsonl(tmp_path: Path, *rows: object) -> Path:
    path = tmp_path / "set.jsonl"
    path.write_text("".join(row if isinstance(row, str) else json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def parquet(tmp_path: Path, *rows: dict) -> Path:
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "set.parquet"
    pq.write_table(pa.Table.from_pylist(list(rows)), path)
    return path


@pytest.mark.parametrize("write", [jsonl, parquet])
def test_conversation_rows(tmp_path, write):
    assert load_prompts(write(tmp_path, NESTED, NESTED)) == [
        Prompt(tuple(CHAT), "5", "toy", 0),
        Prompt(tuple(CHAT), "5", "toy", 1),
    ]


@pytest.mark.parametrize("write", [jsonl, parquet])
@pytest.mark.parametrize("field", ["prompt", "problem", "question"])
def test_plain_rows(tmp_path, write, field):
    (prompt,) = load_prompts(str(write(tmp_path, {field: "π?", "answer": "3.14"})))
    assert prompt == Prompt(({"role": "user", "content": "π?"},), "3.14", "set", 0)


@pytest.mark.parametrize(
    ("row", "answer"),
    [
        ({"answer": 42}, "42"),
        ({"answer": " "}, None),
        ({}, None),
        ({"answer": "1", "reward_model": {"ground_truth": "2"}}, "2"),
        ({"answer": "1", "reward_model": {"style": "rule"}}, "1"),
        ({"answer": "1", "reward_model": {"ground_truth": " "}}, "1"),
        # what is no text and no number is no answer, which training does not need
        ({"answer": ["5"]}, None),
        ({"answer": {"target": 24, "numbers": [4, 6]}}, None),
        ({"answer": True}, None),
        ({"answer": float("nan")}, None),
        ({"reward_model": {"ground_truth": ["3", "4"]}}, None),
        ({"answer": "5", "reward_model": {"ground_truth": {"target": 24}}}, "5"),
        ({"answer": "5", "reward_model": "rule"}, "5"),
        # as JSON text
        ({"answer": "5", "reward_model": '{"ground_truth": "34"}'}, "34"),
        ({"reward_model": '{"ground_truth": 34, "style": "rule"}'}, "34"),
        ({"answer": "5", "reward_model": '{"ground_truth": ["34"]}'}, "5"),
        ({"answer": "5", "reward_model": '"34"'}, "5"),
    ],
)
def test_answers(tmp_path, row, answer):
    assert load_prompts(jsonl(tmp_path, {"problem": "x", **row}))[0].answer == answer


def test_decimals_of_parquet_are_answers(tmp_path):
    rows = [{"problem": "x", "answer": Decimal("1.50")}, {"problem": "y", "answer": Decimal("-200.00")}]
    assert [prompt.answer for prompt in load_prompts(parquet(tmp_path, *rows))] == ["1.50", "-200.00"]
    nested = {"problem": "x", "reward_model": {"ground_truth": Decimal("1.5")}}
    assert load_prompts(parquet(tmp_path, nested))[0].answer == "1.5"


def test_half_of_a_character_in_json_text_is_refused(tmp_path):
    row = {"problem": "x", "reward_model": '{"ground_truth": "' + "\\ud800" + '"}'}
    with pytest.raises(ValueError, match=r"line 1: reward_model.* expected whole characters") as error:
        load_prompts(jsonl(tmp_path, row))
    assert "\n" not in str(error.value)


def test_the_data_source_is_a_field_or_the_agent_or_the_file(tmp_path):
    agent = {"agent_ref": {"type": "responses_api_agents", "name": "math_agent"}}
    rows = [{"problem": "a", **agent}, {"problem": "a", "data_source": "sums", **agent}, {"problem": "a"}]
    assert [prompt.data_source for prompt in load_prompts(jsonl(tmp_path, *rows))] == ["math_agent", "sums", "set"]
    assert load_prompts(parquet(tmp_path, rows[0]))[0].data_source == "math_agent"


def test_index_skips_blank_lines(tmp_path):
    prompts = load_prompts(jsonl(tmp_path, {"problem": "a"}, "\n", {"problem": "b"}))
    assert [(p.index, p.messages[0]["content"]) for p in prompts] == [(0, "a"), (1, "b")]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ('{"problem": "a\n', "not valid JSON"),
        ("[1]\n", r"is \[1\], expected an object"),
        ({"text": "a"}, "none of the fields prompt, problem, question"),
        ({"prompt": 3}, "prompt is 3, expected text"),
        ({"prompt": []}, "prompt is \\[\\], expected text"),
        ({"prompt": [{"role": "user"}]}, "prompt, message 0 is"),
        ({"prompt": [CHAT[0], "hello"]}, "prompt, message 1 is 'hello'"),
        ({"problem": "a", "data_source": 7}, "data_source is 7"),
    ],
)
def test_errors_name_the_line(tmp_path, row, message):
    with pytest.raises(ValueError, match=rf"set\.jsonl, line 2.*{message}"):
        load_prompts(jsonl(tmp_path, {"problem": "fine"}, row))


def test_parquet_errors_name_the_row(tmp_path):
    with pytest.raises(ValueError, match=r"set\.parquet, row 1: none of the fields"):
        load_prompts(parquet(tmp_path, {"problem": "a", "answer": "1"}, {"problem": None, "answer": "2"}))
    with pytest.raises(ValueError, match=r"set\.parquet, row 0: none of the fields"):
        load_prompts(parquet(tmp_path, {"unknown": "a"}))


def test_unreadable_files(tmp_path):
    with pytest.raises(ValueError, match="no such file"):
        load_prompts(tmp_path / "missing.jsonl")
    with pytest.raises(ValueError, match="holds no prompts"):
        load_prompts(jsonl(tmp_path, "\n"))
    other = tmp_path / "set.csv"
    other.write_text("problem\n1\n")
    with pytest.raises(ValueError, match=r"'\.csv', expected \.parquet or \.jsonl"):
        load_prompts(other)


@pytest.mark.parametrize("keep", [0, 40, -9])
def test_corrupt_parquet(tmp_path, keep):
    path = parquet(tmp_path, NESTED)
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(ValueError, match=r"set\.parquet: not a readable parquet file"):
        load_prompts(path)


def test_order_covers_every_prompt_once_per_epoch():
    order = prompt_order(17, seed=3, start=0, count=51)
    epochs = [order[0:17], order[17:34], order[34:51]]
    assert all(sorted(epoch) == list(range(17)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]
    assert order != prompt_order(17, seed=4, start=0, count=51)


@pytest.mark.parametrize("chunk", [1, 5, 17, 40])
def test_order_resumes_anywhere(chunk):
    whole = prompt_order(17, seed=3, start=0, count=120)
    starts = range(0, 120, chunk)
    assert [index for start in starts for index in prompt_order(17, 3, start, chunk)][:120] == whole


def test_order_is_the_same_in_every_version():
    """Fixed by value: a changed order would silently change what a resumed run trains on."""
    assert prompt_order(6, seed=1234, start=3, count=8) == [1, 2, 0, 2, 0, 1, 4, 5]
    assert prompt_order(1, seed=0, start=10**9, count=3) == [0, 0, 0]
    assert prompt_order(5, seed=0, start=2, count=0) == []


@pytest.mark.parametrize("arguments", [(0, 0, 0, 1), (3, -1, 0, 1), (3, 0, -1, 1), (3, 0, 0, -1)])
def test_order_refuses(arguments):
    with pytest.raises(ValueError, match="expected"):
        prompt_order(*arguments)


@pytest.mark.parametrize(
    ("name", "count", "answer"),
    [
        ("aime24", 30, "204"),
        ("aime25", 30, "70"),
        ("aimo", 83, "142.0"),
        ("amc23", 40, "27"),
        ("math_500", 500, "\\left( 3, \\frac{\\pi}{2} \\right)"),
        ("dapo_math_17k", 17917, "34"),
    ],
)
def test_real_sets(name, count, answer):
    path = DATA / f"{name}.parquet"
    if not path.exists():
        pytest.skip(f"needs ../shared/data/{name}.parquet beside the repository")
    prompts = load_prompts(path)
    assert len(prompts) == count
    assert prompts[0].answer == answer
    assert all(prompt.answer and prompt.messages[-1]["role"] == "user" for prompt in prompts)
    assert [prompt.index for prompt in prompts] == list(range(count))


def test_what_a_teacher_is_told(tmp_path):
    """The last message in the template; braces of formulas stay, and text that is put in is not looked through."""
    prompt = Prompt(tuple(CHAT), "{hint}", "toy", 0, hint="count")
    told = prompt.teacher_messages(r"{prompt} \boxed{{answer}} {hint} {x} {prompt}")
    assert told == (CHAT[0], {"role": "user", "content": r"What is 2+3? \boxed{{hint}} count {x} What is 2+3?"})
    assert prompt.teacher_messages(None) == tuple(CHAT)
    with pytest.raises(ValueError, match="no hint, but teacher.prompt contains {hint}"):
        Prompt(tuple(CHAT), "5", "toy", 0).teacher_messages("{prompt} {hint}")


@pytest.mark.parametrize("write", [jsonl, parquet])
def test_hints(tmp_path, write):
    assert load_prompts(write(tmp_path, {"problem": "x", "hint": "y"}))[0].hint == "y"
