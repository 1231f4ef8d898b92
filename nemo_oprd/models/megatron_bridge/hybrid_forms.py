"""How the tensors of hybrid models (Qwen3-Next, Qwen3.5) are joined: gated attention, and the gated delta net's parts.

Megatron joins what the delta net projects from its input into one matrix of sections (queries, keys, values, gates,
betas, alphas), each of which is split over tensor ranks by heads. Its checkpoints hold every section by itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from nemo_oprd.models.architecture import DeltaNet, Form, ModelSpec, concatenated

if TYPE_CHECKING:
    import torch


class GatedQKV(Form):
    """q [A * 2C, D] (each head's query, then its gate), k, v -> per group its queries, gates, key and value."""

    axis = 0

    def join(self, tensors: Sequence[torch.Tensor], spec: ModelSpec) -> torch.Tensor:
        """(q, k, v) -> [(2A + 2G) * C, ...]."""
        q, k, v = (tensor.unflatten(0, (spec.num_kv_heads, -1)) for tensor in tensors)
        heads = q.unflatten(1, (-1, 2, spec.head_dim))  # [G, A/G, 2, C, ...]
        queries, gates = (heads[:, :, part].flatten(1, 2) for part in (0, 1))
        return concatenated([queries, gates, k, v], 1).flatten(0, 1)

    def split_to_hf(self, tensor: torch.Tensor, spec: ModelSpec) -> tuple[torch.Tensor, ...]:
        """[(2A + 2G) * C, ...] -> (q, k, v)."""
        channels, heads = spec.head_dim, spec.num_heads // spec.num_kv_heads
        sizes = (heads * channels, heads * channels, channels, channels)
        queries, gates, k, v = tensor.unflatten(0, (spec.num_kv_heads, -1)).split(sizes, dim=1)
        parts = [part.unflatten(1, (heads, 1, channels)) for part in (queries, gates)]
        return concatenated(parts, 2).flatten(0, 3), k.flatten(0, 1), v.flatten(0, 1)


class _Sections(Form):
    """Parts one below the other, each split over tensor ranks."""

    axis = 0

    def shard(self, tensor: torch.Tensor, rank: int, size: int, spec: ModelSpec) -> torch.Tensor:
        """The rank's part of every section."""
        return concatenated([part.chunk(size)[rank] for part in self._parts(tensor, spec)])

    def unshard(self, shards: Sequence[torch.Tensor], spec: ModelSpec) -> torch.Tensor:
        """The inverse."""
        of_ranks = [self._parts(shard, spec, len(shards)) for shard in shards]
        return concatenated([part for same in zip(*of_ranks, strict=True) for part in same])

    def _parts(self, tensor: torch.Tensor, spec: ModelSpec, ranks: int = 1) -> tuple[torch.Tensor, ...]:
        return tensor.split([rows // ranks for _, rows in self.sections(spec)])


class Convolution(_Sections):
    """[2 * key heads * K + value heads * V, 1, W]: of queries, keys and values, in Megatron as in transformers."""

    def sections(self, spec: ModelSpec) -> tuple[tuple[str, int], ...]:
        """As `Form`."""
        return _projected(_delta(spec))[:3]


class Projections(_Sections):
    """(queries with keys and values, gates, betas, alphas), as Qwen3.5's files have them -> all of them."""

    def sections(self, spec: ModelSpec) -> tuple[tuple[str, int], ...]:
        """As `Form`."""
        return _projected(_delta(spec))

    def join(self, tensors: Sequence[torch.Tensor], spec: ModelSpec) -> torch.Tensor:
        """Stacked."""
        return concatenated(tensors)

    def split_to_hf(self, tensor: torch.Tensor, spec: ModelSpec) -> tuple[torch.Tensor, ...]:
        """The inverse of `join`."""
        queries, keys, values, *rest = (rows for _, rows in self.sections(spec))
        return tensor.split([queries + keys + values, *rest])


class GroupedProjections(_Sections):
    """Qwen3-Next's two tensors: per key head its query, key, values and gates; per key head its betas and alphas."""

    def sections(self, spec: ModelSpec) -> tuple[tuple[str, int], ...]:
        """As `Form`."""
        return _projected(_delta(spec))

    def join(self, tensors: Sequence[torch.Tensor], spec: ModelSpec) -> torch.Tensor:
        """(projections, betas and alphas) -> sections."""
        heads = _delta(spec).key_heads
        sizes = [rows // heads for _, rows in self.sections(spec)]
        parts = [
            part
            for tensor, of_head in zip(tensors, (sizes[:4], sizes[4:]), strict=True)
            for part in tensor.unflatten(0, (heads, -1)).split(of_head, dim=1)
        ]
        return concatenated([part.flatten(0, 1) for part in parts])

    def split_to_hf(self, tensor: torch.Tensor, spec: ModelSpec) -> tuple[torch.Tensor, ...]:
        """The inverse of `join`."""
        heads = _delta(spec).key_heads
        parts = [part.unflatten(0, (heads, -1)) for part in self._parts(tensor, spec)]
        return tuple(concatenated(each, 1).flatten(0, 1) for each in (parts[:4], parts[4:]))


def _projected(delta: DeltaNet) -> tuple[tuple[str, int], ...]:
    """(Megatron's name of a section, its rows), in Megatron's order."""
    keys, values = delta.key_heads * delta.key_channels, delta.value_heads * delta.value_channels
    states = (("query", keys), ("key", keys), ("value", values), ("z", values))
    return (*states, ("beta", delta.value_heads), ("alpha", delta.value_heads))


def _delta(spec: ModelSpec) -> DeltaNet:
    assert spec.delta is not None, f"{spec.model_type} has no delta net"
    return spec.delta
