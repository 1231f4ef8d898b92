"""Prompts of a run: lengths in tokens, chat templates, what data.json says, and the warning about other prompts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from nemo_oprd.config.loading import load_config
from nemo_oprd.config.schema import Config
from nemo_oprd.data.order import PromptOrder, exact_weights, prompt_order
from nemo_oprd.data.preparation import DataReport
from nemo_oprd.data.tokenizer import Tokenizer
from nemo_oprd.evaluation.evaluator import Evaluator
from nemo_oprd.rollout.schedule import training_requests
from nemo_oprd.run.data import RunPrompts, read_run_prompts
from nemo_oprd.run.prompt_files import write_report
from nemo_oprd.tools.toy import pair


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the toy tokenizer: one id per character, and a template that writes the contents."""
    directory = tmp_path_factory.mktemp("model")
    pair.write_tokenizer(directory)
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": pair.EOS_ID}))
    return directory


@pytest.fixture
def tokenizer(model: Path) -> Tokenizer:
    return Tokenizer.load(model)


def write(file: Path, *texts: str) -> Path:
    file.write_text("".join(json.dumps({"problem": text, "answer": "1"}) + "\n" for text in texts))
    return file


def configured(*overrides: str) -> Config:
    return load_config("verify", ["student.hf_path=a", "teacher.hf_path=b", *overrides])


def read(tokenizer: Tokenizer, *overrides: str) -> RunPrompts:
    return read_run_prompts(configured(*overrides), tokenizer, 64)


def contents(prompts: RunPrompts) -> list[str]:
    return [str(request.prompt) for request in prompts.training.requests]


# the toy tokenizer has no id for a space
TEXTS = ("1+1=", "12 34 5678+1=", "1+2=", "1 22 333 4444 55555=")


def test_long_prompts_are_left_out_or_cut_and_said(tokenizer: Tokenizer, tmp_path: Path) -> None:
    data = f"data.train={write(tmp_path / 'a.jsonl', *TEXTS)}"
    limit = "data.max_prompt_tokens=8"
    dropped = read(tokenizer, data, limit)
    assert contents(dropped) == ["1+1=", "1+2="]
    what = "2 of 4 prompts have more than data.max_prompt_tokens=8 tokens (the longest 16); they "
    assert dropped.report.lines == [f"data.over_long=drop: {what}are left out"]
    cut = read(tokenizer, data, limit, "data.over_long=truncate_left")
    assert contents(cut) == ["1+1=", "5678+1=", "1+2=", "55555="]
    assert cut.report.lines == [f"data.over_long=truncate_left: {what}lost the beginning of their last message"]
    for request in cut.training.requests:
        assert tokenizer.decode(request.prompt_ids) == str(request.prompt).replace(" ", "")
        assert len(request.prompt_ids) <= 8
        assert request.messages == request.teacher_messages == ({"role": "user", "content": request.prompt},)
    counts = {"prompts": 2, "of": 4, "longest": 16, "max_prompt_tokens": 8, "action": "truncate_left"}
    assert cut.report.content["over_long"] == counts
    # as many words as fit stay
    assert (
        contents(read(tokenizer, data, "data.max_prompt_tokens=10", "data.over_long=truncate_left"))[3] == "4444 55555="
    )
    assert contents(read(tokenizer, data)) == list(TEXTS) and read(tokenizer, data).report.lines == []
    with pytest.raises(ValueError, match=r"a\.jsonl: prompt 1: has 11 tokens, expected at most .*tokens=8; raise it"):
        read(tokenizer, data, limit, "data.over_long=refuse")


def test_the_suffix_survives_the_cut(tokenizer: Tokenizer, tmp_path: Path) -> None:
    data = f"data.train={write(tmp_path / 'a.jsonl', *TEXTS)}"
    cut = read(tokenizer, data, "data.max_prompt_tokens=10", "data.over_long=truncate_left", "data.suffix='=='")
    assert contents(cut) == ["1+1= ==", "5678+1= ==", "1+2= ==", "55555= =="]


