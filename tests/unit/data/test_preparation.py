"""What is done to training prompts before a run: suffix, held-out problems, duplicates, contamination."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from nemo_oprd.cli import main
from nemo_oprd.config.loading import load_config
from nemo_oprd.data.preparation import DataReport, Preparation, PreparedPrompts, decontaminate, prepare
from nemo_oprd.data.prompts import Prompt, load_prompts
from nemo_oprd.data.text import identity, share_of
from nemo_oprd.run.prompt_files import held_out_problems, validation_problems

DATA = Path(__file__).resolve().parents[3] / "../shared/data"
BOX = r"Please reason step by step, and put your final answer within \boxed{}."
BASE = ["student.hf_path=a", "teacher.hf_path=b"]


def write(file: Path, *texts: str, answer: str = "1") -> Path:
    file.write_text("".join(json.dumps({"problem": text, "answer": answer}) + "\n" for text in texts))
    return file


def long_problem(seed: int) -> str:
    draw = random.Random(seed)
    return " ".join("".join(draw.choices("abcdefghij", k=4)) for _ in range(30))


def prepared(*files: Path, **settings: Any) -> tuple[PreparedPrompts, DataReport]:
    report = DataReport()
    return prepare(Preparation(tuple(map(str, files)), **settings), report), report


def texts(prompts: list[Prompt]) -> list[str]:
    return [prompt.messages[-1]["content"] for prompt in prompts]


def test_without_settings_nothing_changes_and_nothing_is_said(tmp_path: Path) -> None:
    files = [write(tmp_path / f"{name}.jsonl", *(f"{name} {n}" for n in range(4))) for name in "ab"]
    result, report = prepared(*files)
    assert result.files == [load_prompts(file) for file in files] and result.held_out == []
    assert report.lines == []


def test_held_out_problems_are_those_of_their_hash_whatever_the_files(tmp_path: Path) -> None:
    problems = [f"{n} + {n * 7} = ?" for n in range(300)]
    both = write(tmp_path / "both.jsonl", *problems, problems[5] + " ", *problems[:40])
    result, report = prepared(both, held_out=0.2)
    aside = set(texts(result.held_out))
    assert 30 < len(aside) < 90 and report.content["held_out"]["problems"] == len(aside) == len(result.held_out)
    shares = {text: share_of(identity(Prompt(({"role": "user", "content": text},), None, "", 0))) for text in problems}
    assert aside == {text for text, share in shares.items() if share < 0.2}
    assert aside.isdisjoint(map(str.strip, texts(result.files[0])))
    assert len(result.files[0]) == len([text for text in problems + problems[5:6] + problems[:40] if text not in aside])
    # other files, another order, a suffix that some prompts have already: the same problems in the same order
    shuffled = random.Random(0).sample(problems, 300)
    halves = [
        write(tmp_path / "one.jsonl", *shuffled[:100]),
        write(tmp_path / "two.jsonl", *(f"{text} {BOX}" for text in shuffled[100:])),
    ]
    again, _ = prepared(*halves, held_out=0.2, suffix=BOX)
    assert texts(again.held_out) == [f"{text} {BOX}" for text in texts(result.held_out)]
    trained = [text for prompts in again.files for text in texts(prompts)]
    assert sorted(trained) == sorted(f"{text} {BOX}" for text in set(problems) - aside)
    # a larger share has all of a smaller one
    assert aside < set(texts(prepared(both, held_out=0.3)[0].held_out))


def test_duplicates_are_counted_and_dropped(tmp_path: Path) -> None:
    one = write(tmp_path / "one.jsonl", "2 + 3", "4+5", "$2+3$")
    two = write(tmp_path / "two.jsonl", "6+7", "4 + 5", answer="2")
    result, report = prepared(one, two)
    assert list(map(len, result.files)) == [3, 2]
    assert "2 of 5 prompts repeat an earlier one, 1 of them with another answer; they stay" in report.lines[0]
    result, report = prepared(one, two, deduplicate=True)
    assert [texts(prompts) for prompts in result.files] == [["2 + 3", "4+5"], ["6+7"]]
    assert report.lines[0].endswith("they are dropped")
    counts = {"prompts": 2, "with_another_answer": 1, "of": 5, "dropped": True}
    assert report.content["duplicates"] == counts


def test_a_file_may_be_empty_afterwards_unless_it_has_a_weight(tmp_path: Path) -> None:
    one, two = (write(tmp_path / f"{name}.jsonl", "2+3") for name in ("one", "two"))
    assert list(map(len, prepared(one, two, deduplicate=True)[0].files)) == [1, 0]
    with pytest.raises(ValueError, match=r"no prompt of .*two\.jsonl remains .*data\.deduplicate=true"):
        prepared(one, two, deduplicate=True, weighted=True)
    with pytest.raises(ValueError, match="data.held_out=0.001: of 1 prompts none"):
        prepared(one, held_out=0.001)


def test_contamination_is_said_dropped_or_refused(tmp_path: Path) -> None:
    training = [long_problem(n) for n in range(6)]
    one, two = write(tmp_path / "one.jsonl", *training[:3]), write(tmp_path / "two.jsonl", *training[3:])
    changed = " ".join([*training[4].split()[:25], "other", "words"])
    sets = {
        "first": load_prompts(write(tmp_path / "first.jsonl", training[1], changed, "short")),
        "clean": load_prompts(write(tmp_path / "clean.jsonl", long_problem(70))),
    }
    for action in ("warn", "drop"):
        result, report = prepared(one, two)
        settings = Preparation((str(one), str(two)), contamination=action)  # type: ignore[arg-type]
        after = decontaminate(settings, result, sets, report)
        kept = [texts(prompts) for prompts in after.files]
        dropped = [[training[0], training[2]], [training[3], training[5]]]
        assert kept == ([training[:3], training[3:]] if action == "warn" else dropped)
        said = report.lines[0]
        assert said.startswith(
            f"data.contamination={action}: 2 of 3 problems of first stand in data.train (1 with the "
        )
        assert f"1 by sequences of 13 words), e.g. problem 0 in prompt 1 of {one}: '{training[1][:90]}...'" in said
        assert "2 of 6 training prompts contain a validation problem" in report.lines[1] and len(report.lines) == 2
        content = report.content["contamination"]
        assert content["training_prompts"] == 2 and content["sets"]["clean"]["contained"] == 0
        found = content["sets"]["first"]
        assert found["contained_problems"] == [0, 1] and (found["contained"], found["same_text"]) == (2, 1)
        fields = ("problem", "training_file", "training_prompt", "training_text")
        examples = [tuple(example[field] for field in fields) for example in found["examples"]]
        assert examples == [(0, str(one), 1, training[1]), (1, str(two), 1, training[4])]
    with pytest.raises(ValueError, match="data.contamination=refuse: 2 of 3 problems of first stand in data.train"):
        decontaminate(Preparation((str(one), str(two)), contamination="refuse"), result, sets, DataReport())


def test_held_out_problems_take_part_in_the_comparison_and_in_evaluations(tmp_path: Path) -> None:
    problems = [long_problem(n) for n in range(30)]
    file = write(tmp_path / "train.jsonl", *problems, *(f"{text} indeed" for text in problems))
    config = load_config("verify", [*BASE, f"data.train={file}", "data.held_out=0.3", "evaluation.every=5"])
    assert config.data.sets == ("held_out",)
    aside = held_out_problems(config)
    assert aside == validation_problems(config)["held_out"] == prepared(file, held_out=0.3)[0].held_out
    assert held_out_problems(load_config("verify", [*BASE, f"data.train={file}"])) == []
    output = tmp_path / "report.json"
    main(["data", "--config-name", "verify", *BASE, f"data.train={file}", "data.held_out=0.3", f"--json={output}"])
    found = json.loads(output.read_text())["contamination"]["sets"]["held_out"]
    assert found["problems"] == len(aside) and found["same_text"] == 0 < found["contained"]


def test_the_command_says_everything(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = write(tmp_path / "one.jsonl", *(long_problem(n) for n in range(4)))
    two = write(tmp_path / "two.jsonl", long_problem(1), f"{long_problem(9)} {BOX}")
    sets = f"data.validation={{dirty: {one}, clean: {write(tmp_path / 'clean.jsonl', 'other')}}}"
    overrides = [*BASE, f"data.train={{{one}: 3, {two}: 1}}", f"data.suffix='{BOX}'", sets]
    main(["data", "--config-name", "verify", *overrides])
    said = capsys.readouterr().out.splitlines()
    assert said[0].startswith(f"{one}: 4 prompts, 4 to train on, e.g. '{long_problem(0)[:60]}")
    assert said[1].startswith(f"{two}: 2 prompts, 2 to train on")
    assert said[2] == "data.suffix: added to 5 prompts of data.train; 1 have it already"
    assert "data.deduplicate=false: 1 of 6 prompts repeat an earlier one; they stay" in said[3]
    assert said[4] == "data.suffix: added to 4 prompts of data.validation.dirty; 0 have it already"
    assert "4 of 4 problems of dirty stand in data.train (4 with the same text" in said[6]
    assert "5 of 6 training prompts contain a validation problem; they stay" in said[7]
    assert said[8] == f"data.train: 75.0% from {one} (4 prompts), 25.0% from {two} (2 prompts)"
    assert said[9].startswith("data.train: no prompt is shown as the student reads it, because student.hf_path is no")
    assert said[10] == "data.contamination: no problem of clean was found in data.train" and len(said) == 11


def test_sets_that_are_not_evaluated_need_not_exist(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    overrides = [*BASE, f"data.train={write(tmp_path / 'a.jsonl', 'x')}", "data.validation={no: nowhere.jsonl}"]
    main(["data", "--config-name", "verify", *overrides])
    said = capsys.readouterr().out
    assert "data.validation.no=nowhere.jsonl: there is no such file, so data.train is not compared" in said
    with pytest.raises(SystemExit):
        main(["data", "--config-name", "verify", *overrides, "evaluation.every=1"])


@pytest.mark.slow
def test_real_collections() -> None:
    """DAPO-Math-17k holds most of AMC 2023 and nothing of AIME 2024 and 2025, as a comparison by hand says."""
    if not (DATA / "dapo_math_17k.parquet").exists():
        pytest.skip("needs ../shared/data/*.parquet beside the repository")
    result, report = prepared(DATA / "dapo_math_17k.parquet")
    assert report.content["duplicates"] == {"prompts": 1176, "with_another_answer": 18, "of": 17917, "dropped": False}
    sets = {name: load_prompts(DATA / f"{name}.parquet") for name in ("aime24", "aime25", "amc23", "math_500")}
    decontaminate(Preparation((str(DATA / "dapo_math_17k.parquet"),)), result, sets, report)
    found = {name: each["contained"] for name, each in report.content["contamination"]["sets"].items()}
    assert found == {"aime24": 0, "aime25": 0, "amc23": 23, "math_500": 18}
