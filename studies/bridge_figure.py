"""The curves in a bridge's report as a figure: mean cosine over ranks, with its baselines, and E(r).

    python -m studies.bridge_figure BRIDGE --output bridge.svg

There is one column per layer pair. The upper row shows the held-out cosine between the projections of both models, the
lower row E(r) and the optimal rank that `fit-bridge` reports. Baselines are drawn where the report has them
(`bridge.baselines=true`).
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

STYLES = {
    "bridge": ("#2166ac", "-"),
    "before": ("#d6604d", ":"),  # a random projector
    "random_basis": ("#b8860b", ":"),
    "reduced_rank": ("#1b8a6b", "--"),
    "student_pca": ("#8c5fa8", "--"),
    "constant": ("#66707c", "-."),
}


def layers_of(bridge: Path) -> dict[str, Any]:
    """Layer pair -> the report of its fit.

    Raises:
        ValueError: the bridge has no report, because `fit-bridge` did not make it.
    """
    manifest = json.loads((bridge / "bridge.json").read_text())
    layers: dict[str, Any] = manifest.get("report", {}).get("layers", {})
    if not layers:
        raise ValueError(f"{bridge}/bridge.json has no report; expected a bridge that `nemo-oprd fit-bridge` made")
    return layers


def has_baselines(layers: dict[str, Any]) -> bool:
    """Whether the bridge was fitted with `bridge.baselines=true`."""
    return all(set(report["curves"]) > {"bridge"} for report in layers.values())


def draw(layers: dict[str, Any], file: Path) -> None:
    """Writes an SVG."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    matplotlib.rcParams["svg.hashsalt"] = "bridge_figure"
    figure, axes = pyplot.subplots(
        2, len(layers), figsize=(2.6 * len(layers), 4.6), sharex=True, sharey="row", squeeze=False
    )
    for column, (pair, report) in enumerate(layers.items()):
        upper, lower = axes[:, column]
        for number, (name, curve) in enumerate(report["curves"].items()):
            color, style = STYLES.get(name, (f"C{number}", ":"))
            ranks = [int(rank) for rank in curve["cosine"]]
            upper.plot(ranks, list(curve["cosine"].values()), style, color=color, label=name.replace("_", " "))
        error = {int(rank): value for rank, value in report["error_curve"].items() if int(rank) > 0}
        lower.plot(list(error), list(error.values()), color="#2166ac")
        lower.axvline(report["optimal_rank"], color="#66707c", linestyle=":")
        lower.text(
            report["optimal_rank"],
            max(error.values()),
            f"r* = {report['optimal_rank']}",
            va="top",
            ha="right",
            rotation=90,
        )
        upper.set_title(pair)
        lower.set_xscale("log", base=2)
        lower.set_xlabel("rank r")
    axes[0, 0].set_ylabel("held-out cosine")
    axes[1, 0].set_ylabel("E(r) / variance")
    handles, labels = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False, bbox_to_anchor=(0.5, -0.14))
    figure.savefig(file, bbox_inches="tight", metadata={"Date": None})


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("bridge", type=Path)
    parser.add_argument("--output", type=Path, required=True, metavar="FILE")
    options = parser.parse_args()
    layers = layers_of(options.bridge)
    draw(layers, options.output)
    if not has_baselines(layers):
        print(f"{options.bridge}/bridge.json has no baselines, none is drawn; fit again with bridge.baselines=true")


if __name__ == "__main__":
    main()
