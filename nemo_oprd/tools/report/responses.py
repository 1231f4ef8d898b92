"""Responses in the report: to validation problems, and those of training steps with values per token."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from nemo_oprd.evaluation.grading.graders import GraderChoice
from nemo_oprd.evaluation.responses import GENERATIONS, read_lines
from nemo_oprd.run.run_reader import Run, token_files
from nemo_oprd.tools.report.evaluations import FIX, Evaluation, RunEvaluations
from nemo_oprd.tools.report.figures import Key, run_key

# Responses of training steps in the report, their tokens coloured by how far student and teacher are apart.
#
# The values are those of `rollouts/token_metrics_*.jsonl`, of the first and the last step that has any. All tokens of a
# run share one scale per measure, so that both steps can be compared by eye.


RESPONSES = 12  # of a step, shown
HEAD, TAIL = 500, 1000  # tokens of a long response that are shown; supervised tokens are often the last ones
LEVELS = 8
_FIX = "remove the file"


@dataclass(frozen=True)
class Measure:
    """A value per token: its name in the files, its letter in CSS classes, its heading, and its axis.

    `direction` is -1 if smaller values mean farther apart; `logarithmic`: levels are equal steps of the logarithm.
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
        """Returns the level of a value: 0 (no colour) to `LEVELS`."""
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
    """Returns the responses of the run at position `index` of the page; None if it kept no values.

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
    """Returns the value on the axis of the levels, on which larger means farther apart."""
    if measure.logarithmic:
        return math.log10(max(abs(value), 1e-12))
    return measure.direction * (value if measure.direction < 0 else abs(value))


def _scale(measure: Measure, records: Iterable[dict[str, Any]]) -> Scale | None:
    """Returns the scale from the 2nd to the 98th percentile of all values; None if there are none."""
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
    """Returns the quarter of each step's shown responses with the largest mean loss (KL where no response has one)."""
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
    """Returns the verdict, right or wrong, by comparison as text; "" if there is no answer to compare."""
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


PER_KIND = 6


@dataclass(frozen=True)
class Shown:
    """One response: whose it is, its text, its grade, and its length in tokens."""

    label: str
    text: str
    correct: bool
    truncated: bool
    tokens: int


@dataclass(frozen=True)
class SampledProblem:
    """A problem with its responses, in order of time, the teacher's last.

    `kinds` names the filters that show the problem: "right" or "wrong" and "truncated", by the student's last response;
    "changed" if the student's first response had another grade.
    """

    problem: int
    prompt: str
    answer: str
    responses: list[Shown]
    kinds: list[str]


@dataclass(frozen=True)
class Samples:
    """Responses of one run on one set; `total` problems, of which `samples` are shown."""

    key: Key
    set_name: str
    samples: list[SampledProblem]
    total: int


def responses(run: RunEvaluations, prompt_text: Callable[[list[int]], str]) -> Iterator[Samples]:
    """Yields first responses to some problems of each set, chosen so that every kind of change is among them.

    Args:
        prompt_text: token ids of a prompt -> its text.

    Raises:
        ValueError: a file of an evaluation is damaged.
    """
    if run.last is None:
        return
    for name, graded in run.last.graded.items():
        prompts = _prompts(run.last.directory, name)
        sides = (_first_responses(each, name, graded.answers) for each in (run.first, run.last, run.teacher))
        before, after, teacher = sides
        made = []
        for problem, answer in sorted(graded.answers.items()):
            shown = [side[problem] for side in (before, after, teacher) if problem in side]
            was, now = before.get(problem), after[problem]
            kinds = ["right" if now.correct else "wrong"] + (["truncated"] if now.truncated else [])
            kinds += ["changed"] if was is not None and was.correct != now.correct else []
            made.append(SampledProblem(problem, prompt_text(prompts.get(problem, [])), answer, shown, kinds))
        yield Samples(run.key, name, _chosen(made), len(made))


def _first_responses(each: Evaluation | None, name: str, answers: dict[int, str]) -> dict[int, Shown]:
    """Returns problem -> its first response, for the problems that have the same answer in this evaluation."""
    if each is None or name not in each.graded:
        return {}
    found: dict[int, Shown] = {}
    for sample in each.graded[name].samples:
        shown = Shown(each.label, sample.response, sample.correct, bool(sample.truncated), sample.num_tokens)
        if each.graded[name].answers[sample.problem] == answers.get(sample.problem):
            found.setdefault(sample.problem, shown)
    return found


def _prompts(directory: Path, name: str) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for _, record in read_lines(directory / GENERATIONS / f"{name}.jsonl", "a response", FIX):
        ids = record.get("prompt_ids")
        found.setdefault(record["problem"], ids if isinstance(ids, list) else [])
    return found


def _chosen(samples: list[SampledProblem]) -> list[SampledProblem]:
    """Returns at most `PER_KIND` each of: became right, still right, became wrong, still wrong; cut-off ones first."""
    kept: list[SampledProblem] = []
    for right in (True, False):
        for changed in (True, False):
            of_kind = [s for s in samples if ("right" in s.kinds) == right and ("changed" in s.kinds) == changed]
            kept += sorted(of_kind, key=lambda sample: "truncated" not in sample.kinds)[:PER_KIND]
    return sorted(kept, key=lambda sample: sample.problem)


def prompt_decoder(run: Run) -> Callable[[list[int]], str]:
    """Returns a function, token ids of a prompt -> its text, by the tokenizer of the run's export or of its student.

    If neither has a tokenizer.json, the text tells the number of tokens, because generations hold ids only.
    """
    sources = [run.path / "hf", *(Path(str(run.setting(f"student.{key}") or "")) for key in ("hf_path", "checkpoint"))]
    tokenizer = next((found for source in sources if (found := _tokenizer(source / "tokenizer.json"))), None)

    def text(ids: list[int]) -> str:
        if tokenizer is None:
            return f"a prompt of {len(ids)} tokens (no tokenizer.json in {sources[0]} or with the student)"
        return str(tokenizer.decode(ids, skip_special_tokens=True))

    return text


@cache
def _tokenizer(file: Path) -> Any:
    """Returns the tokenizer in a file; None if it is missing or unreadable: the page is complete without prompts."""
    if not file.is_file():
        return None
    from tokenizers import Tokenizer

    try:
        return Tokenizer.from_file(str(file))
    except Exception:  # the library raises plain Exception for any damage
        return None
