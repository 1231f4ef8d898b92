"""The stand-ins for FLA's kernels: shapes and dtypes of this project's torch kernels, forward and backward."""

from __future__ import annotations

import torch

from nemo_oprd.megatron import delta_net
from nemo_oprd.tools.rehearse import fla_functions

TOKENS, HEADS, KEY, VALUE = 150, 3, 8, 16
BOUNDS = torch.tensor([0, 70, TOKENS])


def drawn(*shape: int) -> torch.Tensor:
    """Made anew, and with a gradient."""
    return torch.randn(*shape, dtype=torch.bfloat16).requires_grad_()


def test_the_rule() -> None:
    inputs = [drawn(1, TOKENS, HEADS, width) for width in (KEY, KEY, VALUE)]
    g, beta = -torch.rand(1, TOKENS, HEADS).requires_grad_(), drawn(1, TOKENS, HEADS)
    theirs, nothing = fla_functions.chunk_gated_delta_rule(*inputs, g=g, beta=beta, cu_seqlens=BOUNDS)
    ours, _ = delta_net.gated_delta_rule(*inputs, g=g, beta=beta, cu_seqlens=BOUNDS)
    assert (theirs.shape, theirs.dtype, nothing) == (ours.shape, ours.dtype, None)
    leaves = [*inputs, beta]
    gradients = torch.autograd.grad(theirs.sum(), leaves)
    assert [(each.shape, each.dtype) for each in gradients] == [(each.shape, each.dtype) for each in leaves]


def test_the_convolution_keeps_the_product_that_it_is_a_part_of() -> None:
    product, weight = drawn(1, TOKENS, 40), drawn(24, 4)
    part = product[..., :24]
    kept: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        theirs, _ = fla_functions.causal_conv1d(part, weight, None, activation="silu", cu_seqlens=BOUNDS)
    ours, _ = delta_net.causal_convolution(part, weight, cu_seqlens=BOUNDS)
    assert (theirs.shape, theirs.dtype, theirs.is_contiguous()) == (ours.shape, ours.dtype, True)
    assert kept[0].untyped_storage().nbytes() == product.untyped_storage().nbytes()
    of_product, of_weight = torch.autograd.grad(theirs.sum(), [product, weight])
    assert (of_product.shape, of_weight.shape, of_weight.dtype) == (product.shape, weight.shape, weight.dtype)


def test_the_norm_keeps_what_it_returns() -> None:
    states = drawn(1, TOKENS, HEADS, KEY)
    kept: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        normed = fla_functions.l2norm(states)
    assert (normed.shape, normed.dtype) == (delta_net.l2norm(states).shape, states.dtype)
    assert [each.shape for each in kept] == [states.shape, states.shape[:-1]]
