"""The routers' losses of the plain Hugging Face computation, and tokens that visit recorded experts.

Shapes: T tokens of a sequence, E experts, K experts per token.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from nemo_oprd.batch.types import Rollout
from nemo_oprd.config.schema import StudentConfig


class RouterReference:
    """Takes the place of the routers (`mlp.gate`) of a transformers model, in the model's precision.

    Args:
        layers: the layers (1-based) whose losses count, if they have experts.
        lengths: for each rollout, how many of its tokens count.

    Attributes:
        losses: "moe/aux_loss" and "moe/z_loss", those with a weight, of the responses so far.
    """

    def __init__(
        self, student: StudentConfig, model: Any, rollouts: list[Rollout], layers: range, lengths: list[int]
    ) -> None:
        self.student, self.model, self.rollouts, self.lengths = student, model, rollouts, lengths
        self.tokens = sum(lengths)
        self.logits: dict[int, torch.Tensor] = {}
        self.experts: dict[int, torch.Tensor] = {}
        self._forced: Any = None
        blocks = {i + 1: layer.mlp for i, layer in enumerate(model.model.layers) if hasattr(layer.mlp, "gate")}
        for number, (layer, block) in enumerate(blocks.items()):
            block.gate.forward = lambda hidden, layer=layer, number=number, gate=block.gate: self._route(
                gate, layer, number, hidden
            )
        self.layers = [layer for layer in blocks if layer in layers]
        self._weights = {"moe/aux_loss": student.router_aux_loss, "moe/z_loss": student.router_z_loss}
        self.losses = {name: 0.0 for name, weight in self._weights.items() if weight}
        self.fractions = self._fractions() if student.router_aux_loss else {}

    def _route(self, gate: Any, layer: int, number: int, hidden: torch.Tensor) -> tuple[torch.Tensor, ...]:
        logits = hidden.reshape(-1, hidden.shape[-1]) @ gate.weight.T
        p = logits.softmax(-1)
        experts = p.topk(gate.top_k, dim=-1).indices
        if self._forced is not None:
            experts[: len(self._forced)] = torch.from_numpy(self._forced[:, number].astype(np.int64))
        weights = p.gather(1, experts)
        if getattr(gate, "norm_topk_prob", True):  # Mixtral has no such setting, and does so
            weights = weights / weights.sum(-1, keepdim=True)
        self.logits[layer], self.experts[layer] = logits, experts
        return logits, weights, experts

    def before(self, rollout: Rollout) -> None:
        """Called before the model computes a rollout; with `student.router_replay` its tokens visit its experts."""
        self._forced = rollout.expert_routes if self.student.router_replay else None

    @torch.no_grad()
    def _fractions(self) -> dict[int, torch.Tensor]:
        """Layer -> how often each expert is chosen, per counted token of all rollouts."""
        counts: dict[int, Any] = dict.fromkeys(self.layers, 0)
        for rollout, length in zip(self.rollouts, self.lengths, strict=True):
            if length:
                self.before(rollout)
                self.model.model(torch.from_numpy(rollout.ids)[None].long(), use_cache=False)
                for layer in self.layers:
                    chosen = torch.nn.functional.one_hot(self.experts[layer][:length], self.logits[layer].shape[1])
                    counts[layer] = counts[layer] + chosen.sum((0, 1))
        return {layer: count / self.tokens for layer, count in counts.items()}

    def response_loss(self, number: int) -> torch.Tensor | float:
        """The routers' part of the total loss of one response, which the model has just computed."""
        total: torch.Tensor | float = 0.0
        for layer in self.layers:
            logits = self.logits[layer][: self.lengths[number]]
            share = 1 / (len(self.layers) * self.tokens)
            if "moe/aux_loss" in self.losses:
                aux = share * logits.shape[1] * (logits.softmax(-1) * self.fractions[layer]).sum()
                self.losses["moe/aux_loss"] += float(aux.detach())
                total = total + self.student.router_aux_loss * aux
            if "moe/z_loss" in self.losses:
                z = share * (logits.logsumexp(-1) ** 2).sum()
                self.losses["moe/z_loss"] += float(z.detach())
                total = total + self.student.router_z_loss * z
        return total

    @property
    def total(self) -> float:
        """What the losses add to the total loss."""
        return sum(self._weights[name] * loss for name, loss in self.losses.items())
