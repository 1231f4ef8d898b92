"""The gated block's activation, against autograd's own and against finite differences; what it keeps."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import silu

from nemo_oprd.megatron.swiglu import SwiGLU
from tests.support.live_bytes import LiveBytes


def plain(both: torch.Tensor) -> torch.Tensor:
    """As Megatron's MLP writes it."""
    gate, value = both.chunk(2, -1)
    return silu(gate) * (value + 0.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("shape", [(5, 1, 12), (0, 1, 6), (4, 6)])
def test_bit_for_bit_as_autograd(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    draw = torch.Generator().manual_seed(0)
    both = (3 * torch.randn(shape, generator=draw)).to(dtype)
    found = []
    for function in (plain, SwiGLU.apply):
        leaf = both.clone().requires_grad_(True)
        result = function(leaf)
        upstream = torch.randn(result.shape, generator=torch.Generator().manual_seed(1)).to(dtype)
        result.backward(upstream)
        found.append((result.detach(), leaf.grad))
    assert torch.equal(found[0][0], found[1][0])
    assert torch.equal(found[0][1], found[1][1])
    assert torch.equal(leaf, both)  # the input is as it was


def test_gradient_against_finite_differences() -> None:
    both = torch.randn(3, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(2), requires_grad=True)
    assert torch.autograd.gradcheck(SwiGLU.apply, (both,))


def test_only_the_output_is_made_and_only_the_input_kept() -> None:
    """F is 64: of 10 tokens, 64 * 10 * 4 bytes are the output; the SiLU lives until the product is there."""
    both, one = torch.randn(10, 128, requires_grad=True), 64 * 10 * 4
    with LiveBytes() as counter:
        result = SwiGLU.apply(both)
    assert (counter.peak, counter.now) == (2 * one, one)
    with LiveBytes() as counter:
        result.backward(torch.ones_like(result))
    assert counter.peak <= 3 * one  # the given gradient, and that of both halves
