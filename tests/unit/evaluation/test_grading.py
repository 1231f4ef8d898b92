"""`nemo-oprd grade` on kept responses: files, tables, interruptions, changed graders, comparisons and refusals."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from kept_responses import ANSWERS, TEXTS, files_of, grade, read, refused, write_generations

from nemo_oprd.evaluation.grading import grade_sets as grading
from nemo_oprd.evaluation.grading.grade_sets import read_graded
from nemo_oprd.evaluation.grading.graders import GraderChoice
from nemo_oprd.evaluation.tables import final_report
from nemo_oprd.runtime.run_lock import RunLock

ROOT = Path(__file__).parents[3]


def test_the_files_and_the_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("math_verify")
    write_generations(tmp_path / "run")
    grade(tmp_path / "run")
    assert list(files_of(tmp_path / "run")) == ["disagreements/sums.jsonl", "evaluation.json", "grades/sums.jsonl"]
    grades = read(tmp_path / "run" / "grades" / "sums.jsonl")
    assert [list(line) for line in grades] == [["problem", "sample", "extracted", "correct", "grader"]] * 6
    assert [line["extracted"] for line in grades] == ["4", "5", None, "20/2", None, "07"]
    assert [line["correct"] for line in grades] == [True, False, False, True, False, True]
    (listed,) = read(tmp_path / "run" / "disagreements" / "sums.jsonl")
    assert listed == {
        "problem": 1, "sample": 1, "answer": "10", "extracted": "20/2", "text": False, "math_verify": True,
        "correct": True, "grader": "boxed",
    }  # fmt: skip
    metrics = json.loads((tmp_path / "run" / "evaluation.json").read_text())
    assert metrics["val/sums/avg@2"] == 0.5 and metrics["val/sums/best@2"] == 1
    assert metrics["val/sums/no_answer"] == pytest.approx(2 / 6) and metrics["val/sums/avg_len"] == 3.5
    assert metrics["val/sums/truncated"] == pytest.approx(2 / 6)
    assert metrics["val/sums/avg@2/ci"] == [0.5, 0.5]
    said = capsys.readouterr()
    assert "sums  run" in said.out and "50.0% [50.0, 50.0]" in said.out and "100.0% [100.0, 100.0]" in said.out
    assert "run: sums: graded by boxed (6 responses)" in said.err and "disagree about 1 answers" in said.err


def test_the_form_of_the_answers_chooses_the_grader_and_the_log_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = ["so 4 of them", "5", "####10", "in all 10.", "7 in all", "none"]
    file = write_generations(tmp_path, texts)
    lines = [{**line, "answer": f"2 + 2 = <<2+2=4>>4\n#### {line['answer']}"} for line in read(file)]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    grade(tmp_path, "--judge", "text")
    said = capsys.readouterr().err
    assert said.count("all answers of the data source 'toy' end in the form that 'number' reads") == 1
    assert "--grader sums=NAME names another grader" in said and "graded by number (text) (6 responses)" in said
    assert [line["correct"] for line in read(tmp_path / "grades" / "sums.jsonl")] == [
        True,
        False,
        True,
        True,
        True,
        False,
    ]
    grade(tmp_path, "--judge", "text", "--grader", "boxed")
    assert {line["extracted"] for line in read(tmp_path / "grades" / "sums.jsonl")} == {None}
    assert "'number'" not in capsys.readouterr().err


def test_another_grader_replaces_all_grades_and_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("math_verify")
    file = write_generations(tmp_path)
    grade(tmp_path)
    assert "replaced" not in capsys.readouterr().err
    grade(file, "--grader", "sums=answer_line_or_boxed")
    assert "sums: was graded by boxed; all its grades are now replaced by those of answer_line_or_boxed" in (
        capsys.readouterr().err
    )
    grades = read(tmp_path / "grades" / "sums.jsonl")
    assert grades[4]["correct"] and {line["grader"] for line in grades} == {"answer_line_or_boxed"}
    grade(tmp_path, "--judge", "text")
    assert "replaced by those of boxed (text)" in capsys.readouterr().err
    assert (
        not read(tmp_path / "grades" / "sums.jsonl")[3]["correct"]
        and not (tmp_path / "disagreements" / "sums.jsonl").exists()
    )


def test_the_grader_of_the_evaluation_and_of_the_data_source_are_used(tmp_path: Path) -> None:
    for name, changes in (("a", {"data_source": "math_dapo"}), ("b", {"grader": "number"}), ("c", {})):
        write_generations(tmp_path, name=name, **changes)  # type: ignore[arg-type]
    grade(tmp_path, "--judge", "text")
    used = {name: read(tmp_path / "grades" / f"{name}.jsonl")[0]["grader"] for name in "abc"}
    assert used == {"a": "answer_line_or_boxed (text)", "b": "number (text)", "c": "boxed (text)"}


def test_the_metrics_of_other_sets_stay(tmp_path: Path) -> None:
    write_generations(tmp_path, name="a")
    other = write_generations(tmp_path, name="b")
    grade(tmp_path, "--judge", "text")
    before = json.loads((tmp_path / "evaluation.json").read_text())
    grade(other, "--grader", "answer_line")
    after = json.loads((tmp_path / "evaluation.json").read_text())
    assert after["val/b/avg@2"] != before["val/b/avg@2"] and before.keys() == after.keys()
    assert {k: v for k, v in after.items() if "/a/" in k} == {k: v for k, v in before.items() if "/a/" in k}


def test_answers_come_from_the_data_where_they_are_given(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write_generations(tmp_path, answer=None, data_source=None)
    assert refused(capsys, file).endswith("give the set's file with --data sums=FILE")
    data = tmp_path / "data.jsonl"
    data.write_text(
        "".join(
            json.dumps({"problem": "?", "answer": a, "subject": s}) + "\n"
            for a, s in zip(["5", "1", "7"], "xyx", strict=True)
        )
    )
    grade(file, "--data", data, "--judge", "text")
    assert [line["correct"] for line in read(tmp_path / "grades" / "sums.jsonl")] == [
        False,
        True,
        False,
        False,
        False,
        True,
    ]
    metrics = json.loads((tmp_path / "evaluation.json").read_text())
    assert metrics["val/sums/subject/x/avg@2"] == 0.5 and metrics["val/sums/subject/y/problems"] == 1
    write_generations(tmp_path)
    capsys.readouterr()
    grade(file, "--data", f"sums={data}", "--judge", "text")
    assert "2 problems have another answer in" in capsys.readouterr().err


@pytest.mark.parametrize("judge", ["text", "math_verify"])
def test_half_of_a_character_is_graded_and_written(tmp_path: Path, judge: str) -> None:
    """UTF-8 can't hold it, JSON can: "\\ud83d"."""
    if judge == "math_verify":
        pytest.importorskip("math_verify")
    half = "\ud83d\N{DEGREE SIGN}"
    write_generations(tmp_path, [rf"\boxed{{{half}}}", r"\boxed{4}", *TEXTS[2:]])
    grade(tmp_path, "--judge", judge)
    grades = read(tmp_path / "grades" / "sums.jsonl")
    assert [line["extracted"] for line in grades[:2]] == [half, "4"]
    assert [line["correct"] for line in grades[:2]] == [False, True]
    metrics = json.loads((tmp_path / "evaluation.json").read_text())
    assert {f"val/sums/{name}": value for name, value in read_graded(tmp_path)["sums"].metrics.items()} == metrics


