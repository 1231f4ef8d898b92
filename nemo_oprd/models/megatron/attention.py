"""Core attention on PyTorch's SDPA, used where Transformer Engine is not: packed training and cached decoding.

Replaces Megatron's `DotProductAttention`, which rejects packed sequences and context parallelism and builds the whole
score matrix. Three paths, chosen by the `PackedSeqParams` of the microbatch:
- packed (THD), one context rank: sequences of similar length share one causal SDPA call;
- packed, several context ranks: keys and values are gathered, and each zig-zag chunk attends up to its own end;
- decoding: keys and values are in a `KVCache` indexed by position.

Shapes: S packed tokens, s tokens of a decoding call, A query heads and G key/value heads on this TP rank, C channels
per head, B sequences, T positions of the cache.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.module import MegatronModule
from torch.nn.functional import scaled_dot_product_attention

from nemo_oprd.batch.packing import Pack
from nemo_oprd.models.megatron.kv_cache import DecodeParams, KVCache
from nemo_oprd.models.megatron.parallel import on_device

# Sequences share a padded SDPA call if the longest is at most this many times the shortest; this bounds wasted work.
BUCKET_RATIO = 1.5
# what flash attention computes with
FLASH_DTYPES = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Bucket:
    """B sequences of similar length, padded to T tokens, that share a call of SDPA."""

    index: torch.Tensor | None  # int64 [B * T] into the packed tokens; None: the bucket is the pack
    sequences: int
    longest: int

    def gather(self, states: torch.Tensor) -> torch.Tensor:
        """[S, heads, C] -> [B, heads, T, C]."""
        if self.index is not None:
            states = states.index_select(0, self.index)
        return states.view(self.sequences, self.longest, *states.shape[1:]).transpose(1, 2)


@dataclass
class AttentionPlan:
    """Index arithmetic of one microbatch, computed once on the host and used by every layer."""

    # without context parallelism
    buckets: list[Bucket] = field(default_factory=list)
    # int64 [S], the places of the packed tokens in the outputs of all buckets, laid end to end; None: they are in order
    order: torch.Tensor | None = None
    # for each zig-zag chunk (first local query row, rows, first key of the sequence, keys)
    chunks: list[tuple[int, int, int, int]] = field(default_factory=list)
    # int64 [S], puts the tokens gathered from all context ranks into their order in the pack
    gathered_order: torch.Tensor | None = None

    @staticmethod
    def build(pack: Pack, context: int) -> AttentionPlan:
        """The plan for `pack` on context rank `context`."""
        if pack.layout.context > 1:
            return AttentionPlan._zigzag(pack, context)
        lengths, offsets = pack.padded, pack.offsets
        if len(lengths) == 1:
            return AttentionPlan([Bucket(None, 1, pack.total)])
        buckets: list[list[int]] = []
        for j in np.argsort(-lengths, kind="stable").tolist():
            if not buckets or lengths[buckets[-1][0]] > BUCKET_RATIO * lengths[j]:
                buckets.append([])
            buckets[-1].append(j)
        plan, order, start = AttentionPlan(), np.empty(pack.total, dtype=np.int64), 0
        for bucket in buckets:
            longest = int(lengths[bucket[0]])
            column = np.arange(longest)
            valid = column < lengths[bucket][:, None]
            first = offsets[bucket][:, None]
            # padding repeats the first token; the output of padding is dropped
            index = np.where(valid, first + column, first)
            order[index[valid]] = start + np.flatnonzero(valid)
            plan.buckets.append(Bucket(on_device(index.ravel()), len(bucket), longest))
            start += index.size
        plan.order = on_device(order)
        return plan

    @staticmethod
    def _zigzag(pack: Pack, context: int) -> AttentionPlan:
        size = pack.layout.context
        plan = AttentionPlan()
        for offset, length in zip(pack.offsets.tolist(), pack.padded.tolist(), strict=True):
            chunk = length // (2 * size)
            for local, number in ((0, context), (chunk, 2 * size - 1 - context)):
                # local query rows, and the keys from the sequence's start to this chunk's end
                plan.chunks.append((offset // size + local, chunk, offset, (number + 1) * chunk))
        gathered = torch.cat([torch.from_numpy(pack.context_slice(rank)) for rank in range(size)])
        plan.gathered_order = on_device(torch.argsort(gathered))
        return plan


class SDPAttention(MegatronModule):
    """The core attention module, for Megatron's `SelfAttentionSubmodules.core_attention`."""

    def __init__(
        self,
        config: Any,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: Any = None,
        **_: Any,
    ) -> None:
        super().__init__(config=config)
        if config.attention_dropout:
            raise ValueError(
                f"attention_dropout={config.attention_dropout}: expected 0, because distillation uses no dropout; set 0"
            )
        self.layer_number = layer_number
        self.scale = softmax_scale
        self.cp_group = pg_collection.cp
        self.tp_group = pg_collection.tp  # Megatron reads it when it makes a sharded state dict

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        attn_mask_type: Any = None,
        attention_bias: torch.Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> torch.Tensor:
        """query [S, A, C] (packed) -> [S, A * C]; query [s, B, A, C] (decoding) -> [s, B, A * C]."""
        if isinstance(packed_seq_params, DecodeParams):
            assert packed_seq_params.cache is not None
            return self._decode(query, key, value, packed_seq_params.cache)
        plan = getattr(packed_seq_params, "attention_plan", None)
        assert plan is not None, "SDPAttention needs packed sequences with an attention plan"
        if plan.chunks:
            return self._context_parallel(query, key, value, plan)
        if plan.order is None:
            value = value.contiguous()  # a part of the product of all three, which would be kept for the backward pass
        outputs = []
        for bucket in plan.buckets:
            attended = self._attend(*(bucket.gather(states) for states in (query, key, value)))
            outputs.append(attended.transpose(1, 2).flatten(0, 1))
        out = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
        return (out if plan.order is None else out.index_select(0, plan.order)).flatten(1)

    def _attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Causal attention of whole sequences: [B, A, T, C], [B, G, T, C], [B, G, T, C] -> [B, A, T, C].

        On a GPU only flash attention takes grouped heads, and only of half precision. With float32 torch would choose
        the math kernel, which makes the matrix of all scores: 13 GB for 12 heads and 16,384 tokens. So the keys and
        values are repeated there, which the memory-efficient kernel takes.
        """
        if repeats_heads(q):
            k, v = _repeated(k, q), _repeated(v, q)
            return scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.scale)
        return scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.scale, enable_gqa=True)

    def _attend_last(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """As `_attend`, of fewer queries than keys, which are those of the last tokens."""
        from torch.nn.attention.bias import causal_lower_right  # takes half a second: it imports torch's compiler

        k, v = _repeated(k, q), _repeated(v, q)
        bias = causal_lower_right(q.shape[2], k.shape[2])
        return scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=self.scale)

    def _context_parallel(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, plan: AttentionPlan
    ) -> torch.Tensor:
        """Every context rank gathers all keys and values; their gradient is reduce-scattered."""
        both = torch.cat([key, value], dim=-1)
        # Megatron's mapping for sequence parallelism, applied to the context group
        gathered = gather_from_sequence_parallel_region(both, tensor_parallel_output_grad=True, group=self.cp_group)
        k_all, v_all = gathered.index_select(0, plan.gathered_order).chunk(2, dim=-1)
        parts = []
        for row, count, start, keys in plan.chunks:
            q = query[row : row + count].transpose(0, 1)[None]
            k, v = (tensor[start : start + keys].transpose(0, 1)[None] for tensor in (k_all, v_all))
            parts.append(self._attend_last(q, k, v)[0].transpose(0, 1))
        return torch.cat(parts).flatten(1)

    def _decode(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, cache: KVCache) -> torch.Tensor:
        q, k, v = (tensor.permute(1, 2, 0, 3) for tensor in (query, key, value))
        k, v = cache.update(self.layer_number, k, v)
        if cache.mask is not None:
            # One query token: the query heads of a group become the group's queries. Keys and values are not expanded,
            # and fused kernels accept the mask, which they reject together with grouped heads.
            batch, heads, _, channels = q.shape
            grouped = q.reshape(batch, k.shape[1], heads // k.shape[1], channels)
            out = scaled_dot_product_attention(grouped, k, v, attn_mask=cache.mask, scale=self.scale)
            return out.reshape(batch, 1, heads * channels).transpose(0, 1)
        return self._attend(q, k, v).permute(2, 0, 1, 3).flatten(2)


def repeats_heads(q: torch.Tensor) -> bool:
    """Whether keys and values of grouped heads are repeated for these queries, see `SDPAttention._attend`."""
    return q.device.type != "cpu" and q.dtype not in FLASH_DTYPES


def _repeated(states: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """Keys or values [B, G, T, C] once for each query head: [B, A, T, C]."""
    groups = q.shape[1] // states.shape[1]
    return states if groups == 1 else states.repeat_interleave(groups, dim=1)
