"""What is read of a row: every field of messages and tools reaches the model, and what cannot reach it is refused."""

from __future__ import annotations

import datetime
import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from nemo_oprd.config.loading import load_config
from nemo_oprd.data.preparation import DataReport, Preparation, TrainingTexts, prepare
from nemo_oprd.data.prompts import load_prompts
from nemo_oprd.data.template_use import template_notes, unread_fields
from nemo_oprd.data.text import identity, with_suffix
from nemo_oprd.data.tokenizer import Tokenizer, copy_tokenizer_files, teacher_prompts
from nemo_oprd.run.data import read_run_prompts
from tests.support.align_tokenizers import byte_level
from tests.support.conversation_rows import ASKED, CALL, PLAIN, TEMPLATE, TURNS, WEATHER, jsonl, parquet

GYM = {
    "input": [
        {"role": "user", "content": [{"type": "input_text", "text": "Is it warm in Paris?"}]},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "I look it up."}]},
        {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": '{"place": "Paris"}'},
        {"type": "function_call_output", "call_id": "c1", "output": "21"},
    ],
    "instructions": "Be brief.",
    "tools": [{"type": "function", "strict": True, **WEATHER["function"]}],
    "parallel_tool_calls": False,
}
GYM_CALL = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"place": "Paris"}'}}
GYM_TURNS = [
    {"role": "system", "content": "Be brief."},
    ASKED,
    {"role": "assistant", "content": None, "reasoning_content": "I look it up.", "tool_calls": [GYM_CALL]},
    {"role": "tool", "tool_call_id": "c1", "content": "21"},
]
PARTS = [{"type": "text", "text": "Is it warm "}, {"type": "text", "text": "in Paris?"}]

