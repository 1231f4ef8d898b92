"""Attention with grouped heads: keys and values that are repeated, as in float32 on a GPU, give the grouped result."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from nemo_oprd.megatron import attention
from nemo_oprd.megatron.attention import SDPAttention

HEADS, TOKENS, CHANNELS = 12, 33, 16


def project_attention() -> SDPAttention:
    """The module without Megatron's configuration, of which `_attend` needs the scale only."""
    core = SDPAttention.__new__(SDPAttention)
    torch.nn.Module.__init__(core)
    core.scale = 0.3
    return core


@pytest.mark.parametrize("groups", [1, 2, 12])
def test_repeated_keys_and_values_equal_grouped_ones(groups: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Output and gradients; the branch of a GPU runs here on the CPU, where both forms are supported."""
    draw = torch.Generator().manual_seed(groups)
    inputs = [torch.randn(2, heads, TOKENS, CHANNELS, generator=draw) for heads in (HEADS, groups, groups)]
    weight = torch.randn(2, HEADS, TOKENS, CHANNELS, generator=draw)
    calls: list[tuple[int, bool]] = []

    def note(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: object) -> torch.Tensor:
        calls.append((k.shape[1], "enable_gqa" in options))
        return scaled_dot_product_attention(q, k, v, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(attention, "scaled_dot_product_attention", note)

    def run(*, repeats: bool) -> list[torch.Tensor]:
        leaves = [tensor.clone().requires_grad_() for tensor in inputs]
        monkeypatch.setattr(attention, "repeats_heads", lambda q: repeats)
        out = project_attention()._attend(*leaves)
        return [out.detach(), *torch.autograd.grad((out * weight).sum(), leaves)]

    grouped, repeated = run(repeats=False), run(repeats=True)
    assert calls == [(groups, True), (HEADS, False)]
    for found, expected in zip(repeated, grouped, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("device", "dtype", "repeated"),
    [
        ("cpu", torch.float32, False),
        ("meta", torch.bfloat16, False),
        ("meta", torch.float16, False),
        ("meta", torch.float32, True),
    ],
)
def test_where_heads_are_repeated(device: str, dtype: torch.dtype, repeated: bool) -> None:
    """Off the CPU, which "meta" stands for, and only where flash attention refuses the dtype."""
    assert attention.repeats_heads(torch.empty(1, device=device, dtype=dtype)) == repeated