def test_one_file_keeps_the_order_that_it_had_and_several_are_one_pool(tokenizer: Tokenizer, tmp_path: Path) -> None:
    """Existing runs resume, and their results can be repeated."""
    texts = [f"{n}+1=" for n in range(9)]
    one = write(tmp_path / "one.jsonl", *texts)
    parts = [write(tmp_path / "two.jsonl", *texts[:4]), write(tmp_path / "three.jsonl", *texts[4:])]
    expected = [texts[i] for i in prompt_order(9, 7, 5, 12)]
    for train in (one, f"[{one}]", f"{{{one}: 2}}", f"[{','.join(map(str, parts))}]"):
        config = configured(f"data.train={train}", "seed=7", "rollout.per_prompt=1")
        prompts = read_run_prompts(config, tokenizer, 64).training
        assert [request.prompt for request in training_requests(prompts, config, 5, 12)] == expected
    config = configured(f"data.train={{{parts[0]}: 1, {parts[1]}: 3}}", "seed=7")
    prompts = read_run_prompts(config, tokenizer, 64).training
    assert prompts.order == PromptOrder((4, 5), exact_weights([1, 3]))


def test_a_chat_template_and_its_variables(model: Path, tmp_path: Path) -> None:
    file = tmp_path / "template.jinja"
    file.write_text("{% for m in messages %}{{ m.content }}{% endfor %}{% if not thinking %}=={% endif %}")
    asked = [{"role": "user", "content": "1+1"}]
    changed = Tokenizer.load(model)
    assert changed.decode(changed.encode_prompt(asked)) == "1+1"
    changed.set_chat_template(file, {})
    assert changed.decode(changed.encode_prompt(asked)) == changed.render(asked, True) == "1+1=="
    changed.set_chat_template(None, {"thinking": True})
    assert changed.render(asked, True) == "1+1"


def test_data_json_and_the_warning_about_other_prompts(tokenizer: Tokenizer, tmp_path: Path) -> None:
    one, two = write(tmp_path / "one.jsonl", *TEXTS[:3]), write(tmp_path / "two.jsonl", *TEXTS)
    first = read(tokenizer, f"data.train={one}").report
    assert write_report(first, tmp_path) is None
    assert write_report(first, tmp_path) is None
    content = json.loads((tmp_path / "data.json").read_text())
    assert content["format"] == 1 and content["prompts"] == 3
    assert content["files"] == [{"file": str(one), "prompts": 3}]
    # another answer, another limit, another weight: each changes what a position means
    for overrides in (
        [f"data.train={two}"],
        [f"data.train={two}", "data.max_prompt_tokens=9"],
        [f"data.train={{{two}: 1, {one}: 2}}"],
        [f"data.train={{{two}: 1, {one}: 3}}"],
    ):
        warning = write_report(read(tokenizer, *overrides).report, tmp_path)
        assert warning is not None and "the earlier start had other training prompts" in warning
    assert write_report(read(tokenizer, *overrides).report, tmp_path) is None


def test_a_damaged_data_json_is_refused(tmp_path: Path) -> None:
    (tmp_path / "data.json").write_text("{")
    with pytest.raises(ValueError, match=r"data\.json: not valid JSON .* remove the file"):
        write_report(DataReport(content={"prompts": 1, "fingerprint": "x"}), tmp_path)


def test_evaluations_have_the_suffix_and_the_held_out_problems(tokenizer: Tokenizer, tmp_path: Path) -> None:
    sums = write(tmp_path / "sums.jsonl", "1+1=", "1+2= ==", "1+3=")
    train = write(tmp_path / "train.jsonl", *(f"{n}+5=" for n in range(40)))
    config = configured(
        f"data.validation={{sums: {sums}}}", f"data.train={train}", "data.suffix='=='", "data.held_out=0.3",
        "evaluation.every=1", "evaluation.limit=2",
    )  # fmt: skip
    prompts = read_run_prompts(config, tokenizer, 64)
    evaluator = Evaluator(config, tokenizer, 64, prompts.held_out)
    texts = {name: [tokenizer.decode(ids) for ids in sets] for name, sets in evaluator.ids.items()}
    assert texts["sums"] == ["1+1===", "1+2==="] and list(texts) == ["sums", "held_out"]
    assert evaluator.notes == ["data.suffix: added to 2 prompts of data.validation.sums; 1 have it already"]
    held_out = [prompt.messages[-1]["content"].replace(" ", "") for prompt in prompts.held_out]
    assert texts["held_out"] == held_out[:2] and len(held_out) > 2
    assert {text.replace(" ", "") for text in contents(prompts)} == {f"{n}+5===" for n in range(40)} - set(held_out)
