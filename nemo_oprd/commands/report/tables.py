"""The tables of the report that come from metrics.jsonl: validation before and after, first and last values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from nemo_oprd.commands.report.evaluations import Evaluation, RunEvaluations, undefined
from nemo_oprd.commands.report.figures import Key, last, run_key
from nemo_oprd.commands.report.numbers import closed_gap, number
from nemo_oprd.commands.report.panels import PHASES, validation_names
from nemo_oprd.observability.run_reader import Run

METRICS = (
    *("loss/total", "rep/loss", "rep/cosine_similarity", "output/loss", "actor/pg_loss", "actor/entropy"),
    *("teacher/entropy", "val-topk/overlap_ratio", "response_length/mean", "actor/grad_norm", "lr"),
    *(f"timing/{phase}_s" for phase in PHASES),
    *("perf/tokens_per_s", "perf/peak_memory_gb"),
)


@dataclass(frozen=True)
class Cell:
    """A metric of a validation set: "" where there is no value, `gap_closed` in percent of the teacher's lead.

    `first_interval` and `last_interval` are "" where no interval is kept.
    """

    last: str
    first: str = ""
    gap_closed: str = ""
    first_interval: str = ""
    last_interval: str = ""


@dataclass(frozen=True)
class ValidationRow:
    """A student (`key` and its evaluated `steps`) or a teacher on one validation set.

    `set_name` is "" in all rows of a set except the first one.
    """

    set_name: str
    cells: list[Cell]
    key: Key | None = None
    steps: tuple[str, str] | None = None
    teacher: str = ""


def validation_metrics(runs: list[Run]) -> list[str]:
    """The columns of the validation table."""
    return list(dict.fromkeys(metric for _, metric in validation_names(runs)))


def validation_rows(runs: list[Run], evaluations: Sequence[RunEvaluations]) -> list[ValidationRow]:
    """Per set: each run at its first and last evaluated step, then the teachers."""
    metrics = validation_metrics(runs)
    rows: list[ValidationRow] = []
    for name in dict.fromkeys(name for name, _ in validation_names(runs)):
        # by their values, so that equal teachers share one row
        teachers: dict[tuple[str, ...], tuple[str, Evaluation | None]] = {}
        of_set: list[ValidationRow] = []
        for index, run in enumerate(runs):
            columns = [f"val/{name}/{metric}" for metric in metrics]
            references = [f"val/{name}/teacher/{metric}" for metric in metrics]
            evaluated = [step for column in columns for step in run.metrics.get(column, {})]
            if evaluated:
                ends = min(evaluated), max(evaluated)
                pairs = zip(columns, references, strict=True)
                cells = [_before_after(run, *pair, ends, evaluations[index]) for pair in pairs]
                steps = f"{ends[0]:,}", f"{ends[1]:,}"
                of_set.append(ValidationRow("" if of_set else name, cells, run_key(index, run), steps))
            if any(key in run.metrics for key in references):
                values = tuple(
                    number(key, last(run, key)) if key in run.metrics else undefined(key) for key in references
                )
                teachers.setdefault(values, (run.name, evaluations[index].teacher))
        for values, (owner, kept) in teachers.items():
            label = "teacher" if len(teachers) == 1 else f"teacher of {owner}"
            intervals = ["" if kept is None else kept.interval(f"val/{name}/{metric}") for metric in metrics]
            of_teacher = [Cell(value, last_interval=own) for value, own in zip(values, intervals, strict=True)]
            of_set.append(ValidationRow("" if of_set else name, of_teacher, teacher=label))
        rows += of_set
    return rows


def _before_after(run: Run, student: str, teacher: str, ends: tuple[int, int], kept: RunEvaluations) -> Cell:
    """The metric `student` at the steps `ends` of two evaluations, and how much of the teacher's lead was made up.

    An evaluation without a value shows why, if the metric may lack one.
    """
    series = run.metrics.get(student, {})
    first, final = (number(student, series[step]) if step in series else undefined(student) for step in ends)
    intervals = ["" if each is None else each.interval(student) for each in (kept.first, kept.last)]
    if ends[0] == ends[1]:
        return Cell(final, last_interval=intervals[1] if final else "")
    closed = ""
    if "@" in student and teacher in run.metrics and set(ends) <= set(series):
        before, after, reference = series[ends[0]], series[ends[1]], last(run, teacher)
        closed = closed_gap(before, after, reference) if reference > before else ""
    return Cell(final, first, closed, intervals[0] if first else "", intervals[1] if final else "")


def first_and_last(runs: list[Run]) -> list[tuple[str, list[tuple[str, str]]]]:
    """(metric, (first, last) value per run) for every metric of METRICS that a run has; "" where a run lacks it."""
    rows = []
    for metric in METRICS:
        series = [list(run.metrics.get(metric, {}).values()) for run in runs]
        if any(series):
            rows.append((metric, [(number(metric, s[0]), number(metric, s[-1])) if s else ("", "") for s in series]))
    return rows
