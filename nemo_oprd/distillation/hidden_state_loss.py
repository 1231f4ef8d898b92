"""The student's observer: each supervised layer's loss is measured, and its gradient injected, where the layer is."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from nemo_oprd.batch.position_bins import PROFILE_BINS
from nemo_oprd.distillation.gradient_injection import Learned, inject_gradient, row_chunks
from nemo_oprd.distillation.output_head import OutputHeadLoss
from nemo_oprd.losses.representation import RowLoss


@dataclass
class LayerTarget:
    """The supervision of one layer in one microbatch on this rank: n rows.

    `weight` already holds 1 / (global counts); `scale` is what the layer's loss is multiplied by in the total.
    """

    rows: torch.Tensor  # [n] int64
    weight: torch.Tensor  # [n] float32
    response: torch.Tensor  # [n] int64, index of the rollout
    target: torch.Tensor  # [n, D] in the run's precision
    scale: float
    bins: torch.Tensor | None = None  # [2, n] int64: where a row's cosine is counted in the position profile


@dataclass
class HiddenStateLoss:
    """The student's observer: measures each supervised layer once and injects its gradient.

    Under recompute the first pass runs without gradients: the value is taken there, the gradient is attached when the
    layer runs again.

    Args:
        targets: layer -> what to match.
        row_loss: the distance per row.
        dim_reduction: handed to `row_loss`.
        final_layer: the layer that is supervised after the final norm, None if none is.
        num_responses: of the whole batch.
        measure: False on ranks whose rows another rank counts already (replicas under plain tensor parallelism).
        project: (layer, float32 [n, D]) -> what is compared; the bridge's student side goes here.
        learned: layer -> the parameters of `project` that are trained.
        output: the output-space term, on the last stage.
    """

    targets: dict[int, LayerTarget]
    row_loss: RowLoss
    dim_reduction: str
    num_responses: int
    final_layer: int | None = None
    measure: bool = True
    project: Callable[[int, torch.Tensor], torch.Tensor] | None = None
    learned: Callable[[int], Learned] = lambda layer: ()
    output: OutputHeadLoss | None = None
    measured: dict[int, torch.Tensor] = field(default_factory=dict)
    injections: Counter = field(default_factory=Counter)
    injected: dict[int, torch.Tensor] = field(default_factory=dict)
    per_response: torch.Tensor | None = None  # float64 [num_responses], shares of the total loss
    profile: torch.Tensor | None = None  # float64 [2, PROFILE_BINS], sums of cosines of the layer whose target has bins

    # order of the sums in `measured[layer]` (float64 [5]); the norm ratio is |student| / |teacher|
    SUMS = ("loss", "cosine", "squared_error", "squared_target", "norm_ratio")

    def at_layer(self, layer: int, hidden: torch.Tensor, *, stage_ends: bool) -> torch.Tensor:
        """Supervises `layer`, unless it is supervised after the final norm."""
        return hidden if layer == self.final_layer else self._supervise(layer, hidden, keep_rows=stage_ends)

    def after_final_norm(self, hidden: torch.Tensor) -> torch.Tensor:
        """Supervises the last layer and its distribution; nothing else keeps the norm's output, so only rows are."""
        if self.final_layer is not None:
            hidden = self._supervise(self.final_layer, hidden, keep_rows=True)
        return hidden if self.output is None else self.output.attach(hidden)

    def _supervise(self, layer: int, hidden: torch.Tensor, *, keep_rows: bool) -> torch.Tensor:
        target = self.targets.get(layer)
        if target is None or len(target.rows) == 0:
            return hidden
        if self.measure and layer not in self.measured:
            self.measured[layer] = self._measure(layer, hidden.detach(), target)
        if not torch.is_grad_enabled() or target.scale == 0.0:
            return hidden

        def loss(rows_ND: torch.Tensor, chunk: slice) -> torch.Tensor:
            return target.scale * (self._distance(layer, rows_ND, target, chunk) * target.weight[chunk]).sum()

        def done(squared: torch.Tensor) -> None:
            self.injections[layer] += 1
            self.injected[layer] = self.injected.get(layer, 0.0) + squared

        learned = self.learned(layer)
        return inject_gradient(hidden, target.rows, loss, keep_rows=keep_rows, done=done, learned=learned)

    def _student(self, layer: int, rows_ND: torch.Tensor) -> torch.Tensor:
        return rows_ND if self.project is None else self.project(layer, rows_ND)

    def _distance(self, layer: int, rows_ND: torch.Tensor, target: LayerTarget, chunk: slice) -> torch.Tensor:
        return self.row_loss(self._student(layer, rows_ND), target.target[chunk].float(), self.dim_reduction)

    @torch.no_grad()
    def _measure(self, layer: int, hidden: torch.Tensor, target: LayerTarget) -> torch.Tensor:
        sums = torch.zeros(len(self.SUMS), dtype=torch.float64, device=hidden.device)
        for chunk in row_chunks(len(target.rows)):
            rows_ND = hidden.flatten(0, 1).index_select(0, target.rows[chunk]).float()
            compared, teacher_ND = self._student(layer, rows_ND), target.target[chunk].float()
            distance = self.row_loss(compared, teacher_ND, self.dim_reduction)
            if target.scale:  # what is only measured may be infinite
                self._add_per_response(distance.double() * target.weight[chunk] * target.scale, target.response[chunk])
            cosine = torch.nn.functional.cosine_similarity(compared, teacher_ND, dim=-1).double()
            sums += torch.stack(
                [
                    (distance.double() * target.weight[chunk]).sum(),
                    cosine.sum(),
                    (compared - teacher_ND).square().sum(dtype=torch.float64),
                    teacher_ND.square().sum(dtype=torch.float64),
                    (compared.norm(dim=-1) / teacher_ND.norm(dim=-1).clamp_min(1e-30)).sum(dtype=torch.float64),
                ]
            )
            if target.bins is not None:
                if self.profile is None:
                    self.profile = cosine.new_zeros(2, PROFILE_BINS)
                self.profile.scatter_add_(1, target.bins[:, chunk], cosine.expand(2, -1))
        return sums

    def _add_per_response(self, losses: torch.Tensor, response: torch.Tensor) -> None:
        if self.per_response is None:
            self.per_response = losses.new_zeros(self.num_responses)
        self.per_response.index_add_(0, response, losses)
