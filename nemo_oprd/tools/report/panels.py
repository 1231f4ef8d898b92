"""The figures of the report and the metrics that they show; TensorBoard shows metrics without a figure, too.

The paper's figures are here under their metrics: accuracy over steps, and over training time with the memory of the
run; response length; cosine similarity over steps and by position; the policy-gradient loss; the overlap of the top-k
sets; both models' entropies; the cosine of a bridge over its rank. Runs side by side give the paper's figures that
compare methods or weights.
"""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from nemo_oprd.evaluation.intervals import order_of, repeated
from nemo_oprd.run.run_reader import Run
from nemo_oprd.run.timeline import SAMPLING, Interval, hidden_share, read_timeline
from nemo_oprd.tools.report.figures import COLORS, SMOOTH_FROM, Draw, Key, Panel, line, run_key, smooth

# The timeline figure: the intervals of sampling, waiting, teaching and updating in some steps; from timeline.jsonl.


# phase -> (label, colour), from the top of the figure
LANES = {
    SAMPLING: ("sampling", "phase-0"),
    "generate": ("waiting for it", "phase-rest"),
    "check": ("check", "phase-1"),
    "gradient_noise": ("gradient noise", "phase-5"),
    "teacher": ("teacher", "phase-2"),
    "gradient": ("gradient", "phase-3"),
    "optimizer": ("optimizer", "phase-3"),
    "sync": ("weights to the engine", "phase-4"),
    "evaluation": ("evaluation", "phase-5"),
    "save": ("saving", "phase-rest"),
}
DEFAULT_STEPS = 5
_NUMBERS_UP_TO = 40  # samplings whose numbers have room


def parse_steps(text: str) -> tuple[int, int]:
    """Returns the first and the last step of "8-12" or "8". Raises ValueError for anything else."""
    match = re.fullmatch(r"(\d+)(?:-(\d+))?", text)
    first, last = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
    if not 0 < first <= last:
        raise ValueError(f"--steps {text}: expected a step or a range of steps, from 1; choose e.g. 8-12")
    return first, last


def timeline_panel(runs: Sequence[Run], steps: tuple[int, int] | None) -> Panel:
    """Returns a plot per run with the intervals of `steps` (None: the last ones); no plots if no run has any."""
    plots: list[tuple[str, Draw]] = []
    for run in runs:
        chosen = shown(read_timeline(run.path), steps)
        numbers = [each.step for each in chosen if each.phase != SAMPLING]
        if not numbers:
            continue
        name = f"{run.name}, " if len(runs) > 1 else ""
        share = hidden_share(chosen)
        hidden = "" if share is None else f", {100 * share:.0f} % of the sampling hidden"
        caption = f"{name}steps {min(numbers)} to {max(numbers)}{hidden}"
        plots.append((caption, partial(_draw, chosen)))
    note = "seconds; hidden: the ranks did something else than wait. Numbers: the step whose responses are sampled"
    return Panel("Timeline", note, [], plots)


def shown(intervals: Sequence[Interval], steps: tuple[int, int] | None) -> list[Interval]:
    """Returns the intervals of the first to the last of `steps`, and sampling, clipped there; second 0 is their start.

    Evaluations and checkpoints between steps belong to the earlier one. `steps` None: the last `DEFAULT_STEPS` ones.
    """
    last = max((each.step for each in intervals), default=0)
    first, last = steps or (max(1, last - DEFAULT_STEPS + 1), last)
    own = [each for each in intervals if first <= each.step <= last and each.phase != SAMPLING]
    if not own:
        return []
    begin, end = min(each.began for each in own), max(each.ended for each in own)
    cut = [
        replace(each, began=max(each.began, begin) - begin, ended=min(each.ended, end) - begin)
        for each in intervals
        if first <= each.step <= last or each.phase == SAMPLING
    ]
    return [each for each in cut if each.began < each.ended]


