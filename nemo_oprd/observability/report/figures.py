"""The figures of the report: the metrics that they show, and their SVG in the colours of the page.

Text from files never goes into matplotlib, which would take a `$` in a run's name for mathematics: titles and legends
are HTML. Left out: metrics without an entry below, which TensorBoard shows.
"""

from __future__ import annotations

import html
import io
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from nemo_oprd.observability.run_reader import Run

# Name -> (light, dark). Figures are drawn in the light colours, which `svg` replaces by references to CSS variables.
COLORS = {
    "ink": ("#1d232a", "#e7eaee"),
    "muted": ("#66707c", "#9aa5b1"),
    "line": ("#dfe3e8", "#333c46"),
    "page": ("#fbfbfa", "#14181d"),
    "card": ("#ffffff", "#1b2127"),
    "series-0": ("#2166ac", "#6cb0f2"),
    "series-1": ("#d6604d", "#f58f7c"),
    "series-2": ("#1b8a6b", "#4fc9a4"),
    "series-3": ("#8c5fa8", "#c39ae0"),
    "series-4": ("#b8860b", "#e3b94f"),
    "series-5": ("#5f6b2e", "#b3c267"),
    "phase-0": ("#3d405b", "#8389b5"),
    "phase-1": ("#81b29a", "#6fa389"),
    "phase-2": ("#f2cc8f", "#d9b274"),
    "phase-3": ("#e07a5f", "#cf6a50"),
}
NUM_COLORS = 6
LINE_STYLES = ("solid", "dotted")  # names that CSS and matplotlib share
SMOOTH_FROM = 100  # number of points from which on a curve is smoothed
MARKERS_UP_TO = 40  # number of points up to which each point has a marker

CURVES = (  # metric, title, note, logarithmic
    ("rep/loss", "Representation loss", "mean over layers, log scale", True),
    ("rep/cosine_similarity", "Cosine similarity", "student and teacher hidden states, mean over layers", False),
    ("output/loss", "Output-space loss", "log scale", True),
    ("actor/entropy", "Student entropy", "nats per token", False),
    ("response_length/mean", "Response length", "mean, tokens", False),
    ("actor/grad_norm", "Gradient norm", "before clipping, log scale", True),
    ("perf/tokens_per_s", "Throughput", "tokens per second", False),
)
LAYER_COSINE = re.compile(r"rep/cosine_similarity_layer/(\d+)")
POSITION_COSINE = re.compile(r"rep/cosine_(first|last)_k/(\d+)")
METRICS = ("avg", "best", "avg_len", "dist_4g")
PHASES = ("generate", "teacher", "update", "sync")
VALIDATION = re.compile(r"val/(.+?)(/teacher)?/(avg@\d+|best@\d+|avg_len|dist_4g)")

RC: dict[Any, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "nemo_oprd",  # without a fixed salt, ids are random and no two pages are equal
    "font.size": 9.5,
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "axes.edgecolor": COLORS["line"][0],
    "axes.labelcolor": COLORS["muted"][0],
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": COLORS["line"][0],
    "grid.linewidth": 0.7,
    "text.color": COLORS["ink"][0],
    "xtick.color": COLORS["line"][0],
    "ytick.color": COLORS["line"][0],
    "xtick.labelcolor": COLORS["muted"][0],
    "ytick.labelcolor": COLORS["muted"][0],
    "lines.solid_capstyle": "round",
}

Draw = Callable[[Any], None]  # draws on matplotlib axes


@dataclass(frozen=True)
class Key:
    """A legend entry and the colour and style of its line."""

    label: str
    color: str
    style: str = "solid"


@dataclass(frozen=True)
class Panel:
    """One figure of the page: plots with a caption each ("" for a single plot) and a common legend."""

    title: str
    note: str
    keys: list[Key]
    plots: list[tuple[str, Draw]]


def panels(runs: list[Run]) -> list[Panel]:
    """The figures for which the runs have data, in the order of the page."""
    chosen = [_accuracy(runs, name, metric) for name, metric in validation_names(runs) if metric.startswith("avg@")]
    chosen += [_curve(runs, *curve) for curve in CURVES[:2]] + [_layers(runs), _positions(runs)]
    chosen += [_curve(runs, *curve) for curve in CURVES[2:]] + [_phases(runs)]
    return [panel for panel in chosen if panel.plots]


def validation_names(runs: list[Run]) -> list[tuple[str, str]]:
    """The (set, metric) pairs of all students' validations: sets by name, metrics in the order of `METRICS`."""
    matches = [match for run in runs for name in run.metrics if (match := VALIDATION.fullmatch(name))]
    pairs = {(match[1], match[3]) for match in matches if not match[2]}
    return sorted(pairs, key=lambda pair: (pair[0], METRICS.index(pair[1].split("@")[0]), pair[1]))


