"""The metrics of one update, from the sums that its observers measured on all ranks.

The formulas stand beside the observers: `hidden_state_metrics`, `output_head_metrics`, `RouterMetrics`, `TokenMetrics`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from nemo_oprd.batch.plan import BatchPlan, StepPlan
from nemo_oprd.batch.position_bins import PROFILE_BINS
from nemo_oprd.batch.token_table import TokenTable
from nemo_oprd.distillation.hidden_state_loss import LAYER_SUMS, LayerSums, hidden_state_metrics, position_gap
from nemo_oprd.distillation.metrics.named_sums import NamedSums
from nemo_oprd.distillation.metrics.router_metrics import RouterMetrics
from nemo_oprd.distillation.metrics.token_metrics import OUTPUT, REPRESENTATION, TokenMetrics
from nemo_oprd.distillation.objective import StepObjective
from nemo_oprd.distillation.output_head import ROW_METRICS, output_head_metrics
from nemo_oprd.distillation.step_batch import StepBatch


def step_sums(layers: Sequence[int], batch: StepBatch, place: torch.device) -> NamedSums:
    """What the observers of an update measure, all 0: `HiddenStateLoss`, `OutputHeadLoss` and `RouterLosses`."""
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
        """Layer -> its metric `name` of `LAYER_METRICS`."""
        prefix = f"rep/{name}_layer/"
        return {int(key.removeprefix(prefix)): v for key, v in self.named.items() if key.startswith(prefix)}


def step_metrics(
    sums: dict[str, torch.Tensor], layers: LayerSums, batch: StepBatch, adaptive: dict[str, float], targets_bytes: int
) -> StepMetrics:
    """Means and norms from the sums of all ranks.

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
    """Teacher's number -> mean of one loss over the teacher's rows; empty if the loss has no weight or no rows.

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
    """The weights of the losses by metric name, if any of them changes over the updates."""
    if not any(isinstance(weight, list) for weight in objective.run.weights):
        return {}
    named = {"loss/weight_representation": objective.weight} if objective.run.layers else {}
    return named if objective.run.output is None else {**named, "loss/weight_output": objective.output_weight}


def _nonfinite_reason(
    sums: dict[str, torch.Tensor], layers: LayerSums, plan: BatchPlan, trained: dict[str, float]
) -> str | None:
    """The trained losses and gradients that are not finite, and their first responses; None if all are finite."""
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
