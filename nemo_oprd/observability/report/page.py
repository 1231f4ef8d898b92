"""Turns run directories into one self-contained HTML page: a summary per run, before/after tables and figures.

The page is the jinja2 template `page.html.jinja`, which escapes all text; this module computes what the template shows.
Left out: anything interactive, and the date. Equal input gives an equal page, byte for byte, so pages can be compared.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from nemo_oprd.fault_tolerance.files import write_atomically
from nemo_oprd.observability.report.comparison import COLUMNS, DIRECTORY, Comparison, read_comparison
from nemo_oprd.observability.report.figures import (
    COLORS,
    PHASES,
    Key,
    Panel,
    last,
    panels,
    run_key,
    svg,
    validation_names,
)
from nemo_oprd.observability.run_reader import Run, read_run, short_names

TEMPLATE = "page.html.jinja"
METRICS = (
    *("loss/total", "rep/loss", "rep/cosine_similarity", "output/loss", "actor/pg_loss", "actor/entropy"),
    *("teacher/entropy", "val-topk/overlap_ratio", "response_length/mean", "actor/grad_norm", "lr"),
    *(f"timing/{phase}_s" for phase in PHASES),
    *("perf/tokens_per_s", "perf/peak_memory_gb"),
)
PARALLEL = (("tensor", "TP"), ("pipeline", "PP"), ("virtual_pipeline", "VPP"), ("context", "CP"))


@dataclass(frozen=True)
class Card:
    """The summary of one run: (setting, value) pairs, and the number of a line that was cut off."""

    key: Key
    settings: list[tuple[str, str]]
    cut_line: int | None


@dataclass(frozen=True)
class Cell:
    """A metric of a validation set: "" where there is no value, `gap_closed` in percent of the teacher's lead."""

    last: str
    first: str = ""
    gap_closed: str = ""


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


@dataclass(frozen=True)
class Figure:
    """A panel whose plots are drawn: (caption, SVG element) each."""

    title: str
    note: str
    legend: list[Key]
    plots: list[tuple[str, Markup]]


def write_report(runs: Sequence[Path], output: Path) -> Path:
    """Writes the page that shows `runs` (directories with metrics.jsonl and config.yaml) side by side to `output`.

    A run whose last line of metrics.jsonl was cut off is shown without that line, and the page mentions it.

    Returns: `output`; its parent directories are created.

    Raises:
        ValueError: there are no runs, a file is missing or malformed, or a run has no metrics yet.
    """
    if not runs:
        raise ValueError("no run directories, expected at least one; name the directories of the runs to report")
    paths, output = [Path(run) for run in runs], Path(output)
    if output.is_dir():
        raise ValueError(f"{output} is a directory, expected a file to write; add a name such as report.html")
    read = [read_run(path, name) for path, name in zip(paths, short_names(paths), strict=True)]
    page = _render(read, [read_comparison(path / DIRECTORY) for path in paths])
    output.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(output, page)
    return output


def _render(runs: list[Run], comparisons: list[Comparison | None]) -> str:
    text = resources.files(__package__).joinpath(TEMPLATE).read_text(encoding="utf-8")
    # autoescape: names of runs, sets and models come from files
    environment = Environment(autoescape=True, trim_blocks=True, keep_trailing_newline=True, undefined=StrictUndefined)
    steps = min(run.steps[0] for run in runs), max(run.steps[1] for run in runs)
    return environment.from_string(text).render(
        title=", ".join(run.name for run in runs),
        colors=COLORS,
        cards=[Card(run_key(index, run), _settings(run), run.cut_line) for index, run in enumerate(runs)],
        validation={"metrics": _validation_metrics(runs), "rows": _validation_rows(runs)},
        columns=COLUMNS,
        comparisons=[
            (run_key(index, run), comparison)
            for index, (run, comparison) in enumerate(zip(runs, comparisons, strict=True))
            if comparison is not None
        ],
        figures=[_figure(panel, steps, f"f{index}") for index, panel in enumerate(panels(runs))],
        metrics=_first_and_last(runs),
    )


def _figure(panel: Panel, steps: tuple[int, int], ident: str) -> Figure:
    """Draws the plots of a panel; `ident` keeps their ids apart from the ids of other panels."""
    plots = [
        (caption, Markup(svg(draw, steps, f"{panel.title} {caption}".strip(), f"{ident}-{index}")))
        for index, (caption, draw) in enumerate(panel.plots)
    ]
    return Figure(panel.title, panel.note, panel.keys, plots)


# --- summary of a run -----------------------------------------------------------------------------------------------


def _settings(run: Run) -> list[tuple[str, str]]:
    """Only the settings that the run has."""
    rows = [
        ("Student", _model(run, "student")),
        ("Student layout", _layout(run, "student")),
        ("Teacher", _model(run, "teacher")),
        ("Teacher layout", _layout(run, "teacher")),
        ("Loss", " + ".join(filter(None, (_representation_term(run), _output_term(run))))),
        ("Batch", _batch(run)),
        ("Steps", f"{run.steps[1]:,}"),
        ("Total time", _duration(run.seconds)),
    ]
    return [(name, value) for name, value in rows if value]


def _model(run: Run, role: str) -> str:
    return str(run.setting(f"{role}.checkpoint") or run.setting(f"{role}.hf_path") or "")


