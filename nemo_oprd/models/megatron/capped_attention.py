"""Core attention whose products of queries and keys are bounded, as Gemma 2's: cap * tanh(product / cap).

Neither Transformer Engine in Megatron-core 0.19 nor torch's fused attention has it without a compiler. Here it is plain
torch on CPUs and GPUs, for packed sequences, several context ranks, and sliding windows. The scores of some queries are
in memory at a time; the backward pass computes them again.

Shapes as in `attention.py`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from nemo_oprd.config.memory_bounds import CAPPED_QUERIES
from nemo_oprd.models.megatron.attention import SDPAttention

QUERIES = CAPPED_QUERIES


class CappedAttention(SDPAttention):
    """The core attention module of a provider that has `attn_logit_softcapping` and `query_pre_attn_scalar`."""

    def __init__(self, config: Any, layer_number: int, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, layer_number, *args, **kwargs)
        self.scale = config.query_pre_attn_scalar**-0.5
        self.cap: float | None = config.attn_logit_softcapping
        # the keys to the left of the query's own that it sees; None: all
        self.left: int | None = config.window_size[0] if config.window_attn_skip_freq[layer_number - 1] else None

    def _attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return self._attend_last(q, k, v)

    def _attend_last(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """As `SDPAttention`; the numbers of queries and keys may be equal."""
        before = k.shape[2] - q.shape[2]
        parts = []
        for start in range(0, q.shape[2], QUERIES):
            some = q[:, :, start : start + QUERIES]
            stop = before + start + some.shape[2]
            first = 0 if self.left is None else max(0, before + start - self.left)
            arguments = some, k[:, :, first:stop], v[:, :, first:stop]
            if torch.is_grad_enabled():
                parts.append(checkpoint(self._scored, *arguments, use_reentrant=False, preserve_rng_state=False))
            else:
                parts.append(self._scored(*arguments))
        return torch.cat(parts, dim=2)

    def _scored(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """As `_attend_last`, with all scores at once."""
        grouped = q.unflatten(1, (k.shape[1], -1))  # [B, G, A / G, Q, C]
        scores = (grouped @ k.unsqueeze(2).mT) * self.scale
        if self.cap is not None:
            scores = (scores / self.cap).tanh() * self.cap
        queries, keys = scores.shape[-2:]
        # a query's own key minus the key, in tokens
        distance = torch.arange(keys - queries, keys, device=q.device)[:, None] - torch.arange(keys, device=q.device)
        unseen = distance < 0 if self.left is None else (distance < 0) | (distance > self.left)
        dtype = torch.promote_types(scores.dtype, torch.float32)
        weights = scores.masked_fill(unseen, -torch.inf).softmax(-1, dtype=dtype).to(q.dtype)
        return (weights @ v.unsqueeze(2)).flatten(1, 2)
