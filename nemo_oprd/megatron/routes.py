"""Which experts the tokens of one microbatch visit, kept from the first forward pass for every later one."""

from __future__ import annotations

import torch


class Routes:
    """The experts of one microbatch's tokens, by layer: int32 [N, K].

    A layer's entry is written by the first forward pass and read by every later one of the same microbatch.
    """

    def __init__(self) -> None:
        self._chosen: dict[int, torch.Tensor] = {}

    def get(self, layer: int) -> torch.Tensor | None:
        """The experts of a layer's tokens, int64 [N, K]; None before the layer's first pass."""
        chosen = self._chosen.get(layer)
        return None if chosen is None else chosen.long()

    def set(self, layer: int, experts: torch.Tensor) -> None:
        """Keeps the experts [N, K] of a layer's tokens."""
        self._chosen[layer] = experts.to(torch.int32)
