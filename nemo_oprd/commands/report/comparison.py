"""What `nemo-oprd compare` measured, for its own table and for the report of a run that has it in `RUN/compare`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nemo_oprd.evaluation.files import read_lines
from nemo_oprd.runtime.files import read_json

DIRECTORY = "compare"
TEACHER = "teacher"
SHOWN_RESPONSES = 8
_SHARED = ("teacher", "prompts", "responses", "count", "dtype", "sampling")
_FIX = "remove the directory and measure again"


@dataclass(frozen=True)
class Column:
    """A measurement: its heading, whose responses it is measured on (`on_teacher` or `on_student`), and its key."""

    heading: str
    source: str
    key: str


# s is the student's distribution, t the teacher's
COLUMNS = (
    Column("KL(s|t)", "on_teacher", "reverse_kl"),
    Column("KL(t|s)", "on_teacher", "forward_kl"),
    Column("same greedy token", "on_teacher", "greedy_agreement"),
    Column("KL(s|t)", "on_student", "reverse_kl"),
    Column("KL(t|s)", "on_student", "forward_kl"),
    Column("student's entropy", "on_student", "student_entropy"),
    Column("teacher's perplexity", "on_student", "teacher_perplexity"),
    Column("distinct 4-grams", "on_student", "distinct_4"),
    Column("length", "on_student", "length"),
)


@dataclass(frozen=True)
class Comparison:
    """Measurements and responses of a directory.

    Attributes:
        rows: (student's name, text of each of `COLUMNS`), by name.
        responses: (prompt, [(model's name, response)]) of the first prompts, the teacher's response first.
    """

    rows: list[tuple[str, list[str]]]
    responses: list[tuple[str, list[tuple[str, str]]]]


def cells(result: dict[str, Any]) -> list[str]:
    """The text of each of `COLUMNS` for one student's measurements."""
    return [f"{result[column.source][column.key]:.4g}" for column in COLUMNS]


def markdown_table(results: dict[str, dict[str, Any]]) -> str:
    """Student's name -> measurements as a Markdown table; a heading says whose responses a column is measured on."""
    headings = [f"{c.heading}, {'its own' if c.source == 'on_student' else 'teacher'}" for c in COLUMNS]
    lines = ["| student | " + " | ".join(headings) + " |", "|---" * (1 + len(COLUMNS)) + "|"]
    lines += [f"| {name} | " + " | ".join(cells(result)) + " |" for name, result in results.items()]
    return "\n".join(lines)


def read_comparison(directory: Path) -> Comparison | None:
    """What is in `directory`; None if nothing was measured there. Measurements of other settings are left out.

    Raises:
        ValueError: a file is damaged.
    """
    files = sorted(file for file in directory.glob("*.json") if file.stem != TEACHER)
    if not files:
        return None
    rows, texts = [], {TEACHER: _responses(directory / f"{TEACHER}.jsonl")}
    teacher = read_json(directory / f"{TEACHER}.json", "an object", _FIX)
    for file in files:
        result = read_json(file, "an object", _FIX)
        if any(result.get(key) != teacher.get(key) for key in _SHARED):
            continue  # measured with settings that have changed since then
        try:
            rows.append((file.stem, cells(result)))
        except (KeyError, TypeError) as error:
            raise ValueError(f"{file}: has no {error}; expected what nemo-oprd compare writes; {_FIX}") from error
        texts[file.stem] = _responses(file.with_suffix(".jsonl"))
    first = [prompt for prompt, _ in texts[TEACHER]][:SHOWN_RESPONSES]
    shown = [
        (prompt, [(name, pairs[number][1]) for name, pairs in texts.items() if number < len(pairs)])
        for number, prompt in enumerate(first)
    ]
    return Comparison(rows, shown)


def _responses(file: Path) -> list[tuple[str, str]]:
    """(Prompt, response) of every line."""
    if not file.is_file():
        return []
    lines = read_lines(file, "an object with prompt and response", _FIX)
    return [(str(row["prompt"]), str(row["response"])) for _, row in lines]