def _draw(intervals: list[Interval], axes: Any) -> None:
    """Draws the intervals, one lane per phase."""
    lanes = [phase for phase in LANES if any(each.phase == phase for each in intervals)]
    samplings = sum(each.phase == SAMPLING for each in intervals)
    for row, phase in enumerate(lanes):
        own = [each for each in intervals if each.phase == phase]
        bars = [(each.began, each.ended - each.began) for each in own]
        axes.broken_barh(bars, (row - 0.38, 0.76), color=COLORS[LANES[phase][1]][0], linewidth=0)
        if phase == SAMPLING and samplings <= _NUMBERS_UP_TO:
            for each in own:
                middle = (each.began + each.ended) / 2
                axes.text(middle, row, str(each.batch), ha="center", va="center", fontsize=7, color=COLORS["card"][0])
    own = [each for each in intervals if each.phase != SAMPLING]
    for step in {each.step for each in own}:
        begins = min(each.began for each in own if each.step == step)
        axes.axvline(begins, color=COLORS["muted"][0], linewidth=0.6, linestyle="dotted")
    axes.set_yticks(range(len(lanes)), [LANES[phase][0] for phase in lanes])
    axes.set_ylim(len(lanes) - 0.5, -0.5)
    axes.set_xlim(0, max(each.ended for each in intervals))
    axes.set_xlabel("seconds")
    axes.grid(visible=False, axis="y")


CURVES = (  # metric, title, note, logarithmic
    ("rep/loss", "Representation loss", "mean over layers, log scale", True),
    ("rep/cosine_similarity", "Cosine similarity", "student and teacher hidden states, mean over layers", False),
    ("output/loss", "Output-space loss", "log scale", True),
    ("actor/pg_loss", "Policy-gradient loss", "log ratio of student to teacher at the sampled tokens, nats", False),
    ("output/reverse_kl", "KL of student from teacher", "nats per response token, log scale", True),
    ("val-topk/overlap_ratio", "Top-k overlap", "share of ids that both models have among their k likeliest", False),
    ("response_length/mean", "Response length", "mean, tokens", False),
    ("actor/grad_norm", "Gradient norm", "before clipping, log scale", True),
    ("perf/tokens_per_s", "Throughput", "tokens per second", False),
    ("perf/peak_memory_gb", "Peak memory", "GB; of the GPU, on a CPU of the first rank's process", False),
)
NUM_LOSSES = 6  # the first ones of CURVES, which stand before the entropies
LAYER_COSINE = re.compile(r"rep/cosine_similarity_layer/(\d+)")
POSITION_COSINE = re.compile(r"rep/cosine_(first|last)_k/(\d+)")
PHASES = ("generate", "check", "teacher", "update", "sync", "gradient_noise")
VALIDATION = re.compile(r"val/(.+?)(/teacher)?/((?:avg|best|pass|maj)@\d+|avg_len|truncated|no_answer|dist_4g)")


def panels(runs: list[Run], steps: tuple[int, int] | None = None) -> list[Panel]:
    """Returns the figures for which the runs have data, in the order of the page; `steps`: those of the timeline."""
    averages = [(name, metric) for name, metric in validation_names(runs) if metric.startswith("avg@")]
    chosen = [_accuracy(runs, name, metric) for name, metric in averages]
    chosen += [_accuracy_over_time(runs, name, metric) for name, metric in averages]
    chosen += [_curve(runs, *curve) for curve in CURVES[:2]] + [_layers(runs), _positions(runs)]
    chosen += [_curve(runs, *curve) for curve in CURVES[2:NUM_LOSSES]] + [_entropies(runs)]
    chosen += [_curve(runs, *curve) for curve in CURVES[NUM_LOSSES:]] + [_phases(runs)]
    chosen += [timeline_panel(runs, steps), _bridge_ranks(runs)]
    return [panel for panel in chosen if panel.plots]


def validation_names(runs: list[Run]) -> list[tuple[str, str]]:
    """Returns (set, metric) pairs of the students' validations, by set name and `order_of`, without `repeated` ones."""
    matches = [match for run in runs for name in run.metrics if (match := VALIDATION.fullmatch(name))]
    sets: dict[str, set[str]] = {}
    for match in matches:
        sets.setdefault(match[1], set()).update([] if match[2] else [match[3]])
    return [
        (name, metric) for name, own in sorted(sets.items()) for metric in sorted(own - repeated(own), key=order_of)
    ]


def _curve(runs: list[Run], metric: str, title: str, note: str, logarithmic: bool) -> Panel:
    curves = _curves(runs, metric)
    logarithmic = logarithmic and not any(value <= 0 for _, series in curves for value in series.values())
    if not logarithmic:
        note = note.replace(", log scale", "").replace("log scale", "")
    if any(len(series) >= SMOOTH_FROM for _, series in curves):
        note = f"{note}; bold: moving average".lstrip("; ")
    return _lines(title, note, curves, _logarithmic if logarithmic else None)


