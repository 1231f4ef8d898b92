"""The metrics of one update: sums by name over all ranks, the routers' metrics, and the metrics of a step.

Other formulas stand beside their observers: `hidden_state_metrics`, `output_head_metrics`, `TokenMetrics`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist

from nemo_oprd.batch.plan import BatchPlan, StepPlan
from nemo_oprd.batch.token_table import PROFILE_BINS, TokenTable
from nemo_oprd.distillation.hidden_state_loss import LAYER_SUMS, LayerSums, hidden_state_metrics, position_gap
from nemo_oprd.distillation.metrics.injection_counts import CaptureError
from nemo_oprd.distillation.metrics.token_metrics import OUTPUT, REPRESENTATION, TokenMetrics
from nemo_oprd.distillation.objective import StepObjective
from nemo_oprd.distillation.output_head import ROW_METRICS, output_head_metrics
from nemo_oprd.distillation.router_losses import RouterLosses, RouterTerm
from nemo_oprd.distillation.step_batch import StepBatch

# Sums by name over the ranks of an update: the sums of its observers, added up in one all-reduce.


class NamedSums:
    """Float64 sums by name, which are views of one flat tensor.

    All ranks have the same names in the same order. A stage adds the sums of its layers, the last stage also those of
    the output loss. Among ranks with the same rows, only the first one adds sums over them.
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
        """Returns name -> the sum over all ranks of `group` (None: all ranks), on the CPU. Each of them calls this."""
        dist.all_reduce(self._flat, group=group)
        return self._views(self._flat.cpu())


# The metrics of the student's routers in one update, from their sums over all ranks.


@dataclass(frozen=True)
class RouterMetrics:
    """The routers' losses and metrics."""

    loss: float  # what the routers' losses add to the total loss
    named: dict[str, float]  # the metrics by their names in metrics.jsonl

    @property
    def nonfinite_reason(self) -> str | None:
        """A text with both losses of the routers if their weighted sum is not finite; else None."""
        if math.isfinite(self.loss):
            return None
        return ", ".join(f"{name} is {self.named[name]}" for name in ("moe/aux_loss", "moe/z_loss"))

    @staticmethod
    def from_sums(sums: torch.Tensor, term: RouterTerm | None) -> RouterMetrics:
        """Returns the metrics from the sum "routers" of `RouterLosses` over all ranks; empty without layers that count.

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


def step_sums(layers: Sequence[int], batch: StepBatch, place: torch.device) -> NamedSums:
    """Returns the sums of an update's observers, all 0: `HiddenStateLoss`, `OutputHeadLoss` and `RouterLosses`."""
    responses, routers = len(batch.rollouts), batch.routers
    slots = 0 if batch.token_slots is None else batch.token_slots.count + 1
    return NamedSums(
        {
            "layers": (len(layers), len(LAYER_SUMS)),
            "profile": (2, PROFILE_BINS),
            "output_passes": (),
            "output_loss": (),
            "output_rows": (len(ROW_METRICS), 2),
            "rep_responses": (responses,),
            "output_responses": (responses,),
            "rep_tokens": (len(REPRESENTATION), slots),
            "output_tokens": (len(OUTPUT), slots),
            "routers": (0, 0) if routers is None else routers.sums_shape,
        },
        place,
    )


@dataclass(frozen=True)
class StepMetrics:
    """The metrics of one update's forward and backward passes, the same on every student rank.

    Attributes:
        trained_losses: the losses whose weight is not 0 in this update, by their names in metrics.jsonl, before the
            weight is applied.
        per_teacher: "rep_loss" and "output_loss" -> teacher's number -> weighted mean over the teacher's rows.
    """

    named: dict[str, float]  # the metrics by their names in metrics.jsonl (docs/runs.md)
    trained_losses: dict[str, float]
    per_teacher: dict[str, dict[int, float]]
    position_gap: dict[int, float]  # profile bin (`row_bins`) -> 1 - mean cosine of the deepest supervised layer
    loss_per_response: list[float]  # the responses' contributions to the total loss
    identical_layers: list[int]  # supervised layers at which student and teacher agree exactly
    targets_bytes: int  # the most bytes of targets that this rank held at a time
    nonfinite_reason: str | None  # where a loss or a gradient is not finite; None if all are finite
    tokens: TokenMetrics | None  # values per token of some responses; None if none are kept

    @property
    def loss(self) -> float:
        """The total loss."""
        return self.named["loss/total"]

    def per_layer(self, name: str) -> dict[int, float]:
        """Returns layer -> its metric `name` of `LAYER_METRICS`."""
        prefix = f"rep/{name}_layer/"
        return {int(key.removeprefix(prefix)): v for key, v in self.named.items() if key.startswith(prefix)}


