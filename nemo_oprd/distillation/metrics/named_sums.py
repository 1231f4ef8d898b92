"""Sums by name over the ranks of an update: what its observers return, added up in one all-reduce."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
import torch.distributed as dist


class NamedSums:
    """Float64 sums by name, which are views of one flat tensor.

    All ranks make the same names in the same order. Each rank adds what it alone has measured: a pipeline stage the
    sums of its layers, the last stage those of the output loss, and of ranks with the same rows the first one only.
    """

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], place: torch.device) -> None:
        self._shapes = dict(shapes)
        self._flat = torch.zeros(sum(map(math.prod, shapes.values())), dtype=torch.float64, device=place)
        self._sums = self._views(self._flat)

    def _views(self, flat: torch.Tensor) -> dict[str, torch.Tensor]:
        parts = flat.split([math.prod(shape) for shape in self._shapes.values()])
        return {name: part.view(shape) for (name, shape), part in zip(self._shapes.items(), parts, strict=True)}

    def add(self, measured: Mapping[str, torch.Tensor | float]) -> None:
        """Adds sums of this rank; names that are absent add nothing."""
        for name, value in measured.items():
            self._sums[name].add_(value)

    def reduced(self, group: dist.ProcessGroup | None) -> dict[str, torch.Tensor]:
        """Name -> the sum over all ranks of `group` (None: all ranks), on the CPU. Every rank of `group` calls this."""
        dist.all_reduce(self._flat, group=group)
        return self._views(self._flat.cpu())