Curves = list[tuple[Key, dict[int, float]]]


def _curves(runs: list[Run], metric: str) -> Curves:
    """Returns a metric of the runs that have it."""
    return [(run_key(i, run), run.metrics[metric]) for i, run in enumerate(runs) if metric in run.metrics]


def _lines(title: str, note: str, curves: Curves, axes_too: Draw | None = None, more: Sequence[Key] = ()) -> Panel:
    """Returns a figure of one plot with all curves; without curves, a figure without plots.

    Args:
        axes_too: draws more on the axes, after the curves.
        more: legend entries after those of the curves.
    """

    def draw(axes: Any) -> None:
        for key, series in curves:
            line(axes, key, series)
        if axes_too is not None:
            axes_too(axes)

    return Panel(title, note, [*(key for key, _ in curves), *more], [("", draw)] if curves else [])


def _logarithmic(axes: Any) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5), numticks=8))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())


def _accuracy(runs: list[Run], name: str, metric: str) -> Panel:
    """Returns the figure of a metric: students as curves over the steps, teachers as horizontal lines."""
    curves = _curves(runs, f"val/{name}/{metric}")
    teachers = _teachers(runs, f"val/{name}/teacher/{metric}")
    shares = partial(_draw_shares, [value for _, series in curves for value in series.values()], teachers)
    return _lines(f"Accuracy on {name}", f"{metric} on validation", curves, shares, [key for key, _ in teachers])


def _teachers(runs: list[Run], metric: str) -> list[tuple[Key, float]]:
    """Returns the teachers' last values with their legend entries; one neutral entry if all values are equal."""
    levels = [(key, list(series.values())[-1]) for key, series in _curves(runs, metric)]
    if len({value for _, value in levels}) == 1:
        return [(Key("teacher", "ink", "dashed"), levels[0][1])]
    return [(Key(f"teacher of {key.label}", key.color, "dashed"), value) for key, value in levels]


def _draw_shares(values: list[float], teachers: list[tuple[Key, float]], axes: Any) -> None:
    """Draws teachers as horizontal lines, and a vertical axis in percent that shows differences near 100 %."""
    from matplotlib.ticker import FuncFormatter

    for key, value in teachers:
        axes.axhline(value, color=COLORS[key.color][0], linestyle=key.style, linewidth=1.3)
    shown = [value for value in (*values, *(value for _, value in teachers)) if math.isfinite(value)]
    low, high = min(shown, default=0.0), max(shown, default=0.0)
    bottom = 0.0 if low < high / 2 else low - 0.5 * (high - low)
    axes.set_ylim(bottom - 0.01, high + 0.08 * (high - bottom) + 0.01)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:.3g}%"))


def _position_limits(runs: list[Run]) -> tuple[float, float]:
    """Returns the limits of the vertical axis of all position figures of a page."""
    curves = [series for run in runs for name, series in run.metrics.items() if POSITION_COSINE.fullmatch(name)]
    ends = [series[step] for series in curves for step in (min(series), max(series)) if math.isfinite(series[step])]
    low, high = min(ends, default=0.0), max(ends, default=1.0)
    margin = 0.06 * (high - low) or 0.05
    return low - margin, high + margin


def phase_seconds(run: Run) -> dict[str, float]:
    """Returns phase -> its seconds in all steps together, without phases of less than a thousandth of the time."""
    seconds = {phase: sum(run.metrics.get(f"timing/{phase}_s", {}).values()) for phase in PHASES}
    return {phase: value for phase, value in seconds.items() if value > 1e-3 * sum(seconds.values())}


def training_minutes(run: Run) -> dict[int, float]:
    """Returns step -> minutes of all phases up to it, without evaluations and checkpoints; {} if not logged."""
    series = [run.metrics[f"timing/{phase}_s"] for phase in PHASES if f"timing/{phase}_s" in run.metrics]
    steps = sorted(set().union(*series)) if series else []
    seconds = [sum(one.get(step, 0.0) for one in series) for step in steps]
    return dict(zip(steps, (total / 60 for total in itertools.accumulate(seconds)), strict=True))


