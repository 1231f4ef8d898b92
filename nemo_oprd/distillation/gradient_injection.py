"""Adds the gradient of a layer's loss to the gradient of its hidden state, so that every pipeline stage can be trained.

Megatron's schedule calls a loss function on the last stage only. The loss of a layer is therefore not a root of the
autograd graph. It is an identity in the forward pass, and its backward adds d(loss)/d(hidden) to the gradient that
arrives from the next layer. Autograd keeps the hidden state anyway, as the input of the next layer; this module keeps
the rows' indices, weights and targets besides. (For the last layer of a stage it keeps a copy of the rows, see
`inject_gradient`.)

S tokens of a sequence or of a pack, B sequences (1 for packs), D hidden size, n supervised rows of a microbatch on this
rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from megatron.core.utils import make_viewless_tensor

from nemo_oprd.losses.registry import ROW_CHUNK

# (float32 [m, D]: some rows of the hidden state; their slice of the n rows) -> the weighted loss of the rows, a scalar
RowsToLoss = Callable[[torch.Tensor, slice], torch.Tensor]
Parameters = Sequence[torch.nn.Parameter]


def row_chunks(n: int) -> Iterator[slice]:
    """Returns slices that cover 0..n in chunks of `ROW_CHUNK`."""
    return (slice(start, min(start + ROW_CHUNK, n)) for start in range(0, n, ROW_CHUNK))


class _InjectGradient(torch.autograd.Function):
    """The identity on a hidden state [S, B, D]; its backward adds the gradient of `loss(hidden[rows])`.

    The parameters of the loss are inputs of this function, so that autograd accumulates their gradients as it does for
    any weight, and recomputation, DDP and the optimizer treat them as usual.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        rows: torch.Tensor,
        loss: RowsToLoss,
        keep_rows: bool,
        on_injected: Callable[[torch.Tensor], None],
        *parameters: torch.nn.Parameter,
    ) -> torch.Tensor:
        ctx.loss, ctx.keep_rows, ctx.on_injected, ctx.parameters = loss, keep_rows, on_injected, parameters
        kept = hidden.flatten(0, 1).index_select(0, rows) if keep_rows else hidden
        ctx.save_for_backward(kept, rows)
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, grad_output: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        kept, rows = ctx.saved_tensors
        # contiguous, so that `flat` is a view of it
        total = grad_output.clone(memory_format=torch.contiguous_format)
        flat = total.flatten(0, 1)
        squared = torch.zeros((), dtype=torch.float64, device=total.device)
        parameter_grads = [torch.zeros_like(parameter) for parameter in ctx.parameters]
        for chunk in row_chunks(len(rows)):
            index = rows[chunk]
            picked = kept[chunk] if ctx.keep_rows else kept.flatten(0, 1).index_select(0, index)
            with torch.enable_grad():
                leaf = picked.detach().float().requires_grad_()
                gradient, *chunk_grads = torch.autograd.grad(ctx.loss(leaf, chunk), (leaf, *ctx.parameters))
            for parameter_grad, chunk_grad in zip(parameter_grads, chunk_grads, strict=True):
                parameter_grad += chunk_grad
            # the sum is computed in float32 and rounded once
            flat[index] = (flat[index].float() + gradient).to(flat.dtype)
            squared += gradient.square().sum(dtype=torch.float64)
        ctx.on_injected(squared)
        return total, None, None, None, None, *parameter_grads


def inject_gradient(
    hidden: torch.Tensor,
    rows: torch.Tensor,
    loss: RowsToLoss,
    *,
    keep_rows: bool,
    on_injected: Callable[[torch.Tensor], None] = lambda squared: None,
    parameters: Parameters = (),
) -> torch.Tensor:
    """Returns `hidden` [S, B, D] unchanged; in backward, its rows also receive the gradient of `loss(hidden[rows])`.

    Args:
        rows: int64 [n], indices into the S * B tokens (B is 1 for packed sequences).
        loss: called in backward, on chunks of the rows.
        keep_rows: save a copy of the rows for backward instead of the hidden state. This is needed for the last layer
            of a pipeline stage: the schedule frees a stage's output after sending it, and saving the output would
            keep its memory allocated.
        on_injected: called in every backward pass with the squared norm of the added gradient, a float64 scalar. The
            gradient check counts these calls.
        parameters: float32 parameters of `loss` (those of a trained projector); they receive their gradients, too.
    """
    injected = _InjectGradient.apply(hidden, rows, loss, keep_rows, on_injected, *parameters)
    # the schedule frees a stage's output after sending it, and rejects a view
    return make_viewless_tensor(injected, requires_grad=True, keep_graph=True)