# name -> (row, messages and tools that transformers' own template gets)
ROWS: dict[str, tuple[dict[str, Any], list[dict[str, Any]], list[dict[str, Any]]]] = {
    "text": ({"question": ASKED["content"]}, [ASKED], []),
    "turns and tools": ({"prompt": TURNS, "tools": [WEATHER]}, TURNS, [WEATHER]),
    "tools as JSON text": ({"prompt": [ASKED], "tools": json.dumps([WEATHER])}, [ASKED], [WEATHER]),
    "tools as JSON texts": ({"prompt": [ASKED], "tools": [json.dumps(WEATHER)]}, [ASKED], [WEATHER]),
    "calls as JSON text": (
        {"prompt": [*TURNS[:2], {**TURNS[2], "tool_calls": json.dumps([CALL])}, TURNS[3]]}, TURNS, [],
    ),
    "arguments as they are": ({"prompt": GYM_TURNS}, GYM_TURNS, []),
    "messages as JSON text": ({"prompt": json.dumps(TURNS), "tools": [WEATHER]}, TURNS, [WEATHER]),
    "one message as JSON text": ({"prompt": json.dumps(ASKED)}, [ASKED], []),
    "parts of text": ({"prompt": [{"role": "user", "content": PARTS}]}, [ASKED], []),
    "NeMo Gym": ({"responses_create_params": GYM, "question": "not this"}, GYM_TURNS, [WEATHER]),
    "NeMo Gym, text": ({"responses_create_params": {"input": ASKED["content"]}}, [ASKED], []),
    "columns without content": ({"prompt": [ASKED], "images": [], "videos": None, "tools": []}, [ASKED], []),
    "a list of numbers is a problem": ({"problem": "[1, 2, 3]"}, [{"role": "user", "content": "[1, 2, 3]"}], []),
    "sets in a set are a problem": (
        {"problem": "{'a', {'b', 'c'}}"}, [{"role": "user", "content": "{'a', {'b', 'c'}}"}], [],
    ),
    "a set is a problem": ({"problem": "{1, 2}"}, [{"role": "user", "content": "{1, 2}"}], []),
    "JSON inside a message": (
        {"prompt": [{"role": "user", "content": '{"a": 1}'}]}, [{"role": "user", "content": '{"a": 1}'}], [],
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return byte_level(tmp_path_factory.mktemp("model"), [], template=TEMPLATE)


def theirs(model: Path, messages: list[dict[str, Any]], tools: list[dict[str, Any]], **variables: Any) -> list[int]:
    """What transformers makes of a conversation, without this project."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    found = tokenizer.apply_chat_template(
        messages, tools=tools or None, add_generation_prompt=True, tokenize=True, return_dict=True, **variables
    )
    return list(found["input_ids"])


@pytest.mark.parametrize("name", ROWS)
def test_rendered_as_transformers_renders_it(name: str, model: Path, tmp_path: Path) -> None:
    row, messages, tools = ROWS[name]
    data = f"data.train={jsonl(tmp_path / 'a.jsonl', row)}"
    variables = "data.chat_template_args={thinking: true}"
    config = load_config("verify", ["student.hf_path=a", "teacher.hf_path=b", data, variables])
    tokenizer = Tokenizer.load(model)
    tokenizer.set_chat_template(None, config.data.chat_template_args)
    (request,) = read_run_prompts(config, tokenizer, 10_000).training.requests
    assert request.prompt_ids == theirs(model, messages, tools, thinking=True)
    assert (list(request.messages), list(request.tools)) == (messages, tools)


def test_parquet_unites_rows_and_adds_nothing(model: Path, tmp_path: Path) -> None:
    """Keys that are null because another row has them are dropped, in messages, arguments and schemas."""
    other = {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {"zone": {
        "type": "string", "enum": ["UTC", "CET"]}}}}}  # fmt: skip
    call = {"id": "c2", "type": "function", "function": {"name": "now", "arguments": {"zone": "UTC"}}}
    rows = [
        {"prompt": TURNS, "tools": [WEATHER], "images": None},
        {"prompt": [ASKED], "tools": [other], "images": []},
        {"prompt": [ASKED, {"role": "assistant", "content": "", "tool_calls": [call]}, {**TURNS[3], "content": "x"}],
         "tools": None, "images": None},
    ]  # fmt: skip
    found = load_prompts(parquet(tmp_path / "a.parquet", *rows))
    tokenizer = Tokenizer.load(model)
    for prompt, row in zip(found, rows, strict=True):
        assert list(prompt.messages) == row["prompt"] and list(prompt.tools) == (row["tools"] or [])
        assert tokenizer.encode_prompt(prompt.messages, prompt.tools) == theirs(
            model, row["prompt"], row["tools"] or []
        )


def test_arguments_in_a_map_are_an_object(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    function = pa.struct({"name": pa.string(), "arguments": pa.map_(pa.string(), pa.string())})
    message = pa.struct(
        {"role": pa.string(), "content": pa.string(), "tool_calls": pa.list_(pa.struct({"function": function}))}
    )
    call = {"function": {"name": "f", "arguments": [("a", "1")]}}
    turns = [ASKED, {"role": "assistant", "content": "", "tool_calls": [call]}, ASKED]
    pq.write_table(pa.table({"prompt": pa.array([turns], pa.list_(message))}), tmp_path / "a.parquet")
    (prompt,) = load_prompts(tmp_path / "a.parquet")
    assert prompt.messages[1]["tool_calls"] == [{"function": {"name": "f", "arguments": {"a": "1"}}}]


TEXT = {"prompt": [ASKED]}
IMAGE = {"type": "image_url", "image_url": {"url": "a.png"}}


@pytest.mark.parametrize(
    ("row", "says"),
    [
        (
            {**TEXT, "images": ["a.png"]},
            "line 1: images is \\['a.png'\\], which would be left out .*leave out the rows",
        ),
        ({**TEXT, "video": "a.mp4"}, "line 1: video is"),
        ({**TEXT, "system_prompt": "Be brief."}, "system_prompt is 'Be brief.', .*write it as the first message"),
        ({**TEXT, "chat_template_kwargs": {"a": 1}}, "set data.chat_template_args"),
        ({"prompt": [{"role": "user", "content": [*PARTS, IMAGE]}]}, "message 0: a part of content is .*image_url"),
        ({"problem": "<image>What is it?"}, "message 0 is '<image>What is it.', expected text without <image>"),
        ({"prompt": '[{"from": "human", "value": "Hi"}]'}, "prompt is .*expected text, or messages as a list of"),
        ({"prompt": "{'question': 'Hi'}"}, "prompt is .*expected text, or messages as a list of"),
        ({"prompt": '{"question": "Hi"}'}, "prompt is .*expected text, or messages as a list of"),
        ({**TEXT, "tools": "get_weather"}, "tools is 'get_weather', expected a list of objects, or JSON text"),
        ({"prompt": [ASKED, {"role": "assistant", "content": None, "tool_calls": [CALL]}]}, "message 1 is .*not blank"),
        ({"prompt": [ASKED, {"role": "assistant", "content": None}, ASKED]}, "message 1 is .*not blank"),
        ({"prompt": [{"role": "user", "content": 5, "tool_calls": [CALL]}, ASKED]}, "message 0 is .*not blank"),
        ({"responses_create_params": {"input": [{"type": "computer_call"}]}}, "item 0 is .*leave the row out"),
        ({"responses_create_params": {"input": "a", "tools": [{"type": "web_search"}]}}, "expected tools of type func"),
        ({"responses_create_params": {"input": "a", "metadata": {"chat_template_kwargs": '{"a":1}'}}}, "metadata.chat"),
        ({"responses_create_params": {"tools": []}}, "input is None, expected text or a non-empty list"),
        (
            {"prompt": "[{'role': 'user', 'content': 'Hi'}\n {'role': 'user', 'content': 'x'}]"},
            "neither JSON nor Python",
        ),
        (
            {"prompt": json.dumps([{**ASKED, "content": "a \ud83d"}])},
            "message 0: content is 'a .ud83d', expected whole",
        ),
        ({**TEXT, "tools": json.dumps([{"name": "\ud83d"}])}, "tools: name is '.ud83d', expected whole characters"),
        ({"responses_create_params": {"input": [{"content": "hi"}, ASKED]}}, "message 0 is .*expected {role, content}"),
        ({"responses_create_params": {"input": [{"type": "reasoning", "summary": [{}]}]}}, "item 0: a part of content"),
        ({"problem": "half \ud83d of it"}, "line 1: holds 'half .ud83d of it', half of a character"),
        ({**TEXT, "answer": "\udc00"}, "line 1: holds '.udc00', half of a character"),
    ],
)
def test_refused_by_name(row: dict[str, Any], says: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=says) as error:
        load_prompts(jsonl(tmp_path / "a.jsonl", row))
    assert "\n" not in str(error.value)


def test_an_image_in_a_parquet_file_is_refused_by_its_row(tmp_path: Path) -> None:
    rows = [{**TEXT, "images": None}] * 70 + [{**TEXT, "images": [{"bytes": b"\x89PNG", "path": None}]}]
    with pytest.raises(ValueError, match="row 70: images is .*leave out the rows with such content"):
        load_prompts(parquet(tmp_path / "a.parquet", *rows))
    dated = parquet(tmp_path / "b.parquet", {"prompt": [{**ASKED, "when": datetime.date(2026, 1, 1)}]})
    with pytest.raises(ValueError, match="row 0: prompt, message 0: when is .*expected text, a number"):
        load_prompts(dated)


def test_calls_and_tools_belong_to_the_identity(tmp_path: Path) -> None:
    """Three conversations that differ only in calls stay three; equal ones are one; else the texts alone decide."""
    others = [{**CALL, "id": name} for name in "ab"]
    rows = [{"prompt": [*TURNS[:2], {**TURNS[2], "tool_calls": [call]}, TURNS[3]]} for call in (CALL, *others, CALL)]
    rows += [{"prompt": [ASKED], "tools": tools} for tools in ([WEATHER], [], [])]
    rows += [{"prompt": [{**ASKED, "role": role}, {"role": "user", "content": "b"}]} for role in ("user", "system")]
    file = str(jsonl(tmp_path / "a.jsonl", *rows))
    prepared = prepare(Preparation((file,), deduplicate=True), DataReport())
    assert [prompt.index for prompt in prepared.files[0]] == [0, 1, 2, 4, 5, 7, 8]
    prompts = load_prompts(file)
    (null,) = load_prompts(jsonl(tmp_path / "null.jsonl", {"prompt": [{**ASKED, "tool_calls": None, "name": ""}]}))
    assert identity(null) == identity(prompts[5]) == "is it warm in paris?"
    assert identity(prompts[8]) == "is it warm in paris?\nb"
    # an evaluation of other calls, or of other tools, is another problem
    found = TrainingTexts([[prompts[0], prompts[4]]]).overlaps({"v": [prompts[1], prompts[3], prompts[5]]})["v"]
    assert [(overlap.problem, overlap.training) for overlap in found if overlap.same_text] == [(1, 0)]


def test_the_order_is_of_the_whole_conversation(model: Path, tmp_path: Path) -> None:
    """A template of the student's that leaves calls out makes the same ids; the prompts are others all the same."""
    tokenizer = Tokenizer.load(byte_level(tmp_path / "plain", [], template=PLAIN))
    reports = []
    for name, call in (("a", CALL), ("b", {**CALL, "id": "other"})):
        turns = [*TURNS[:2], {**TURNS[2], "tool_calls": [call]}, TURNS[3]]
        data = f"data.train={jsonl(tmp_path / f'{name}.jsonl', {'prompt': turns})}"
        config = load_config("verify", ["student.hf_path=a", "teacher.hf_path=b", data])
        reports.append(read_run_prompts(config, tokenizer, 10_000))
    one, other = (each.training.requests[0] for each in reports)
    assert one.prompt_ids == other.prompt_ids
    assert reports[0].report.content["fingerprint"] != reports[1].report.content["fingerprint"]
    # the teacher's cache of prompts tells them apart
    asked = [one.messages, other.messages, one.messages], [(), (), (WEATHER,)]
    ids = teacher_prompts(Tokenizer.load(model), *asked)
    assert ids == [theirs(model, [*m], [*t]) for m, t in zip(*asked, strict=True)] and len({*map(tuple, ids)}) == 3
    left_out = (
        "leaves out name (of 1), reasoning_content (of 1), tool_calls (of 1), tool_call_id (of 1), which the student"
    )
    assert left_out in reports[0].report.lines[-1]


def test_the_problem_of_a_conversation_that_ends_with_a_result(tmp_path: Path) -> None:
    (prompt,) = load_prompts(jsonl(tmp_path / "a.jsonl", {"prompt": TURNS}))
    assert prompt.text == "Is it warm in Paris?"
    ((suffixed,), counts) = with_suffix([prompt], "Answer yes or no.")
    assert counts.added == 1 and suffixed.messages[1]["content"] == "Is it warm in Paris? Answer yes or no."
    assert suffixed.messages[1]["name"] == "Ann" and suffixed.messages[2:] == prompt.messages[2:]
    assert prompt.teacher_messages("{prompt} Hint.")[1]["content"] == "Is it warm in Paris? Hint."


def test_what_a_template_leaves_out(model: Path, tmp_path: Path) -> None:
    prompts = load_prompts(
        jsonl(tmp_path / "a.jsonl", {"prompt": TURNS, "tools": [WEATHER]}, *[{"prompt": [ASKED]}] * 3)
    )
    assert unread_fields(Tokenizer.load(model), prompts) == {} == unread_fields(Tokenizer.load(model), [])
    plain = Tokenizer.load(byte_level(tmp_path / "plain", [], template=PLAIN))
    assert unread_fields(plain, prompts) == dict.fromkeys(
        ["name", "reasoning_content", "tool_calls", "tool_call_id", "tools"], 1
    )
    (line,) = template_notes(plain, prompts, "data.train", "the student")
    assert line.startswith(f"data.train: the chat template of {plain.path} leaves out ") and "tools (of 1)" in line


DATED = (
    "{% if not date_string is defined %}{% set date_string = strftime_now('%d %b %Y') %}{% endif %}{{ date_string }}"
)


def test_a_template_that_writes_the_date(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(byte_level(tmp_path, [], template=DATED + PLAIN))
    prompts = load_prompts(jsonl(tmp_path / "a.jsonl", {"prompt": [ASKED]}))
    (line,) = template_notes(tokenizer, prompts, "data.train", "the student")
    assert "writes today's date" in line and "date_string" in line
    tokenizer.set_chat_template(None, {"date_string": "1 Jan 2026"})
    assert template_notes(tokenizer, prompts, "data.train", "the student") == []
    assert tokenizer.render([ASKED], True) == "1 Jan 2026Is it warm in Paris?"


@pytest.mark.parametrize(
    "template", ["{% include 'other.jinja' %}", "{{ messages + 1 }}", "{{ messages[5].role + 1 }}"]
)
def test_a_template_that_fails_is_one_line(template: str, tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(byte_level(tmp_path, [], template=template))
    with pytest.raises(ValueError, match="the chat template (fails|refuses)") as error:
        tokenizer.encode_prompt([ASKED])
    assert "\n" not in str(error.value) and str(tmp_path) in str(error.value)


def test_a_system_prompt_of_the_teachers_own(model: Path) -> None:
    tokenizer = Tokenizer.load(model)
    tokenizer.set_chat_template(None, {}, system_prompt="You know it.", keys="teacher")
    told = {"role": "system", "content": "You know it."}
    assert tokenizer.encode_prompt(TURNS, [WEATHER]) == theirs(model, [told, *TURNS[1:]], [WEATHER])
    assert tokenizer.encode_prompt([ASKED]) == theirs(model, [told, ASKED], [])
    with pytest.raises(ValueError, match="teacher.chat_template_args.tools"):
        tokenizer.set_chat_template(None, {"tools": 1}, keys="teacher")


def test_templates_in_other_files_are_read_and_copied(tmp_path: Path) -> None:
    old = byte_level(tmp_path / "old", [], template=None)
    (old / "chat_template.json").write_text(json.dumps({"chat_template": PLAIN}))
    named = byte_level(tmp_path / "named", [], template=None)
    (named / "chat_template.jinja").write_text(PLAIN)
    (named / "additional_chat_templates").mkdir()
    (named / "additional_chat_templates" / "tool_use.jinja").write_text(TEMPLATE)
    for source, kind in ((old, PLAIN), (named, TEMPLATE)):
        copy_tokenizer_files(source, source / "copy")
        for directory in (source, source / "copy"):
            tokenizer = Tokenizer.load(directory)
            expected = AutoTokenizer.from_pretrained(directory).apply_chat_template(
                [ASKED], tools=[WEATHER], chat_template=kind, add_generation_prompt=True, tokenize=False
            )
            assert tokenizer.render([ASKED], True, [WEATHER]) == expected
            assert tokenizer.render([ASKED], True) == "Is it warm in Paris?"
