"""Which experts the tokens of one microbatch visit, kept from a layer's first forward pass for its second one."""

from __future__ import annotations

import torch


class Routes:
    """The experts of one microbatch's tokens, by layer: int16 [N, K], from the first pass until the second one."""

    def __init__(self) -> None:
        self._chosen: dict[int, torch.Tensor] = {}

    def keep(self, layer: int, experts: torch.Tensor) -> None:
        """Keeps the experts [N, K] of a layer's tokens."""
        self._chosen[layer] = experts.to(torch.int16)

    def take(self, layer: int) -> torch.Tensor | None:
        """The experts of a layer's tokens, int64 [N, K], which are then forgotten; None if none were kept."""
        chosen = self._chosen.pop(layer, None)
        return None if chosen is None else chosen.long()
