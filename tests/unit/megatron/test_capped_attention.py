"""Attention whose products are bounded, against one query at a time in float64."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.transformer.transformer_config import TransformerConfig

from nemo_oprd.megatron import attention as capped_attention
from nemo_oprd.megatron.attention import CappedAttention

HEADS, GROUPS, CHANNELS = 4, 2, 8


def attention(cap: float | None, left: int | None) -> CappedAttention:
    config = TransformerConfig(num_layers=2, hidden_size=32, num_attention_heads=HEADS, attention_dropout=0.0)
    settings = {"query_pre_attn_scalar": 5, "attn_logit_softcapping": cap, "window_size": (left or 0, 0)}
    for name, value in {**settings, "window_attn_skip_freq": [0, int(left is not None)]}.items():
        setattr(config, name, value)
    groups = SimpleNamespace(cp=None, tp=None)
    return CappedAttention(config, 2, None, "self", pg_collection=groups)


def plain(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cap: float | None, left: int | None) -> torch.Tensor:
    """[B, A, Q, C], [B, G, K, C] twice -> [B, A, Q, C]; the queries are the last tokens."""
    found = torch.empty_like(q)
    for b, a, i in torch.cartesian_prod(*(torch.arange(size) for size in q.shape[:3])).tolist():
        group, own = a // (HEADS // GROUPS), k.shape[2] - q.shape[2] + i
        first = 0 if left is None else max(0, own - left)
        scores = k[b, group, first : own + 1] @ q[b, a, i] / 5**0.5
        if cap is not None:
            scores = cap * torch.tanh(scores / cap)
        found[b, a, i] = scores.softmax(0) @ v[b, group, first : own + 1]
    return found


@pytest.mark.parametrize("cap", [None, 0.8])
@pytest.mark.parametrize("left", [None, 0, 3, 50])
@pytest.mark.parametrize(("queries", "keys"), [(9, 9), (5, 12)])
def test_attention_and_its_gradient(
    cap: float | None, left: int | None, queries: int, keys: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(capped_attention, "QUERIES", 4)  # several parts, the last one smaller
    torch.manual_seed(0)
    sizes = [(2, HEADS, queries, CHANNELS), (2, GROUPS, keys, CHANNELS), (2, GROUPS, keys, CHANNELS)]
    inputs: list[Any] = [torch.randn(size, dtype=torch.float64, requires_grad=True) for size in sizes]
    module = attention(cap, left)
    compute = module._attend if queries == keys else module._attend_last
    found, expected = compute(*inputs), plain(*inputs, cap, left)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)
    weight = torch.randn_like(found)
    ours, theirs = (torch.autograd.grad((out * weight).sum(), inputs) for out in (found, expected))
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-10, atol=1e-13)
    with torch.no_grad():
        torch.testing.assert_close(compute(*inputs), found.detach(), rtol=0, atol=0)
