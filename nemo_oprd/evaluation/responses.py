"""Paths and lines of an evaluation's files, and its responses as the grade step reads them. Imports no torch."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nemo_oprd.data.prompts import Prompt
from nemo_oprd.runtime.files import parse_json, replacing, why_no_file

# The files of an evaluation, and functions that read and write their lines.
#
# OUTPUT/generations/SET.jsonl        the responses (`generations.py` writes them)
# OUTPUT/grades/SET.jsonl             one grade per response, in the same order
# OUTPUT/grades/.SET.part.jsonl       the grades so far, while a set is graded
# OUTPUT/disagreements/SET.jsonl      the responses about which text comparison and math-verify disagree
# OUTPUT/evaluation.json              metric -> value
# OUTPUT/differences.json             metric -> difference from another evaluation (`nemo-oprd grade` writes it)


GENERATIONS, GRADES, DISAGREEMENTS = "generations", "grades", "disagreements"
ABOUT, METRICS, DIFFERENCES = "about.json", "evaluation.json", "differences.json"
# fields of a response's line that come from the problem, not from sampling
FACTS = ("answer", "data_source", "subject", "level")
# how a file takes half of a character (a lone surrogate), which UTF-8 can't hold: as JSON's escape
ESCAPED = "backslashreplace"


def write_lines(path: Path, records: Iterable[dict[str, Any]]) -> None:
    """Writes one JSON object per line; the file appears whole, flushed to the disk. Raises OSError as `replacing`."""
    with replacing(path) as partial, partial.open("w", encoding="utf-8", errors=ESCAPED) as file:
        for record in records:
            file.write(json.dumps(record, ensure_ascii=False) + "\n")


def read_lines(path: Path, expected: str, fix: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields (where, object) for each line that is not blank; `where` names the file and the line, from 1.

    Raises:
        ValueError: there is no such file, or a line is not a JSON object.
    """
    if not path.is_file():
        raise ValueError(f"{path}: {why_no_file(path, '.jsonl')}, expected {expected}; {fix}")
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            where = f"{path}, line {number}"
            if not line.strip():
                continue
            record = parse_json(line, where, expected, fix)
            if not isinstance(record, dict):
                raise ValueError(f"{where} is {type(record).__name__}, expected {expected}; {fix}")
            yield where, record


logger = logging.getLogger(__name__)

FIX = "sample it with `evaluate`, or correct the path"


@dataclass(frozen=True)
class GradableResponse:
    """The fields of a response that the grade step needs.

    Attributes:
        tokens: the number of response tokens; `truncated`: whether the response was cut off, None if not known.
        answer: the reference answer.
        data_source, subject, level: of the problem, None if not known.
    """

    problem: int
    sample: int
    text: str
    tokens: int
    truncated: bool | None
    answer: str
    data_source: str | None = None
    subject: str | None = None
    level: str | None = None


def read_responses(
    file: Path, problems: Sequence[Prompt] | None = None, data: Path | None = None
) -> tuple[list[GradableResponse], str | None]:
    """Returns (the responses in a file SET.jsonl, the grader that its lines name or None).

    Args:
        problems: the set's problems in the file `data`, whose fields replace those of the lines; None keeps these.

    Raises:
        ValueError: the file is missing or damaged, or a response has no reference answer.
    """
    responses, named, changed = list[GradableResponse](), None, set[int]()
    for where, record in read_lines(file, "a response", FIX):
        for key, kind in (("problem", int), ("sample", int), ("response", str), ("response_ids", list)):
            if not isinstance(record.get(key), kind):
                raise ValueError(f"{where}: {key} is {record.get(key)!r}, expected {kind.__name__}; {FIX}")
        grader = _text_of(record, "grader", where)
        named = named or grader
        if problems is not None:
            number = record["problem"]
            if not 0 <= number < len(problems):
                raise ValueError(
                    f"{where}: problem {number}, but {data} has {len(problems)} problems, expected the set that was "
                    "sampled; give its file with --data"
                )
            if record.get("answer") not in (None, problems[number].answer):
                changed.add(number)
            record |= {name: getattr(problems[number], name) for name in FACTS}
        if problems is not None and record["answer"] is None:
            raise ValueError(
                f"{data}: problem {record['problem']} has no answer to grade against, expected text or a number (a "
                "list or an object is none); add an answer to each"
            )
        if not isinstance(record.get("answer"), str):
            raise ValueError(
                f"{where}: no reference answer, expected a text in the field answer; give the set's file with --data "
                f"{file.stem}=FILE"
            )
        record |= {name: _text_of(record, name, where) for name in FACTS}
        responses.append(response_of(record))
    if changed:
        logger.info(
            f"{file}: {len(changed)} problems have another answer in {data}, which is used; first: {min(changed)}"
        )
    return responses, named


def _text_of(record: Mapping[str, Any], key: str, where: str) -> str | None:
    """Returns a field that may be missing; a level may be a whole number. Raises ValueError if it is no text."""
    value = record.get(key)
    if key == "level" and type(value) is int:  # a bool is no level
        return str(value)
    if not isinstance(value, str | None):
        expected = "text, a whole number or null" if key == "level" else "text or null"
        raise ValueError(f"{where}: {key} is {value!r}, expected {expected}; {FIX}")
    return value


def response_of(record: Mapping[str, Any]) -> GradableResponse:
    """Returns the response in a line of a file SET.jsonl; the caller has checked the fields."""
    finish_reason = record.get("finish_reason")
    return GradableResponse(
        problem=record["problem"],
        sample=record["sample"],
        text=record["response"],
        tokens=len(record["response_ids"]),
        truncated=None if finish_reason is None else finish_reason == "length",
        answer=record["answer"],
        **{name: record.get(name) for name in FACTS if name != "answer"},
    )