def step_metrics(
    sums: dict[str, torch.Tensor], layers: LayerSums, batch: StepBatch, adaptive: dict[str, float], targets_bytes: int
) -> StepMetrics:
    """Computes means and norms from the sums of all ranks.

    Args:
        sums: of `step_sums`, on the CPU; `layers` are those of its sum "layers".
        adaptive: the metrics of adaptive weights.
    """
    plan, objective = batch.plan, batch.objective
    table, output_table = plan.hidden.table, None if plan.output is None else plan.output.table
    positions, slots = objective.run.positions, batch.token_slots
    representation = hidden_state_metrics(layers, sums["profile"], objective.layer_weights, table, positions)
    output = output_head_metrics(sums, objective.output)
    router = RouterMetrics.from_sums(sums["routers"], batch.routers)
    weights = {"rep/loss": objective.weight if layers else 0.0, "output/loss": objective.output_weight}
    weights = {name: weight for name, weight in weights.items() if weight}
    trained = {name: {**representation, **output}[name] for name in weights}
    # a loss of weight 0 may be infinite, so it is not multiplied
    total = sum(weight * trained[name] for name, weight in weights.items()) + router.loss
    reason = _nonfinite_reason(sums, layers, plan.hidden, trained)
    named = {"loss/total": total, **_scheduled_weights(objective), **adaptive, **representation, **output}
    return StepMetrics(
        named={**named, **router.named},
        trained_losses=trained,
        per_teacher={
            "output_loss": _loss_per_teacher(sums["output_responses"], output_table, plan, weights.get("output/loss")),
            "rep_loss": _loss_per_teacher(sums["rep_responses"], table, plan, weights.get("rep/loss")),
        },
        position_gap=position_gap(sums["profile"], table, positions) if layers else {},
        loss_per_response=(sums["rep_responses"] + sums["output_responses"]).tolist(),
        identical_layers=[layer for layer, found in layers.items() if found["squared_error"] == 0.0],
        targets_bytes=targets_bytes,
        nonfinite_reason=reason or router.nonfinite_reason,
        tokens=None if slots is None else TokenMetrics.from_sums(sums, slots, table, output_table, named),
    )


def _loss_per_teacher(
    shares: torch.Tensor, table: TokenTable | None, plan: StepPlan, weight: float | None
) -> dict[int, float]:
    """Returns teacher number -> mean of one loss over the teacher's rows; empty if the loss has no weight or no rows.

    `shares` [responses] are the responses' contributions of this loss to the total loss.
    """
    if table is None or not weight:
        return {}
    teacher_of = np.zeros(len(shares), dtype=np.int64)
    for packs in plan.hidden.packs:
        for teacher, pack in zip(plan.taught_by, packs, strict=True):
            teacher_of[list(pack.sequences)] = teacher
    owner = teacher_of[table.response]
    losses = {}
    for teacher in np.unique(owner).tolist():
        rows = owner == teacher
        share = float(shares[torch.from_numpy(np.unique(table.response[rows]))].sum())
        losses[teacher] = share / (weight * float(table.weight[rows].sum()))
    return losses


def _scheduled_weights(objective: StepObjective) -> dict[str, float]:
    """Returns the weights of the losses by metric name, if any of them changes over the steps."""
    if not any(isinstance(weight, list) for weight in objective.run.weights):
        return {}
    named = {"loss/weight_representation": objective.weight} if objective.run.layers else {}
    return named if objective.run.output is None else {**named, "loss/weight_output": objective.output_weight}


def _nonfinite_reason(
    sums: dict[str, torch.Tensor], layers: LayerSums, plan: BatchPlan, trained: dict[str, float]
) -> str | None:
    """Names the trained losses and gradients that are not finite, and their first responses; None without any."""
    reasons, responses = [], set()
    if not math.isfinite(trained.get("output/loss", 0.0)):
        reasons.append(f"the output-space loss is {trained['output/loss']}")
        responses |= _nonfinite_responses(sums["output_responses"])
    found = {layer: (of["loss"], of["squared_gradient"]) for layer, of in layers.items() if "rep/loss" in trained}
    wrong = [layer for layer, (loss, gradient) in found.items() if not math.isfinite(loss + gradient)]
    if wrong:
        others = f" (and {len(wrong) - 1} others)" if len(wrong) > 1 else ""
        loss, gradient = found[wrong[0]]
        reasons.append(f"loss {loss} and gradient norm {gradient**0.5} at layer {wrong[0]}{others}")
        responses |= _nonfinite_responses(sums["rep_responses"])
    if not reasons:
        return None
    return ", ".join([*reasons, *(_place(response, plan) for response in sorted(responses)[:3])])


def _nonfinite_responses(shares: torch.Tensor) -> set[int]:
    return set((~torch.isfinite(shares)).nonzero()[:, 0].tolist())


def _place(response: int, plan: BatchPlan) -> str:
    for data, packs in enumerate(plan.packs):
        for m, pack in enumerate(packs):
            if response in pack.sequences:
                return f"response {response} in microbatch {m} of data-parallel rank {data}"
    raise AssertionError(f"response {response} is in no microbatch")
