"""Seconds and memory of what a device does; without CUDA, memory is not measured."""

from __future__ import annotations

import gc
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch


def is_cuda() -> bool:
    """Whether tensors are on a GPU, or in a rehearsal on a fake one."""
    return torch.cuda.is_available()


def place() -> str:
    """The device of tensors."""
    return "cuda" if is_cuda() else "cpu"


def synchronize() -> None:
    """Waits for the device."""
    if is_cuda():
        torch.cuda.synchronize()


@dataclass(frozen=True)
class Measured:
    """Of one or several passes: median seconds, largest peak and its bytes above what was there before (None: CPU)."""

    seconds: float
    peak: int | None
    delta: int | None


class Meter:
    """Measures phases that come again; see `Measured`."""

    def __init__(self) -> None:
        self._seconds: dict[str, list[float]] = defaultdict(list)
        self._peaks: dict[str, list[int]] = defaultdict(list)
        self._deltas: dict[str, list[int]] = defaultdict(list)

    @contextmanager
    def __call__(self, phase: str, part: str | None = None) -> Iterator[None]:
        """Measures the body; it stands for a `PhaseTimer`, which also knows parts of phases."""
        synchronize()
        before = torch.cuda.memory_allocated() if is_cuda() else 0
        if is_cuda():
            torch.cuda.reset_peak_memory_stats()
        start = time.perf_counter()
        yield
        synchronize()
        self._seconds[phase].append(time.perf_counter() - start)
        if is_cuda():
            peak = torch.cuda.max_memory_allocated()
            self._peaks[phase].append(peak)
            self._deltas[phase].append(peak - before)

    def of(self, phase: str, warmup: int = 0, *, total: bool = False) -> Measured:
        """A phase after `warmup` passes; its seconds are the median of a pass, or the sum of all with `total`."""
        peaks, deltas = self._peaks[phase][warmup:], self._deltas[phase][warmup:]
        passes = self._seconds[phase][warmup:]
        seconds = sum(passes) if total else statistics.median(passes)
        return Measured(seconds, max(peaks, default=None), max(deltas, default=None))


def measured(run: Callable[[], Any], *, warmup: int = 1, passes: int = 1) -> Measured:
    """A function, after `warmup` calls."""
    meter = Meter()
    for _ in range(warmup + passes):
        gc.collect()
        with meter("run"):
            run()
    return meter.of("run", warmup)


def median_seconds(run: Callable[[], Any], passes: int = 5) -> float:
    """Seconds of a short function, after two calls."""
    return measured(run, warmup=2, passes=passes).seconds
