"""The keys and values of a decoding batch, and how they reach the attention of every layer.

B sequences, s tokens of a call, G key/value heads on this TP rank, T positions of the cache, C channels per head.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from megatron.core.packed_seq_params import PackedSeqParams

from nemo_oprd.megatron.router_replay import Routes


@dataclass
class KVCache:
    """Keys and values of a decoding batch.

    Attributes:
        layers: for each layer number, keys and values [B, G, T, C] indexed by position in the sequence.
        positions: int64 [B, s], positions of the current call's tokens.
        mask: [B, 1, 1, used] in the states' dtype, 0 where a token may attend and -inf elsewhere; None while
            right-padded prompts are prefilled from position 0, which is plain causal attention.
        used: number of positions that attention reads, at least those that are filled in the longest sequence.
        rows: int64 [B, 1], 0 to B - 1; None where `mask` is None.
        lengths: int64 [B], number of tokens of each sequence so far, including those of the current call.
    """

    max_length: int
    layers: dict[int, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)
    positions: torch.Tensor | None = None
    mask: torch.Tensor | None = None
    used: int = 0
    lengths: torch.Tensor | None = None
    rows: torch.Tensor | None = None

    def update(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Writes the new keys and values [B, G, s, C] at `positions`; returns all [B, G, used, C]."""
        if layer not in self.layers:
            shape = (key.shape[0], key.shape[1], self.max_length, key.shape[3])
            self.layers[layer] = (key.new_zeros(shape), value.new_zeros(shape))
        keys, values = self.layers[layer]
        assert self.positions is not None
        if self.mask is None:
            keys[:, :, : key.shape[2]] = key
            values[:, :, : key.shape[2]] = value
        else:
            keys[self.rows, :, self.positions] = key.transpose(1, 2)
            values[self.rows, :, self.positions] = value.transpose(1, 2)
        return keys[:, :, : self.used], values[:, :, : self.used]

    def select(self, rows: torch.Tensor) -> None:
        """Keeps only the sequences with the indices `rows` (int64)."""
        for layer in list(self.layers):  # one layer at a time, so that only one layer is in memory twice
            keys, values = self.layers.pop(layer)
            self.layers[layer] = keys[rows], values[rows]


@dataclass
class DecodeParams(PackedSeqParams):
    """Passes the cache to the attention of every layer; "sbhd" prevents Megatron's attention from taking its packed
    path.

    `rotation` holds the cosines and sines that rotate queries and keys (`attention.decoding_rotation`). The model's
    forward computes them once for all layers. `routes` keeps the experts of the tokens; None: they are not kept.
    """

    qkv_format: str = "sbhd"
    cache: KVCache | None = None
    rotation: tuple[torch.Tensor, torch.Tensor] | None = None
    routes: Routes | None = None
