"""Reads and formats the results of `nemo-oprd compare`, for its table and for a run's report (`RUN/compare`)."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nemo_oprd.evaluation.responses import read_lines
from nemo_oprd.runtime.files import read_json

DIRECTORY = "compare"
TEACHER = "teacher"
SHOWN_RESPONSES = 8
TERMINAL = 80  # characters of a line
_CORNER = "s: student, t: teacher"
_TITLES = {"on_teacher": "on the teacher's responses", "on_student": "on the student's own responses"}
_SHARED = ("teacher", "prompts", "responses", "count", "dtype", "sampling")
_FIX = "remove the directory and measure again"


@dataclass(frozen=True)
class Column:
    """A measurement: its heading, the responses that it uses (`on_teacher` or `on_student`), and its key."""

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
        rows: (student's name, text of each of `COLUMNS`), in the order of `_in_time`.
        responses: (prompt, [(model's name, response)]) of the first prompts, the teacher's response first.
    """

    rows: list[tuple[str, list[str]]]
    responses: list[tuple[str, list[tuple[str, str]]]]


def cells(result: dict[str, Any]) -> list[str]:
    """Returns the text of each of `COLUMNS` for one student's measurements."""
    return [f"{result[column.source][column.key]:.4g}" for column in COLUMNS]


def terminal_table(results: dict[str, dict[str, Any]]) -> str:
    """Formats the measurements by student's name as a table with a column per student, in blocks for many students."""
    texts = {name: cells(result) for name, result in results.items()}
    rows = [(_CORNER, [*texts])]
    for source, columns in itertools.groupby(enumerate(COLUMNS), lambda each: each[1].source):
        rows.append((_TITLES[source], [""] * len(texts)))
        rows += [(f"  {column.heading}", [own[number] for own in texts.values()]) for number, column in columns]
    first = max(len(heading) for heading, _ in rows)
    widths = [max(map(len, (name, *own))) + 2 for name, own in texts.items()]
    blocks, begin = list[str](), 0
    while begin < len(widths):
        room = itertools.accumulate(widths[begin:], initial=first)
        end = begin + max(1, sum(total <= TERMINAL for total in room) - 1)
        lines = (
            f"{heading:<{first}}" + "".join(map(str.rjust, own[begin:end], widths[begin:end])) for heading, own in rows
        )
        blocks.append("\n".join(line.rstrip() for line in lines))
        begin = end
    return "\n\n".join(blocks)


def read_comparison(directory: Path) -> Comparison | None:
    """Reads the comparison in `directory`; None without measurements. Leaves out those with other settings.

    Raises:
        ValueError: a file is damaged.
    """
    files = sorted((file for file in directory.glob("*.json") if file.stem != TEACHER), key=_in_time)
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


def _in_time(file: Path) -> tuple[int, str]:
    """Returns a sort key: alphabetical, but names with the word `before` first and those with `after` last."""
    words = file.stem.lower().replace("_", "-").replace(".", "-").split("-")
    return ("after" in words) - ("before" in words), file.stem


def _responses(file: Path) -> list[tuple[str, str]]:
    """Returns (prompt, response) of every line."""
    if not file.is_file():
        return []
    lines = read_lines(file, "an object with prompt and response", _FIX)
    return [(str(row["prompt"]), str(row["response"])) for _, row in lines]
