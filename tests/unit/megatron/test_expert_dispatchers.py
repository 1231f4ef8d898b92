"""Dispatchers of layers with experts: what they keep between passes."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from megatron.core.transformer.moe.moe_layer import MoELayer

from nemo_oprd.megatron.experts import release_weights_after_forward


class Layer(MoELayer):
    """A layer with experts that only has a dispatcher."""

    def __init__(self) -> None:
        torch.nn.Module.__init__(self)
        self.token_dispatcher = SimpleNamespace(
            probs=None, local_probs=None, reversed_local_input_permutation_mapping=None
        )

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """Keeps weights that lead to the states, as Megatron's dispatchers do."""
        self.token_dispatcher.probs = self.token_dispatcher.local_probs = states.softmax(-1)
        self.token_dispatcher.reversed_local_input_permutation_mapping = states.argsort(-1)
        return states * self.token_dispatcher.probs


def test_a_dispatcher_forgets_a_pass_when_it_ends() -> None:
    """Otherwise its weights hold the input of every recomputed layer, and its gradient, until the next step."""
    layer = Layer()
    chunk = torch.nn.Sequential(layer)
    states = torch.ones(2, 4, requires_grad=True)
    chunk(states)
    assert layer.token_dispatcher.probs is not None, "the layer keeps its weights without this"
    release_weights_after_forward(chunk)
    chunk(states).sum().backward()
    assert layer.token_dispatcher.probs is None and layer.token_dispatcher.local_probs is None
    assert layer.token_dispatcher.reversed_local_input_permutation_mapping is None
    assert states.grad is not None
