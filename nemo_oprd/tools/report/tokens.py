"""Responses of training steps in the report, their tokens coloured by how far student and teacher are apart.

The values are those of `rollouts/token_metrics_*.jsonl`, of the first and the last step that has any. All tokens of a
run share one scale per measure, so that both steps can be compared by eye.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from nemo_oprd.evaluation.grading.graders import GraderChoice
from nemo_oprd.evaluation.responses import read_lines
from nemo_oprd.run.run_reader import Run, token_files
from nemo_oprd.tools.report.figures import Key, run_key

RESPONSES = 12  # of a step, shown
HEAD, TAIL = 500, 1000  # tokens of a long response that are shown; supervised tokens are often the last ones
LEVELS = 8
_FIX = "remove the file"


@dataclass(frozen=True)
class Measure:
    """A value per token: its name in the files, its letter in CSS classes, its heading, and its axis.

    `direction` is -1 where small values are far apart; `logarithmic`: levels are equal steps of the logarithm.
    """

    name: str
    letter: str
    title: str
    direction: int = 1
    logarithmic: bool = False


MEASURES = (
    Measure("cosine", "c", "cosine", direction=-1),
    Measure("rep_loss", "r", "representation loss", logarithmic=True),
    Measure("kl", "k", "KL", logarithmic=True),
    Measure("log_ratio", "g", "log ratio"),
)


# a token as it is shown: its text, CSS classes such as "c3 kx" (`_classes`), and its values for a tooltip
Token = tuple[str, str, str]


@dataclass(frozen=True)
class TokenResponse:
    """One response: its prompt, its tokens, (name, mean) of its values, and the filters that show it.

    `left_out` tokens are missing after the first `HEAD` ones.
    """

    step: int
    prompt: str
    tokens: list[Token]
    left_out: int
    facts: list[tuple[str, str]]
    kinds: list[str]


@dataclass(frozen=True)
class Scale:
    """The values of a measure at which the colouring begins and at which it is strongest."""

    measure: Measure
    low: float
    high: float

    def level(self, value: float | None) -> int:
        """The level of a value: 0 (no colour) to `LEVELS`."""
        if value is None or self.high == self.low:
            return 0
        share = (_axis(self.measure, value) - self.low) / (self.high - self.low)
        return round(LEVELS * min(1.0, max(0.0, share)))

    @property
    def ends(self) -> tuple[str, str]:
        """The values at both ends of the scale, as text."""
        low, high = (self.measure.direction * value for value in (self.low, self.high))
        return tuple(f"{10**value if self.measure.logarithmic else value:.3g}" for value in (low, high))  # type: ignore[return-value]


@dataclass(frozen=True)
class TokenPanel:
    """The responses of one run with values per token; `total` is the number in the files of the shown steps."""

    key: Key
    scales: list[Scale]
    responses: list[TokenResponse]
    total: int


def token_panel(index: int, run: Run) -> TokenPanel | None:
    """The responses of the run at position `index` of the page; None if it kept no values.

    Raises:
        ValueError: a file is damaged.
    """
    files = {step: file for step, file in token_files(run.path / "rollouts").items() if step <= run.steps[1]}
    if not files:
        return None
    records = [record for step in dict.fromkeys((min(files), max(files))) for record in _read(files[step])]
    if not records:
        return None
    scales = [scale for measure in MEASURES if (scale := _scale(measure, records)) is not None]
    grading = GraderChoice({}, "text")
    grading.read("", ((r.get("data_source"), r["answer"]) for r in records if isinstance(r.get("answer"), str)))
    worst = _largest(records)
    shown = [number for step in dict.fromkeys(r["step"] for r in records) for number in _of_step(records, step)]
    made = [_response(records[number], scales, grading, number in worst) for number in shown]
    return TokenPanel(run_key(index, run), scales, made, len(records))


def _read(file: Path) -> list[dict[str, Any]]:
    records = []
    for where, record in read_lines(file, "a response with values per token", _FIX):
        ids = record.get("token_ids")
        columns = [record.get(measure.name) for measure in MEASURES] + [record.get("tokens")]
        if not isinstance(ids, list) or not isinstance(record.get("step"), int):
            raise ValueError(f"{where}: no token_ids or step, expected a response with values per token; {_FIX}")
        if any(column is not None and (not isinstance(column, list) or len(column) != len(ids)) for column in columns):
            raise ValueError(f"{where}: columns of other lengths than token_ids, expected one value per token; {_FIX}")
        records.append(record)
    return records


def _of_step(records: Sequence[dict[str, Any]], step: int) -> list[int]:
    return [number for number, record in enumerate(records) if record["step"] == step][:RESPONSES]


def _axis(measure: Measure, value: float) -> float:
    """The value on the axis of the levels, on which larger means farther apart."""
    if measure.logarithmic:
        return math.log10(max(abs(value), 1e-12))
    return measure.direction * (value if measure.direction < 0 else abs(value))


def _scale(measure: Measure, records: Iterable[dict[str, Any]]) -> Scale | None:
    """The scale from the 2nd to the 98th percentile of all values; None if there are none."""
    every = (value for record in records for value in record.get(measure.name, ()))
    values = [_axis(measure, value) for value in every if value is not None]
    if not values:
        return None
    low, high = np.percentile(values, [2, 98]).tolist()
    return Scale(measure, low, high)


def _mean(record: dict[str, Any], name: str) -> float | None:
    values = [value for value in record.get(name, ()) if value is not None]
    return sum(values) / len(values) if values else None


def _largest(records: Sequence[dict[str, Any]]) -> set[int]:
    """The quarter of each step's responses with the largest mean loss (KL in runs without a representation loss)."""
    name = "rep_loss" if any("rep_loss" in record for record in records) else "kl"
    found: set[int] = set()
    for step in {record["step"] for record in records}:
        means = [(mean, n) for n in _of_step(records, step) if (mean := _mean(records[n], name)) is not None]
        found |= {n for _, n in sorted(means, reverse=True)[: math.ceil(len(means) / 4)]}
    return found


