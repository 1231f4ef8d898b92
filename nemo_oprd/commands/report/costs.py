"""Where the time and the memory of each run went."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from nemo_oprd.commands.report.figures import Key, run_key
from nemo_oprd.commands.report.numbers import duration, number
from nemo_oprd.commands.report.panels import PHASES, phase_seconds, training_minutes
from nemo_oprd.observability.run_reader import Run

_FACTS: tuple[tuple[str, Callable[[Any], float], str, str], ...] = (
    ("Peak memory", max, "perf/peak_memory_gb", "GB"),
    ("Teacher states held at a time", max, "perf/targets_gb", "GB"),
    ("Throughput, mean over steps", statistics.fmean, "perf/tokens_per_s", "tokens/s"),
)

_SMALL_GB = 0.1  # less is shown in MB


@dataclass(frozen=True)
class Cost:
    """The time of one run by parts, (name, colour, text, share of the whole), and (name, text) of what it needed."""

    key: Key
    total: str
    parts: list[tuple[str, str, str, float]]
    facts: list[tuple[str, str]]


def costs(runs: list[Run]) -> list[Cost]:
    """One entry per run that logged times."""
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
