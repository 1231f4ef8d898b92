"""Draws figures of the report, as SVG in the colours of the page, and writes numbers as text. `panels.py` fills them.

Text from files never goes into matplotlib, which would take a `$` in a run's name for mathematics: titles and legends
are HTML.
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

from nemo_oprd.evaluation.intervals import Difference
from nemo_oprd.run.run_reader import Run

# Numbers as text for the tables of the report.


_SHARES = ("avg@", "best@", "pass@", "maj@")
MINUS = "\N{MINUS SIGN}"
SPACE = "\N{NO-BREAK SPACE}"


def is_share(metric: str) -> bool:
    """Returns whether a metric of an evaluation is a share of responses or problems, shown in percent."""
    name = metric.rsplit("/", 1)[-1]
    return name.startswith(_SHARES) or name in ("avg", "truncated", "no_answer")


def number(metric: str, value: float) -> str:
    """Returns a value as text: shares in percent, diversity with three decimals, the rest with about four digits."""
    if not math.isfinite(value):
        return str(value)
    if is_share(metric):
        return f"{100 * value:.1f}{SPACE}%"
    if metric.endswith("dist_4g"):
        return f"{value:.3f}"
    if value != 0 and not 1e-3 <= abs(value) < 1e7:
        text = f"{value:.2e}"
    else:
        text = f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return text.replace("-", MINUS)


def interval(metric: str, bounds: tuple[float, float] | list[float] | None) -> str:
    """Returns an interval as text. Example: "[20.1, 30.2]", in the unit of `number`; "" for None."""
    if bounds is None:
        return ""
    low, high = (number(metric, value).removesuffix(f"{SPACE}%") for value in bounds)
    return f"[{low}, {high}]"


def signed(metric: str, value: float, gap: Difference) -> str:
    """Formats a difference or a bound of it: shares in percentage points, with `gap`'s decimals, such as "+12.5"."""
    scale, least = (1, 3) if metric.endswith("dist_4g") else (100, 1) if is_share(metric) else (1, 2)
    return f"{scale * value:+.{gap.decimals(scale, least)}f}".replace("-", MINUS)


def duration(seconds: float) -> str:
    """Formats seconds in two units. Example: 7985.2 -> "2 h 13 min"."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours:,} h {minutes} min"
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"


def closed_gap(before: float, after: float, teacher: float) -> str:
    """Returns the part of the teacher's lead before training that the student has closed, in percent."""
    return f"{100 * (after - before) / (teacher - before):.0f}".replace("-", MINUS)


def count(value: float) -> str:
    """Formats a number with three significant digits and a unit. Example: 1543714304 -> "1.54 B"."""
    for unit, name in ((1e9, " B"), (1e6, " M"), (1e3, " k")):
        if value >= 0.9995 * unit:
            return f"{value / unit:.{max(0, 2 - int(math.log10(max(1, value / unit))))}f}{name}"
    return f"{value:.0f}"


# Name -> (light, dark). Figures are drawn in the light colours, which `svg` replaces by references to CSS variables.
COLORS = {
    "ink": ("#1d232a", "#e7eaee"),
    "muted": ("#66707c", "#9aa5b1"),
    "line": ("#dfe3e8", "#333c46"),
    "page": ("#fbfbfa", "#14181d"),
    "card": ("#ffffff", "#1b2127"),
    "series-0": ("#2166ac", "#6cb0f2"),
    "series-1": ("#bf4937", "#f58f7c"),
    "series-2": ("#167a5e", "#4fc9a4"),
    "series-3": ("#8c5fa8", "#c39ae0"),
    "series-4": ("#8a6508", "#e3b94f"),
    "series-5": ("#5f6b2e", "#b3c267"),
    "phase-0": ("#3d405b", "#8389b5"),
    "phase-1": ("#4f8a70", "#6fa389"),
    "phase-2": ("#b98235", "#d9b274"),
    "phase-3": ("#d9694d", "#cf6a50"),
    "phase-4": ("#8a74ab", "#a795c4"),
    "phase-5": ("#577590", "#7d9db8"),
    "phase-rest": ("#868f99", "#7c8793"),
    "right": ("#1a7f4b", "#58c98c"),
    "wrong": ("#b3372b", "#f28b7d"),
    "heat": ("#b4382c", "#c8564a"),  # behind tokens, whose text stays in ink
}
NUM_COLORS = 6
LINE_STYLES = ("solid", "dotted")  # names that CSS and matplotlib share
SMOOTH_FROM = 100  # number of points from which on a curve is smoothed
MARKERS_UP_TO = 40  # number of points up to which each point has a marker

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


def run_key(index: int, run: Run) -> Key:
    """Returns the legend entry of the run at position `index`, from 0, on the page."""
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


def last(run: Run, metric: str) -> float:
    """Returns the value of a metric at its last step."""
    return list(run.metrics[metric].values())[-1]


def line(axes: Any, key: Key, series: dict[int, float]) -> None:
    """Draws one run's curve: few points with markers, many points faintly with their moving average on top."""
    steps, values = np.array(list(series)), np.array(list(series.values()), dtype=float)
    color, style = COLORS[key.color][0], key.style
    if len(values) < SMOOTH_FROM:
        marker = "o" if len(values) <= MARKERS_UP_TO else ""
        axes.plot(steps, values, color=color, linestyle=style, linewidth=1.8, marker=marker, markersize=3.5)
    else:
        axes.plot(steps, values, color=color, linewidth=0.7, alpha=0.3)
        axes.plot(steps, smooth(values), color=color, linestyle=style, linewidth=1.8)


def smooth(values: np.ndarray) -> np.ndarray:
    """Returns a centred moving average over about 4 % of the points, fewer at the ends; few points stay unchanged."""
    if len(values) < SMOOTH_FROM:
        return values
    window = np.ones(2 * (len(values) // 50) + 1)
    return np.convolve(values, window, "same") / np.convolve(np.ones(len(values)), window, "same")
