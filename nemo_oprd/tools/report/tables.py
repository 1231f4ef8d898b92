"""The tables of the report: costs, settings, validation, first and last values; and the display of foreign text."""

from __future__ import annotations

import json
import re
import statistics
import unicodedata
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from markupsafe import Markup, escape

from nemo_oprd.config.loading import as_plain
from nemo_oprd.config.resume_rules import Change, changes
from nemo_oprd.config.schema import Config
from nemo_oprd.run.config_history import starts
from nemo_oprd.run.run_reader import Run
from nemo_oprd.tools.report.evaluations import Evaluation, RunEvaluations, undefined
from nemo_oprd.tools.report.figures import Key, closed_gap, duration, last, number, run_key
from nemo_oprd.tools.report.panels import PHASES, phase_seconds, training_minutes, validation_names

# The time and the memory of each run, by parts.


_FACTS: tuple[tuple[str, Callable[[Any], float], str, str], ...] = (
    ("Peak memory", max, "perf/peak_memory_gb", "GB"),
    ("Teacher states held at a time", max, "perf/targets_gb", "GB"),
    ("Throughput, mean over steps", statistics.fmean, "perf/tokens_per_s", "tokens/s"),
)

_SMALL_GB = 0.1  # less is shown in MB


@dataclass(frozen=True)
class Cost:
    """The time of a run by `parts` (name, key in `COLORS`, text, share) and `facts` (name, text) like peak memory."""

    key: Key
    total: str
    parts: list[tuple[str, str, str, float]]
    facts: list[tuple[str, str]]


def costs(runs: list[Run]) -> list[Cost]:
    """Returns one entry per run that logged times."""
    return [_cost(index, run) for index, run in enumerate(runs) if training_minutes(run)]


def _cost(index: int, run: Run) -> Cost:
    seconds, steps = phase_seconds(run), len(training_minutes(run))
    # the first line of a run is written after its first step, or after the evaluation before it
    rest = max(0.0, run.seconds - sum(seconds.values()))
    whole = sum(seconds.values()) + rest
    parts = []
    for phase, value in seconds.items():
        text = f"{duration(value)}, {value / steps:.3g} s per step"
        parts.append((phase.replace("_", " "), f"phase-{PHASES.index(phase)}", text, value / whole))
    if rest:
        parts.append(("between steps", "phase-rest", duration(rest), rest / whole))
    facts = []
    for name, reduce, metric, unit in _FACTS:
        if metric in run.metrics:
            value = reduce(run.metrics[metric].values())
            value, unit = (1000 * value, "MB") if unit == "GB" and value < _SMALL_GB else (value, unit)
            facts.append((name, f"{number(metric, value)} {unit}"))
    return Cost(run_key(index, run), duration(whole), parts, facts)


# The settings of runs, and their differences: from the defaults, from each other, from start to start.


ABSENT = "\N{EM DASH}"
# names of the runs, times of their starts, and names of their files
_LEFT_OUT = ("output", *(f"environment.{name}" for name in ("started", "config", "after_step")))
_MODELS = ("environment.models", "environment.model_sizes")
# a password in an address, because users mail the page
_PASSWORD = re.compile(r"(?<=://)[^/@\s]*@")


# settings with which steps of a run were made: the steps, the file, and what differs from the steps before
Settings = tuple[str, str, list[Change]]


def differing_settings(runs: list[Run]) -> list[tuple[str, list[str]]]:
    """Returns (key, value per run) of every key whose value differs between runs, in the order of the first run.

    Keys of environment.json (the last start of a run) begin with `environment.`.
    """
    return [
        (key, values)
        for key, values in all_settings(runs)
        if len(set(values)) > 1 and not key.startswith(_MODELS) and key not in _LEFT_OUT
    ]


def chosen_settings(run: Run) -> list[tuple[str, str, str]]:
    """Returns (key, value, default) of each key with another value than the default, in the configuration's order."""
    defaults = _flat(as_plain(Config()))
    flat = {key: value for key, value in _flat(run.config).items() if key not in _LEFT_OUT}
    return [(key, value, defaults.get(key, ABSENT)) for key, value in flat.items() if value != defaults.get(key)]


def all_settings(runs: list[Run]) -> list[tuple[str, list[str]]]:
    """Returns (key, value per run) of every key of the runs' configurations and of their last starts' environments."""
    flat = [_flat(run.config) | _environment(run) for run in runs]
    keys = dict.fromkeys(key for one in flat for key in one)
    return [(key, [one.get(key, ABSENT) for one in flat]) for key in keys]


