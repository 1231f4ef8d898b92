"""Rows with calls and tools in the commands: what models read is what transformers makes of the row."""

from __future__ import annotations

import contextlib
import io
import json
from pathlib import Path
from typing import Any

import pytest
from pool import Pools, WorkerError
from tiny_models import save_random
from transformers import AutoTokenizer

from nemo_oprd.cli import main
from tests.support.align_tokenizers import byte_level
from tests.support.conversation_rows import ASKED, TEMPLATE, TURNS, WEATHER, parquet

QWEN = {
    "model_type": "qwen2", "vocab_size": 320, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 512, "tie_word_embeddings": False,
    "eos_token_id": 0, "bos_token_id": None,
}  # fmt: skip
OWN_TEMPLATE = "{% for m in messages %}[{{ m.role }}]{{ m.content or '' }}{% endfor %}{{ style }}"
ROWS: list[dict[str, Any]] = [
    {"prompt": TURNS, "tools": [WEATHER], "data_source": "calls", "answer": "yes", "images": None},
    {"prompt": [ASKED], "tools": None, "data_source": "plain", "answer": "no", "images": []},
]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("conversations")
    for number, name in enumerate(("student", "first", "second")):
        byte_level(root / name, [], template=TEMPLATE)
        save_random(root / name, QWEN, number)
        (root / name / "generation_config.json").write_text('{"eos_token_id": 0}')
    (root / "own.jinja").write_text(OWN_TEMPLATE)
    parquet(root / "prompts.parquet", *ROWS)
    return root


def settings(place: Path) -> list[str]:
    own = "system_prompt: Know it., chat_template_args: {style: short}"
    teachers = [
        f"{{hf_path: {place / 'first'}, data_sources: [calls], {own}, chat_template: {place / 'own.jinja'}}}",
        f"{{hf_path: {place / 'second'}, data_sources: [plain]}}",
    ]
    return [
        f"student.hf_path={place / 'student'}", f"teachers=[{', '.join(teachers)}]", "teacher.hf_path=null",
        f"data.train={place / 'prompts.parquet'}", f"data.validation={{calls: {place / 'prompts.parquet'}}}",
        "student.parallel.tensor=2", "student.checkpoint=null", "teacher.checkpoint=null",
        "precision=fp32", "train.steps=1", "rollout.save=true",
        "train.prompts_per_step=4", "rollout.per_prompt=1", "rollout.max_new_tokens=4", "evaluation.max_new_tokens=4",
        "evaluation.teacher=false", "evaluation.every=1", "evaluation.samples=1", "logging.tensorboard=false",
        "train.export_hf=false", "data.chat_template_args={thinking: true}",
    ]  # fmt: skip


def theirs(model: Path, row: dict[str, Any], template: str | None = None, **variables: Any) -> list[int]:
    """A row as transformers renders it, without this project."""
    found = AutoTokenizer.from_pretrained(model).apply_chat_template(
        row["prompt"], tools=row["tools"], chat_template=template, add_generation_prompt=True, **variables
    )
    return list(found["input_ids"])


def read_lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_training_evaluation_and_replay(pools: Pools, place: Path, tmp_path: Path) -> None:
    """One teacher has a conversation of its own, the other reads the student's ids; a replay makes the same update."""
    run = tmp_path / "run"
    pools[2].run("cases:run_train", overrides=[*settings(place), f"output={run}"], config="quickstart")
    rollouts = read_lines(run / "rollouts" / "step_0000001.jsonl")
    ids = {row["data_source"]: theirs(place / "student", row, thinking=True) for row in ROWS}
    turns = [{"role": "system", "content": "Know it."}, *TURNS[1:]]
    own = theirs(place / "first", {**ROWS[0], "prompt": turns}, OWN_TEMPLATE, style="short", thinking=True)
    assert sorted(line["data_source"] for line in rollouts) == ["calls", "calls", "plain", "plain"]
    for line in rollouts:
        assert line["prompt_ids"] == ids[line["data_source"]]
        assert line.get("teacher_prompt_ids") == (own if line["data_source"] == "calls" else None)
    evaluated = read_lines(run / "evaluations" / "step_0000001" / "generations" / "calls.jsonl")
    assert [line["prompt_ids"] for line in evaluated] == [ids["calls"], ids["plain"]]
    (start,) = json.loads((run / "environment.json").read_text())
    said = start["conversations"]
    assert said["teachers[0]"]["system_prompt"] == "Know it." and "teachers[1]" not in said
    assert said["teachers[0]"]["chat_template_args"] == {"style": "short", "thinking": True}
    assert said["teachers[0]"]["chat_template_sha256"] != said["student"]["chat_template_sha256"]

    replayed = [*settings(place), f"rollout.replay={run / 'rollouts' / 'step_0000001.jsonl'}", "evaluation.every=0"]
    pools[2].run("cases:run_train", overrides=[*replayed, f"output={tmp_path / 'again'}"], config="quickstart")
    one, other = (
        [line for line in read_lines(d / "metrics.jsonl") if "loss/total" in line] for d in (run, tmp_path / "again")
    )
    assert (
        one[-1]["loss/total"] == other[-1]["loss/total"] and one[-1]["actor/grad_norm"] == other[-1]["actor/grad_norm"]
    )
    # a line of the teacher with a conversation of its own must have it
    (tmp_path / "cut.jsonl").write_text(
        "".join(json.dumps({k: v for k, v in line.items() if k != "teacher_prompt_ids"}) + "\n" for line in rollouts)
    )
    replayed[-2] = f"rollout.replay={tmp_path / 'cut.jsonl'}"
    with pytest.raises(WorkerError, match="no teacher_prompt_ids, expected what the teacher reads"):
        pools[2].run("cases:run_train", overrides=[*replayed, f"output={tmp_path / 'no'}"], config="quickstart")


def test_data_and_doctor_show_what_models_read(pools: Pools, place: Path, tmp_path: Path) -> None:
    """A prompt of each source, as rendered; what a template leaves out is said."""
    with contextlib.redirect_stdout(io.StringIO()) as said:
        main(["data", "--config-name", "quickstart", *settings(place)])
    tokenizer = AutoTokenizer.from_pretrained(place / "student")
    for row in ROWS:
        text = tokenizer.decode(theirs(place / "student", row, thinking=True))
        assert f"{row['data_source']}, as the student reads it: {text!r}" in said.getvalue()
    _wrong, found = pools[2].run(
        "doctor_cases:diagnose", config="quickstart", overrides=settings(place), plant=None, prompts=2, problems=2
    )
    lines = [finding.line for finding in found]
    assert sum("as the student reads it" in line for line in lines) == 2
    assert any("as the teacher reads it: '[system]Know it.[user]" in line for line in lines)
    left_out = [finding for finding in found if finding.code == "template-leaves-out"]
    assert [sorted(finding.numbers) for finding in left_out] == [
        ["name", "reasoning_content", "teacher", "tool_call_id", "tool_calls", "tools"]
    ]
