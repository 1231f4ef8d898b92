"""`nemo-oprd compare` as a user runs it: what it writes, what it uses again, what it refuses, and the report's page."""

from __future__ import annotations

import io
import json
import os
import shutil
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import Models

from nemo_oprd.cli import main
from nemo_oprd.evaluation.comparison import COLUMNS, read_comparison, terminal_table
from nemo_oprd.tools.report.page import write_report
from nemo_oprd.tools.toy.pair import write_tokenizer


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A teacher, a student with other weights, and prompts that the toy's tokenizer can read."""
    place = tmp_path_factory.mktemp("compare")
    shutil.copytree(Models(tmp_path_factory.mktemp("models"))("qwen2_tied"), place / "teacher")
    write_tokenizer(place / "teacher")
    shutil.copytree(place / "teacher", place / "student")
    weights = place / "student" / "model.safetensors"
    torch.manual_seed(1)
    save_file({k: v + 0.3 * torch.randn_like(v) for k, v in load_file(weights).items()}, weights, {"format": "pt"})
    lines = [json.dumps({"prompt": text}) for text in ("1+2=", "30+4=", "5+5=")]
    (place / "prompts.jsonl").write_text("\n".join(lines) + "\n")
    return place


def compare(place: Path, *arguments: str, output: str = "out") -> tuple[int, str, str]:
    """The command in this process: exit status, standard output and standard error."""
    words = [
        "compare", "--teacher", str(place / "teacher"), "--prompts", str(place / "prompts.jsonl"), "--output",
        str(place / output), "--max-new-tokens", "5", *arguments,
    ]  # fmt: skip
    out, err, status = io.StringIO(), io.StringIO(), 0
    with redirect_stdout(out), redirect_stderr(err):
        try:
            main(words)
        except SystemExit as ended:
            status = int(ended.code or 0)
    return status, out.getvalue(), err.getvalue()


@pytest.fixture(scope="module")
def measured(place: Path) -> Path:
    status, out, err = compare(place, f"first={place / 'student'}", f"same={place / 'teacher'}")
    assert status == 0, err
    heading, *table = out.splitlines()
    assert heading.split()[-2:] == ["first", "same"] and "|---" not in out and max(map(len, out.splitlines())) <= 80
    kl = next(line for line in table if line.startswith("  KL(s|t)"))
    first = json.loads((place / "out" / "first.json").read_text())
    assert kl.split() == ["KL(s|t)", f"{first['on_teacher']['reverse_kl']:.4g}", "0"]
    return place / "out"


def test_the_files(measured: Path) -> None:
    first, same = (json.loads((measured / f"{name}.json").read_text()) for name in ("first", "same"))
    assert first["on_teacher"]["reverse_kl"] > 0.01 and first["on_student"]["forward_kl"] > 0.01
    for source in ("on_teacher", "on_student"):
        # the same weights, loaded twice
        assert same[source]["reverse_kl"] == same[source]["forward_kl"] == 0
        assert same[source]["greedy_agreement"] == 1
        tokens = [part["tokens"] for part in first["per_prompt"][source]]
        assert len(tokens) == 3 and sum(tokens) == first[source]["tokens"]
    lines = [json.loads(line) for line in (measured / "first.jsonl").read_text().splitlines()]
    assert [line["prompt"] for line in lines] == ["1+2=", "30+4=", "5+5="]
    assert [len(line["response_ids"]) for line in lines] == [p["tokens"] for p in first["per_prompt"]["on_student"]]
    # the same weights, seed and prompts give the same responses
    assert (measured / "same.jsonl").read_text() == (measured / "teacher.jsonl").read_text()


def test_measurements_are_used_again(place: Path, measured: Path) -> None:
    """A second student is measured on the kept responses of the teacher; the first one is not measured again."""
    kept = {file.name: file.read_bytes() for file in measured.iterdir()}
    times = {file.name: file.stat().st_mtime_ns for file in measured.iterdir()}
    status, _, err = compare(place, f"first={place / 'student'}", f"second={place / 'student'}")
    assert status == 0, err
    assert "first:" not in err and "second:" in err
    assert {name: (measured / name).stat().st_mtime_ns for name in kept} == times
    results = {name: json.loads((measured / f"{name}.json").read_text()) for name in ("first", "second")}
    assert results["first"]["per_prompt"] == results["second"]["per_prompt"]
    for name in ("second.json", "second.jsonl"):
        (measured / name).unlink()


