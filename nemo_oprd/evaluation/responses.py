"""The responses of an evaluation as the grade step reads them from disk. Imports no torch."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from nemo_oprd.data.prompts import Prompt
from nemo_oprd.evaluation.files import read_lines

logger = logging.getLogger(__name__)

FIX = "sample it with `evaluate`, or correct the path"


@dataclass(frozen=True)
class Response:
    """What the grade step needs of a response; of `tokens` only the number counts.

    Attributes:
        truncated: whether it was cut off; None if it is not known.
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
) -> tuple[list[Response], str | None]:
    """(The responses in a file SET.jsonl, the grader that its lines name or None).

    Args:
        problems: of `data`, the problems of the set: what they say counts and not what the lines say.

    Raises:
        ValueError: the file is missing or damaged, or a response has no reference answer.
    """
    responses, named, changed = list[Response](), None, set[int]()
    for where, record in read_lines(file, "a response", FIX):
        for key, kind in (("problem", int), ("sample", int), ("response", str), ("response_ids", list)):
            if not isinstance(record.get(key), kind):
                raise ValueError(f"{where}: {key} is {record.get(key)!r}, expected {kind.__name__}; {FIX}")
        number, facts = record["problem"], record
        if problems is not None:
            if not 0 <= number < len(problems):
                raise ValueError(
                    f"{where}: problem {number}, but {data} has {len(problems)} problems, expected the set that was "
                    "sampled; give its file with --data"
                )
            problem = problems[number]
            facts = {name: getattr(problem, name) for name in ("answer", "data_source", "subject", "level")}
            if record.get("answer") not in (None, problem.answer):
                changed.add(number)
        answer = facts.get("answer")
        if not isinstance(answer, str):
            raise ValueError(
                f"{where}: no reference answer, expected a text in the field answer; give the set's file with --data "
                f"{file.stem}=FILE"
            )
        named = named or record.get("grader")
        finish_reason = record.get("finish_reason")
        responses.append(
            Response(
                problem=number,
                sample=record["sample"],
                text=record["response"],
                tokens=len(record["response_ids"]),
                truncated=None if finish_reason is None else finish_reason == "length",
                answer=answer,
                data_source=facts.get("data_source"),
                subject=facts.get("subject"),
                level=facts.get("level"),
            )
        )
    if changed:
        logger.info(
            f"{file}: {len(changed)} problems have another answer in {data}, which is used; first: {min(changed)}"
        )
    return responses, named