def _accuracy_over_time(runs: list[Run], name: str, metric: str) -> Panel:
    """Returns the paper's first figure: accuracy over training time; circle areas show the memory of several runs."""
    student, curves = f"val/{name}/{metric}", []
    for i, run in enumerate(runs):
        minutes = {0: 0.0, **training_minutes(run)}
        points = {minutes[step]: value for step, value in run.metrics.get(student, {}).items() if step in minutes}
        if len(points) > 1:
            memory = run.metrics.get("perf/peak_memory_gb", {})
            curves.append((run_key(i, run), points, max(memory.values(), default=math.nan)))
    teachers = _teachers(runs, f"val/{name}/teacher/{metric}")
    largest = max((memory for *_, memory in curves if math.isfinite(memory)), default=0.0)
    bubbles = len(curves) > 1 and largest > 0

    def draw(axes: Any) -> None:
        for key, points, memory in curves:
            times, values, color = list(points), list(points.values()), COLORS[key.color][0]
            axes.plot(times, values, color=color, linestyle=key.style, linewidth=1.8, marker="o", markersize=3.5)
            if bubbles and math.isfinite(memory):
                axes.scatter(times[-1:], values[-1:], s=600 * memory / largest, color=color, alpha=0.3, linewidths=0)
        _draw_shares([value for _, points, _ in curves for value in points.values()], teachers, axes)
        axes.set_xlabel("minutes of training")

    memories = ", ".join(f"{memory:.3g} GB" for *_, memory in curves)
    note = f"{metric}; time without evaluations" + (f"; circle area: peak memory ({memories})" if bubbles else "")
    keys = [key for key, *_ in curves] + [key for key, _ in teachers]
    return Panel(f"Accuracy on {name} over time", note, keys, [("", draw)] if curves else [])


def _entropies(runs: list[Run]) -> Panel:
    """Returns the figure of both models' entropies on the student's responses; the teacher's lines are dashed."""
    curves = []
    for i, run in enumerate(runs):
        key = run_key(i, run)
        prefix = f"{key.label}, " if len(runs) > 1 else ""
        for metric, role, style in (("actor", "student", key.style), ("teacher", "teacher", "dashed")):
            if f"{metric}/entropy" in run.metrics:
                curves.append((Key(f"{prefix}{role}", key.color, style), run.metrics[f"{metric}/entropy"]))
    return _lines("Entropies", "nats per response token", curves)


def _layers(runs: list[Run]) -> Panel:
    """Returns heat maps of the cosine similarity per layer and step, one per run, all on the same colour scale."""
    maps: list[tuple[str, list[int], list[int], np.ndarray]] = []
    for run in runs:
        layers = sorted(int(match[1]) for name in run.metrics if (match := LAYER_COSINE.fullmatch(name)))
        series = [run.metrics[f"rep/cosine_similarity_layer/{layer}"] for layer in layers]
        steps = sorted(set().union(*series))
        if layers:
            values = np.array([[one.get(step, np.nan) for step in steps] for one in series])
            maps.append((run.name, steps, layers, values))
    finite = [value for *_, values in maps for value in values[np.isfinite(values)].tolist()]
    low, high = min(finite, default=0.0), max(finite, default=1.0)

    def draw(steps: list[int], layers: list[int], values: np.ndarray, axes: Any) -> None:
        middles = (np.array(steps[:-1]) + np.array(steps[1:])) / 2
        edges = np.concatenate(([steps[0] - 0.5], middles, [steps[-1] + 0.5]))
        rows = np.arange(len(layers) + 1) - 0.5
        mesh = axes.pcolormesh(edges, rows, values, vmin=low, vmax=high, cmap="viridis", rasterized=True)
        shown = range(0, len(layers), math.ceil(len(layers) / 10))
        axes.set_yticks(list(shown), [str(layers[i]) for i in shown])
        axes.set_ylabel("layer")
        axes.grid(False)
        axes.figure.colorbar(mesh, ax=axes, pad=0.02).outline.set_visible(False)

    plots: list[tuple[str, Draw]] = [(name if len(runs) > 1 else "", partial(draw, s, n, v)) for name, s, n, v in maps]
    return Panel("Cosine similarity by layer", "student layer over steps; brighter is closer", [], plots)


