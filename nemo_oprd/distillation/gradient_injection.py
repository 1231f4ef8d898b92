"""Adds the gradient of a stage-local loss to a hidden state on its way back. The heart of training on every stage.

A pipeline stage can't hand a loss to the schedule: only the last stage's loss function runs. So the loss of a layer is
not a node that must reach a root; it is an identity in the forward pass whose backward adds d(loss)/d(hidden) to the
gradient that comes from above. Nothing but the rows' indices, weights and targets is kept beside the hidden state,
which autograd keeps anyway as the input of the next layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from megatron.core.utils import make_viewless_tensor

# (float32 [m, D] some rows of the hidden state, which of the n rows they are) -> their weighted loss, a scalar
RowsToLoss = Callable[[torch.Tensor, slice], torch.Tensor]
Learned = Sequence[torch.nn.Parameter]

# Rows turned into float32 at a time: bounds the transient memory of value and gradient (8192 x 4096 x 4 B = 128 MiB).
ROW_CHUNK = 8192


def row_chunks(n: int) -> Iterator[slice]:
    """Slices that cover 0..n in chunks of `ROW_CHUNK`."""
    return (slice(start, min(start + ROW_CHUNK, n)) for start in range(0, n, ROW_CHUNK))


class _InjectGradient(torch.autograd.Function):
    """Identity; backward adds the gradient of `loss(hidden[rows])` (Megatron hands layers [S, 1, D]).

    Parameters of the loss itself are inputs, too: autograd accumulates their gradients like those of any weight, so
    that recomputation, DDP and the optimizer find them where they look.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        rows: torch.Tensor,
        loss: RowsToLoss,
        keep_rows: bool,
        done: Callable[[torch.Tensor], None],
        *learned: torch.nn.Parameter,
    ) -> torch.Tensor:
        ctx.loss, ctx.keep_rows, ctx.done, ctx.learned = loss, keep_rows, done, learned
        kept = hidden.flatten(0, 1).index_select(0, rows) if keep_rows else hidden
        ctx.save_for_backward(kept, rows)
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, grad_output: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        kept, rows = ctx.saved_tensors
        total = grad_output.clone()
        flat = total.flatten(0, 1)
        squared = torch.zeros((), dtype=torch.float64, device=total.device)
        of_learned = [torch.zeros_like(parameter) for parameter in ctx.learned]
        for chunk in row_chunks(len(rows)):
            here = rows[chunk]
            picked = kept[chunk] if ctx.keep_rows else kept.flatten(0, 1).index_select(0, here)
            with torch.enable_grad():
                leaf = picked.detach().float().requires_grad_()
                gradient, *more = torch.autograd.grad(ctx.loss(leaf, chunk), (leaf, *ctx.learned))
            for part_sum, part in zip(of_learned, more, strict=True):
                part_sum += part
            # added in float32 and rounded once
            flat[here] = (flat[here].float() + gradient).to(flat.dtype)
            squared += gradient.square().sum(dtype=torch.float64)
        ctx.done(squared)
        return total, None, None, None, None, *of_learned


def inject_gradient(
    hidden: torch.Tensor,
    rows: torch.Tensor,
    loss: RowsToLoss,
    *,
    keep_rows: bool,
    done: Callable[[torch.Tensor], None] = lambda squared: None,
    learned: Learned = (),
) -> torch.Tensor:
    """`hidden` [S, 1, D] unchanged; in backward its `rows` [n] also receive the gradient of `loss(hidden[rows])`.

    Args:
        keep_rows: save a compact copy of the rows instead of the hidden state itself. Right for the last layer of a
            pipeline stage, whose output the schedule frees after sending: saving it whole would keep it alive.
        done: called with the squared norm of what was added, each time backward passes here (the guard counts these).
        learned: float32 parameters of `loss` itself (a trained projector), which receive their gradients as well.
    """
    injected = _InjectGradient.apply(hidden, rows, loss, keep_rows, done, *learned)
    # the schedule frees a stage's output after sending it, and refuses to do so for a view
    return make_viewless_tensor(injected, requires_grad=True, keep_graph=True)
