"""An observer that keeps rows of hidden states: for a teacher's targets, bridge fits and the sampling check."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from nemo_oprd.distillation.output_head import FinalStateRows


@dataclass
class HiddenStateCapture:
    """An observer that copies the given rows of the given layers, and nothing else.

    `captured` holds the rows of a layer under its `keys_of_layer`; for a teacher layer these are the student layers
    that are matched with it. `project` maps (key, states [n, D]) to the values [n, R] to keep; None keeps the states.
    """

    rows: torch.Tensor  # int64 [n], indices into this rank's hidden state, on its device
    keys_of_layer: dict[int, list[int]]
    final_layer: int | None = None  # the layer whose state is taken after the final norm; None: no layer's state is
    project: Callable[[int, torch.Tensor], torch.Tensor] | None = None
    final_rows: FinalStateRows | None = None  # the rows whose final hidden states `final` keeps for the output loss
    captured: dict[int, torch.Tensor] = field(default_factory=dict)
    final: torch.Tensor | None = None

    def at_layer(self, layer: int, hidden: torch.Tensor, *, stage_ends: bool) -> torch.Tensor:
        """Keeps the rows of `layer`, unless its state is taken after the final norm."""
        if layer in self.keys_of_layer and layer != self.final_layer:
            self._keep(layer, hidden)
        return hidden

    def after_final_norm(self, hidden: torch.Tensor) -> torch.Tensor:
        """Keeps the rows of the state after the final norm."""
        if self.final_layer is not None and self.final_layer in self.keys_of_layer:
            self._keep(self.final_layer, hidden)
        if self.final_rows is not None:
            self.final = self.final_rows.gather(hidden)
        return hidden

    def _keep(self, layer: int, hidden: torch.Tensor) -> None:
        # in a loop of another program gradients may be enabled, and the rows would keep the whole graph in memory
        picked = hidden.detach().flatten(0, 1).index_select(0, self.rows)
        for key in self.keys_of_layer[layer]:
            self.captured[key] = picked if self.project is None else self.project(key, picked)
