"""The figure of docs/theory.md: four plots of the measurements of `studies.theory`, as one SVG."""

from __future__ import annotations

import io
import re
from typing import Any

import numpy as np

from nemo_oprd.tools.report.figures import COLORS, RC

INK, MUTED = COLORS["ink"][0], COLORS["muted"][0]
SERIES = [COLORS[f"series-{i}"][0] for i in range(6)]
ROLLOUT_NAMES = {
    "sampled": "sampled token",
    "full_vocab": "full KL",
    "token": "OPRD, token",
    "predicting": "OPRD, predicting",
}


def figure(found: dict[str, Any]) -> str:
    """An SVG document on an opaque page, because a Markdown viewer may be dark."""
    import matplotlib
    from matplotlib.figure import Figure

    buffer = io.StringIO()
    with matplotlib.rc_context(RC | {"figure.facecolor": COLORS["card"][0], "axes.titlesize": 10}):
        page = Figure(figsize=(9.6, 6.8), layout="constrained")
        axes = page.subplots(2, 2)
        _moments(axes[0, 0], found["given_prefix"])
        _snr(axes[0, 1], found["given_prefix"])
        _responses(axes[1, 0], found["responses"])
        _head(axes[1, 1], found)
        page.savefig(buffer, format="svg", metadata={"Date": None})
    text = re.sub(r"\s*(<metadata>.*?</metadata>|<!--.*?-->)", "", buffer.getvalue(), flags=re.DOTALL)
    return re.sub(r"(\.\d\d)\d+", r"\1", re.sub(r"\n\s+", "\n", text))  # half the size, with no visible difference


def _moments(axes: Any, given_prefix: dict[str, Any]) -> None:
    rows = given_prefix["rows"]
    delta = [row["delta"] for row in rows]
    for i, (name, label) in enumerate((("signal", "signal: squared norm of the mean"), ("variance", "variance"))):
        axes.loglog(delta, [row[f"sampled_{name}"] for row in rows], "o-", color=SERIES[i], markersize=3.5, label=label)
    last = rows[-1]
    claimed = [last["sampled_signal"] * (x / last["delta"]) ** 2 for x in delta]
    shown = [
        (x, y) for x, y in zip(delta, claimed, strict=True) if y < 10 * max(row["sampled_variance"] for row in rows)
    ]
    axes.loglog(*zip(*shown, strict=True), "--", color=MUTED, label="slope 2 (the paper's signal)")
    _finish(axes, "Sampled token, given the prefix", "delta = KL(p|q) + KL(q|p), nats", "")


def _snr(axes: Any, given_prefix: dict[str, Any]) -> None:
    rows = given_prefix["rows"]
    delta = [row["delta"] for row in rows]
    for i, (name, label) in enumerate((("sampled", "sampled token"), ("token", "OPRD, token state"))):
        axes.loglog(delta, [row[f"{name}_snr"] for row in rows], "o-", color=SERIES[2 * i], markersize=3.5, label=label)
    axes.axhline(
        given_prefix["limit"]["snr"], color=SERIES[0], linestyle="dotted", label="limit, computed at the teacher"
    )
    first = rows[0]
    axes.loglog(
        delta, [first["sampled_snr"] * x / first["delta"] for x in delta], "--", color=MUTED, label="slope 1 (claimed)"
    )
    axes.set_ylim(bottom=1e-4)
    _finish(axes, "Signal-to-noise given the prefix", "delta, nats", "")
    axes.text(
        0.02,
        0.68,
        "OPRD, predicting state: no noise",
        transform=axes.transAxes,
        color=MUTED,
        fontsize=8.5,
    )


def _responses(axes: Any, rows: list[dict[str, Any]]) -> None:
    """Estimates within two standard errors of zero cannot be shown on a logarithmic axis; they are upper limits."""
    gap = np.array([row["gap"] for row in rows])
    for i, (name, label) in enumerate(ROLLOUT_NAMES.items()):
        snr, error = (np.array([row[name][key] for row in rows]) for key in ("snr", "snr_error"))
        clear, color = snr > 2 * error, SERIES[i]
        axes.errorbar(
            gap[clear], snr[clear], error[clear], fmt="o-", color=color, markersize=3.5, capsize=2, label=label
        )
        axes.plot(gap[~clear], (snr.clip(0) + 2 * error)[~clear], "v", color=color, fillstyle="none")
    axes.set_xscale("log")
    axes.set_yscale("log")
    _finish(
        axes,
        "Signal-to-noise of one response's gradient",
        "gap: part of the way from teacher to student (open: at most)",
        "",
    )


def _head(axes: Any, found: dict[str, Any]) -> None:
    for i, (name, label) in enumerate((("head", "toy"), ("narrow_head", "narrow pair"))):
        head = found[name]
        vocabulary, width = head["shape"]
        sigma = [row["sigma"] for row in head["spectrum"]]
        kl = [row["full_vocab"] for row in head["spectrum"]]
        axes.loglog(sigma, kl, "o", color=SERIES[i], markersize=4, label=f"{label}: {vocabulary} tokens, width {width}")
        middle = len(sigma) // 2
        line = [kl[middle] * (x / sigma[middle]) ** 2 for x in sigma]
        axes.loglog(sigma, line, "--", color=SERIES[i], linewidth=0.9)
    _finish(
        axes,
        "Equal steps along the head's singular directions",
        "singular value (dashed: KL as its square)",
        "KL, nats",
    )


def _tick(value: float, _: int) -> str:
    return f"{value:g}" if 0.01 <= value <= 100 else f"{value:.0e}".replace("e-0", "e-").replace("e+0", "e")


def _finish(axes: Any, title: str, x: str, y: str) -> None:
    from matplotlib.ticker import FuncFormatter

    axes.set_title(title, loc="left", color=INK)
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.minorticks_off()
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(FuncFormatter(_tick))
    axes.legend(frameon=False, fontsize=8.5)