def _positions(runs: list[Run]) -> Panel:
    """Returns the figure of cosine similarity over the first or last k tokens, at each run's first and last step."""
    keys = {
        (which, end): Key(f"{which} k, {('start', 'end')[end]}", color, ("dotted", "solid")[end])
        for which, color in (("first", "series-0"), ("last", "series-1"))
        for end in (0, 1)
    }

    def draw(curves: dict[tuple[str, int], dict[int, float]], axes: Any) -> None:
        for which, curve in sorted(curves.items()):
            line(axes, keys[which], dict(sorted(curve.items())))
        axes.set_xscale("log", base=2)
        axes.set_xlabel("k")
        axes.set_ylim(*limits)

    limits = _position_limits(runs)
    plots, drawn = list[tuple[str, Draw]](), set[tuple[str, int]]()
    for run in runs:
        curves: dict[tuple[str, int], dict[int, float]] = {}
        for name, series in run.metrics.items():
            if match := POSITION_COSINE.fullmatch(name):
                for end, step in enumerate((min(series), max(series))):
                    curves.setdefault((match[1], end), {})[int(match[2])] = series[step]
        if curves:
            plots.append((run.name if len(runs) > 1 else "", partial(draw, curves)))
            drawn |= set(curves)
    shown = [key for which, key in keys.items() if which in drawn]
    return Panel("Cosine similarity by position", "deepest layer, first or last k response tokens", shown, plots)


def _phases(runs: list[Run]) -> Panel:
    """Returns seconds per step, stacked by phase, a plot per run, all on one scale; a missing value counts as 0."""
    measured = [phase for phase in PHASES if any(phase in phase_seconds(run) for run in runs)]
    keys = [Key(phase.replace("_", " "), f"phase-{PHASES.index(phase)}") for phase in measured]
    stacks: list[tuple[str, list[float], np.ndarray]] = []
    for run in runs:
        series = [run.metrics.get(f"timing/{phase}_s", {}) for phase in measured]
        steps = sorted(set().union(*series))
        if steps:
            stack = np.array([smooth(np.array([one.get(step, 0.0) for step in steps])) for one in series])
            stacks.append((run.name, [float(step) for step in steps], stack))
    top = max((float(stack.sum(axis=0).max()) for _, _, stack in stacks), default=1.0)

    def draw(steps: list[float], stack: np.ndarray, axes: Any) -> None:
        if len(steps) == 1:  # an area needs two points
            steps, stack = [steps[0] - 0.4, steps[0] + 0.4], stack.repeat(2, axis=1)
        axes.stackplot(steps, stack, colors=[COLORS[key.color][0] for key in keys], linewidth=0)
        axes.set_ylim(0, 1.08 * top)

    plots: list[tuple[str, Draw]] = [(n if len(runs) > 1 else "", partial(draw, s, stack)) for n, s, stack in stacks]
    return Panel("Time per step", "seconds, by phase", keys, plots)


def _bridge_ranks(runs: list[Run]) -> Panel:
    """Returns the figure of the held-out cosine by rank, mean over layers, as `fit-bridge` measured the bridges."""
    curves = []
    for i, run in enumerate(runs):
        key = run_key(i, run)
        for name, series in _rank_curves(run.path / "bridge" / "bridge.json").items():
            label, style = ("after the fit", key.style) if name == "bridge" else ("before the fit", "dashed")
            curves.append((Key(f"{key.label}, {label}" if len(runs) > 1 else label, key.color, style), series))

    def over_ranks(axes: Any) -> None:
        axes.set_xscale("log", base=2)
        axes.set_xlabel("rank of the bridge")

    note = "held-out states of both models after projection, mean over layer pairs"
    return _lines("Cosine similarity by rank", note, curves, over_ranks)


def _rank_curves(file: Path) -> dict[str, dict[int, float]]:
    """Returns "before" and "bridge" -> rank -> cosine; {} without a file, or for a bridge that was not fitted here."""
    try:
        layers = json.loads(file.read_bytes())["report"]["layers"].values()
        found: dict[str, dict[int, float]] = {}
        for name in ("before", "bridge"):
            curves = [report["curves"][name]["cosine"] for report in layers if name in report["curves"]]
            if curves and len(curves) == len(layers):
                ranks = sorted(set.intersection(*(set(map(int, curve)) for curve in curves)))
                found[name] = {rank: sum(curve[str(rank)] for curve in curves) / len(curves) for rank in ranks}
        return found
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}  # the bridge is checked where it is used; the page is complete without this figure
