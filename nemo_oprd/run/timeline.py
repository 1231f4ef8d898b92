"""Measures the phases of a run, and writes and reads timeline.jsonl: a line per interval, by the first rank's clock.

    {"step": 3, "phase": "gradient", "began": 1764000000.1234, "ended": 1764000001.2345}

The phases of a step are those of `timing/PHASE_s`, with two parts for the update: `gradient` and `optimizer`. Between
the steps there are `evaluation` and `save`. A line of `sampling` has more fields (`Interval`). `sampling`
lasts until the last response, `generate` while the ranks wait for it. Step 0 is the time before the first step.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from nemo_oprd.run.metrics_log import drop_lines_after
from nemo_oprd.runtime.disk import naming
from nemo_oprd.runtime.files import parse_json

# Timer of the phases of a step.


class PhaseTimer:
    """Measures the seconds per phase of a step: `with timer("teacher"): ...`. Repeated phases add up.

    Args:
        note: called with every interval: its name, when it began and when it ended, in seconds since the epoch.
    """

    def __init__(self, note: Callable[[str, float, float], None] = lambda name, began, ended: None) -> None:
        self.seconds: dict[str, float] = {}
        self._note = note

    @contextmanager
    def __call__(self, phase: str, part: str | None = None) -> Iterator[None]:
        """Adds the seconds of the body to `phase`; passes the interval to `note` under the name `part`, or `phase`."""
        began, start = time.time(), time.perf_counter()
        yield
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        seconds = time.perf_counter() - start
        self.seconds[phase] = self.seconds.get(phase, 0.0) + seconds
        self._note(part or phase, began, began + seconds)

    def take(self) -> dict[str, float]:
        """Returns phase -> seconds since the last call of `take`."""
        seconds, self.seconds = self.seconds, {}
        return seconds


FILE = "timeline.jsonl"
WAITING = "generate"
SAMPLING = "sampling"
# a teacher's servers compute for a batch that is not complete: from the first request to the last answer
AHEAD = "teacher_ahead"
# shorter intervals are not written, such as an evaluation that is not due
_SHORTEST_S = 1e-3
_DIGITS = 4  # of seconds

Spans = list[tuple[float, float]]


@dataclass(frozen=True)
class Interval:
    """One line of the file; times are seconds since the epoch.

    Attributes:
        step: the step in which the phase ended, from 1; 0 before the first one.
        batch: of a sampling, the step that uses the responses, or with `rollout.mode=segments` the first step whose
            responses continue; 0 for other phases.
        submitted: of a sampling, the time of the request to the engine.
        collected: of a sampling, the time at which all ranks had the responses.
        servers: of a sampling, per server the times of its start and of its last response.
    """

    step: int
    phase: str
    began: float
    ended: float
    batch: int = 0
    submitted: float = 0.0
    collected: float = 0.0
    servers: dict[str, tuple[float, float]] = field(default_factory=dict)


class Timeline:
    """Writes the intervals of a run on the world's first rank; every rank has one. A line costs one call of `write`.

    Args:
        directory: of the run.
        first_step: the step from which the run resumes.
    """

    def __init__(self, directory: Path, first_step: int, *, writes: bool) -> None:
        self._path, self._step, self._writes = directory / FILE, first_step, writes

    def drop_later_steps(self) -> None:
        """Removes the lines of the steps that the run repeats; the caller does this before the first `note`."""
        if self._writes:
            drop_lines_after(self._path, self._step)

    def begin(self, step: int) -> None:
        """Starts step `step`, from 1: later intervals belong to it."""
        self._step = step

    def note(self, phase: str, began: float, ended: float, **more: Any) -> None:
        """Writes one interval.

        Args:
            more: additional fields of `Interval`.
        """
        if not self._writes or ended - began < _SHORTEST_S:
            return
        row = {"step": self._step, "phase": phase, "began": began, "ended": ended, **more}
        with naming(self._path), self._path.open("a") as file:
            file.write(json.dumps(_rounded(row)) + "\n")

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        """Writes the interval of the body: `with timeline("evaluation"): ...`."""
        began, start = time.time(), time.perf_counter()
        yield
        self.note(phase, began, began + time.perf_counter() - start)


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return round(value, _DIGITS)
    if isinstance(value, dict):
        return {name: _rounded(item) for name, item in value.items()}
    return [_rounded(item) for item in value] if isinstance(value, list | tuple) else value


def read_timeline(directory: Path) -> list[Interval]:
    """Reads the intervals of a run in the order of the file, without an incomplete last line; none without the file.

    Raises:
        ValueError: a line is malformed.
    """
    path = directory / FILE
    if not path.is_file():
        return []
    found = []
    for number, line in enumerate(path.read_bytes().splitlines(keepends=True), 1):
        if not line.endswith(b"\n"):  # a killed run was writing it
            break
        where = f"{path}, line {number}"
        row = parse_json(line, where, "an interval", "remove the line, or restore the file")
        try:
            servers = {name: (float(began), float(ended)) for name, (began, ended) in row.pop("servers", {}).items()}
            found.append(Interval(**row, servers=servers))
            sum((found[-1].began, found[-1].ended, found[-1].step))
        except (AttributeError, TypeError, ValueError):
            raise ValueError(
                f"{where}: {line.decode(errors='replace').strip():.80}: expected an object with step, phase, began and "
                "ended; remove the line, or restore the file"
            ) from None
    return found


def hidden_share(intervals: Sequence[Interval]) -> float | None:
    """Returns the share of the sampling time in which the ranks did not wait; None without sampling."""
    sampling = union((each.began, each.ended) for each in intervals if each.phase == SAMPLING)
    others = union((each.began, each.ended) for each in intervals if each.phase not in (SAMPLING, WAITING, AHEAD))
    return length(common(sampling, others)) / length(sampling) if length(sampling) else None


def union(spans: Iterable[tuple[float, float]]) -> Spans:
    """Merges spans into disjoint ones that cover the same times, ascending."""
    joined: Spans = []
    for began, ended in sorted(spans):
        if joined and began <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(ended, joined[-1][1])
        else:
            joined.append((began, ended))
    return joined


def common(some: Spans, others: Spans) -> Spans:
    """Returns the spans of time that two lists of disjoint ascending spans share."""
    both = ((max(a, c), min(b, d)) for a, b in some for c, d in others)
    return [(began, ended) for began, ended in both if began < ended]


def length(spans: Spans) -> float:
    """Returns the total seconds of disjoint spans."""
    return sum(ended - began for began, ended in spans)