def _layout(run: Run, role: str) -> str:
    """Only what is switched on. Example: "TP 2, PP 2, sequence parallel"."""
    layout = run.setting(f"{role}.parallel")
    if not isinstance(layout, dict):
        return ""
    parts = [f"{short} {layout[name]}" for name, short in PARALLEL if layout.get(name, 1) != 1]
    parts += ["sequence parallel"] if layout.get("sequence") else []
    if role == "teacher" and run.setting("teacher.placement"):
        parts.append(str(run.setting("teacher.placement")))
    return ", ".join(parts) or "data parallel only"


def _representation_term(run: Run) -> str:
    """Example: "representation mse (layers all, last_k 2000)"; "" if the term is off."""
    settings = run.setting("loss.representation")
    if not isinstance(settings, dict) or not settings.get("weight"):
        return ""
    positions = settings.get("positions", "")
    positions = "all positions" if positions == "all" else f"{positions} {settings.get('k', '')}"
    bridge = run.setting("bridge.path")
    through = f", bridge {bridge}" if bridge not in (None, "none") else ""
    details = f"layers {settings.get('layers', '')}, {positions}{through}"
    return f"{_weight(settings)}representation {settings.get('kind', '')} ({details})"


def _output_term(run: Run) -> str:
    """Example: "0.5 x output top_k (k 16)"; "" if the term is off."""
    settings = run.setting("loss.output")
    if not isinstance(settings, dict) or not settings.get("weight") or settings.get("kind") in (None, "none"):
        return ""
    support = f" (k {settings.get('k')})" if settings["kind"] == "top_k" else ""
    return f"{_weight(settings)}output {settings['kind']}{support}"


def _weight(settings: dict[str, Any]) -> str:
    return "" if settings["weight"] == 1 else f"{settings['weight']} x "


def _batch(run: Run) -> str:
    prompts, each, lr = (run.setting(k) for k in ("train.prompts_per_step", "rollout.per_prompt", "train.lr"))
    return "" if None in (prompts, each, lr) else f"{prompts} prompts x {each} responses, learning rate {lr}"


# --- tables ----------------------------------------------------------------------------------------------------------


def _validation_metrics(runs: list[Run]) -> list[str]:
    return list(dict.fromkeys(metric for _, metric in validation_names(runs)))


def _validation_rows(runs: list[Run]) -> list[ValidationRow]:
    """Per set: each run at its first and last evaluated step, then the teachers."""
    metrics = _validation_metrics(runs)
    rows: list[ValidationRow] = []
    for name in dict.fromkeys(name for name, _ in validation_names(runs)):
        teachers: dict[tuple[str, ...], str] = {}  # by their values, so that equal teachers share one row
        of_set: list[ValidationRow] = []
        for index, run in enumerate(runs):
            columns = [f"val/{name}/{metric}" for metric in metrics]
            references = [f"val/{name}/teacher/{metric}" for metric in metrics]
            cells = [_before_after(run, student, teacher) for student, teacher in zip(columns, references, strict=True)]
            evaluated = [step for column in columns for step in run.metrics.get(column, {})]
            if evaluated:
                steps = f"{min(evaluated):,}", f"{max(evaluated):,}"
                of_set.append(ValidationRow("" if of_set else name, cells, run_key(index, run), steps))
            values = tuple(_number(key, last(run, key)) if key in run.metrics else "" for key in references)
            if any(values):
                teachers.setdefault(values, run.name)
        for values, owner in teachers.items():
            label = "teacher" if len(teachers) == 1 else f"teacher of {owner}"
            of_set.append(ValidationRow("" if of_set else name, [Cell(value) for value in values], teacher=label))
        rows += of_set
    return rows


def _before_after(run: Run, student: str, teacher: str) -> Cell:
    """First and last value of the metric `student`, and how much of the teacher's lead in accuracy was made up."""
    if student not in run.metrics:
        return Cell("")
    values = list(run.metrics[student].values())
    final = _number(student, values[-1])
    if len(values) == 1:
        return Cell(final)
    closed = ""
    if "@" in student and teacher in run.metrics and (lead := last(run, teacher) - values[0]) > 0:
        closed = f"{100 * (values[-1] - values[0]) / lead:.0f}"
    return Cell(final, _number(student, values[0]), closed)


def _first_and_last(runs: list[Run]) -> list[tuple[str, list[tuple[str, str]]]]:
    """(metric, (first, last) value per run) for every metric of METRICS that a run has; "" where a run lacks it."""
    rows = []
    for metric in METRICS:
        series = [list(run.metrics.get(metric, {}).values()) for run in runs]
        if any(series):
            rows.append((metric, [(_number(metric, s[0]), _number(metric, s[-1])) if s else ("", "") for s in series]))
    return rows


# --- numbers ---------------------------------------------------------------------------------------------------------


def _number(metric: str, value: float) -> str:
    """Accuracies in percent, diversity with three decimals, the rest with four significant digits."""
    if not math.isfinite(value):
        return str(value)
    if "/avg@" in f"/{metric}" or "/best@" in f"/{metric}":
        return f"{100 * value:.1f}\N{NO-BREAK SPACE}%"
    if metric.endswith("dist_4g"):
        return f"{value:.3f}"
    if value != 0 and not 1e-3 <= abs(value) < 1e7:
        text = f"{value:.2e}"
    else:
        text = f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return text.replace("-", "\N{MINUS SIGN}")


def _duration(seconds: float) -> str:
    """Two units. Example: 7985.2 -> "2 h 13 min"."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours:,} h {minutes} min"
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"
