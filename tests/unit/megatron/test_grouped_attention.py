"""Attention with grouped heads: keys and values that are repeated, as in float32 on a GPU, give the grouped result."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from nemo_oprd.batch.layout import Layout
from nemo_oprd.batch.packing import Pack
from nemo_oprd.megatron import attention
from nemo_oprd.megatron.attention import AttentionPlan, SDPAttention

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


@pytest.mark.parametrize("lengths", [[7], [7, 7, 7], [5, 9, 4], [9, 9, 3, 1]])
def test_packed_sequences_attend_to_themselves(lengths: list[int]) -> None:
    """Output and gradients are those of each sequence alone; sequences of one length are not moved."""
    plan = AttentionPlan.build(Pack.build(list(range(len(lengths))), lengths, Layout()), 0)
    assert (plan.order is None) == (len(set(lengths)) == 1)
    draw, total = torch.Generator().manual_seed(0), sum(lengths)
    leaves = [torch.randn(total, heads, 8, generator=draw, requires_grad=True) for heads in (4, 2, 2)]
    weight = torch.randn(total, 4 * 8, generator=draw)
    found = project_attention().forward(*leaves, None, packed_seq_params=SimpleNamespace(attention_plan=plan))
    alone = []
    for parts in zip(*(leaf.split(lengths) for leaf in leaves), strict=True):
        q, k, v = (part.transpose(0, 1)[None].double() for part in parts)
        k, v = (each.repeat_interleave(2, dim=1) for each in (k, v))
        length = q.shape[2]
        scores = (q @ k.mT * 0.3).masked_fill(torch.ones(length, length).triu(1).bool(), -torch.inf)
        alone.append((scores.softmax(-1) @ v)[0].transpose(0, 1).flatten(1))
    expected = torch.cat(alone)
    torch.testing.assert_close(found, expected.float(), rtol=1e-5, atol=1e-6)
    gradients = [torch.autograd.grad((out * weight).sum(), leaves, retain_graph=True) for out in (found, expected)]
    for ours, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
