"""The check for massive activations: which layers and which dimensions hold the error between hidden states.

n rows of a rank, W compared values per row (hidden size, or rank of a bridge), L supervised layers.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist

from nemo_oprd.commands.doctor.findings import Finding
from nemo_oprd.config.schema import RepresentationLossConfig
from nemo_oprd.distillation.distiller import Distiller
from nemo_oprd.distillation.gradient_injection import row_chunks
from nemo_oprd.distillation.step_batch import StepBatch
from nemo_oprd.distillation.trained_projectors import student_projection
from nemo_oprd.models.megatron.parallel import device

# an error is "dominated" where the largest 1 % of the dimensions hold more than half of it, and ...
TOP_SHARE, DOMINATED = 0.01, 0.5
# ... at least ten times what they would hold if all were equal: one of 4 dimensions is no small part of them
TIMES_EQUAL = 10.0
SHOWN = 3
# the text names the layers that have this part of the loss
MOST = 0.9


@dataclass(frozen=True)
class LayerError:
    """The error of one layer of the student: its share of the representation loss, and where in the layer it is."""

    layer: int
    share: float  # of the squared error over all layers, at the layers' weights
    top: tuple[int, ...]  # the 1 % of the dimensions that hold most of it, largest first
    top_share: float  # their part of the layer's error
    width: int  # number of dimensions

    @property
    def dominated(self) -> bool:
        """Whether few dimensions hold most of the layer's error."""
        return self.top_share > max(DOMINATED, TIMES_EQUAL * len(self.top) / self.width)


def massive_activations(
    distiller: Distiller, batch: StepBatch, loss: RepresentationLossConfig, gradient_shares: dict[int, float]
) -> Finding:
    """Whether a few dimensions hold most of the hidden-state loss.

    Many models have a few dimensions with states hundreds of times larger than all others. A plain MSE then trains
    these dimensions, and in layers that have them, and hardly anything else, while the loss falls by orders of
    magnitude. Measured on the rows as the loss compares them: projected by a bridge; scaled to unit length for
    normalized_mse and cosine.

    Args:
        batch: rollouts of one teacher.
        gradient_shares: layer -> its share of the squared gradient, for the numbers.
    """
    normalized = loss.kind in ("normalized_mse", "cosine")
    errors = layer_errors(squared_errors(distiller, batch, normalized=normalized), batch.objective.layer_weights)
    return judge(errors, loss, gradient_shares)


def judge(errors: list[LayerError], loss: RepresentationLossConfig, gradient_shares: dict[int, float]) -> Finding:
    """The finding about the errors of all layers; `massive_activations` says how it is judged."""
    check = "massive activations"
    dominated = [error for error in errors if error.dominated]
    held = sum(error.share for error in dominated)
    numbers = {
        "dominated_layers": [error.layer for error in dominated],
        "share_of_loss": held,
        "layers": [
            {
                "layer": error.layer,
                "share_of_loss": error.share,
                "share_of_gradient": gradient_shares.get(error.layer),
                "top_dimensions": list(error.top[:SHOWN]),
                "share_of_top_dimensions": error.top_share,
            }
            for error in errors
        ],
    }
    if not any(error.share for error in errors):
        return Finding(check, "ok", "the states of both models are equal", numbers)
    largest = max(errors, key=lambda error: error.share)
    if held <= DOMINATED:
        text = f"no few dimensions hold the {loss.kind} loss: layers {_ranges(_most(errors))} of {len(errors)} have "
        text += f"{MOST:.0%} of it, most of all layer {largest.layer}, where {_dimensions(largest)} hold "
        return Finding(check, "ok", f"{text}{largest.top_share:.0%} of the error", numbers)
    worst = max(dominated, key=lambda error: error.top_share)
    layers = _ranges([error.layer for error in dominated])
    said = f"few dimensions hold the error of layers {layers}, which have {held:.0%} of the {loss.kind} loss: in layer "
    said += f"{worst.layer}, {_dimensions(worst)} hold {worst.top_share:.0%}"
    if loss.kind not in ("mse", "normalized_mse", "cosine"):
        text = f"{said} of the squared error; what {loss.kind} makes of it is not known here"
        return Finding(check, "skipped", text, numbers)
    choice = "loss.representation.kind=normalized_mse or cosine, or " if loss.kind == "mse" else ""
    text = f"{said}; expected at most half of the loss there: little else is trained; fix: {choice}"
    return Finding(check, "warning", f"{text}loss.representation.layers=last", numbers, code="massive-activations")


