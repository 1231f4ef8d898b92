"""The student's observer: computes each supervised layer's loss on the stage of the layer and injects its gradient.

Its measured values are summed by name over the microbatches and ranks of an update
(`metrics/step_metrics.py`); functions at the end of this module turn the sums into metrics. A metric per
layer is one entry of `LAYER_METRICS`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple, TypeAlias

import numpy as np
import torch

from nemo_oprd.batch.token_table import PROFILE_BINS, TokenTable, profile_bins, row_bins
from nemo_oprd.distillation.gradient_injection import Parameters, inject_gradient, row_chunks
from nemo_oprd.distillation.metrics.token_metrics import LayerTokens
from nemo_oprd.distillation.output_head import OutputHeadLoss
from nemo_oprd.losses.representation import RowLoss


@dataclass(frozen=True)
class ComparedRows:
    """c rows of one layer: the compared states, float32 [c, D] (or [c, R] behind a bridge), and their losses, [c]."""

    student_ND: torch.Tensor
    teacher_ND: torch.Tensor
    loss: torch.Tensor  # float32
    weight: torch.Tensor  # float32, includes 1 / (global counts)
    cosine: torch.Tensor  # float64

    @cached_property
    def teacher_norm(self) -> torch.Tensor:
        """Lengths of the teacher's states, float32 [c]."""
        return self.teacher_ND.norm(dim=-1)


class LayerMetric(NamedTuple):
    """A sum over the rows of a layer, or a metric per layer, or both.

    Attributes:
        summed: some rows -> values of any shape, whose total is added to the sum; None: `value` uses other sums.
        value: the layer's sums -> the metric `rep/NAME_layer/LAYER`; None: the sum is only part of other metrics.
            Beside the sums `LAYER_SUMS`, "rows" is the number of the layer's rows, and "gradient_of_all_layers" the
            total of "squared_gradient".
    """

    summed: Callable[[ComparedRows], torch.Tensor] | None = None
    value: Callable[[Mapping[str, float]], float] | None = None


LAYER_METRICS = {
    "loss": LayerMetric(lambda rows: rows.loss.double() * rows.weight, lambda sums: sums["loss"]),
    "cosine_similarity": LayerMetric(lambda rows: rows.cosine, lambda sums: sums["cosine_similarity"] / sums["rows"]),
    "squared_error": LayerMetric(lambda rows: (rows.student_ND - rows.teacher_ND).square().sum(-1)),
    "squared_target": LayerMetric(lambda rows: rows.teacher_norm.double().square()),
    "relative_error": LayerMetric(value=lambda sums: ratio(sums["squared_error"], sums["squared_target"]) ** 0.5),
    "norm_ratio": LayerMetric(  # |student| / |teacher|
        lambda rows: rows.student_ND.norm(dim=-1) / rows.teacher_norm.clamp_min(1e-30),
        lambda sums: sums["norm_ratio"] / sums["rows"],
    ),
    "gradient_norm": LayerMetric(value=lambda sums: sums["squared_gradient"] ** 0.5),
    "gradient_share": LayerMetric(value=lambda sums: ratio(sums["squared_gradient"], sums["gradient_of_all_layers"])),
}
_MEASURED = {name: metric.summed for name, metric in LAYER_METRICS.items() if metric.summed is not None}
# the sums of a layer: over its rows, then the squared norm of its injected gradients, and how many were injected
LAYER_SUMS = (*_MEASURED, "squared_gradient", "injections")


def ratio(part: float, whole: float) -> float:
    """Returns part / whole, or 0 for a whole of 0."""
    return part / whole if whole else 0.0


@dataclass
class LayerTarget:
    """The target of one layer in one microbatch on this rank, for n rows."""

    rows: torch.Tensor  # [n] int64, indices into the hidden state
    weight: torch.Tensor  # [n] float32, includes 1 / (global counts)
    response: torch.Tensor  # [n] int64, index of the rollout
    target: torch.Tensor  # [n, D] in the run's precision, or [n, R] float32
    scale: float  # the factor of the layer's loss in the total loss
    bins: torch.Tensor | None = None  # [2, n] int64, a row's bins in the position profile: from the start, from the end
    tokens: LayerTokens | None = None  # where the rows' values are kept per token


