"""The experts that the tokens of one microbatch visit: kept between passes, recorded elsewhere, and observed.

Shapes: N tokens of this rank, E experts, K experts per token.
"""

from __future__ import annotations

import copy
from typing import Protocol

import torch


class RouterObserver(Protocol):
    """Sees the logits and the choices of a router for the tokens of one microbatch, in every pass."""

    def at_router(self, layer: int, logits: torch.Tensor) -> torch.Tensor:
        """Gets the router's logits [N, E]; returns those by which the tokens are routed."""
        ...

    def routed(self, layer: int, logits: torch.Tensor, experts: torch.Tensor, own: torch.Tensor) -> None:
        """Gets detached logits [N, E], the experts int64 [N, K] that the tokens visit, and the router's own choice."""
        ...


class Routes:
    """The experts of one microbatch's tokens, by layer: int16 [N, K].

    A pass without gradients keeps the experts that it has used, and later passes use them again. The pass with
    gradients is the last one, so it forgets them.

    Args:
        recorded: layer -> experts int16 [N, K] to use instead of the most probable ones; -1 in rows of tokens whose
            experts were not recorded, which the router routes itself. None: it routes all tokens.
        observer: sees the logits and the experts.
    """

    def __init__(self, recorded: dict[int, torch.Tensor] | None = None, observer: RouterObserver | None = None) -> None:
        self._kept: dict[int, torch.Tensor] = {}
        self._recorded = recorded or {}
        self.observer = observer

    def unobserved(self) -> Routes:
        """Returns the same routes, with shared storage, for a pass without an observer."""
        twin = copy.copy(self)
        twin.observer = None
        return twin

    def keep(self, layer: int, experts: torch.Tensor) -> None:
        """Keeps the experts [N, K] of a layer's tokens."""
        self._kept[layer] = experts.to(torch.int16)

    def kept(self, layer: int) -> torch.Tensor | None:
        """Returns the kept experts of a layer's tokens, int64 [N, K]; None if none were kept."""
        kept = self._kept.get(layer)
        return None if kept is None else kept.long()

    def take(self, layer: int) -> torch.Tensor | None:
        """Returns what `kept` returns, and forgets it."""
        kept = self.kept(layer)
        self._kept.pop(layer, None)
        return kept

    def replayed(self, layer: int, chosen: torch.Tensor) -> torch.Tensor:
        """Returns a layer's recorded experts int64 [N, K], and those in `chosen` where none are recorded."""
        recorded = self._recorded.get(layer)
        return chosen if recorded is None else torch.where(recorded >= 0, recorded.long(), chosen)
