"""Dispatchers of layers with experts: what they keep between passes."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from megatron.core.transformer.moe.moe_layer import MoELayer

from nemo_oprd.megatron.experts import release_weights_after_forward


class Experts(MoELayer):
    """The experts of a layer, which only have a dispatcher."""

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


class Layer(torch.nn.Module):
    """A layer that calls its experts as a module, or as Gemma 4's does."""

    def __init__(self, *, as_module: bool) -> None:
        super().__init__()
        self.mlp, self._as_module = Experts(), as_module

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return self.mlp(states) if self._as_module else self.mlp.forward(states)


@pytest.mark.parametrize("as_module", [True, False])
def test_a_dispatcher_forgets_a_pass_when_it_ends(as_module: bool) -> None:
    """Otherwise its weights hold the input of every recomputed layer, and its gradient, until the next step."""
    layer = Layer(as_module=as_module)
    chunk, dispatcher = torch.nn.Sequential(layer), layer.mlp.token_dispatcher
    states = torch.ones(2, 4, requires_grad=True)
    chunk(states)
    assert dispatcher.probs is not None, "the layer keeps its weights without this"
    release_weights_after_forward(chunk)
    chunk(states).sum().backward()
    assert dispatcher.probs is None and dispatcher.local_probs is None
    assert dispatcher.reversed_local_input_permutation_mapping is None
    assert states.grad is not None