@dataclass
class HiddenStateLoss:
    """The losses of one microbatch's hidden states, with their metrics; an observer of the student's forward pass.

    With recomputation, a layer's first forward pass runs without gradients and measures the loss; the second one
    attaches the gradient.

    Args:
        counts_rows: whether this rank adds its rows to the metrics; False on replicas of another rank's rows (tensor
            parallelism without sequence parallelism).
        project: (layer, float32 [n, D]) -> the values to compare with the target: the states, or a projection [n, R].

    Attributes:
        sums: name -> float64 sum over this microbatch; absent if nothing was measured. "layers" [layers,
            len(LAYER_SUMS)]; "rep_responses" [num_responses], contributions to the total loss; "profile" [2,
            PROFILE_BINS], cosines of the layer whose target has bins; "rep_tokens", see `LayerTokens`.
    """

    targets: dict[int, LayerTarget]  # layer -> its target
    row_loss: RowLoss  # the loss per row
    dim_reduction: str  # passed to `row_loss`
    layers: Sequence[int]  # the supervised layers of all stages, in the order of the sums
    num_responses: int  # responses in the whole batch
    final_layer: int | None = None  # the layer that is supervised after the final norm; None if there is none
    counts_rows: bool = True
    project: Callable[[int, torch.Tensor], torch.Tensor] = lambda layer, rows_ND: rows_ND
    projector_parameters: Mapping[int, Parameters] = field(default_factory=dict)  # layer -> trained ones of `project`
    output: OutputHeadLoss | None = None  # the output loss, on the last stage
    measured: set[int] = field(default_factory=set)  # the layers whose rows have been measured
    sums: dict[str, torch.Tensor] = field(default_factory=dict)

    def at_layer(self, layer: int, hidden: torch.Tensor, *, stage_ends: bool) -> torch.Tensor:
        """Supervises the state `hidden` [S, 1, D] of `layer`, unless `layer` is supervised after the final norm."""
        return hidden if layer == self.final_layer else self._supervise(layer, hidden, keep_rows=stage_ends)

    def after_final_norm(self, hidden: torch.Tensor) -> torch.Tensor:
        """Supervises the state after the final norm, and attaches the output loss."""
        if self.final_layer is not None:
            # autograd does not keep the norm's output, so only the rows are kept
            hidden = self._supervise(self.final_layer, hidden, keep_rows=True)
        return hidden if self.output is None else self.output.attach(hidden)

    def _supervise(self, layer: int, hidden: torch.Tensor, *, keep_rows: bool) -> torch.Tensor:
        target = self.targets.get(layer)
        if target is None or len(target.rows) == 0:
            return hidden
        if self.counts_rows and layer not in self.measured:
            self.measured.add(layer)
            self._measure(layer, hidden.detach(), target)
        if not torch.is_grad_enabled() or target.scale == 0.0:
            return hidden

        def loss(rows_ND: torch.Tensor, chunk: slice) -> torch.Tensor:
            pair = self.project(layer, rows_ND), target.target[chunk].float()
            return target.scale * (self.row_loss(*pair, self.dim_reduction) * target.weight[chunk]).sum()

        def count_injection(squared_norm: torch.Tensor) -> None:
            sums = self._sums_of_layer(layer, squared_norm)
            sums[LAYER_SUMS.index("injections")] += 1
            if self.counts_rows:
                sums[LAYER_SUMS.index("squared_gradient")] += squared_norm

        return inject_gradient(
            hidden,
            target.rows,
            loss,
            keep_rows=keep_rows,
            on_injected=count_injection,
            parameters=self.projector_parameters.get(layer, ()),
        )

    @torch.no_grad()
    def _measure(self, layer: int, hidden: torch.Tensor, target: LayerTarget) -> None:
        sums = self._sums_of_layer(layer, hidden)[: len(_MEASURED)]
        for chunk in row_chunks(len(target.rows)):
            rows_ND = hidden.flatten(0, 1).index_select(0, target.rows[chunk]).float()
            student_ND, teacher_ND = self.project(layer, rows_ND), target.target[chunk].float()
            losses, weight = self.row_loss(student_ND, teacher_ND, self.dim_reduction), target.weight[chunk]
            cosine = torch.nn.functional.cosine_similarity(student_ND, teacher_ND, dim=-1).double()
            rows = ComparedRows(student_ND, teacher_ND, losses, weight, cosine)
            sums += torch.stack([summed(rows).sum(dtype=torch.float64) for summed in _MEASURED.values()])
            if target.scale:  # the loss of a layer that is only measured may be infinite, and 0 * inf is NaN
                shares = losses.double() * weight * target.scale
                self._sum("rep_responses", hidden, self.num_responses).index_add_(0, target.response[chunk], shares)
            if target.tokens is not None:
                target.tokens.add_(self._sum("rep_tokens", hidden, *target.tokens.shape), chunk, losses, cosine)
            if target.bins is not None:
                profile = self._sum("profile", hidden, 2, PROFILE_BINS)
                profile.scatter_add_(1, target.bins[:, chunk], cosine.expand(2, -1))

    def _sum(self, name: str, like: torch.Tensor, *shape: int) -> torch.Tensor:
        """Returns the sum `name` on the device of `like`; zeros at first."""
        if name not in self.sums:
            self.sums[name] = torch.zeros(shape, dtype=torch.float64, device=like.device)
        return self.sums[name]

    def _sums_of_layer(self, layer: int, like: torch.Tensor) -> torch.Tensor:
        """Returns the sums of `layer`, [len(LAYER_SUMS)]: a view of the sum "layers"."""
        return self._sum("layers", like, len(self.layers), len(LAYER_SUMS))[self.layers.index(layer)]


