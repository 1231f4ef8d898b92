"""Rotary angles of a microbatch, in the form that Megatron's attention takes, from the frequencies of `ModelSpec.rope`.

For decoding, the cosines and sines are also computed here, because Megatron would compute them again in every layer,
for queries and for keys.

Packed sequences with the same frequencies share one table over positions. If the frequencies depend on a sequence's
total length, the table is over the tokens of the whole pack and each sequence has its own part, so that a sequence's
result does not depend on the other sequences of its pack.
"""

from __future__ import annotations

import math
from itertools import pairwise

import torch
from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import (
    _yarn_get_concentration_factor_from_config,
)
from megatron.core.transformer.transformer_config import TransformerConfig

from nemo_oprd.models.rope import Rope


def scale_rotations(config: TransformerConfig, rope: Rope) -> None:
    """Makes Megatron's attention multiply cosines and sines by `rope.scale`.

    Megatron computes that factor from YaRN's settings: `0.1 * yarn_mscale * log(yarn_rotary_scaling_factor) + 1`.
    """
    if rope.scale != 1.0:
        config.yarn_rotary_scaling_factor = math.e  # type: ignore[attr-defined]
        config.yarn_mscale = 10 * (rope.scale - 1)  # type: ignore[attr-defined]
        config.yarn_mscale_all_dim = 0.0  # type: ignore[attr-defined]


def packed_angles(
    rope: Rope, inv_freq: torch.Tensor, cu_seqlens: torch.Tensor, longest: int, total_lengths: tuple[int, ...]
) -> torch.Tensor:
    """Angles [T, 1, 1, C] of C rotated channels.

    T is the length of the longest sequence, or of the whole pack if frequencies differ between sequences.

    Args:
        inv_freq: [regimes, C / 2] of `rope`, on the model's device.
        cu_seqlens: [sequences + 1] start of each sequence in the pack, including padding, and the end of the last.
        longest: length of the longest sequence.
        total_lengths: lengths of the whole sequences, including tokens after the last computed one.
    """
    if rope.switch is None:
        positions = torch.arange(longest, device=inv_freq.device)
        return _both_halves(positions[:, None] * inv_freq[0])[:, None, None]
    bounds = cu_seqlens.tolist()
    parts = []
    for j, (start, end) in enumerate(pairwise(bounds)):
        regime = int(j < len(total_lengths) and total_lengths[j] > rope.switch)
        parts.append(torch.arange(end - start, device=inv_freq.device)[:, None] * inv_freq[regime])
    return _both_halves(torch.cat(parts))[:, None, None]


def decoding_angles(
    rope: Rope, inv_freq: torch.Tensor, positions: torch.Tensor, lengths: torch.Tensor | None
) -> torch.Tensor:
    """Angles [s, B, 1, C] for `positions` [B, s] of sequences that have `lengths` [B] tokens so far."""
    if rope.switch is None:
        return _both_halves(positions.t()[..., None] * inv_freq[0])[:, :, None]
    assert lengths is not None
    chosen = inv_freq[(lengths > rope.switch).long()]  # [B, C / 2]
    return _both_halves(positions.t()[..., None] * chosen)[:, :, None]


def rotation(angles: torch.Tensor, config: TransformerConfig) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosine and sine of `angles` [s, B, 1, C] as Megatron's attention computes them, in the weights' dtype."""
    scale = _yarn_get_concentration_factor_from_config(config)
    return (torch.cos(angles) * scale).to(config.params_dtype), (torch.sin(angles) * scale).to(config.params_dtype)


def rotate(states: torch.Tensor, rotation: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Rotates the first channels, as many as `rotation` has, of queries or keys [s, B, heads, C]; keeps the others."""
    cos, sin = rotation
    rotated, rest = states[..., : cos.shape[-1]], states[..., cos.shape[-1] :]
    low, high = rotated.chunk(2, dim=-1)
    rotated = rotated * cos + torch.cat([-high, low], dim=-1) * sin
    return torch.cat([rotated, rest], dim=-1) if rest.shape[-1] else rotated


def _both_halves(angles: torch.Tensor) -> torch.Tensor:
    return torch.cat([angles, angles], dim=-1)
