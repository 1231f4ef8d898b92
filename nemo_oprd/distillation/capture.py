"""The teacher's observer: keeps the supervised rows of the layers that are matched, compact."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from nemo_oprd.distillation.output_head import Rows


@dataclass
class HiddenStateCapture:
    """An observer that keeps the wanted rows of the wanted layers, compact.

    Args:
        rows: [n] rows of this rank's hidden state (int64, on its device).
        wanted: layer -> under which names its rows are kept (a teacher layer may serve several student layers).
        final_layer: the layer whose state is taken after the final norm, None to take every layer before it.
        project: (name, [n, D]) -> what is kept; the bridge's teacher side goes here.
        final_rows: whose final hidden states are kept besides, for the output-space term.
    """

    rows: torch.Tensor
    wanted: dict[int, list[int]]
    final_layer: int | None = None
    project: Callable[[int, torch.Tensor], torch.Tensor] | None = None
    final_rows: Rows | None = None
    captured: dict[int, torch.Tensor] = field(default_factory=dict)
    final: torch.Tensor | None = None

    def at_layer(self, layer: int, hidden: torch.Tensor, *, stage_ends: bool) -> torch.Tensor:
        """Takes the rows of `layer`, unless it is taken after the final norm."""
        if layer in self.wanted and layer != self.final_layer:
            self._take(layer, hidden)
        return hidden

    def after_final_norm(self, hidden: torch.Tensor) -> torch.Tensor:
        """Takes the rows of the last layer."""
        if self.final_layer is not None and self.final_layer in self.wanted:
            self._take(self.final_layer, hidden)
        if self.final_rows is not None:
            self.final = self.final_rows.take(hidden)
        return hidden

    def _take(self, layer: int, hidden: torch.Tensor) -> None:
        picked = hidden.flatten(0, 1).index_select(0, self.rows)
        for name in self.wanted[layer]:
            self.captured[name] = picked if self.project is None else self.project(name, picked)