def _most(errors: list[LayerError]) -> list[int]:
    """The fewest layers that have 90 % of the loss."""
    ordered = sorted(errors, key=lambda error: -error.share)
    before = np.cumsum([0.0, *(error.share for error in ordered)])
    return [error.layer for error, earlier in zip(ordered, before, strict=False) if earlier < MOST]


def _dimensions(error: LayerError) -> str:
    shown = ", ".join(map(str, error.top[:SHOWN])) + (", ..." if len(error.top) > SHOWN else "")
    return f"{len(error.top)} of {error.width} dimensions ({shown})"


def _ranges(layers: list[int]) -> str:
    """[1, 2, 3, 5] -> "1-3, 5"."""
    parts: list[list[int]] = []
    for layer in sorted(layers):
        if parts and parts[-1][-1] == layer - 1:
            parts[-1] = [parts[-1][0], layer]
        else:
            parts.append([layer])
    return ", ".join("-".join(map(str, part)) for part in parts)


def layer_errors(squares: dict[int, np.ndarray], weights: dict[int, float]) -> list[LayerError]:
    """The layers' errors from the sums of squared differences per dimension.

    Args:
        squares: layer -> float64 [W], weighted by the rows' weights.
        weights: layer -> its weight in the representation loss.
    """
    total = sum(weights[layer] * values.sum() for layer, values in squares.items())
    errors = []
    for layer, values in sorted(squares.items()):
        top = np.argsort(-values, kind="stable")[: max(1, int(TOP_SHARE * len(values)))]
        whole = values.sum()
        share = float(weights[layer] * whole / total) if total else 0.0
        top_share = float(values[top].sum() / whole) if whole else 0.0
        errors.append(LayerError(layer, share, tuple(top.tolist()), top_share, len(values)))
    return errors


@torch.no_grad()
def squared_errors(distiller: Distiller, batch: StepBatch, *, normalized: bool) -> dict[int, np.ndarray]:
    """Layer -> float64 [W], the squared differences of the compared rows, summed with the rows' weights, on every rank.

    Args:
        batch: rollouts of one teacher.
        normalized: whether rows are scaled to unit length first.
    """
    student, layers = distiller.student, distiller.objective.layers
    (number,) = set(batch.plan.taught_by)
    sums = torch.zeros(len(layers), distiller.objective.teachers[number].width, dtype=torch.float64, device=device())
    project = student_projection(student.chunks, distiller.objective, number)
    for group in batch.groups:
        targets, states = distiller.targets(batch, group), student.hidden_states(batch.rollouts, group.hidden)
        coords = student.role.coords
        # tensor ranks without sequence parallelism hold the same rows
        if coords is None or number not in targets or (group.hidden.replicated and coords.tensor > 0):
            continue
        rows = np.concatenate([local.table_index for local in group.hidden.local_rows(coords)])
        weight = torch.from_numpy(group.hidden.table.weight[rows]).to(device())
        for layer, student_ND in states.items():
            for chunk in row_chunks(len(rows)):
                pair = project(layer, student_ND[chunk].float()), targets[number].hidden[layer][chunk].float()
                if normalized:
                    pair = tuple(torch.nn.functional.normalize(values, dim=-1) for values in pair)  # type: ignore
                squares = (pair[0] - pair[1]).double().square()
                sums[layers.index(layer)] += weight[chunk] @ squares
    dist.all_reduce(sums)
    return {layer: sums[i].cpu().numpy() for i, layer in enumerate(layers)}
