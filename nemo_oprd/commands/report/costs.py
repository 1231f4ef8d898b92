"""Where the time and the memory of each run went."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

from nemo_oprd.commands.report.figures import Key, run_key
from nemo_oprd.commands.report.numbers import duration, number
from nemo_oprd.commands.report.panels import PHASES, phase_seconds, training_minutes
from nemo_oprd.observability.run_reader import Run


@dataclass(frozen=True)
class Part:
    """A part of a run's time: its name, its colour, its text and its share of the whole."""

    name: str
    color: str
    text: str
    share: float


@dataclass(frozen=True)
class Cost:
    """The time of one run by parts, which sum to the whole, and (name, text) of what it needed."""

    key: Key
    total: str
    parts: list[Part]
    facts: list[tuple[str, str]]


def costs(runs: list[Run]) -> list[Cost]:
    """One entry per run that logged times."""
    return [_cost(index, run) for index, run in enumerate(runs) if training_minutes(run)]


def _cost(index: int, run: Run) -> Cost:
    seconds = phase_seconds(run)
    phases, steps = sum(seconds.values()), len(training_minutes(run))
    # the first line of a run is written after its first step, or after the evaluation before it
    rest = max(0.0, run.seconds - phases)
    whole = phases + rest
    parts = [
        Part(phase.replace("_", " "), f"phase-{PHASES.index(phase)}", _time(value, steps), value / whole)
        for phase, value in seconds.items()
    ]
    if rest:
        parts.append(Part("between steps", "phase-rest", duration(rest), rest / whole))
    facts = [
        ("Peak memory", _value(run, max, "perf/peak_memory_gb", "GB")),
        ("Teacher states held at a time", _value(run, max, "perf/targets_gb", "GB")),
        ("Throughput, mean over steps", _value(run, _mean, "perf/tokens_per_s", "tokens/s")),
    ]
    return Cost(run_key(index, run), duration(whole), parts, [(name, text) for name, text in facts if text])


def _time(seconds: float, steps: int) -> str:
    return f"{duration(seconds)}, {seconds / steps:.3g} s per step"


def _value(run: Run, of: Callable[[Collection[float]], float], metric: str, unit: str) -> str:
    values = run.metrics.get(metric, {}).values()
    return f"{number(metric, of(values))} {unit}" if values else ""


def _mean(values: Collection[float]) -> float:
    return sum(values) / len(values)
