"""The plan of one training batch: its supervised rows, its packs, and the ranks that hold each row.

Planning is index arithmetic. Every rank computes the same plan from the same rollouts, without communication.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property

import numpy as np

from nemo_oprd.batch.layout import Coordinates, Layout
from nemo_oprd.batch.packing import Pack, make_packs
from nemo_oprd.batch.token_table import TokenTable


@dataclass(frozen=True)
class LocalRows:
    """The supervised rows of one microbatch whose hidden states one rank holds."""

    table_index: np.ndarray  # int64 [n], indices of the rows in the batch's `TokenTable`, ascending
    hidden_index: np.ndarray  # int64 [n], indices of the same rows in the rank's hidden state [S, 1, D]


@dataclass(frozen=True)
class _Sequences:
    """Places of the sequences of a plan; int64 arrays, indexed by the response's number in the batch."""

    data: np.ndarray
    microbatch: np.ndarray
    offset: np.ndarray  # first token in the whole pack
    padded: np.ndarray  # padded length
    pack_tokens: np.ndarray  # tokens of the whole pack


@dataclass(frozen=True)
class RowPlaces:
    """Places of n rows; int64 arrays [n]."""

    table_index: np.ndarray  # indices of the rows in the batch's `TokenTable`
    data: np.ndarray  # the data-parallel rank
    microbatch: np.ndarray
    context: np.ndarray  # the context-parallel rank
    tensor: np.ndarray  # the tensor-parallel rank that owns the row; with sequence parallelism no other one holds it
    hidden_index: np.ndarray  # indices of the rows in that rank's hidden state [S, 1, D] of the microbatch

    def select(self, chosen: np.ndarray) -> RowPlaces:
        """Returns some of the rows, by their indices here."""
        return RowPlaces(*(getattr(self, f.name)[chosen] for f in fields(self)))


def _equal_parts(group: np.ndarray, parts: int) -> np.ndarray:
    """Divides each group of rows into `parts` consecutive parts, equal but for one row: groups [n] -> parts [n]."""
    if parts == 1:
        return np.zeros(len(group), dtype=np.int64)
    order = np.argsort(group, kind="stable")
    starts = np.flatnonzero(np.diff(group[order], prepend=-1))
    counts = np.diff(starts, append=len(group))
    number = np.arange(len(group)) - np.repeat(starts, counts)
    part = np.empty(len(group), dtype=np.int64)
    part[order] = number * parts // np.repeat(counts, counts)
    return part