LayerSums: TypeAlias = dict[int, dict[str, float]]


def layer_sums(sums_LC: torch.Tensor, layers: Sequence[int]) -> LayerSums:
    """Returns layer -> its sums `LAYER_SUMS` by name, from [layers, len(LAYER_SUMS)] on the CPU."""
    rows = zip(layers, sums_LC.tolist(), strict=True)
    return {layer: dict(zip(LAYER_SUMS, row, strict=True)) for layer, row in rows}


def mean_loss(sums: LayerSums, weights: Mapping[int, float]) -> float:
    """Returns the representation loss: the mean of the layers' losses with the layers' weights; 0 without layers."""
    return sum(weights[layer] * found["loss"] for layer, found in sums.items()) / (sum(weights.values()) or 1.0)


def hidden_state_metrics(
    sums: LayerSums, profile: torch.Tensor, weights: Mapping[int, float], table: TokenTable, positions: str
) -> dict[str, float]:
    """Returns the metrics of the representation loss by their names in metrics.jsonl; empty without supervised layers.

    `rep/cosine_first_k/K` and `rep/cosine_last_k/K` are mean cosines of the deepest supervised layer over the first
    (last) K tokens of every response (the paper's position figure); `positions` "all" gives both, others their own.

    Args:
        sums: of all ranks, as `layer_sums`.
        profile: [2, PROFILE_BINS], sums of the deepest layer's cosines by position from a response's start and end.
        positions: `loss.representation.positions`.
    """
    if not sums:
        return {}
    all_gradients = sum(found["squared_gradient"] for found in sums.values())
    shared = {"rows": len(table), "gradient_of_all_layers": all_gradients}
    per_layer = {
        name: {layer: metric.value({**found, **shared}) for layer, found in sums.items()}
        for name, metric in LAYER_METRICS.items()
        if metric.value is not None
    }
    cosines = per_layer["cosine_similarity"].values()
    named = {"rep/loss": mean_loss(sums, weights), "rep/cosine_similarity": sum(cosines) / len(cosines)}
    for name, values in per_layer.items():
        named |= {f"rep/{name}_layer/{layer}": value for layer, value in values.items()}
    for name, cosine_sums, numbers in zip(
        ("first_k", "last_k"), profile.numpy(), (table.from_start, table.from_end), strict=True
    ):
        if positions in ("all", name):
            named |= {f"rep/cosine_{name}/{k}": mean for k, mean in _cumulative(cosine_sums, numbers).items()}
    return named


def position_gap(profile: torch.Tensor, table: TokenTable, positions: str) -> dict[int, float]:
    """Returns profile bin (`row_bins`) -> 1 - mean cosine of the deepest supervised layer, for the bins that have rows.

    The arguments are those of `hidden_state_metrics`.
    """
    cosines = profile[1 if positions == "last_k" else 0].tolist()
    counts = np.bincount(row_bins(table, positions), minlength=PROFILE_BINS).tolist()
    return {j: 1 - total / count for j, (total, count) in enumerate(zip(cosines, counts, strict=True)) if count}


def _cumulative(cosine_sums: np.ndarray, numbers: np.ndarray) -> dict[int, float]:
    """Returns k = 1, 2, 4, ... -> mean cosine of rows numbered below k, from 0, up to the first k that covers all."""
    bins = profile_bins(numbers)
    counts = np.bincount(bins, minlength=PROFILE_BINS)
    means = np.cumsum(cosine_sums) / np.maximum(1, np.cumsum(counts))
    return {1 << j: float(means[j]) for j in range(int(bins.max()) + 1)}