def run_key(index: int, run: Run) -> Key:
    """The legend entry of the run at position `index`, from 0, on the page."""
    return Key(run.name, f"series-{index % NUM_COLORS}", LINE_STYLES[index // NUM_COLORS % len(LINE_STYLES)])


def svg(draw: Draw, steps: tuple[int, int], label: str, ident: str) -> str:
    """Draws on fresh axes and returns an `<svg>` element in the page's colours.

    Args:
        draw: draws on the axes; the x-axis is the step unless `draw` sets another label.
        steps: first and last step to show, equal for all figures of a page so that they line up.
        label: text for screen readers.
        ident: prefix that keeps the element's ids apart from those of other figures.
    """
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    buffer = io.StringIO()
    with matplotlib.rc_context(RC):
        figure = Figure(figsize=(5.6, 2.9), layout="constrained")
        axes = figure.add_subplot()
        axes.set_xlabel("step")
        axes.xaxis.set_major_locator(MaxNLocator(nbins=7, steps=[1, 2, 5, 10], integer=True))
        draw(axes)
        if axes.get_xlabel() == "step":
            margin = max(0.5, 0.02 * (steps[1] - steps[0]))
            axes.set_xlim(steps[0] - margin, steps[1] + margin)
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    text = buffer.getvalue()
    text = re.sub(r"\s*<metadata>.*?</metadata>", "", text[text.index("<svg") :], flags=re.DOTALL)
    text = re.sub(r' xmlns(:xlink)?="[^"]*"', "", text)  # HTML defines both name spaces
    text = re.sub(r'( id="|href="#|url\(#)', rf"\g<1>{ident}-", text)
    for name, (light, _) in COLORS.items():
        text = text.replace(light, f"var(--{name})")
    return text.replace("<svg", f'<svg role="img" aria-label="{html.escape(label)}"', 1).strip()


def _curve(runs: list[Run], metric: str, title: str, note: str, logarithmic: bool) -> Panel:
    curves = [(run_key(i, run), run.metrics[metric]) for i, run in enumerate(runs) if metric in run.metrics]
    logarithmic = logarithmic and not any(value <= 0 for _, series in curves for value in series.values())
    smoothed = any(len(series) >= SMOOTH_FROM for _, series in curves)

    def draw(axes: Any) -> None:
        for key, series in curves:
            _line(axes, key, series)
        if logarithmic:
            from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

            axes.set_yscale("log")
            axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5), numticks=8))
            axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
            axes.yaxis.set_minor_formatter(NullFormatter())

    if not logarithmic:
        note = note.replace(", log scale", "").replace("log scale", "")
    if smoothed:
        note = f"{note}; bold: moving average".lstrip("; ")
    return Panel(title, note, [key for key, _ in curves], [("", draw)] if curves else [])


def _accuracy(runs: list[Run], name: str, metric: str) -> Panel:
    """Students as curves, teachers as horizontal lines: one neutral line if all runs have the same teacher values."""
    keys = [run_key(i, run) for i, run in enumerate(runs)]
    student, teacher = f"val/{name}/{metric}", f"val/{name}/teacher/{metric}"
    curves = [(key, run.metrics[student]) for key, run in zip(keys, runs, strict=True) if student in run.metrics]
    levels = [(key, last(run, teacher)) for key, run in zip(keys, runs, strict=True) if teacher in run.metrics]
    if len({value for _, value in levels}) == 1:
        teachers = [(Key("teacher", "ink", "dashed"), levels[0][1])]
    else:
        teachers = [(Key(f"teacher of {key.label}", key.color, "dashed"), value) for key, value in levels]
    values = [value for _, series in curves for value in series.values()] + [value for _, value in teachers]
    values = [value for value in values if math.isfinite(value)]
    low, high = min(values, default=0.0), max(values, default=0.0)
    bottom = 0.0 if low < high / 2 else low - 0.5 * (high - low)  # differences stay visible near 100 %

    def draw(axes: Any) -> None:
        from matplotlib.ticker import FuncFormatter

        for key, series in curves:
            _line(axes, key, series)
        for key, value in teachers:
            axes.axhline(value, color=COLORS[key.color][0], linestyle=key.style, linewidth=1.3)
        axes.set_ylim(bottom - 0.01, high + 0.08 * (high - bottom) + 0.01)
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:.3g}%"))

    keys = [key for key, _ in curves] + [key for key, _ in teachers]
    return Panel(f"Accuracy on {name}", f"{metric} on validation", keys, [("", draw)] if curves else [])


