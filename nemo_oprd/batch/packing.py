"""Rollouts -> packed microbatches for one layout, and the rank and row of each token. Pure index arithmetic.

Sequences are concatenated (THD); there is no padded batch. A sequence is padded only where the layout requires it: to a
multiple of 2 * context for zig-zag context parallelism, and at the end of a pack so that sequence parallelism divides
the pack. Padding comes after a sequence's last token, so causal attention ignores it.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, replace

import numpy as np

from nemo_oprd.batch.layout import Layout


def partition_by_length(lengths: list[int], parts: int) -> list[list[int]]:
    """Splits sequences over `parts` data-parallel ranks with balanced token counts; deterministic.

    Assigns the longest sequence first, each to the rank with the fewest tokens so far. A rank may get no sequence.
    Indices within a part are ascending. Sequences of length 0 are omitted.
    """
    loads = [(0, part) for part in range(parts)]  # a heap: the fewest tokens first, then the lowest rank
    chosen: list[list[int]] = [[] for _ in range(parts)]
    for i in sorted(filter(lengths.__getitem__, range(len(lengths))), key=lambda i: (-lengths[i], i)):
        load, part = loads[0]
        chosen[part].append(i)
        heapq.heapreplace(loads, (load + lengths[i], part))
    return [sorted(part) for part in chosen]


def fill_microbatches(indices: list[int], lengths: list[int], token_budget: int) -> list[list[int]]:
    """Groups sequences into packs of at most `token_budget` tokens (first fit, longest first); deterministic.

    A sequence longer than the budget gets a pack of its own, because splitting the sequence would change the result.
    """
    packs: list[list[int]] = []
    room: list[int] = []
    for i in sorted(indices, key=lambda i: (-lengths[i], i)):
        fit = next((p for p, free in enumerate(room) if lengths[i] <= free), None)
        if fit is None:
            packs.append([])
            room.append(token_budget)
            fit = len(packs) - 1
        packs[fit].append(i)
        room[fit] -= lengths[i]
    return packs


@dataclass(frozen=True)
class Pack:
    """One microbatch: its sequences (indices into the step's rollouts) and their positions in the pack.

    `lengths[j]` is the number of tokens of the j-th sequence that are computed; `offsets[j]` and `padded[j]` are the
    start and the padded length of the sequence in the whole pack. `widest` is the number of tokens of the largest pack
    with the same microbatch number, over all data-parallel ranks.
    """

    sequences: tuple[int, ...]
    lengths: tuple[int, ...]
    offsets: np.ndarray
    padded: np.ndarray
    layout: Layout
    widest: int

    @staticmethod
    def build(sequences: list[int], lengths: list[int], layout: Layout) -> Pack:
        """Lays out `sequences` for `layout`; without sequences the pack holds only padding (a rank without work)."""
        unit = 2 * layout.context if layout.context > 1 else 1
        padded = np.array([-(-lengths[i] // unit) * unit for i in sequences] or [unit], dtype=np.int64)
        grain = int(np.lcm(_parts(layout), unit))
        padded[-1] += -int(padded.sum()) % grain
        offsets = np.concatenate([[0], np.cumsum(padded)[:-1]])
        computed = tuple(lengths[i] for i in sequences)
        return Pack(tuple(sequences), computed, offsets, padded, layout, widest=int(padded.sum()))

    @property
    def total(self) -> int:
        """Number of tokens of the whole pack, including padding."""
        return int(self.padded.sum())

    @property
    def most_tokens(self) -> int:
        """The largest number of tokens that a rank of a pipeline stage holds of this microbatch, padding included."""
        return self.widest // _parts(self.layout)

    @property
    def cu_seqlens(self) -> np.ndarray:
        """[sequences + 1] cumulative padded lengths of the whole pack (before context parallelism)."""
        return np.concatenate([self.offsets, [self.total]])

    def context_slice(self, context: int) -> np.ndarray:
        """Returns the positions in the whole pack that context rank `context` holds, in that rank's order."""
        if self.layout.context == 1:
            return np.arange(self.total)
        size = self.layout.context
        parts = []
        for offset, length in zip(self.offsets, self.padded, strict=True):
            chunk = int(length) // (2 * size)
            parts.append(offset + np.arange(context * chunk, (context + 1) * chunk))
            mirrored = 2 * size - 1 - context
            parts.append(offset + np.arange(mirrored * chunk, (mirrored + 1) * chunk))
        return np.concatenate(parts)


def make_packs(lengths: list[int], layout: Layout, token_budget: int) -> list[list[Pack]]:
    """Returns a step's microbatches: `packs[d]` are those of data-parallel rank d. Sequences of length 0 are omitted.

    Every rank gets the same number of microbatches; with an interleaved schedule the number is a multiple of the
    pipeline size, because Megatron's schedule rejects an incomplete last group. Empty packs make up the difference.
    """
    parts = partition_by_length(lengths, layout.data)
    groups = [fill_microbatches(part, lengths, token_budget) for part in parts]
    count = max(1, *(len(group) for group in groups))
    if layout.virtual_pipeline > 1:
        count = -(-count // layout.pipeline) * layout.pipeline
    filled = [group + [[]] * (count - len(group)) for group in groups]
    packs = [[Pack.build(sequences, lengths, layout) for sequences in group] for group in filled]
    widest = [max(pack.total for pack in alike) for alike in zip(*packs, strict=True)]
    return [[replace(pack, widest=most) for pack, most in zip(part, widest, strict=True)] for part in packs]


def _parts(layout: Layout) -> int:
    """Returns the number of equal parts into which the context and tensor ranks split a pack."""
    return layout.context * (layout.tensor if layout.sequence else 1)
