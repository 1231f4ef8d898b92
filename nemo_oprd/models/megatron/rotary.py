"""Rotary embeddings: cosines and sines of a call's tokens, computed once for all layers.

Megatron's attention would compute them again in every layer, for queries and for keys, and for packed sequences it
would wait for the device to read the sequences' lengths, four times per layer. `RotatedSelfAttention` therefore rotates
queries and keys itself; Megatron gets no angles.

S tokens of this rank, B sequences of a decoding batch, s their tokens of a call, C rotated channels.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer.attention import SelfAttention

from nemo_oprd.models.rope import Frequencies

# Cosines and sines, each [.., 1, C] before the dimension of the heads, in the weights' dtype.
Rotation = tuple[torch.Tensor, torch.Tensor]


def packed_rotation(
    frequencies: Frequencies, positions: torch.Tensor, is_long: torch.Tensor | None, dtype: torch.dtype
) -> Rotation:
    """The rotation [S, 1, 1, C] of packed tokens at `positions` int64 [S] of their sequences.

    `is_long` bool [S]: whether a token's whole sequence is longer than `frequencies.switch`; None if that is no matter.
    """
    inv_freq = frequencies.inv_freq
    chosen = inv_freq[0] if is_long is None else torch.where(is_long[:, None], inv_freq[1], inv_freq[0])
    return _cos_sin(frequencies.scale, positions[:, None] * chosen, dtype, [len(positions), 1, 1])


def decoding_rotation(
    frequencies: Frequencies, positions: torch.Tensor, lengths: torch.Tensor | None, dtype: torch.dtype
) -> Rotation:
    """The rotation [s, B, 1, C] for `positions` [B, s] of sequences that have `lengths` [B] tokens so far."""
    inv_freq = frequencies.inv_freq
    chosen = inv_freq[0]
    if frequencies.switch is not None:
        assert lengths is not None
        chosen = torch.where((lengths > frequencies.switch)[:, None], inv_freq[1], inv_freq[0])  # [B, C / 2]
    return _cos_sin(frequencies.scale, positions.t()[..., None] * chosen, dtype, [*positions.t().shape, 1])


def _cos_sin(scale: float, angles: torch.Tensor, dtype: torch.dtype, shape: list[int]) -> Rotation:
    """Cosine and sine, times `scale`, of angles [.., C / 2], for both halves of the channels."""
    both = torch.cat([angles, angles], dim=-1).view(*shape, -1)
    return (torch.cos(both) * scale).to(dtype), (torch.sin(both) * scale).to(dtype)


def rotate(states: torch.Tensor, rotation: Rotation) -> torch.Tensor:
    """Rotates the first channels, as many as `rotation` has, of queries or keys [s, B, heads, .]; keeps the others."""
    cos, sin = rotation
    rotated, rest = states[..., : cos.shape[-1]], states[..., cos.shape[-1] :]
    low, high = rotated.chunk(2, dim=-1)
    rotated = rotated * cos + torch.cat([-high, low], dim=-1) * sin
    return torch.cat([rotated, rest], dim=-1) if rest.shape[-1] else rotated


class RotatedSelfAttention(SelfAttention):
    """Megatron's self-attention, whose queries and keys are rotated by `packed_seq_params.rotation`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._rotation: Rotation | None = None  # only while `forward` runs

    def forward(self, *args: Any, packed_seq_params: Any = None, **kwargs: Any) -> Any:
        """As the parent class."""
        self._rotation = packed_seq_params.rotation
        try:
            return super().forward(*args, packed_seq_params=packed_seq_params, **kwargs)
        finally:
            self._rotation = None

    def get_query_key_value_tensors(self, *args: Any, **kwargs: Any) -> Any:
        """(Query, key, value), each [s, B, heads, channels], the first two of them rotated."""
        query, key, value = super().get_query_key_value_tensors(*args, **kwargs)
        assert self._rotation is not None
        return rotate(query, self._rotation), rotate(key, self._rotation), value
