"""Core attention on PyTorch's SDPA, for use without Transformer Engine; capped core attention; rotary embeddings.

`SDPAttention` replaces Megatron's `DotProductAttention`, which rejects packed sequences and context parallelism and
builds the whole score matrix. Three paths, chosen by the `PackedSeqParams` of the microbatch:
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
import torch.distributed as dist
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel.mappings import (
    all_gather_last_dim_from_tensor_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.module import MegatronModule
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

from nemo_oprd.batch.packing import Pack
from nemo_oprd.config.memory_bounds import CAPPED_QUERIES
from nemo_oprd.megatron.kv_cache import DecodeParams, KVCache
from nemo_oprd.megatron.parallel import on_device
from nemo_oprd.models.rope import Frequencies

# Sequences share a padded SDPA call if the longest is at most this many times the shortest; this bounds wasted work.
BUCKET_RATIO = 1.5
# the dtypes of flash attention
FLASH_DTYPES = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Bucket:
    """B sequences of similar length, padded to T tokens, that share a call of SDPA."""

    index: torch.Tensor | None  # int64 [B * T] into the packed tokens; None: the bucket is the pack
    sequences: int
    longest: int

    def gather(self, states: torch.Tensor) -> torch.Tensor:
        """Gathers the bucket's sequences from the packed tokens: [S, heads, C] -> [B, heads, T, C]."""
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
        """Returns the plan for `pack` on context rank `context`."""
        if pack.layout.context > 1:
            return AttentionPlan._zigzag(pack, context)
        lengths, offsets = pack.padded, pack.offsets
        if len(set(lengths.tolist())) == 1:  # one after the other, so that nothing has to be moved
            return AttentionPlan([Bucket(None, len(lengths), int(lengths[0]))])
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
        """Attends; query [S, A, C] (packed) -> [S, A * C], query [s, B, A, C] (decoding) -> [s, B, A * C]."""
        if isinstance(packed_seq_params, DecodeParams):
            assert packed_seq_params.cache is not None
            return self._decode(query, key, value, packed_seq_params.cache)
        plan = getattr(packed_seq_params, "attention_plan", None)
        assert plan is not None, "SDPAttention needs packed sequences with an attention plan"
        if plan.chunks:
            return self._context_parallel(query, key, value, plan)
        if plan.order is None:
            value = value.contiguous()  # a view, which would keep the product of all three for the backward pass
        outputs = []
        for bucket in plan.buckets:
            attended = self._attend(*(bucket.gather(states) for states in (query, key, value)))
            outputs.append(attended.transpose(1, 2).flatten(0, 1))
        out = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
        return (out if plan.order is None else out.index_select(0, plan.order)).flatten(1)

    def _attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Attends causally over whole sequences: [B, A, T, C], [B, G, T, C], [B, G, T, C] -> [B, A, T, C].

        On a GPU only flash attention takes grouped heads, and only of half precision. With float32 torch would choose
        the math kernel, which makes the matrix of all scores: 13 GB for 12 heads and 16,384 tokens. So the keys and
        values are repeated there, which the memory-efficient kernel takes.
        """
        if repeats_heads(q):
            k, v = _repeated(k, q), _repeated(v, q)
            return scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.scale)
        return scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.scale, enable_gqa=True)

    def _attend_last(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Attends like `_attend`, with at most one query per key: those of the last tokens."""
        from torch.nn.attention.bias import causal_lower_right  # takes half a second: it imports torch's compiler

        k, v = _repeated(k, q), _repeated(v, q)
        bias = causal_lower_right(q.shape[2], k.shape[2])
        return scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=self.scale)

    def _context_parallel(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, plan: AttentionPlan
    ) -> torch.Tensor:
        """Attends with all keys and values, which every context rank gathers; their gradient is reduce-scattered."""
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
    """Returns whether `SDPAttention._attend` repeats keys and values of grouped heads for these queries."""
    return q.device.type != "cpu" and q.dtype not in FLASH_DTYPES