@dataclass(frozen=True)
class BatchPlan:
    """One role's plan of a batch: its packs, and the rows that each of its ranks holds.

    `packs[d][m]` is microbatch m of data-parallel rank d.
    """

    table: TokenTable
    layout: Layout
    packs: list[list[Pack]]

    @staticmethod
    def build(table: TokenTable, lengths: list[int], layout: Layout, token_budget: int) -> BatchPlan:
        """Packs rollouts for `layout`; `lengths` are the tokens to compute of each rollout, 0 to omit the rollout."""
        return BatchPlan(table, layout, make_packs(lengths, layout, token_budget))

    @property
    def lengths(self) -> dict[int, int]:
        """Index of a rollout -> the number of its tokens that are computed."""
        all_packs = (pack for packs in self.packs for pack in packs)
        return {i: length for pack in all_packs for i, length in zip(pack.sequences, pack.lengths, strict=True)}

    def group_numbers(self, microbatches: int | None) -> list[range]:
        """Returns the microbatch numbers of groups of at most `microbatches` per data-parallel rank (None: one group).

        An interleaved schedule needs groups whose size is a positive multiple of the pipeline size.
        """
        count = len(self.packs[0])
        size = count if microbatches is None else microbatches
        if self.layout.virtual_pipeline > 1:
            size = max(1, size // self.layout.pipeline) * self.layout.pipeline
        return [range(start, min(start + size, count)) for start in range(0, count, size)]

    def part(self, microbatches: Sequence[int]) -> BatchPlan:
        """Returns the plan of some of the microbatches, with their rows.

        Rows keep the weights that they have in the whole batch, so the gradients of the parts add up to the gradient
        of the batch.
        """
        if len(microbatches) == len(self.packs[0]):
            return self
        return self._part(self.table, [[packs[m] for m in microbatches] for packs in self.packs])

    def _part(self, table: TokenTable, packs: list[list[Pack]]) -> BatchPlan:
        responses = [i for part in packs for pack in part for i in pack.sequences]
        return BatchPlan(table.for_responses(responses), self.layout, packs)

    def with_rows(self, table: TokenTable) -> BatchPlan:
        """Returns the plan of other rows in the same packed sequences, without sequence parallelism.

        Their indices refer to hidden states that are whole on every tensor rank.
        """
        layout = replace(self.layout, sequence=False)
        packs = [[replace(pack, layout=layout) for pack in part] for part in self.packs]
        return BatchPlan(self.table, layout, packs)._part(table, packs)

    @cached_property
    def _sequences(self) -> _Sequences:
        """The places of the responses' sequences."""
        placed = [
            (i, d, m, offset, padded, pack.total)
            for d, packs in enumerate(self.packs)
            for m, pack in enumerate(packs)
            for i, offset, padded in zip(pack.sequences, pack.offsets, pack.padded, strict=False)
        ]
        columns = np.zeros((5, 1 + max((row[0] for row in placed), default=0)), dtype=np.int64)
        for i, *place in placed:
            columns[:, i] = place
        return _Sequences(*columns)

    def places(self, responses: Sequence[int] | np.ndarray) -> RowPlaces:
        """Returns the ranks that hold the rows of some responses, and the rows' places there."""
        rows = self.table.rows_of(responses)
        response, position, layout = self.table.response[rows], self.table.position[rows], self.layout
        sequences, size = self._sequences, layout.context
        if size == 1:
            context = np.zeros(len(rows), dtype=np.int64)
            hidden_index = sequences.offset[response] + position
        else:  # zig-zag: chunk c and chunk 2 * size - 1 - c of a sequence are on context rank c
            chunk_tokens = sequences.padded[response] // (2 * size)
            chunk = position // chunk_tokens
            context = np.minimum(chunk, 2 * size - 1 - chunk)
            second_half = np.where(chunk < size, 0, chunk_tokens)
            hidden_index = sequences.offset[response] // size + position % chunk_tokens + second_half
        if layout.sequence and layout.tensor > 1:
            tokens = sequences.pack_tokens[response] // size // layout.tensor
            tensor, hidden_index = hidden_index // tokens, hidden_index % tokens
        else:
            tensor = _equal_parts(response * size + context, layout.tensor)
        return RowPlaces(rows, sequences.data[response], sequences.microbatch[response], context, tensor, hidden_index)

    @cached_property
    def _places_of_data_rank(self) -> dict[int, RowPlaces]:
        return {}

    def _on_data_rank(self, data: int) -> RowPlaces:
        """Returns the rows of one data-parallel rank, in the order of its microbatches, then of table indices."""
        if data not in self._places_of_data_rank:
            places = self.places([i for pack in self.packs[data] for i in pack.sequences])
            self._places_of_data_rank[data] = places.select(np.argsort(places.microbatch, kind="stable"))
        return self._places_of_data_rank[data]

    def _on_rank(self, coords: Coordinates) -> RowPlaces:
        """Returns the rows in the hidden states of the rank at `coords`, in the order of its microbatches."""
        places = self._on_data_rank(coords.data)
        held = places.context == coords.context
        if not self.replicated:
            held &= places.tensor == coords.tensor
        return places.select(np.flatnonzero(held))

    def local_rows(self, coords: Coordinates) -> list[LocalRows]:
        """Returns the rows in the hidden states of the rank at `coords` per microbatch, the same for all its layers."""
        places = self._on_rank(coords)
        ends = np.searchsorted(places.microbatch, np.arange(len(self.packs[coords.data]) + 1))
        return [
            LocalRows(places.table_index[first:end], places.hidden_index[first:end])
            for first, end in itertools.pairwise(ends)
        ]

    def owned_rows(self, coords: Coordinates) -> np.ndarray:
        """Returns table indices of the rows that the rank at `coords` sends or receives, ordered by microbatch.

        Under tensor parallelism without sequence parallelism all tensor ranks hold the same rows. Each of them owns an
        equal part of every response's rows, so that no row is sent twice.
        """
        places = self._on_rank(coords)
        return places.table_index[places.tensor == coords.tensor]

    def tensor_owners(self, coords: Coordinates) -> tuple[np.ndarray, np.ndarray]:
        """Returns (table indices of the rows that the rank at `coords` holds, the tensor rank that owns each)."""
        places = self._on_rank(coords)
        return places.table_index, places.tensor

    def held_microbatches(self) -> int:
        """Returns the number of microbatches with rows on a rank, summed over the ranks of one pipeline stage."""
        layout, places = self.layout, self.places([i for packs in self.packs for pack in packs for i in pack.sequences])
        held = np.zeros((layout.data, len(self.packs[0]), layout.context, layout.tensor), dtype=bool)
        tensor = slice(None) if self.replicated else places.tensor
        held[places.data, places.microbatch, places.context, tensor] = True
        return int(held.sum())

    @property
    def replicated(self) -> bool:
        """True if tensor ranks hold copies of the same hidden states."""
        return self.layout.tensor > 1 and not self.layout.sequence


@dataclass(frozen=True)
class StepPlan:
    """One role's plan of an update: the rows of the representation loss, and the rows of the output loss.

    Both plans describe the same packed sequences. The rows of `output` are in the final hidden states, which are
    gathered over tensor ranks before use; `output` is therefore planned without sequence parallelism. All sequences of
    microbatch m have the same teacher, `taught_by[m]`.
    """

    hidden: BatchPlan
    output: BatchPlan | None
    taught_by: tuple[int, ...]

    @staticmethod
    def build(
        hidden: TokenTable,
        output: TokenTable | None,
        num_responses: int,
        layout: Layout,
        token_budget: int,
        taught_by: Sequence[int] | None = None,
    ) -> StepPlan:
        """Packs the tokens that the rows depend on, and no others, for `layout`.

        Args:
            hidden, output: the rows of the representation loss, and of the output loss if there is one.
            token_budget: `train.tokens_per_microbatch`.
            taught_by: the number of each response's teacher; None: all responses have the same teacher.
        """
        lengths = np.array(hidden.needed_tokens(num_responses))
        if output is not None:
            lengths = np.maximum(lengths, output.needed_tokens(num_responses))
        owners = np.zeros(num_responses, dtype=np.int64) if taught_by is None else np.asarray(taught_by)
        packs: list[list[Pack]] = [[] for _ in range(layout.data)]
        teachers: list[int] = []
        for teacher in np.unique(owners[lengths > 0]).tolist() or [0]:
            added = make_packs(np.where(owners == teacher, lengths, 0).tolist(), layout, token_budget)
            for rank_packs, rank_added in zip(packs, added, strict=True):
                rank_packs.extend(rank_added)
            teachers += [teacher] * len(added[0])
        plan = BatchPlan(hidden, layout, packs)
        return StepPlan(plan, None if output is None else plan.with_rows(output), tuple(teachers))

    def microbatch_groups(self, microbatches: int | None) -> list[StepPlan]:
        """Returns one plan per group of `BatchPlan.group_numbers`."""
        return [self.part(numbers) for numbers in self.hidden.group_numbers(microbatches)]

    def part(self, microbatches: Sequence[int]) -> StepPlan:
        """Returns the plan of some of the microbatches, with their rows."""
        if len(microbatches) == len(self.taught_by):
            return self
        part = self.hidden.part(microbatches)
        output = None if self.output is None else part.with_rows(self.output.table)
        return StepPlan(part, output, tuple(self.taught_by[m] for m in microbatches))

    def of_teacher(self, teacher: int) -> StepPlan | None:
        """Returns the plan of one teacher's microbatches; None if the teacher has no rows."""
        part = self.part([m for m, taught_by in enumerate(self.taught_by) if taught_by == teacher])
        return part if len(part.hidden.table) or (part.output is not None and len(part.output.table)) else None

    def for_teacher(self, layout: Layout, num_responses: int, token_budget: int) -> StepPlan:
        """Returns the plan of the same rows in the teacher's sequences, packed for the teacher's layout."""
        output = None if self.output is None else self.output.table.as_read_by_teacher()
        return StepPlan.build(self.hidden.table.as_read_by_teacher(), output, num_responses, layout, token_budget)
