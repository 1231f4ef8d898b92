"""Formats text tables of evaluations: metrics with their intervals, subjects and levels, and paired differences."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nemo_oprd.evaluation.grading.grade_sets import compare, read_graded
from nemo_oprd.evaluation.intervals import CI, PROBLEMS, Difference, order_of, repeated
from nemo_oprd.evaluation.responses import METRICS

EVALUATIONS = "evaluations"  # of a run: one directory per evaluation
_COMPARED = ("avg", "best", "pass", "maj")  # prefixes of metrics; avg_len has one of them, too
Rows = Mapping[str, Mapping[str, Any]]


def step_directory(step: int) -> str:
    """Returns the name of the directory of the evaluation after `step` updates of a run."""
    return f"step_{step:07d}"


def before_and_after(metrics_file: Path) -> dict[str, dict[str, Any]]:
    """Returns the rows of a run's final table: its first and last evaluation and the teacher's, with stored intervals.

    Args:
        metrics_file: the run's metrics.jsonl, with at least one evaluation; the intervals come from `evaluations/`
            beside it.
    """
    evaluated = _evaluations(metrics_file)
    first, last = evaluated[0], evaluated[-1]

    def validation(line: dict[str, Any], place: str) -> dict[str, Any]:
        teacher = place == "teacher"
        chosen = {n: v for n, v in line.items() if n.startswith("val/") and ("/teacher/" in n) == teacher}
        file = metrics_file.parent / EVALUATIONS / place / METRICS
        intervals = _intervals(file) if chosen else {}
        return {name.replace("/teacher/", "/"): value for name, value in chosen.items()} | intervals

    rows = {
        "student before": validation(first, step_directory(first["step"])),
        "student after": validation(last, step_directory(last["step"])),
    }
    teacher = validation(first, "teacher")
    return {**rows, "teacher": teacher} if teacher else rows


def _intervals(file: Path) -> dict[str, Any]:
    """Returns the intervals in an evaluation.json; none if it is missing or damaged: the metrics don't need it."""
    try:
        kept = json.loads(file.read_bytes())
    except (ValueError, OSError):
        return {}
    return {name: value for name, value in kept.items() if name.endswith(CI)} if isinstance(kept, dict) else {}


def final_report(metrics_file: Path) -> str:
    """Formats a run's final report: the table of `before_and_after`, its `details`, and the student's progress per set.

    If the last and the first evaluation can't be compared, a line gives the reason; if one of the two is missing, there
    is no line. Of a run without any evaluation, the report is a line that gives the reason.
    """
    if not _evaluations(metrics_file):  # a finished run may be started again with another evaluation.every
        return "no evaluation in this run: evaluation.every was 0 when its steps ran"
    rows = before_and_after(metrics_file)
    parts = [table(rows), details(rows)]
    try:
        parts.append(_comparison(metrics_file))
    except (ValueError, OSError) as error:
        parts.append(f"no comparison of the last evaluation with the first: {error}")
    return "\n".join(filter(None, parts))


def _comparison(metrics_file: Path) -> str:
    """Formats the differences of the last and the first evaluation; "" if there are not two."""
    steps = {line["step"] for line in _evaluations(metrics_file)}
    first, last = (metrics_file.parent / EVALUATIONS / step_directory(end(steps)) for end in (min, max))
    if first == last or not (first.exists() and last.exists()):
        return ""
    found = compare(read_graded(last).values(), read_graded(first).values())
    return differences(found, "student before", "after")


def _evaluations(metrics_file: Path) -> list[dict[str, Any]]:
    """Returns each line of a run's metrics.jsonl that holds a metric of a validation set, in order."""
    lines = map(json.loads, metrics_file.read_text().splitlines())
    return [line for line in lines if any(name.startswith("val/") for name in line)]


def table(rows: Rows) -> str:
    """Formats a line per set and model, from metrics such as `val/heldout/avg@4`: shares in percent, intervals in [].

    Args:
        rows: label of a model -> its metrics, without a prefix between set and metric.
    """
    names = sorted({key.split("/")[1] for metrics in rows.values() for key in metrics})
    own = {(name, label): _of_set(metrics, name) for name in names for label, metrics in rows.items()}
    every = {column: 0.0 for values in own.values() for column in values}
    columns = [*_with_k(every, "avg"), *_with_k(every, "best"), *_with_k(every, "maj")]
    columns += [column for column in ("avg_len", "truncated", "no_answer") if column in every]
    lines = [["", *columns]]
    for (name, label), values in own.items():
        if values:
            lines.append([f"{name}  {label}", *(_cell(values, c) if c in values else "" for c in columns)])
    return _aligned(lines)


def details(rows: Rows) -> str:
    """Formats pass@k if a k is between 1 and the samples per problem, and subjects and levels; "" without any."""
    lines: list[list[str]] = []
    for label, metrics in rows.items():
        for name in sorted({key.split("/")[1] for key in metrics}):
            own = _of_set(metrics, name)
            passes = _with_k(own, "pass")
            if len(passes) > 2:  # the first is avg@n, the last is best@n
                lines.append([f"{name}  {label}", *(f"{each} {_cell(own, each)}" for each in passes)])
            for key in own:
                group, _, last = key.rpartition("/")
                if re.fullmatch(r"avg@\d+", last) and group:
                    count = own[f"{group}/{PROBLEMS}"]
                    lines.append([f"{name}  {label}  {group}", f"{last} {_cell(own, key)}", f"{count} problems"])
    return _aligned(lines)


def differences(found: Mapping[str, Mapping[str, Difference]], before: str, after: str) -> str:
    """Formats the paired differences of two evaluations per set, in percentage points or tokens.

    Args:
        found: set -> metric -> value after minus value before.
        before, after: labels of the evaluations.
    """
    lines: list[list[str]] = []
    for name, metrics in sorted(found.items()):
        for metric in [each for each in metrics if each.startswith(_COMPARED) and each not in repeated(metrics)]:
            gap = metrics[metric]
            scale, unit = (1, "tokens") if metric == "avg_len" else (100, "points")
            digits = gap.decimals(scale, 1)
            value, low, high = (f"{scale * each:+.{digits}f}" for each in (gap.value, gap.low, gap.high))
            verdict = "real: the interval excludes 0" if gap.real else "not shown: the interval contains 0"
            lines.append([f"{name}  {before} -> {after}", metric, f"{value} [{low}, {high}] {unit}", verdict])
    return _aligned(lines)


def _of_set(metrics: Mapping[str, Any], name: str) -> dict[str, Any]:
    prefix = f"val/{name}/"
    return {key.removeprefix(prefix): value for key, value in metrics.items() if key.startswith(prefix)}


def _with_k(own: Mapping[str, Any], kind: str) -> list[str]:
    """Returns the metrics `kind@k` of a set, in the order of k."""
    return sorted((key for key in own if re.fullmatch(rf"{kind}@\d+", key)), key=order_of)


def _cell(own: Mapping[str, Any], name: str) -> str:
    scale, unit = (1, "") if name == "avg_len" else (100, "%")
    text = f"{scale * own[name]:.1f}{unit}"
    interval = own.get(name + CI)
    return text if interval is None else f"{text} [{scale * interval[0]:.1f}, {scale * interval[1]:.1f}]"


def _aligned(lines: list[list[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*(line + [""] * 20 for line in lines), strict=False)]
    return "\n".join("  ".join(f"{c:<{w}}" for c, w in zip(line, widths, strict=False)).rstrip() for line in lines)