def _repeated(states: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """Repeats keys or values [B, G, T, C] once for each query head: [B, A, T, C]."""
    groups = q.shape[1] // states.shape[1]
    return states if groups == 1 else states.repeat_interleave(groups, dim=1)


# Core attention whose products of queries and keys are bounded, as Gemma 2's: cap * tanh(product / cap).
#
# Neither Transformer Engine in Megatron-core 0.19 nor torch's fused attention has it without a compiler. Here it is
# plain torch on CPUs and GPUs, for packed sequences, several context ranks, and sliding windows. The scores of some
# queries are in memory at a time; the backward pass computes them again.
#
# Shapes as in the module's docstring.


QUERIES = CAPPED_QUERIES


class CappedAttention(SDPAttention):
    """The core attention module of a provider that has `attn_logit_softcapping` and `query_pre_attn_scalar`."""

    def __init__(self, config: Any, layer_number: int, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, layer_number, *args, **kwargs)
        self.scale = config.query_pre_attn_scalar**-0.5
        self.cap: float | None = config.attn_logit_softcapping
        # number of keys before its own that a query sees; None: all
        self.left: int | None = config.window_size[0] if config.window_attn_skip_freq[layer_number - 1] else None

    def _attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return self._attend_last(q, k, v)

    def _attend_last(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Attends like `SDPAttention._attend_last`; there may also be as many queries as keys."""
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
        """Computes `_attend_last` with all scores at once."""
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


# Rotary embeddings: cosines and sines of a call's tokens, computed once for all layers.
#
# Megatron's attention would compute them again in every layer, for queries and for keys, and for packed sequences it
# would wait for the device to read the sequences' lengths, four times per layer. `RotatedSelfAttention` therefore
# rotates queries and keys itself; Megatron gets no angles.
#
# S tokens of this rank, B sequences of a decoding batch, s their tokens of a call, C rotated channels.


# Cosines and sines, each [.., 1, C] before the dimension of the heads, in the weights' dtype.
Rotation = tuple[torch.Tensor, torch.Tensor]


def packed_rotation(
    frequencies: Frequencies, positions: torch.Tensor, is_long: torch.Tensor | None, dtype: torch.dtype
) -> Rotation:
    """Returns the rotation [S, 1, 1, C] of packed tokens at `positions` int64 [S] of their sequences.

    `is_long` bool [S]: whether a token's whole sequence is longer than `frequencies.switch`; None without a switch.
    """
    inv_freq = frequencies.inv_freq
    chosen = inv_freq[0] if is_long is None else torch.where(is_long[:, None], inv_freq[1], inv_freq[0])
    return _cos_sin(frequencies.scale, positions[:, None] * chosen, dtype, [len(positions), 1, 1])


def decoding_rotation(
    frequencies: Frequencies, positions: torch.Tensor, lengths: torch.Tensor | None, dtype: torch.dtype
) -> Rotation:
    """Returns the rotation [s, B, 1, C] for `positions` [B, s] of sequences that have `lengths` [B] tokens so far."""
    inv_freq = frequencies.inv_freq
    chosen = inv_freq[0]
    if frequencies.switch is not None:
        assert lengths is not None
        chosen = torch.where((lengths > frequencies.switch)[:, None], inv_freq[1], inv_freq[0])  # [B, C / 2]
    return _cos_sin(frequencies.scale, positions.t()[..., None] * chosen, dtype, [*positions.t().shape, 1])


def _cos_sin(scale: float, angles: torch.Tensor, dtype: torch.dtype, shape: list[int]) -> Rotation:
    """Returns cosine and sine, times `scale`, of angles [.., C / 2], for both halves of the channels."""
    both = torch.cat([angles, angles], dim=-1).view(*shape, -1)
    return (torch.cos(both) * scale).to(dtype), (torch.sin(both) * scale).to(dtype)


def rotate(states: torch.Tensor, rotation: Rotation) -> torch.Tensor:
    """Rotates the first channels, as many as `rotation` has, of queries or keys [s, B, heads, .]; keeps the others."""
    cos, sin = rotation
    rotated, rest = states[..., : cos.shape[-1]], states[..., cos.shape[-1] :]
    low, high = rotated.chunk(2, dim=-1)
    rotated = rotated * cos + torch.cat([-high, low], dim=-1) * sin
    return torch.cat([rotated, rest], dim=-1) if rest.shape[-1] else rotated


class ReplicatedKVAttention(SelfAttention):
    """Megatron's self-attention with more tensor ranks than key/value heads, in the tensor group of its own role.

    The fused projection [(A + 2G) * C, D] is interleaved by key/value head, and cut evenly over the N tensor ranks,
    wherever that falls. N / G ranks share a key/value head: each gathers the projected tokens, and takes the head's key
    and value and its own A / N queries. The backward pass of the gathering sums the gradients of all ranks.
    Megatron's own method does the same in the process's global tensor group, which is that of one role only.
    """

    def get_query_key_value_tensors(
        self, hidden_states: torch.Tensor, key_value_states: Any = None, output_gate: bool = False, **kwargs: Any
    ) -> Any:
        """Returns (query, key, value), and the gate with `output_gate`, each [s, B, heads, channels]."""
        group, groups = self.pg_collection.tp, self.config.num_query_groups
        if groups >= group.size():
            return super().get_query_key_value_tensors(hidden_states, key_value_states, output_gate, **kwargs)
        mixed, _ = self.linear_qkv(hidden_states)
        mixed = all_gather_last_dim_from_tensor_parallel_region(mixed, group=group)
        shared_by = group.size() // groups
        head, part = divmod(group.rank(), shared_by)
        of_head = mixed.unflatten(-1, (groups, -1, self.hidden_size_per_attention_head))[..., head, :, :]
        queries = self.config.num_attention_heads // groups
        query, *gate, key, value = of_head.split([queries, *([queries] if output_gate else []), 1, 1], dim=2)
        first, count = part * queries // shared_by, queries // shared_by
        query, *gate = (each.narrow(2, first, count) for each in (query, *gate))
        # copies: views would keep what was gathered for the backward pass
        query, key, value, *gate = (each.contiguous() for each in (query, key, value, *gate))
        query = query if self.q_layernorm is None else self.q_layernorm(query)
        key = key if self.k_layernorm is None else self.k_layernorm(key)
        return (query, key, value, *gate)


class NormOfAllHeads(torch.nn.Module):
    """RMSNorm of the queries, or keys, of all heads together: x / sqrt(mean(x^2) + eps) * w over A * C channels.

    Every tensor rank has some of the heads and the whole weight, of which it uses its part. Megatron adds up the
    gradients of weights of this name over tensor ranks, which is right for whole weights and not for parts. Ranks that
    share a key/value head each add its squares to the sum, which is then divided by their number.
    """

    def __init__(self, heads: int, norm: torch.nn.Module, eps: float, channels: int, group: dist.ProcessGroup) -> None:
        """Makes a norm of `heads` heads of C `channels` over the ranks of `group`, with dtype and device of `norm`."""
        super().__init__()
        given = next(norm.parameters())
        self.width, self.eps, self.group = heads * channels, eps, group
        self.copies = max(1, group.size() // heads)
        self.weight = torch.nn.Parameter(torch.ones(self.width, dtype=given.dtype, device=given.device))
        self.start = group.rank() // self.copies * max(1, heads // group.size()) * channels

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """Normalises [s, B, heads here, C]; keeps shape and dtype, and computes the norm in float32."""
        weight = self.weight.narrow(0, self.start, states.shape[2:].numel())
        normed: torch.Tensor = _NormOverRanks.apply(states, weight, self.group, self.width * self.copies, self.eps)
        return normed


class _NormOverRanks(torch.autograd.Function):
    """The norm of `NormOfAllHeads`, which keeps its input and a number per token for the backward pass."""

    @staticmethod
    def forward(
        ctx: Any, states: torch.Tensor, weight: torch.Tensor, group: dist.ProcessGroup, width: int, eps: float
    ) -> torch.Tensor:
        flat = states.float().flatten(2)
        scale = _sum_over_ranks(flat.square().sum(-1, keepdim=True), group).div_(width).add_(eps).rsqrt_()
        ctx.save_for_backward(states, weight, scale)
        ctx.group, ctx.width = group, width
        return (weight * (flat * scale).to(states.dtype)).view(states.shape)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        states, weight, scale = ctx.saved_tensors
        flat, gradient = states.float().flatten(2), gradients[0].flatten(2)
        of_weight = (gradient * (flat * scale).to(states.dtype)).sum((0, 1), dtype=torch.float)
        gradient = gradient.float() * weight.float()
        # the scale depends on all ranks' heads, and all ranks' outputs depend on the scale
        products = _sum_over_ranks((gradient * flat).sum(-1, keepdim=True), ctx.group)
        of_states = gradient * scale - flat * (products * scale**3 / ctx.width)
        return of_states.to(states.dtype).view(states.shape), of_weight.to(weight.dtype), None, None, None


def _sum_over_ranks(values: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    if group.size() > 1:
        dist.all_reduce(values, group=group)
    return values


# Megatron's class is named again, so that the test of calls into Megatron compares what `super()` calls
class RotatedSelfAttention(ReplicatedKVAttention, SelfAttention):
    """Megatron's self-attention, whose queries and keys are rotated by `packed_seq_params.rotation`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._rotation: Rotation | None = None  # only while `forward` runs

    def forward(self, *args: Any, packed_seq_params: Any = None, **kwargs: Any) -> Any:
        """Runs the parent class's forward with the rotation of `packed_seq_params`."""
        self._rotation = packed_seq_params.rotation
        try:
            return super().forward(*args, packed_seq_params=packed_seq_params, **kwargs)
        finally:
            self._rotation = None

    def get_query_key_value_tensors(self, *args: Any, **kwargs: Any) -> Any:
        """Returns (query, key, value), each [s, B, heads, channels], the first two of them rotated."""
        query, key, value = super().get_query_key_value_tensors(*args, **kwargs)
        assert self._rotation is not None
        return rotate(query, self._rotation), rotate(key, self._rotation), value
