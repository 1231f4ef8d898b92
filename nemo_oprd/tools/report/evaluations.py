"""Evaluations of runs in the report: intervals, meanings of metrics, paired differences, subjects and levels.

The files are those of `evaluations/` in a run directory. A run's metrics.jsonl says which evaluations belong to it; an
evaluation without files (of an earlier version, or not yet graded) has values without intervals and no responses.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from nemo_oprd.evaluation.grading.grade_sets import GradedSet, compare, read_graded
from nemo_oprd.evaluation.intervals import CI, MEANINGS, PROBLEMS, UNDEFINED, Difference, kind_of, order_of, repeated
from nemo_oprd.evaluation.responses import GRADES, METRICS
from nemo_oprd.evaluation.tables import EVALUATIONS, step_directory
from nemo_oprd.run.run_reader import Run
from nemo_oprd.runtime.files import read_json
from nemo_oprd.tools.report.figures import Key, interval, number, run_key, signed

_LESS_IS_BETTER = ("truncated", "no_answer")
FIX = "grade again with `nemo-oprd grade`"


@dataclass(frozen=True)
class Evaluation:
    """One evaluation with its files.

    Attributes:
        label: the model and the step. Example: "after step 200".
        metrics: evaluation.json.
    """

    label: str
    directory: Path
    metrics: dict[str, Any]

    @cached_property
    def graded(self) -> dict[str, GradedSet]:
        """Set -> its grades. Raises ValueError if a file is damaged."""
        return read_graded(self.directory)

    def interval(self, metric: str) -> str:
        """Returns the interval of `val/SET/METRIC` as text; "" if none is kept."""
        return interval(metric, self.metrics.get(metric + CI))


@dataclass(frozen=True)
class RunEvaluations:
    """The first and the last evaluation of a run's student, and its teacher's; None where there are no files.

    A run with a single evaluation has no first one.
    """

    key: Key
    first: Evaluation | None
    last: Evaluation | None
    teacher: Evaluation | None


def read_evaluations(index: int, run: Run) -> RunEvaluations:
    """Returns the evaluations of the run at position `index` of the page.

    Raises:
        ValueError: an evaluation.json is damaged.
    """
    steps = sorted({step for name, series in run.metrics.items() if name.startswith("val/") for step in series})
    ends = [(step, f"after step {step:,}" if step else "before training") for step in steps[:1] + steps[1:][-1:]]
    first, last = ([None, None] + [_read(run.path, step_directory(step), label) for step, label in ends])[-2:]
    return RunEvaluations(run_key(index, run), first, last, _read(run.path, "teacher", "teacher"))


def _read(run: Path, place: str, label: str) -> Evaluation | None:
    directory = run / EVALUATIONS / place
    if not (directory / METRICS).is_file() or not (directory / GRADES).is_dir():
        return None
    return Evaluation(label, directory, read_json(directory / METRICS, "metrics", FIX))


# --- what metrics mean ------------------------------------------------------------------------------------------------


def meanings(metrics: Iterable[str]) -> list[tuple[str, str]]:
    """Returns (name, meaning) for each kind of metric among the columns of the tables, in the order of `MEANINGS`.

    Example: of `avg@2` and `avg`, the name is "avg, avg@2".
    """
    names: dict[str, list[str]] = {}
    for metric in dict.fromkeys(metrics):
        names.setdefault(kind_of(metric), []).append(metric)
    return [
        (", ".join(sorted(names[kind], key=order_of)), meaning) for kind, meaning in MEANINGS.items() if kind in names
    ]


def undefined(metric: str) -> str:
    """Returns the text that a table shows for a metric that an evaluation may lack; "" if it should have the metric."""
    reason = UNDEFINED.get(kind_of(metric))
    return "" if reason is None else f"- ({reason})"


# --- paired differences ----------------------------------------------------------------------------------------------


# a difference as text, its interval, and what it is if the interval excludes 0: "better", "worse" or "other", else ""
DifferenceCell = tuple[str, str, str]


@dataclass(frozen=True)
class DifferenceRow:
    """Two evaluations of a set as (run, label), or why they can't be compared (`note`); run None: that of `after`."""

    set_name: str
    after: tuple[Key | None, str]
    before: tuple[Key | None, str]
    cells: list[DifferenceCell | None]
    note: str = ""


def paired(runs: Sequence[RunEvaluations]) -> tuple[list[str], list[DifferenceRow]]:
    """Returns (metrics, rows): each run's last evaluation minus its first, its teacher's and the first run's last."""
    pairs = []
    for number_, run in enumerate(runs):
        if run.last is None:
            continue
        pairs += [(run.last, run.key, other, run.key) for other in (run.first, run.teacher) if other is not None]
        if number_ and runs[0].last is not None:
            pairs.append((run.last, run.key, runs[0].last, runs[0].key))
    found = [(pair, *_compared(pair[0], pair[2])) for pair in pairs]
    names = {name for _, sets, _ in found for metrics in sets.values() for name in metrics}
    metrics = sorted(names - repeated(names), key=order_of)
    rows = []
    for (after, after_key, before, before_key), sets, note in found:
        sides = (after_key, after.label), (None if after_key == before_key else before_key, before.label)
        if note:
            rows.append(DifferenceRow("", *sides, [], note))
        for name, own in sets.items():
            rows.append(DifferenceRow(name, *sides, [_cell(metric, own.get(metric)) for metric in metrics]))
    return metrics, rows


def _compared(after: Evaluation, before: Evaluation) -> tuple[dict[str, dict[str, Difference]], str]:
    """Returns (set -> metric -> difference, "") or ({}, why the evaluations can't be compared)."""
    try:
        return compare(after.graded.values(), before.graded.values()), ""
    except ValueError as error:  # other problems or other graders
        return {}, str(error)


def _cell(metric: str, gap: Difference | None) -> DifferenceCell | None:
    if gap is None:
        return None
    real = ""
    if gap.real:
        better = (gap.value > 0) != (metric in _LESS_IS_BETTER)
        real = "other" if metric == "avg_len" else ("better" if better else "worse")
    value, low, high = (signed(metric, each, gap) for each in (gap.value, gap.low, gap.high))
    return value, f"[{low}, {high}]", real


# --- subjects and levels ---------------------------------------------------------------------------------------------


# a subject or level of a set: the run, its name, the number of problems, and (value, interval) per evaluation
GroupRow = tuple[Key, str, int, list[tuple[str, str]]]


def groups(runs: Sequence[RunEvaluations]) -> list[GroupRow]:
    """Returns accuracy by subject and level, before, after, and the teacher's, where data have subjects or levels."""
    rows = list[GroupRow]()
    for run in runs:
        metrics = {} if run.last is None else run.last.metrics
        for name, problems in metrics.items():
            _, _, rest = name.partition("val/")
            if not rest.endswith(f"/{PROBLEMS}") or rest.count("/") < 2:
                continue
            prefix = name.removesuffix(PROBLEMS)
            average = next((one for one in metrics if one.startswith(f"{prefix}avg@") and "/ci" not in one), None)
            if average is None:
                continue
            values = []
            for each in (run.first, run.last, run.teacher):
                if each is None or average not in each.metrics:
                    values.append(("", ""))
                else:
                    values.append((number(average, each.metrics[average]), each.interval(average)))
            rows.append((run.key, rest.removesuffix(f"/{PROBLEMS}"), int(problems), values))
    return rows