def changed_settings(runs: list[Run]) -> list[tuple[Key, list[Settings]]]:
    """Returns the settings, by ranges of steps, of each run that changed settings from one step to another."""
    found = []
    for index, run in enumerate(runs):
        ends = [after for after, _, _ in run.history[1:]] + [run.steps[1]]
        rows, before = list[Settings](), None
        for (after, file, config), end in zip(run.history, ends, strict=True):
            if end > after:
                steps = f"{after + 1:,}" if end == after + 1 else f"{after + 1:,} to {end:,}"
                changed: list[Change] = changes(before, config) if before and config else []
                rows.append(
                    (steps, file, [replace(c, before=_shown(c.before), after=_shown(c.after)) for c in changed])
                )
                before = config
        if len(rows) > 1:
            found.append((run_key(index, run), rows))
    return found


def _environment(run: Run) -> dict[str, str]:
    """Returns the environment of a run's last start; empty without environment.json, which only informs."""
    return _flat({"environment": (starts(run.path) or [{}])[-1]})


def _flat(value: Any, prefix: str = "") -> dict[str, str]:
    """Flattens nested mappings to dotted key -> text of its value, as in JSON without quotes around strings."""
    if not isinstance(value, dict):
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
        return {prefix: _shown(text)}
    found: dict[str, str] = {}
    for name, item in value.items():
        found |= _flat(item, f"{prefix}.{name}" if prefix else str(name))
    return found


def _shown(text: str) -> str:
    return _PASSWORD.sub("...@", text)


# Characters of foreign text that a browser would not show, or would obey, made visible: `U+202E` in a frame.
#
# A response may hold controls that turn the text after them around (bidirectional overrides), characters without a
# width, or a NUL, which HTML drops. Nothing of the page's own text holds them, so every text that a template puts in is
# treated.


# controls (Cc), formats such as bidirectional controls and zero width (Cf), separators of lines (Zl, Zp), and halves of
# surrogate pairs (Cs), which no UTF-8 file can hold; without the line feed and the tab
_SHOWN_BY_A_BROWSER = "\n\t"
_CATEGORIES = ("Cc", "Cf", "Zl", "Zp", "Cs")
_MAYBE = re.compile(r"[^\n\t -~\u00a0-\u00ac\u00ae-\u05ff]")  # what may be one of them: most texts have none


def in_text(value: Any) -> Any:
    """Returns a text as HTML with invisible characters framed, for jinja2's `finalize`; HTML and other values as is."""
    if not isinstance(value, str) or isinstance(value, Markup) or _MAYBE.search(value) is None:
        return value
    return Markup("").join(
        Markup('<span class="control" title="{}">{}</span>').format(_name(each), code_point(each))
        if _is_invisible(each)
        else escape(each)
        for each in value
    )


def in_attribute(value: str) -> str:
    """Returns a text with `[U+202E]` for invisible characters, unescaped: attributes and `<title>` hold no elements."""
    return "".join(f"[{code_point(each)}]" if _is_invisible(each) else each for each in value)


def code_point(character: str) -> str:
    """Returns the code point of a character. Example: "U+202E"."""
    return f"U+{ord(character):04X}"


def _is_invisible(character: str) -> bool:
    return character not in _SHOWN_BY_A_BROWSER and unicodedata.category(character) in _CATEGORIES


def _name(character: str) -> str:
    return unicodedata.name(character, "control character").lower()


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
    """Returns the columns of the validation table."""
    return list(dict.fromkeys(metric for _, metric in validation_names(runs)))


def validation_rows(runs: list[Run], evaluations: Sequence[RunEvaluations]) -> list[ValidationRow]:
    """Returns rows per set: each run at its first and last evaluated step, then the teachers."""
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
    """Returns the metric `student` at the steps `ends` of two evaluations, and the closed part of the teacher's lead.

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
    """Returns (metric, (first, last) value per run) of the METRICS that any run has; "" where a run lacks one."""
    rows = []
    for metric in METRICS:
        series = [list(run.metrics.get(metric, {}).values()) for run in runs]
        if any(series):
            rows.append((metric, [(number(metric, s[0]), number(metric, s[-1])) if s else ("", "") for s in series]))
    return rows
