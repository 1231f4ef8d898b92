"""The gated delta net's kernels: against the definition token by token in float64, gradients included."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from family_configs import QWEN3

from nemo_oprd.canary.delta_rule import recurrence
from nemo_oprd.megatron.delta_net import CHUNK, GRAIN, causal_convolution, gated_delta_rule, l2norm
from nemo_oprd.models import parse_model_spec
from nemo_oprd.models.architecture import DeltaNet

# of a pack: one token, a whole chunk, several chunks and a part, no tokens, parts of a chunk
LENGTHS = (1, CHUNK, 2 * CHUNK + 7, 0, GRAIN + 3, CHUNK - 1)
HEADS, KEYS, VALUES = 3, 8, 6


def inputs(dtype: torch.dtype) -> list[torch.Tensor]:
    """q, k, v, g, beta of a pack."""
    draw = torch.Generator().manual_seed(0)
    tokens = sum(LENGTHS)
    shapes = ((HEADS, KEYS), (HEADS, KEYS), (HEADS, VALUES), (HEADS,), (HEADS,))
    q, k, v, g, beta = (torch.randn(1, tokens, *shape, generator=draw, dtype=torch.float64) for shape in shapes)
    made = (l2norm(q), l2norm(k), v, -2 * g.sigmoid(), beta.sigmoid())
    return [tensor.to(dtype).requires_grad_() for tensor in made]


def bounds() -> torch.Tensor:
    return torch.tensor([0, *LENGTHS]).cumsum(0)


def outcome(dtype: torch.dtype, *, definition: bool) -> list[torch.Tensor]:
    """The outputs, and the gradients of all inputs."""
    given = inputs(dtype)
    if definition:
        parts = [slice(*pair) for pair in zip(bounds()[:-1].tolist(), bounds()[1:].tolist(), strict=True)]
        rows = [recurrence(*(x[:, part] for x in given))[0] for part in parts if part.start < part.stop]
        out = torch.cat(rows, dim=1)
    else:
        out = gated_delta_rule(*given, cu_seqlens=bounds())[0]
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    (out * weights.to(dtype)).sum().backward()
    gradients = [x.grad for x in given]
    assert all(gradient is not None for gradient in gradients)
    return [out.detach(), *(gradient for gradient in gradients if gradient is not None)]


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
def test_the_rule_is_the_recurrence(dtype: torch.dtype, tolerance: float) -> None:
    expected = outcome(torch.float64, definition=True)
    for found, exact in zip(outcome(dtype, definition=False), expected, strict=True):
        assert found.dtype == dtype
        assert float((found.double() - exact).norm() / exact.norm()) < tolerance


def test_context_ranks_must_divide_the_heads() -> None:
    spec = replace(parse_model_spec(QWEN3), delta=DeltaNet((True,) * QWEN3["num_hidden_layers"], 4, 8, 8, 8, 4))
    spec.check_attention_parallel(2, 2, "student.parallel")
    with pytest.raises(ValueError, match="context=2 with student.parallel.tensor=4 does not divide the 4 key heads"):
        spec.check_attention_parallel(4, 2, "student.parallel")


def test_the_convolution_sees_its_own_sequence_only() -> None:
    draw = torch.Generator().manual_seed(2)
    x = torch.randn(1, sum(LENGTHS), 4, generator=draw, dtype=torch.float64)
    weight = torch.randn(4, 3, generator=draw, dtype=torch.float64)
    expected = torch.zeros_like(x)
    for start, end in zip(bounds()[:-1].tolist(), bounds()[1:].tolist(), strict=True):
        for t in range(start, end):
            for back in range(min(3, t - start + 1)):
                expected[0, t] += weight[:, 2 - back] * x[0, t - back]
    found = causal_convolution(x, weight, cu_seqlens=bounds())[0]
    torch.testing.assert_close(found, torch.nn.functional.silu(expected))
    whole = causal_convolution(x, weight)[0]
    assert not torch.allclose(whole[:, LENGTHS[0]], found[:, LENGTHS[0]]), "the second sequence would see the first"
