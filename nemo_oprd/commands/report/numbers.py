"""Numbers as text for the tables of the report."""

from __future__ import annotations

import math

from nemo_oprd.evaluation.intervals import Difference

_SHARES = ("avg@", "best@", "pass@", "maj@")
MINUS = "\N{MINUS SIGN}"
SPACE = "\N{NO-BREAK SPACE}"


def is_share(metric: str) -> bool:
    """Whether a metric of an evaluation is a share of responses or problems, shown in percent."""
    name = metric.rsplit("/", 1)[-1]
    return name.startswith(_SHARES) or name in ("avg", "truncated", "no_answer")


def number(metric: str, value: float) -> str:
    """Shares in percent, diversity with three decimals, the rest with four significant digits."""
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
    """Example: "[20.1, 30.2]", in the unit of `number`; "" for None."""
    if bounds is None:
        return ""
    low, high = (number(metric, value).removesuffix(f"{SPACE}%") for value in bounds)
    return f"[{low}, {high}]"


def signed(metric: str, value: float, gap: Difference) -> str:
    """A number of a difference: shares in percentage points, as many decimals as `gap` needs. Example: "+12.5"."""
    scale, least = (1, 3) if metric.endswith("dist_4g") else (100, 1) if is_share(metric) else (1, 2)
    return f"{scale * value:+.{gap.decimals(scale, least)}f}".replace("-", MINUS)


def duration(seconds: float) -> str:
    """Two units. Example: 7985.2 -> "2 h 13 min"."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours:,} h {minutes} min"
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"


def closed_gap(before: float, after: float, teacher: float) -> str:
    """How much of the teacher's lead before training was made up, in percent."""
    return f"{100 * (after - before) / (teacher - before):.0f}".replace("-", MINUS)


def count(value: float) -> str:
    """Three significant digits with a unit. Example: 1543714304 -> "1.54 B"."""
    for unit, name in ((1e9, " B"), (1e6, " M"), (1e3, " k")):
        if value >= 0.9995 * unit:
            return f"{value / unit:.{max(0, 2 - int(math.log10(max(1, value / unit))))}f}{name}"
    return f"{value:.0f}"
