"""The metrics of the student's routers in one update, from their sums over all ranks."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from nemo_oprd.distillation.metrics.injection_counts import CaptureError
from nemo_oprd.distillation.router_losses import RouterLosses, RouterTerm


@dataclass(frozen=True)
class RouterMetrics:
    """The routers' losses and metrics."""

    loss: float  # what the routers' losses add to the total loss
    named: dict[str, float]  # the metrics by their names in metrics.jsonl

    @property
    def nonfinite_reason(self) -> str | None:
        """Which loss is not finite; None if both are."""
        if math.isfinite(self.loss):
            return None
        return ", ".join(f"{name} is {self.named[name]}" for name in ("moe/aux_loss", "moe/z_loss"))

    @staticmethod
    def from_sums(sums: torch.Tensor, term: RouterTerm | None) -> RouterMetrics:
        """From the sum "routers" of `RouterLosses` over all ranks; empty where no layer with experts is reached.

        Raises:
            CaptureError: a router did not see each counted token once, on one rank.
        """
        if term is None or not term.layers:
            return RouterMetrics(0.0, {})
        counts, probability, others = sums.split([term.experts, term.experts, len(RouterLosses.SUMS)], dim=1)
        column = dict(zip(RouterLosses.SUMS, others.unbind(1), strict=True))
        tokens = column["tokens"]
        for layer, seen in zip(term.layers, tokens.tolist(), strict=True):
            if seen != term.tokens:
                raise CaptureError(
                    f"the router of layer {layer} saw {seen:.0f} tokens in this step, expected {term.tokens}: the "
                    "layer's forward was bypassed, or tokens went to their experts twice. Check the code that replaces "
                    "the layer's forward; otherwise the routers' losses and metrics would be wrong"
                )
        aux = term.experts * (counts * probability).sum(1) / tokens**2
        load = counts / counts.sum(1, keepdim=True)
        z = column["z"] / tokens
        per_layer = {
            "load_max": load.amax(1) * term.experts,
            "load_min": load.amin(1) * term.experts,
            "load_entropy": torch.special.entr(load).sum(1) / math.log(term.experts)
            if term.experts > 1
            else load[:, 0],
            "router_entropy": column["entropy"] / tokens,
        }
        overall = {"load_max": per_layer["load_max"].max(), "load_min": per_layer["load_min"].min()}
        overall |= {name: per_layer[name].mean() for name in ("load_entropy", "router_entropy")}
        if column["compared"].min() > 0:
            per_layer["route_changed"] = column["changed"] / column["compared"]
            overall["route_changed"] = column["changed"].sum() / column["compared"].sum()
        losses = {"aux_loss": aux.mean(), "z_loss": z.mean()}
        named = {f"moe/{name}": float(value) for name, value in {**losses, **overall}.items()}
        for name, values in per_layer.items():
            pairs = zip(term.layers, values.tolist(), strict=True)
            named |= {f"moe/{name}_layer/{layer}": value for layer, value in pairs}
        # a loss of weight 0 may be infinite, so it is not multiplied
        parts = ((term.aux, losses["aux_loss"]), (term.z, losses["z_loss"]))
        return RouterMetrics(sum(weight * float(value) for weight, value in parts if weight), named)
