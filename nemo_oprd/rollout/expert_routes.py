"""The experts that sampled tokens visit: recorded while the in-process engine decodes, and read from rollout files.

Shapes: B sequences of a batch, b of them still being decoded, s tokens of a call, T positions, L layers with experts,
E experts of a layer, K experts per token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from nemo_oprd.batch.types import Rollout
from nemo_oprd.megatron.model import DistillingModel
from nemo_oprd.megatron.router_replay import Routes
from nemo_oprd.models import ModelSpec


@dataclass
class RouteRecord:
    """The experts of a batch's tokens: int16 [B, T, L, K] on the device, -1 where none is recorded yet."""

    layers: list[int]
    experts: torch.Tensor

    @staticmethod
    def empty(model: DistillingModel, sequences: int, length: int) -> RouteRecord | None:
        """Allocates room for `length` tokens of each sequence; None for a model without experts."""
        layers = [layer.layer_number for layer in model.decoder.layers if hasattr(layer.mlp, "router")]
        if not layers:
            return None
        shape = (sequences, length, len(layers), model.config.moe_router_topk)
        device = next(model.parameters()).device
        return RouteRecord(layers, torch.full(shape, -1, dtype=torch.int16, device=device))

    def add(self, routes: Routes, sequences: torch.Tensor, positions: torch.Tensor) -> None:
        """Adds the experts of one call; `sequences` int64 [b], `positions` [b, s] of the call's tokens."""
        for i, layer in enumerate(self.layers):
            kept = routes.take(layer)
            assert kept is not None
            b, s = positions.shape
            self.experts[sequences[:, None], positions, i] = kept.view(s, b, -1).transpose(0, 1).to(torch.int16)

    def of_sequences(self, lengths: list[int]) -> list[np.ndarray]:
        """Returns `Rollout.expert_routes` of each sequence, for as many of its first tokens as `lengths` says."""
        experts = self.experts.cpu().numpy()
        return [experts[i, :length].copy() for i, length in enumerate(lengths)]


def parse_routes(record: dict[str, Any], where: str) -> np.ndarray | None:
    """Reads the field `expert_routes` of a line of a rollout file as int16 [tokens, L, K]; None without it.

    Raises:
        ValueError: the field is no such list, or lacks the entry of a token other than the response's last one.
    """
    given = record.get("expert_routes")
    if given is None:
        return None
    try:
        routes = np.array(given)
    except ValueError:  # lists of different lengths
        routes = np.array(None)
    if routes.ndim != 3 or routes.dtype.kind != "i" or not (routes >= 0).all() or not (routes < 2**15).all():
        raise ValueError(
            f"{where}: expert_routes={str(given)[:60]}; expected [tokens][layers with experts][experts per token] of "
            "numbers of experts from 0 on: write such lists, or leave expert_routes out"
        )
    tokens = len(record["prompt_ids"]) + len(record["response_ids"])
    if len(routes) not in (tokens, tokens - 1):
        raise ValueError(
            f"{where}: expert_routes has {len(routes)} entries for {tokens} tokens of prompt and response; expected "
            f"{tokens}, or {tokens - 1} without the last token: write one entry per token"
        )
    return routes.astype(np.int16)


def check_routes(rollout: Rollout, where: str, spec: ModelSpec, *, needed: bool) -> None:
    """Raises ValueError unless a rollout's recorded experts are there, if needed, and are experts of the model `spec`.

    `needed`: whether training uses them (`student.router_replay`).
    """
    if rollout.expert_routes is None:
        if needed:
            raise ValueError(
                f"{where}: no expert_routes, which student.router_replay=true needs; expected the experts of each "
                "token: record rollouts with student.router_replay=true and rollout.save=true, or set it to false"
            )
        return
    if spec.experts is None:
        raise ValueError(
            f"{where}: expert_routes is given, but the {spec.model_type} student has no experts; expected rollouts "
            "of this model: remove the field, or choose the model that was sampled"
        )
    _, layers, per_token = rollout.expert_routes.shape
    sparse = sum(spec.experts.sparse)
    if (layers, per_token) != (sparse, spec.experts.per_token):
        raise ValueError(
            f"{where}: expert_routes has {layers} layers and {per_token} experts per token, but the student has "
            f"{sparse} layers with experts and {spec.experts.per_token} per token; expected these: choose the model "
            "that was sampled, or remove the field"
        )
    highest = int(rollout.expert_routes.max(initial=-1))
    ordered = np.sort(rollout.expert_routes, axis=-1)
    if highest >= spec.experts.count or (ordered[..., 1:] == ordered[..., :-1]).any():
        found = f"expert {highest}" if highest >= spec.experts.count else "an expert twice for one token"
        raise ValueError(
            f"{where}: expert_routes holds {found}, but a layer of the student has experts 0 to "
            f"{spec.experts.count - 1} and a token visits different ones; expected such numbers: choose the model "
            "that was sampled, or remove the field"
        )