def test_many_students_go_on_below(measured: Path) -> None:
    """Each line fits a terminal, and what belongs to a student stands in its column."""
    result = json.loads((measured / "first.json").read_text())
    names = [f"student-of-long-name-{number}" for number in range(5)]
    blocks = terminal_table(dict.fromkeys(names, result)).split("\n\n")
    assert [line for block in blocks for line in block.splitlines()[0].split()[4:]][-5:] == names
    assert len({tuple(line[:24] for line in block.splitlines()[1:]) for block in blocks}) == 1
    for line in "\n".join(blocks).splitlines():
        assert len(line) <= 80
    # a name wider than a terminal has a table of its own
    assert terminal_table({"n" * 90: result, "b": result}).count("\n\n") == 1


def test_before_stands_before_after(measured: Path, tmp_path: Path) -> None:
    for name in ("teacher.json", "teacher.jsonl"):
        shutil.copy(measured / name, tmp_path / name)
    for name in ("after", "before", "m", "before-m", "m_after"):
        for ending in ("json", "jsonl"):
            shutil.copy(measured / f"first.{ending}", tmp_path / f"{name}.{ending}")
    found = read_comparison(tmp_path)
    assert found is not None
    assert [name for name, _ in found.rows] == ["before", "before-m", "m", "after", "m_after"]
    assert [name for name, _ in found.responses[0][1]] == ["teacher", "before", "before-m", "m", "after", "m_after"]


def test_other_settings_are_measured_again(place: Path, measured: Path) -> None:
    shutil.copytree(measured, place / "other")
    status, _, err = compare(place, f"first={place / 'student'}", "--seed", "1", output="other")
    assert status == 0, err
    assert json.loads((place / "other" / "first.json").read_text())["sampling"]["seed"] == 1
    assert (place / "other" / "teacher.jsonl").read_text() != (measured / "teacher.jsonl").read_text()


def test_the_same_weights_written_again_are_the_same_model(place: Path, measured: Path) -> None:
    os.utime(place / "student" / "model.safetensors", ns=(0, 0))
    status, _, err = compare(place, f"first={place / 'student'}")
    assert status == 0 and "first:" not in err


def test_recorded_responses_of_the_teacher(place: Path, measured: Path, tmp_path: Path) -> None:
    recorded = ["--teacher-responses", str(measured / "teacher.jsonl")]
    status, _, err = compare(place, f"first={place / 'student'}", "--seed", "5", *recorded, output="recorded")
    assert status == 0, err
    found, before = (json.loads((d / "first.json").read_text()) for d in (place / "recorded", measured))
    assert found["on_teacher"] == before["on_teacher"] and found["on_student"] != before["on_student"]
    lines = (measured / "teacher.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "swapped.jsonl").write_text("".join([lines[1], lines[0], lines[2]]))
    (tmp_path / "short.jsonl").write_text(lines[0])
    (tmp_path / "other.jsonl").write_text('{"text": "1"}\n')
    for name, says in (
        ("swapped", "line 1 answers another prompt than line 1 of"),
        ("short", "holds 1 responses, expected 3"),
        ("other", "line 1 has no 'prompt_ids'"),
        ("nowhere", "no such file"),
    ):
        file = str(tmp_path / f"{name}.jsonl")
        status, _, err = compare(place, f"a={place / 'student'}", "--teacher-responses", file, output="bad")
        assert status == 2 and says in err, err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["student"], "student 'student': expected NAME=DIR"),
        (["teacher={}/student"], "'teacher' is taken"),
        (["a={}/student", "a={}/teacher"], "that no other model has"),
        (["a={}/nowhere"], "no such directory"),
        (["a={}/student", "--temperature", "-1"], "--temperature -1.0: expected 0 or more"),
        (["a={}/student", "--max-new-tokens", "64"], "the models have 64 positions"),
        (["a={}/student", "--count", "0"], "expected a whole number of at least 1"),
    ],
)
def test_bad_input(place: Path, arguments: list[str], says: str) -> None:
    status, _, err = compare(place, *(argument.format(place) for argument in arguments), output="bad")
    assert status == 2
    assert says in err
    assert "Traceback" not in err
    assert not list((place / "bad").glob("*"))


