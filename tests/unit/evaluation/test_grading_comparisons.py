"""`nemo-oprd grade` on two evaluations, and the comparison that a run prints at its end."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from kept_responses import grade, refused, write_generations

from nemo_oprd.evaluation.tables import final_report


def test_both_sides_of_a_comparison_are_graded_by_the_same_graders(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_generations(tmp_path / "a", grader="number")
    write_generations(tmp_path / "b")
    command = [tmp_path / "a", "--against", tmp_path / "b", "--judge", "text"]
    line = refused(capsys, *command)
    assert "sums: is graded by number (text) in" in line and "and by boxed (text) in" in line
    assert "--grader sums=NAME" in line and not (tmp_path / "a" / "grades").exists()
    grade(*command, "--grader", "sums=number")
    out = capsys.readouterr().out
    assert out.index("sums  b ") < out.index("sums  a ") < out.index("sums  b -> a")


def test_a_run_whose_graders_changed_is_graded_but_not_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_generations(tmp_path / "run" / "evaluations" / "step_0000000")
    write_generations(tmp_path / "run" / "evaluations" / "step_0000050", grader="number")
    grade(tmp_path / "run", "--judge", "text")
    said = capsys.readouterr()
    assert "no comparison of run step 50 with run step 0: sums: is graded by number (text) in" in said.err
    assert "sums  run step 50" in said.out and not [*tmp_path.rglob("differences.json")]


def test_files_of_one_evaluation_are_graded_together(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A shell's `eval/generations/*.jsonl`."""
    files = [write_generations(tmp_path / "eval", name=name) for name in ("a", "b", "c")]
    for name in ("a", "b", "c"):
        write_generations(tmp_path / "base", name=name)
    grade(
        *files,
        tmp_path / "eval" / "generations" / ".." / "generations" / "a.jsonl",
        "--against",
        tmp_path / "base",
        "--judge",
        "text",
    )
    written = json.loads((tmp_path / "eval" / "differences.json").read_text())
    assert written["against"] == "base" and {f"val/{name}/avg" for name in ("a", "b", "c")} <= set(written)
    assert capsys.readouterr().out.count(" base -> eval ") >= 3
    other = tmp_path / "eval" / "a.jsonl"
    other.write_text(files[0].read_text())
    assert "are both of the set a, expected one file" in refused(capsys, files[0], other)


def write_run(run: Path) -> None:
    """A run with evaluations after 0 and 50 steps, graded as text."""
    for name in ("step_0000000", "step_0000050"):
        write_generations(run / "evaluations" / name)
    grade(run, "--judge", "text")
    lines = [{"step": step, "val/sums/avg@2": 0.1, "val/sums/best@2": 0.2, "val/sums/avg_len": 3.0} for step in (0, 50)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


@pytest.mark.parametrize(
    ("file", "content", "words"),
    [
        ("generations/sums.jsonl", None, "no such file"),
        ("generations/sums.jsonl", "without answers", "no reference answer"),
        ("generations/sums.jsonl", "other answers", "expected the same problems in both"),
        ("grades/sums.jsonl", '{"problem": 0, "sample": 0}\n', "line 1: extracted is None, expected a text or null"),
        ("evaluation.json", "{", None),
    ],
)
def test_a_run_that_is_complete_ends_with_its_table(
    tmp_path: Path, file: str, content: str | None, words: str | None
) -> None:
    write_run(tmp_path)
    place = tmp_path / "evaluations" / "step_0000050"
    if content is None:
        (place / file).unlink()
    elif content.endswith("answers"):
        write_generations(place, answer=None if content == "without answers" else "9")
    else:
        (place / file).write_text(content)
    report = final_report(tmp_path / "metrics.jsonl")
    assert "sums  student after" in report
    if words is None:
        assert "student before -> after" in report
    else:
        (line,) = [each for each in report.splitlines() if "no comparison of the last evaluation" in each]
        assert words in line


def test_a_run_that_never_evaluated_ends_with_the_reason(tmp_path: Path) -> None:
    """A finished run with evaluation.every=0 may be started again with evaluation.every=10."""
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 1, "loss/total": 0.5}) + "\n")
    line = "no evaluation in this run: evaluation.every was 0 when its steps ran"
    assert final_report(tmp_path / "metrics.jsonl") == line


def test_results_beside_the_other_file_overwrite_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_generations(tmp_path / "eval")
    other = tmp_path / "mine" / "sums.jsonl"
    other.parent.mkdir()
    other.write_text(write_generations(tmp_path / "base").read_text())
    (other.parent / "evaluation.json").write_text("my own notes\n")
    before = sorted(tmp_path.rglob("*"))
    line = refused(capsys, tmp_path / "eval", "--against", other, "--judge", "text")
    assert f"--against={other.parent} holds evaluation.json, which grade would overwrite" in line
    assert sorted(tmp_path.rglob("*")) == before
    (other.parent / "evaluation.json").unlink()
    for _ in range(2):  # the second time it finds what it made itself
        grade(tmp_path / "eval", "--against", other, "--judge", "text")
        assert (other.parent / "grades" / "sums.jsonl").exists()


def test_against_a_run_s_evaluation_or_its_file(tmp_path: Path) -> None:
    """The directory belongs to the run, which kept the responses there: their grades do, too."""
    write_run(tmp_path / "run")
    (tmp_path / "run" / "checkpoints" / "iter_0000001" / "hf").mkdir(parents=True)
    write_generations(tmp_path / "eval")
    place = tmp_path / "run" / "evaluations" / "step_0000050"
    for other in (place, place / "generations" / "sums.jsonl"):
        grade(tmp_path / "eval", "--against", other, "--judge", "text")
        assert json.loads((tmp_path / "eval" / "differences.json").read_text())["against"] == "run step 50"
