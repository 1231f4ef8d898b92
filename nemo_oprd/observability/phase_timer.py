"""Seconds per phase of a step."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch


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
        """Adds the seconds of the body to `phase`; they are noted as those of `part`, if it is a part of the phase."""
        began, start = time.time(), time.perf_counter()
        yield
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        seconds = time.perf_counter() - start
        self.seconds[phase] = self.seconds.get(phase, 0.0) + seconds
        self._note(part or phase, began, began + seconds)

    def take(self) -> dict[str, float]:
        """Phase -> seconds since the last call of `take`."""
        seconds, self.seconds = self.seconds, {}
        return seconds