def test_another_vocabulary(place: Path, tmp_path: Path) -> None:
    shutil.copytree(place / "student", tmp_path / "other")
    file = tmp_path / "other" / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    vocab = tokenizer["model"]["vocab"]
    first, second = list(vocab)[:2]
    vocab[first], vocab[second] = vocab[second], vocab[first]
    file.write_text(json.dumps(tokenizer))
    status, _, err = compare(place, f"a={tmp_path / 'other'}", output="bad")
    assert status == 2 and "has another vocabulary than the teacher" in err


def test_the_report_shows_it(measured: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.yaml").write_text("train: {lr: 1.0}\n")
    (run / "metrics.jsonl").write_text(json.dumps({"step": 1, "time": 0.0, "loss/total": 1.0}) + "\n")
    without = write_report([run], tmp_path / "without.html").read_text()
    assert "Next-token distributions" not in without and "held-out prompts" not in without
    shutil.copytree(measured, run / "compare")
    # markup, and characters at which str.splitlines would end a line
    text = (run / "compare" / "first.jsonl").read_text().replace('"response": "', '"response": "<b>&\u2028\x85')
    (run / "compare" / "first.jsonl").write_text(text)
    page = write_report([run], tmp_path / "page.html").read_text()
    comparison = read_comparison(run / "compare")
    assert comparison is not None and [name for name, _ in comparison.rows] == ["first", "same"]
    for _, cells in comparison.rows:
        assert len(cells) == len(COLUMNS)
        for cell in cells:
            assert f'<td class="number">{cell}</td>' in page
    assert "&lt;b&gt;&amp;" in page and "<b>&" not in page
    assert page.count('class="sample"') == 3
    other = json.loads((run / "compare" / "first.json").read_text()) | {"count": 2}
    (run / "compare" / "first.json").write_text(json.dumps(other))
    comparison = read_comparison(run / "compare")
    assert comparison is not None and [name for name, _ in comparison.rows] == ["same"]  # measured in another way
    del other["on_teacher"]
    (run / "compare" / "first.json").write_text(json.dumps(other | {"count": 3}))
    with pytest.raises(ValueError, match="what nemo-oprd compare writes"):
        write_report([run], tmp_path / "page.html")


def test_recorded_responses_are_not_taken_for_samples(place: Path, measured: Path) -> None:
    """Without --teacher-responses the teacher is sampled, also where a comparison of recorded responses lies."""
    student, output = f"first={place / 'student'}", place / "mixed"
    lines = [json.loads(line) for line in (measured / "teacher.jsonl").read_text().splitlines()]
    file = place / "reversed.jsonl"
    turned = [{**line, "response_ids": line["response_ids"][::-1]} for line in lines]
    file.write_text("".join(json.dumps(line) + "\n" for line in turned))

    def ids() -> list[list[int]]:
        return [json.loads(line)["response_ids"] for line in (output / "teacher.jsonl").read_text().splitlines()]

    for _ in range(2):
        status, _, err = compare(place, student, "--teacher-responses", str(file), output="mixed")
        assert status == 0 and ids() == [line["response_ids"] for line in turned], err
    assert "teacher:" not in err and "first:" not in err, "used again"
    status, _, err = compare(place, student, output="mixed")
    assert status == 0 and ids() == [line["response_ids"] for line in lines], err
    found = read_comparison(output)
    assert found is not None and [name for name, _ in found.rows] == ["first"]
    # the same responses, whatever their origin
    status, _, err = compare(place, student, "--teacher-responses", str(output / "teacher.jsonl"), output="mixed")
    assert status == 0 and "teacher:" not in err and "first:" not in err


def test_a_comparison_of_an_earlier_version_is_used_where_its_origin_cannot_matter(place: Path, measured: Path) -> None:
    """Its teacher.json does not say whether the responses were sampled."""
    shutil.copytree(measured, place / "earlier")
    file = place / "earlier" / "teacher.json"
    kept = json.loads(file.read_text())
    assert kept.pop("recorded") is False
    file.write_text(json.dumps(kept))
    student, recorded = f"first={place / 'student'}", str(measured / "teacher.jsonl")
    status, _, err = compare(place, student, "--teacher-responses", recorded, output="earlier")
    assert status == 0 and "teacher:" not in err and "first:" not in err
    # sampled again: the same responses, on which the student needs no new measurement
    status, _, err = compare(place, student, output="earlier")
    assert status == 0 and "teacher:" in err and "first:" not in err
    assert json.loads(file.read_text())["recorded"] is False
