"""The norm of all heads together over four tensor ranks, against one computation in float64, gradients included."""

from __future__ import annotations

import pytest
import torch
from norm_cases import seeded
from pool import Pools

RANKS, CHANNELS = 4, 6


@pytest.mark.parametrize("heads", [1, 2, 4, 8])
def test_outputs_and_gradients(pools: Pools, heads: int) -> None:
    """Where ranks share a head, the sum of their gradients is that of the head."""
    states, weight, gradient = seeded(heads, CHANNELS)
    states.requires_grad_()
    weight.requires_grad_()
    flat = states.flatten(2)
    output = (weight * flat * (flat.square().mean(-1, keepdim=True) + 1e-5).rsqrt()).view(states.shape)
    (output * gradient).sum().backward()
    assert states.grad is not None and weight.grad is not None
    found = pools[RANKS].run("norm_cases:norm_of_all_heads", heads=heads, channels=CHANNELS)
    count, sharing = max(1, heads // RANKS), max(1, RANKS // heads)
    of_states = torch.zeros_like(states)
    for rank, (values, of_own, of_weight) in enumerate(found):
        first = rank // sharing * count
        part = (3, 2, count, CHANNELS)
        near(torch.tensor(values).view(part), output[:, :, first : first + count])
        of_states[:, :, first : first + count] += torch.tensor(of_own).view(part)
        near(torch.tensor(of_weight), weight.grad)
    near(of_states, states.grad)


def near(found: torch.Tensor, expected: torch.Tensor) -> None:
    """As far as float32 goes: a sum of 48 products."""
    torch.testing.assert_close(found.double(), expected.detach().double(), rtol=2e-5, atol=2e-6)