def test_a_level_may_be_a_number(tmp_path: Path) -> None:
    file = write_generations(tmp_path)
    lines = [{**line, "level": [5, "5", 3][line["problem"]]} for line in read(file)]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    grade(tmp_path, "--judge", "text")
    metrics = json.loads((tmp_path / "evaluation.json").read_text())
    assert metrics["val/sums/level/5/problems"] == 2 and metrics["val/sums/level/3/problems"] == 1


def test_a_run_is_compared_with_its_beginning(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    texts = [r"\boxed{1}"] * 3 + [r"\boxed{10}"] * 2 + ["none"]
    for name, own in (("step_0000000", texts), ("step_0000050", [rf"\boxed{{{a}}}" for a in ANSWERS for _ in "ab"])):
        write_generations(tmp_path / "run" / "evaluations" / name, own)
    write_generations(tmp_path / "run" / "evaluations" / "teacher")
    grade(tmp_path / "run", "--judge", "text")
    out = capsys.readouterr().out
    assert out.index("run step 0 ") < out.index("run step 50 ") < out.index("run teacher ")
    line = next(line for line in out.splitlines() if "run step 0 -> run step 50" in line and " avg " in line)
    assert "+83.3 [+50.0, +100.0] points" in line and "real: the interval excludes 0" in line
    written = json.loads((tmp_path / "run" / "evaluations" / "step_0000050" / "differences.json").read_text())
    assert written["against"] == "run step 0" and written["val/sums/avg"] == pytest.approx(5 / 6)
    assert written["val/sums/avg/ci"] == pytest.approx([0.5, 1.0])
    lines = [{"step": step, "val/sums/avg@2": 0.1, "val/sums/best@2": 0.2, "val/sums/avg_len": 3.0} for step in (0, 50)]
    (tmp_path / "run" / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    report = final_report(tmp_path / "run" / "metrics.jsonl")
    assert "student before -> after" in report and "+83.3 [+50.0, +100.0] points" in report


def test_two_evaluations_are_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_generations(tmp_path / "a")
    write_generations(tmp_path / "b")
    grade(tmp_path / "a", "--against", tmp_path / "b", "--judge", "text")
    out = capsys.readouterr().out
    assert "sums  b -> a" in out and "+0.0 [+0.0, +0.0] points" in out and "not shown: the interval contains 0" in out
    file = write_generations(tmp_path / "b")
    lines = read(file)
    file.write_text("".join(json.dumps({**line, "answer": "9"}) + "\n" for line in lines))
    before = files_of(tmp_path)
    line = refused(capsys, tmp_path / "a", "--against", tmp_path / "b", "--judge", "text", "--grader", "exact")
    assert f"problem 0 has the answer '4' in {tmp_path / 'a'} and '9' in {tmp_path / 'b'}" in line
    assert files_of(tmp_path) == before, "nothing is graded before the mistake is found"


def test_two_processes_do_not_grade_in_one_directory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_generations(tmp_path)
    lock = RunLock(tmp_path)
    assert f"{tmp_path} is in use by process {os.getpid()}" in refused(capsys, tmp_path, "--judge", "text")
    assert not (tmp_path / "grades").exists()
    lock.release()
    grade(tmp_path, "--judge", "text")


def test_an_endless_answer_is_graded(tmp_path: Path) -> None:
    """Its spelling is not normalised: int() refuses numbers of so many digits."""
    long = r"\boxed{0." + "3" * 4400 + r"\overline{3}}"
    write_generations(tmp_path, [long, long, *TEXTS[2:]])
    grade(tmp_path, "--judge", "text")
    assert not read(tmp_path / "grades" / "sums.jsonl")[0]["correct"]


def test_what_is_read_again_is_what_was_graded(tmp_path: Path) -> None:
    write_generations(tmp_path)
    grade(tmp_path, "--judge", "text")
    graded = read_graded(tmp_path)["sums"]
    metrics = json.loads((tmp_path / "evaluation.json").read_text())
    assert {f"val/sums/{name}": value for name, value in graded.metrics.items()} == metrics
    lines = (tmp_path / "grades" / "sums.jsonl").read_text().splitlines()
    (tmp_path / "grades" / "sums.jsonl").write_text("\n".join(lines[1:]) + "\n")
    with pytest.raises(ValueError, match=r"not the grades of generations/sums.jsonl.*nemo-oprd grade"):
        read_graded(tmp_path)


GRADER = """
import os, time
def slow(response, answer):
    hold = os.environ.get("HOLD")
    if hold and "Answer" in response:
        open(hold, "w").close()
        time.sleep(600)
    return answer in response, response[-2:]
"""


def test_killed_while_it_grades_it_goes_on_with_the_same_result(tmp_path: Path) -> None:
    (tmp_path / "slow_grader.py").write_text(GRADER)
    for name in ("whole", "killed"):
        write_generations(tmp_path / name)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "nemo_oprd", "grade", "--grader", "slow_grader:slow"]

    def run(name: str) -> str:
        done = subprocess.run(
            [*command, name], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0, done.stderr
        return done.stderr

    assert "kept" not in run("whole")
    held = tmp_path / "held"
    with subprocess.Popen([*command, "killed"], cwd=tmp_path, env={**environment, "HOLD": str(held)}) as process:
        end = time.monotonic() + 60
        while not held.exists() and time.monotonic() < end:
            time.sleep(0.02)
        process.send_signal(signal.SIGKILL)
    part = tmp_path / "killed" / "grades" / ".sums.part.jsonl"
    assert len(part.read_text().splitlines()) == 1 + 4 and list(files_of(tmp_path / "killed")) == [
        "grades/.sums.part.jsonl"
    ]
    part.write_text(part.read_text()[:-9])  # as if it had been killed while it wrote
    assert "grading sums: 3 of 6 grades are kept from an earlier start" in run("killed")
    assert files_of(tmp_path / "killed") == files_of(tmp_path / "whole")


def test_part_of_another_grader_or_text_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Killed(BaseException):
        pass

    def until(count: int) -> None:
        made = []

        def record(*arguments: Any) -> dict[str, Any]:
            made.append(arguments)
            if len(made) > count:
                raise Killed
            return real(*arguments)

        real = grading._record
        with monkeypatch.context() as patched:
            patched.setattr(grading, "_record", record)
            with pytest.raises(Killed):
                grade(tmp_path, "--judge", "text")

    write_generations(tmp_path)
    until(3)
    capsys.readouterr()
    grade(tmp_path, "--grader", "exact")
    assert (
        "grades of an interrupted grading of other responses or by another grader are left out"
        in capsys.readouterr().err
    )
    assert {line["grader"] for line in read(tmp_path / "grades" / "sums.jsonl")} == {"exact"}
    until(3)
    write_generations(tmp_path, [r"\boxed{7}"] * 6)
    grade(tmp_path, "--judge", "text")
    assert [line["extracted"] for line in read(tmp_path / "grades" / "sums.jsonl")] == ["7"] * 6


def test_kept_grades_are_those_of_the_responses_in_their_places(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_generations(tmp_path)
    responses, _ = grading.read_responses(tmp_path / "generations" / "sums.jsonl")
    choice = GraderChoice({}, "text")
    graded = grading.grade_set(tmp_path, "sums", responses, choice)
    part = tmp_path / "grades" / ".sums.part.jsonl"
    lines = part.read_text().splitlines(keepends=True)
    # two processes that graded at the same time
    part.write_text("".join([*lines[:3], lines[2], *lines[3:6]]))
    again = grading.grade_set(tmp_path, "sums", responses, choice)
    assert "2 of 6 grades are kept" in capsys.readouterr().err
    assert again.samples == graded.samples and part.read_text() == "".join(lines)


def test_no_model_and_no_torch(tmp_path: Path) -> None:
    write_generations(tmp_path)
    code = f"import sys; from nemo_oprd.cli import main; main(['grade', {str(tmp_path)!r}])\n"
    code += "heavy = {'torch', 'transformers', 'megatron', 'hydra'} & set(sys.modules); assert not heavy, heavy"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["MISSING"], "there is no such file or directory, expected responses to grade"),
        (["EMPTY"], "no generations/SET.jsonl, expected responses to grade; sample it with `evaluate`"),
        (["PARTLY"], "finish sampling with the command that began it"),
        (["RUN", "--grader", "boxd"], "--grader='boxd': expected one of boxed"),
        (["RUN", "--grader", "plus=boxed"], "--grader plus=boxed: there is no such set, expected one of sums"),
        (["RUN", "--data", "plus=x.jsonl"], "--data plus=x.jsonl: there is no such set"),
        (["RUN", "--data", "missing.jsonl"], "missing.jsonl: no such file"),
        (["RUN", "--data", "lists.jsonl"], "lists.jsonl: problem 1 has no answer to grade against, expected text or a"),
        (["RUN", "--judge", "maths"], "--judge='maths': expected one of math_verify, text"),
        (["RUN", "RUN2", "--output", "OUT"], "with 2 evaluations, expected one; omit it"),
        (["RUN", "--grader", "number", "--grader", "boxed"], "expected one value for each set"),
        (["OWN"], "add --grader sums=os:system, or choose a built-in grader"),
        (["DAMAGED"], "line 7: not valid JSON"),
        (["SHORT"], "problem 2 has 1 responses, expected 2 as others have"),
        (["TWICE"], "problem 2 has sample 1 more than once"),
        (["SUBJECT"], "sums.jsonl, line 1: subject is ['a'], expected text or null; "),
        (["LEVEL"], "sums.jsonl, line 1: level is True, expected text, a whole number or null; "),
        (["SOURCE"], "sums.jsonl, line 1: data_source is ['a'], expected text or null; "),
        (["GRADER"], "sums.jsonl, line 1: grader is 5, expected text or null; "),
        (["RUN", "--grader", "choice"], "sums, problem 0: answer '4' with grader 'choice', expected a letter"),
    ],
)
def test_mistakes_are_one_line_and_change_nothing(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    words: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    answers = ["4", ["10"], {"target": 7}]
    (tmp_path / "lists.jsonl").write_text("".join(json.dumps({"problem": "?", "answer": a}) + "\n" for a in answers))
    (tmp_path / "EMPTY").mkdir()
    for name in ("RUN", "RUN2", "PARTLY", "DAMAGED", "SHORT", "TWICE"):
        file = write_generations(tmp_path / name)
    write_generations(tmp_path / "OWN", grader="os:system")
    for name, value in (("subject", ["a"]), ("level", True), ("data_source", ["a"]), ("grader", 5)):
        write_generations(tmp_path / name.removeprefix("data_").upper(), **{name: value})
    (tmp_path / "PARTLY/generations/sums.jsonl").rename(tmp_path / "PARTLY/generations/.sums.part_0.jsonl")
    lines = file.read_text().splitlines(keepends=True)
    (tmp_path / "DAMAGED/generations/sums.jsonl").write_text("".join(lines) + '{"problem"')
    (tmp_path / "SHORT/generations/sums.jsonl").write_text("".join(lines[:-1]))
    (tmp_path / "TWICE/generations/sums.jsonl").write_text("".join([*lines, lines[-1]]))
    before = sorted(tmp_path.rglob("*"))
    assert words in refused(capsys, *arguments)
    assert sorted(tmp_path.rglob("*")) == before


def test_pass_at_k_between_one_and_all_has_a_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Four responses to one problem, two of them right: pass@2 = 1 - 1/6."""
    file = write_generations(tmp_path, [r"\boxed{4}", r"\boxed{4}", "", r"\boxed{5}"])
    lines = [{**line, "problem": 0, "sample": i, "answer": "4"} for i, line in enumerate(read(file))]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    grade(tmp_path, "--judge", "text")
    out = capsys.readouterr().out
    assert "pass@1 50.0%" in out and "pass@2 83.3%" in out and "pass@4 100.0%" in out