def _layers(runs: list[Run]) -> Panel:
    """Cosine similarity per layer and step as a heat map, one per run, all on the same colour scale."""
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

    def draw_map(steps: list[int], layers: list[int], values: np.ndarray) -> Draw:
        def draw(axes: Any) -> None:
            middles = (np.array(steps[:-1]) + np.array(steps[1:])) / 2
            edges = np.concatenate(([steps[0] - 0.5], middles, [steps[-1] + 0.5]))
            rows = np.arange(len(layers) + 1) - 0.5
            mesh = axes.pcolormesh(edges, rows, values, vmin=low, vmax=high, cmap="viridis", rasterized=True)
            shown = range(0, len(layers), math.ceil(len(layers) / 10))
            axes.set_yticks(list(shown), [str(layers[i]) for i in shown])
            axes.set_ylabel("layer")
            axes.grid(False)
            axes.figure.colorbar(mesh, ax=axes, pad=0.02).outline.set_visible(False)

        return draw

    plots = [(name if len(runs) > 1 else "", draw_map(steps, layers, values)) for name, steps, layers, values in maps]
    return Panel("Cosine similarity by layer", "student layer over steps; brighter is closer", [], plots)


def _positions(runs: list[Run]) -> Panel:
    """Cosine similarity over the first or last k tokens, at the first and the last step of a run, as in the paper."""
    keys = {
        ("first", 0): Key("first k, start", "series-0", "dotted"),
        ("first", 1): Key("first k, end", "series-0"),
        ("last", 0): Key("last k, start", "series-1", "dotted"),
        ("last", 1): Key("last k, end", "series-1"),
    }

    def draw_curves(curves: dict[tuple[str, int], dict[int, float]]) -> Draw:
        def draw(axes: Any) -> None:
            for which, curve in sorted(curves.items()):
                _line(axes, keys[which], dict(sorted(curve.items())))
            axes.set_xscale("log", base=2)
            axes.set_xlabel("k")

        return draw

    plots, drawn = [], set()
    for run in runs:
        curves: dict[tuple[str, int], dict[int, float]] = {}
        for name, series in run.metrics.items():
            if match := POSITION_COSINE.fullmatch(name):
                for end, step in enumerate((min(series), max(series))):
                    curves.setdefault((match[1], end), {})[int(match[2])] = series[step]
        if curves:
            plots.append((run.name if len(runs) > 1 else "", draw_curves(curves)))
            drawn |= set(curves)
    shown = [key for which, key in keys.items() if which in drawn]
    return Panel("Cosine similarity by position", "deepest layer, first or last k response tokens", shown, plots)


def _phases(runs: list[Run]) -> Panel:
    """Seconds per step, stacked by phase, one plot per run, all on one scale. A phase without a value counts as 0."""
    keys = [Key(phase, f"phase-{i}") for i, phase in enumerate(PHASES)]
    stacks: list[tuple[str, list[int], np.ndarray]] = []
    for run in runs:
        series = [run.metrics.get(f"timing/{phase}_s", {}) for phase in PHASES]
        steps = sorted(set().union(*series))
        if steps:
            stack = np.array([_smooth(np.array([one.get(step, 0.0) for step in steps])) for one in series])
            stacks.append((run.name, steps, stack))
    top = max((float(stack.sum(axis=0).max()) for _, _, stack in stacks), default=1.0)

    def draw_stack(steps: list[int], stack: np.ndarray) -> Draw:
        def draw(axes: Any) -> None:
            if len(steps) == 1:  # an area needs two points
                steps_, stack_ = [steps[0] - 0.4, steps[0] + 0.4], stack.repeat(2, axis=1)
            else:
                steps_, stack_ = [float(step) for step in steps], stack
            axes.stackplot(steps_, stack_, colors=[COLORS[key.color][0] for key in keys], linewidth=0)
            axes.set_ylim(0, 1.08 * top)

        return draw

    plots = [(name if len(runs) > 1 else "", draw_stack(steps, stack)) for name, steps, stack in stacks]
    return Panel("Time per step", "seconds, by phase", keys, plots)


def last(run: Run, metric: str) -> float:
    """The value of a metric at its last step."""
    return list(run.metrics[metric].values())[-1]


def _line(axes: Any, key: Key, series: dict[int, float]) -> None:
    """Draws one run's curve: few points with markers, many points faintly with their moving average on top."""
    steps, values = np.array(list(series)), np.array(list(series.values()), dtype=float)
    color, style = COLORS[key.color][0], key.style
    if len(values) < SMOOTH_FROM:
        marker = "o" if len(values) <= MARKERS_UP_TO else ""
        axes.plot(steps, values, color=color, linestyle=style, linewidth=1.8, marker=marker, markersize=3.5)
    else:
        axes.plot(steps, values, color=color, linewidth=0.7, alpha=0.3)
        axes.plot(steps, _smooth(values), color=color, linestyle=style, linewidth=1.8)


def _smooth(values: np.ndarray) -> np.ndarray:
    """Centred moving average over about 4 % of the points, over fewer at the ends; few points stay unchanged."""
    if len(values) < SMOOTH_FROM:
        return values
    window = np.ones(2 * (len(values) // 50) + 1)
    return np.convolve(values, window, "same") / np.convolve(np.ones(len(values)), window, "same")
