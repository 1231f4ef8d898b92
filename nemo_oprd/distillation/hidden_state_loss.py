"""The student's observer: each supervised layer's loss is measured, and its gradient injected, where the layer is."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch

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


# Position profile: the first bin is a response's first (last) token, bin j > 0 those with 2^(j-1) < number <= 2^j, so
# that bins 0..j together are the first (last) 2^j tokens. 2^23 tokens are more than any response has.
PROFILE_BINS = 24


def profile_bins(numbers: np.ndarray) -> np.ndarray:
    """Bins of 0-based token numbers, counted from a response's start or from its end."""
    return np.ceil(np.log2(numbers + 1)).astype(np.int64)


@dataclass
class HiddenStateLoss:
    """The student's observer: measures each supervised layer once and injects its gradient.

    Under recompute the first pass runs without gradients: the value is taken there, the gradient is attached when the
    layer runs again.

    Args:
        terms: layer -> what to match.
        row_loss: the distance per row.
        dim_reduction: handed to `row_loss`.
        final_layer: the layer that is supervised after the final norm, None if none is.
        num_responses: of the whole batch.
        measure: False on ranks whose rows another rank counts already (replicas under plain tensor parallelism).
        project: (layer, float32 [n, D]) -> what is compared; the bridge's student side goes here.
        learned: layer -> the parameters of `project` that are trained.
        output: the output-space term, on the last stage.
    """

    terms: dict[int, LayerTarget]
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
    profile: torch.Tensor | None = None  # float64 [2, PROFILE_BINS], sums of cosines of the layer whose term has bins

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
        term = self.terms.get(layer)
        if term is None or len(term.rows) == 0:
            return hidden
        if self.measure and layer not in self.measured:
            self.measured[layer] = self._measure(layer, hidden.detach(), term)
        if not torch.is_grad_enabled() or term.scale == 0.0:
            return hidden

        def loss(rows_ND: torch.Tensor, chunk: slice) -> torch.Tensor:
            return term.scale * (self._distance(layer, rows_ND, term, chunk) * term.weight[chunk]).sum()

        def done(squared: torch.Tensor) -> None:
            self.injections[layer] += 1
            self.injected[layer] = self.injected.get(layer, 0.0) + squared

        learned = self.learned(layer)
        return inject_gradient(hidden, term.rows, loss, keep_rows=keep_rows, done=done, learned=learned)

    def _student(self, layer: int, rows_ND: torch.Tensor) -> torch.Tensor:
        return rows_ND if self.project is None else self.project(layer, rows_ND)

    def _distance(self, layer: int, rows_ND: torch.Tensor, term: LayerTarget, chunk: slice) -> torch.Tensor:
        return self.row_loss(self._student(layer, rows_ND), term.target[chunk].float(), self.dim_reduction)

    @torch.no_grad()
    def _measure(self, layer: int, hidden: torch.Tensor, term: LayerTarget) -> torch.Tensor:
        sums = torch.zeros(len(self.SUMS), dtype=torch.float64, device=hidden.device)
        for chunk in row_chunks(len(term.rows)):
            rows_ND = hidden.flatten(0, 1).index_select(0, term.rows[chunk]).float()
            compared, target = self._student(layer, rows_ND), term.target[chunk].float()
            distance = self.row_loss(compared, target, self.dim_reduction)
            if term.scale:  # what is only measured may be infinite
                self._share_out(distance.double() * term.weight[chunk] * term.scale, term.response[chunk])
            cosine = torch.nn.functional.cosine_similarity(compared, target, dim=-1).double()
            sums += torch.stack(
                [
                    (distance.double() * term.weight[chunk]).sum(),
                    cosine.sum(),
                    (compared - target).square().sum(dtype=torch.float64),
                    target.square().sum(dtype=torch.float64),
                    (compared.norm(dim=-1) / target.norm(dim=-1).clamp_min(1e-30)).sum(dtype=torch.float64),
                ]
            )
            if term.bins is not None:
                if self.profile is None:
                    self.profile = cosine.new_zeros(2, PROFILE_BINS)
                self.profile.scatter_add_(1, term.bins[:, chunk], cosine.expand(2, -1))
        return sums

    def _share_out(self, losses: torch.Tensor, response: torch.Tensor) -> None:
        if self.per_response is None:
            self.per_response = losses.new_zeros(self.num_responses)
        self.per_response.index_add_(0, response, losses)
