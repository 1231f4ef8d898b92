"""The student's observer: computes each supervised layer's loss on the stage of the layer and injects its gradient."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from nemo_oprd.batch.position_bins import PROFILE_BINS
from nemo_oprd.distillation.gradient_injection import Parameters, inject_gradient, row_chunks
from nemo_oprd.distillation.metrics.token_metrics import LayerTokens
from nemo_oprd.distillation.output_head import OutputHeadLoss
from nemo_oprd.losses.representation import RowLoss


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
        targets: layer -> its target.
        row_loss: the loss per row.
        dim_reduction: passed to `row_loss`.
        num_responses: responses in the whole batch.
        final_layer: the layer that is supervised after the final norm; None if there is none.
        counts_rows: whether this rank adds its rows to the metrics; False on replicas of another rank's rows (tensor
            parallelism without sequence parallelism).
        project: (layer, float32 [n, D]) -> the projection [n, R] that is compared; None: states are compared.
        projector_parameters: layer -> the trained parameters of `project`.
        output: the output loss, on the last stage.

    Attributes:
        measured: layer -> the sums `SUMS` over its rows, float64 [5].
        injections: layer -> how many backward passes injected its gradient.
        injected: layer -> squared norm of the injected gradients.
    """

    targets: dict[int, LayerTarget]
    row_loss: RowLoss
    dim_reduction: str
    num_responses: int
    final_layer: int | None = None
    counts_rows: bool = True
    project: Callable[[int, torch.Tensor], torch.Tensor] | None = None
    projector_parameters: Callable[[int], Parameters] = lambda layer: ()
    output: OutputHeadLoss | None = None
    measured: dict[int, torch.Tensor] = field(default_factory=dict)
    injections: Counter = field(default_factory=Counter)
    injected: dict[int, torch.Tensor] = field(default_factory=dict)
    response_losses: torch.Tensor | None = None  # float64 [num_responses], contributions to the total loss
    token_sums: torch.Tensor | None = None  # float64 [2, slots + 1], see `LayerTokens.zeros`
    profile: torch.Tensor | None = None  # float64 [2, PROFILE_BINS], sums of cosines of the layer whose target has bins

    # the norm ratio is |student| / |teacher|
    SUMS = ("loss", "cosine", "squared_error", "squared_target", "norm_ratio")

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
            self.measured[layer] = self._measure(layer, hidden.detach(), target)
        if not torch.is_grad_enabled() or target.scale == 0.0:
            return hidden

        def loss(rows_ND: torch.Tensor, chunk: slice) -> torch.Tensor:
            return target.scale * (self._row_losses(layer, rows_ND, target, chunk) * target.weight[chunk]).sum()

        def count_injection(squared_norm: torch.Tensor) -> None:
            self.injections[layer] += 1
            self.injected[layer] = self.injected.get(layer, 0.0) + squared_norm

        return inject_gradient(
            hidden,
            target.rows,
            loss,
            keep_rows=keep_rows,
            on_injected=count_injection,
            parameters=self.projector_parameters(layer),
        )

    def _projected(self, layer: int, rows_ND: torch.Tensor) -> torch.Tensor:
        return rows_ND if self.project is None else self.project(layer, rows_ND)

    def _row_losses(self, layer: int, rows_ND: torch.Tensor, target: LayerTarget, chunk: slice) -> torch.Tensor:
        return self.row_loss(self._projected(layer, rows_ND), target.target[chunk].float(), self.dim_reduction)

    @torch.no_grad()
    def _measure(self, layer: int, hidden: torch.Tensor, target: LayerTarget) -> torch.Tensor:
        sums = torch.zeros(len(self.SUMS), dtype=torch.float64, device=hidden.device)
        for chunk in row_chunks(len(target.rows)):
            rows_ND = hidden.flatten(0, 1).index_select(0, target.rows[chunk]).float()
            student_ND, teacher_ND = self._projected(layer, rows_ND), target.target[chunk].float()
            losses = self.row_loss(student_ND, teacher_ND, self.dim_reduction)
            if target.scale:  # the loss of a layer that is only measured may be infinite, and 0 * inf is NaN
                self._add_response_losses(losses.double() * target.weight[chunk] * target.scale, target.response[chunk])
            cosine = torch.nn.functional.cosine_similarity(student_ND, teacher_ND, dim=-1).double()
            sums += torch.stack(
                [
                    (losses.double() * target.weight[chunk]).sum(),
                    cosine.sum(),
                    (student_ND - teacher_ND).square().sum(dtype=torch.float64),
                    teacher_ND.square().sum(dtype=torch.float64),
                    (student_ND.norm(dim=-1) / teacher_ND.norm(dim=-1).clamp_min(1e-30)).sum(dtype=torch.float64),
                ]
            )
            if target.tokens is not None:
                self.token_sums = target.tokens.zeros() if self.token_sums is None else self.token_sums
                target.tokens.add_(self.token_sums, chunk, losses, cosine)
            if target.bins is not None:
                if self.profile is None:
                    self.profile = cosine.new_zeros(2, PROFILE_BINS)
                self.profile.scatter_add_(1, target.bins[:, chunk], cosine.expand(2, -1))
        return sums

    def _add_response_losses(self, losses: torch.Tensor, response: torch.Tensor) -> None:
        if self.response_losses is None:
            self.response_losses = losses.new_zeros(self.num_responses)
        self.response_losses.index_add_(0, response, losses)