def _response(record: dict[str, Any], scales: Sequence[Scale], grading: GraderChoice, largest: bool) -> TokenResponse:
    texts = record.get("tokens") or [f"{i} " for i in record["token_ids"]]
    tokens = list[Token]()
    for t, text in enumerate(texts):
        given = [(scale, record[scale.measure.name][t]) for scale in scales if scale.measure.name in record]
        values = [f"{scale.measure.title} {value:.3g}" for scale, value in given if value is not None]
        tokens.append((text, " ".join(_classes(given)), ", ".join(values)))
    left_out = max(0, len(tokens) - HEAD - TAIL)
    means = [(scale.measure.title, _mean(record, scale.measure.name)) for scale in scales]
    verdict = _verdict(record, grading)
    kinds = ([verdict] if verdict else []) + (["truncated"] if record.get("finish_reason") == "length" else [])
    return TokenResponse(
        record["step"],
        str(record.get("prompt", "")),
        tokens[:HEAD] + tokens[len(tokens) - TAIL :] if left_out else tokens,
        left_out,
        [(f"{len(tokens):,} tokens", ""), *((f"mean {name}", f"{m:.3g}") for name, m in means if m is not None)],
        kinds + (["largest"] if largest else []),
    )


def _classes(given: Sequence[tuple[Scale, float | None]]) -> Iterator[str]:
    """Yields each measure's letter with the level, or with x for a token without a value; nothing for level 0."""
    for scale, value in given:
        if value is None:
            yield f"{scale.measure.letter}x"
        elif level := scale.level(value):
            yield f"{scale.measure.letter}{level}"


def _verdict(record: dict[str, Any], grading: GraderChoice) -> str:
    """The verdict, right or wrong, by comparison as text; "" if there is no answer to compare."""
    answer, text = record.get("answer"), record.get("response")
    if record.get("finish_reason") == "prefix":  # it was to end before its answer
        return ""
    if not isinstance(answer, str) or not isinstance(text, str):
        return ""
    grader = grading.of("", record.get("data_source"))
    try:
        grader.check(answer)
    except ValueError:  # an answer that the grader of its data source can't compare with
        return ""
    return "right" if grader(text, answer).correct else "wrong"
