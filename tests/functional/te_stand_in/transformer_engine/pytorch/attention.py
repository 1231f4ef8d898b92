"""DotProductAttention for packed sequences (`qkv_format="thd"`), with grouped heads and zig-zag context parallelism."""

from __future__ import annotations

from typing import Any

import torch

from ..interfaces import since_newest
from .constants import CPLoadBalancingStrategy
from .distributed import Gather
from .modules import WithExtraState, require

# what each function's interface has since 2.20, and 2.11's lacks
_INIT = ("bottom_right_diagonal", "softcap", "name")
_SCORE_MOD = ("score_mod", "score_mod_bprop", "score_mod_tensors", "score_mod_bprop_tensors")
_ONE_TENSOR = ("qkv_layer", "kv_layer", "qkv_interleave_dim")
_POLICIES = ("thd_attention_policies", "thd_attention_policy_dispatch")
_FORWARD = ("bottom_right_diagonal", "softcap", "bf16_backward", *_SCORE_MOD, *_ONE_TENSOR, *_POLICIES)


class DotProductAttention(WithExtraState):
    @since_newest(_INIT)
    def __init__(
        self,
        num_attention_heads: int,
        kv_channels: Any,
        num_gqa_groups: int | None = None,
        attention_dropout: float = 0.0,
        qkv_format: str = "sbhd",
        attn_mask_type: str = "causal",
        window_size: Any = None,
        bottom_right_diagonal: bool | None = None,
        softcap: float = 0.0,
        sequence_parallel: bool = False,
        tp_size: int = 1,
        get_rng_state_tracker: Any = None,
        tp_group: Any = None,
        layer_number: int | None = None,
        attention_type: str = "self",
        cp_group: Any = None,
        cp_global_ranks: Any = None,
        cp_stream: Any = None,
        cp_comm_type: str = "p2p",
        softmax_scale: float | None = None,
        softmax_type: str = "vanilla",
        return_max_logit: bool | None = False,
        name: str | None = None,
    ) -> None:
        super().__init__()
        require(
            attention_dropout=(attention_dropout, 0.0),
            softcap=(softcap, 0.0),
            attention_type=(attention_type, "self"),
            cp_comm_type=(cp_comm_type, "p2p"),
            return_max_logit=(return_max_logit, False),
        )
        size = tp_size if tp_group is None else tp_group.size()
        self.heads = num_attention_heads // size
        self.groups = (num_gqa_groups or num_attention_heads) // size
        both = kv_channels if isinstance(kv_channels, tuple) else (kv_channels, kv_channels)
        self.key_channels, self.hidden_size_per_attention_head_v = both  # Megatron changes the latter where it pads
        self.scale = self.key_channels**-0.5 if softmax_scale is None else softmax_scale
        # the keys to the left of the query's own that it sees; None: all
        self.left = None if window_size is None else window_size[0]
        assert window_size is None or (window_size[0] >= 0 and window_size[1] == 0), window_size
        assert softmax_type in ("vanilla", "learnable"), softmax_type
        self.softmax_type = softmax_type
        if softmax_type == "learnable":  # of float32, on whatever device is the default one
            self.softmax_offset = torch.nn.Parameter(torch.empty(self.heads))
        self.cp_group = cp_group
        self.register_load_state_dict_post_hook(_without_extra_state_is_fine)

    @since_newest(("load_balancing_strategy",))
    def set_context_parallel_group(
        self,
        cp_group: Any,
        cp_global_ranks: Any,
        cp_stream: Any,
        cp_comm_type: str = "p2p",
        load_balancing_strategy: CPLoadBalancingStrategy = CPLoadBalancingStrategy.DUAL_CHUNK_SWAP,
    ) -> None:
        require(load_balancing_strategy=(load_balancing_strategy, CPLoadBalancingStrategy.DUAL_CHUNK_SWAP))
        self.cp_group = cp_group

    @since_newest(_FORWARD, required_before=("query_layer", "key_layer", "value_layer"))
    def forward(
        self,
        query_layer: torch.Tensor | None = None,
        key_layer: torch.Tensor | None = None,
        value_layer: torch.Tensor | None = None,
        attention_mask: Any = None,
        qkv_format: str | None = None,
        cu_seqlens_q: torch.Tensor | None = None,
        cu_seqlens_kv: torch.Tensor | None = None,
        cu_seqlens_q_padded: torch.Tensor | None = None,
        cu_seqlens_kv_padded: torch.Tensor | None = None,
        max_seqlen_q: int | None = None,
        max_seqlen_kv: int | None = None,
        attn_mask_type: str | None = None,
        window_size: Any = None,
        bottom_right_diagonal: bool | None = None,
        softcap: float | None = None,
        checkpoint_core_attention: bool = False,
        core_attention_bias_type: str = "no_bias",
        core_attention_bias: torch.Tensor | None = None,
        alibi_slopes: torch.Tensor | None = None,
        fast_zero_fill: bool = True,
        inference_params: Any = None,
        pad_between_seqs: bool | None = None,
        fp8_output: bool | None = False,
        bf16_backward: bool | None = False,
        num_splits: int | None = 1,
        score_mod: Any = None,
        score_mod_bprop: Any = None,
        score_mod_tensors: Any = None,
        score_mod_bprop_tensors: Any = None,
        qkv_layer: torch.Tensor | None = None,
        kv_layer: torch.Tensor | None = None,
        qkv_interleave_dim: int = -3,
        thd_attention_policies: Any = None,
        thd_attention_policy_dispatch: str = "auto",
    ) -> torch.Tensor:
        """query [T, A, C], key and value [T, G, C] of this context rank -> [T, A * C].

        The assertions are the conditions that the real one documents or checks; sequence lengths are global.
        """
        require(
            attention_mask=(attention_mask, None),
            qkv_format=(qkv_format, "thd"),
            attn_mask_type=(attn_mask_type, "padding_causal"),
            window_size=(window_size, None),
            softcap=(softcap, None),
            core_attention_bias_type=(core_attention_bias_type, "no_bias"),
            inference_params=(inference_params, None),
            score_mod=(score_mod, None),
            packed=((qkv_layer, kv_layer), (None, None)),
            thd_attention_policies=(thd_attention_policies, None),
        )
        assert query_layer is not None and key_layer is not None and value_layer is not None
        assert all(tensor.dim() == 3 for tensor in (query_layer, key_layer, value_layer))
        assert query_layer.shape[1:] == (self.heads, self.key_channels)
        assert key_layer.shape[1:] == (self.groups, self.key_channels)
        assert value_layer.shape == (*key_layer.shape[:2], self.hidden_size_per_attention_head_v)
        assert cu_seqlens_q is not None and cu_seqlens_kv is not None
        assert cu_seqlens_q.dtype == cu_seqlens_kv.dtype == torch.int32
        assert cu_seqlens_q.device == query_layer.device
        assert cu_seqlens_q.dim() == 1 and torch.equal(cu_seqlens_q, cu_seqlens_kv)
        for padded in (cu_seqlens_q_padded, cu_seqlens_kv_padded):  # padding belongs to the sequence before it
            if padded is not None and not torch.equal(padded, cu_seqlens_q):
                raise NotImplementedError(f"the stand-in reads padded bounds {cu_seqlens_q} only, not {padded}")
        return self._attend(query_layer, key_layer, value_layer, cu_seqlens_q, (max_seqlen_q, max_seqlen_kv))

    def _attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, bounds: torch.Tensor, longest: tuple
    ) -> torch.Tensor:
        lengths = bounds.diff()
        size, rank = (1, 0) if self.cp_group is None else (self.cp_group.size(), self.cp_group.rank())
        assert isinstance(longest[0], int) and longest[0] == longest[1] and longest[0] >= int(lengths.max())
        assert int(bounds[-1]) == len(query) * size, "every token belongs to a sequence"
        if size > 1:
            require(left=(self.left, None), softmax_type=(self.softmax_type, "vanilla"))
            assert not bool((lengths % (2 * size)).any()), "lengths must be multiples of 2 * context parallel size"
            order = torch.cat([_positions(lengths, size, other) for other in range(size)]).argsort()
            key, value = (Gather.apply(part, self.cp_group)[order] for part in (key, value))
        lengths = lengths[lengths > 0]
        own = lengths // size
        place_in_sequence = _positions(lengths, size, rank) - (lengths.cumsum(0) - lengths).repeat_interleave(own)
        (query_rows, is_query), (key_rows, is_key) = _side_by_side(own), _side_by_side(lengths)
        positions, places = place_in_sequence[query_rows][:, :, None], torch.arange(key_rows.shape[1])
        allowed = is_key[:, None] & (positions >= places)  # [sequences, queries, keys]
        if self.left is not None:
            allowed &= positions - places <= self.left
        query, key, value = query[query_rows], key[key_rows], value[key_rows]
        key, value = (part.repeat_interleave(self.heads // self.groups, dim=2) for part in (key, value))
        scores = torch.einsum("bqac,bkac->baqk", query, key).float() * self.scale
        scores = scores.masked_fill(~allowed[:, None], -torch.inf)
        if self.softmax_type == "learnable":  # a further key for every head, whose value is zero
            extra = self.softmax_offset.float()[:, None, None].expand(*scores.shape[:3], 1)
            weights = torch.cat([scores, extra], -1).softmax(-1)[..., :-1].to(query.dtype)
        else:
            weights = scores.softmax(-1).to(query.dtype)
        return torch.einsum("baqk,bkac->bqac", weights, value)[is_query].flatten(1)


def _side_by_side(lengths: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Sequences that lie one behind the other, each padded to the longest, as two tensors [sequences, longest].

    Returns:
        The row of each token, in padding that of the sequence's first token; whether there is a token.
    """
    starts, places = (lengths.cumsum(0) - lengths)[:, None], torch.arange(int(lengths.max()))
    there = places < lengths[:, None]
    return starts + places * there, there


def _positions(lengths: torch.Tensor, size: int, rank: int) -> torch.Tensor:
    """Places in the whole pack of the tokens of a context rank: of each sequence its `rank`-th chunk of 2 * size from
    the start and from the end."""
    places, start = [], 0
    for length in lengths.tolist():
        chunks = torch.arange(start, start + length).chunk(2 * size) if size > 1 else [torch.arange(length) + start]
        places += [chunks[rank], chunks[2 * size - 1 - rank]] if size > 1 else list(chunks)
        start += length
    return torch.cat(places)


def _without_extra_state_is_fine(module: torch.nn.Module, keys: Any) -> None:
    keys.missing_keys[:] = [key for key in keys.missing_keys if "core_attention._extra_state" not in key]
