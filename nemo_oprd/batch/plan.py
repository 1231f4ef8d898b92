"""The plan of one training batch: supervised rows, packs, and which rank holds which row. Pure index arithmetic.

Every rank makes the same plan from the same rollouts; nothing about it needs to be communicated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from nemo_oprd.batch.packing import Pack, make_packs
from nemo_oprd.batch.token_table import TokenTable
from nemo_oprd.layout import Coordinates, Layout


@dataclass(frozen=True)
class LocalRows:
    """Rows of one microbatch on one rank: global row numbers [n], ascending, and where they are in its hidden state."""

    row: np.ndarray
    local: np.ndarray


@dataclass(frozen=True)
class BatchPlan:
    """One role's view of a batch: its packs, and the rows that each of its ranks holds.

    `packs[d][m]` is microbatch m of data-parallel rank d.
    """

    table: TokenTable
    layout: Layout
    packs: list[list[Pack]]

    @staticmethod
    def build(table: TokenTable, lengths: list[int], layout: Layout, token_budget: int) -> BatchPlan:
        """Packs `lengths` (tokens of each rollout that are computed; 0 leaves it out) for `layout`."""
        return BatchPlan(table, layout, make_packs(lengths, layout, token_budget))

    @property
    def lengths(self) -> dict[int, int]:
        """Rollout -> tokens of it that are computed."""
        every = (pack for packs in self.packs for pack in packs)
        return {i: length for pack in every for i, length in zip(pack.sequences, pack.lengths, strict=True)}

    def microbatch_groups(self, microbatches: int | None) -> list[BatchPlan]:
        """The batch in parts of at most `microbatches` microbatches per data-parallel rank (None: in one part).

        Rows keep their weights in the whole batch, so that gradients of the parts add up to that of the batch. Under
        an interleaved schedule a part is a multiple of the pipeline size, at least one.
        """
        return [self.part(numbers) for numbers in self.group_numbers(microbatches)]

    def group_numbers(self, microbatches: int | None) -> list[range]:
        """The microbatches of each wave."""
        count = len(self.packs[0])
        size = count if microbatches is None else microbatches
        if self.layout.virtual_pipeline > 1:
            size = max(1, size // self.layout.pipeline) * self.layout.pipeline
        return [range(start, min(start + size, count)) for start in range(0, count, size)]

    def part(self, microbatches: Sequence[int]) -> BatchPlan:
        """Some of the microbatches, with their rows."""
        return self._part(self.table, [[packs[m] for m in microbatches] for packs in self.packs])

    def _part(self, table: TokenTable, packs: list[list[Pack]]) -> BatchPlan:
        responses = [i for part in packs for pack in part for i in pack.sequences]
        return BatchPlan(table.for_responses(responses), self.layout, packs)

    def with_rows(self, table: TokenTable) -> BatchPlan:
        """Other rows of the same packed sequences, in hidden states that are whole on every tensor rank."""
        layout = replace(self.layout, sequence=False)
        packs = [[replace(pack, layout=layout) for pack in part] for part in self.packs]
        return BatchPlan(self.table, layout, packs)._part(table, packs)

    @cached_property
    def _place(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Per supervised row: data-parallel rank, microbatch, slot in the pack."""
        where = {
            i: (d, m, slot)
            for d, packs in enumerate(self.packs)
            for m, pack in enumerate(packs)
            for slot, i in enumerate(pack.sequences)
        }
        places = np.array([where[i] for i in self.table.response.tolist()], dtype=np.int64).reshape(-1, 3)
        return places[:, 0], places[:, 1], places[:, 2]

    def local_rows(self, at: Coordinates) -> list[LocalRows]:
        """Per microbatch, the rows in the hidden states of the rank at `at` (any of its layers)."""
        data, microbatch, slot = self._place
        result = []
        for m, pack in enumerate(self.packs[at.data]):
            row = np.flatnonzero((data == at.data) & (microbatch == m))
            which, local = pack.local_rows(slot[row], self.table.position[row], at)
            result.append(LocalRows(row[which], local))
        return result

    def owned_rows(self, at: Coordinates) -> np.ndarray:
        """Rows that the rank at `at` sends or receives, in the order of its microbatches.

        Under plain tensor parallelism all tensor ranks hold the same rows; each takes an equal part of them, so that
        nothing travels twice.
        """
        rows = np.concatenate([held.row for held in self.local_rows(at)])
        return np.array_split(rows, self.layout.tensor)[at.tensor] if self.replicated else rows

    @property
    def replicated(self) -> bool:
        """Whether tensor ranks hold copies of the same hidden states."""
        return self.layout.tensor > 1 and not self.layout.sequence


@dataclass(frozen=True)
class StepPlan:
    """One role's view of a batch: the rows whose hidden states are matched, and those whose distributions are.

    Both are of the same packed sequences. `output` counts rows in the final hidden states, which its users bring
    together over tensor ranks: it knows no sequence parallelism. All sequences of a microbatch have one teacher, number
    `taught_by[m]`.
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
        """Packs what the rows depend on, and nothing else, for `layout`.

        Args:
            taught_by: the teacher of each response; None: one has them all.
        """
        lengths = np.array(hidden.needed_tokens(num_responses))
        if output is not None:
            lengths = np.maximum(lengths, output.needed_tokens(num_responses))
        owners = np.zeros(num_responses, dtype=np.int64) if taught_by is None else np.asarray(taught_by)
        packs: list[list[Pack]] = [[] for _ in range(layout.data)]
        teachers: list[int] = []
        for teacher in np.unique(owners[lengths > 0]).tolist() or [0]:
            theirs = make_packs(np.where(owners == teacher, lengths, 0).tolist(), layout, token_budget)
            for all_packs, more in zip(packs, theirs, strict=True):
                all_packs.extend(more)
            teachers += [teacher] * len(theirs[0])
        plan = BatchPlan(hidden, layout, packs)
        return StepPlan(plan, None if output is None else plan.with_rows(output), tuple(teachers))

    def microbatch_groups(self, microbatches: int | None) -> list[StepPlan]:
        """See `BatchPlan.microbatch_groups`."""
        return [self.part(numbers) for numbers in self.hidden.group_numbers(microbatches)]

    def part(self, microbatches: Sequence[int]) -> StepPlan:
        """Some of the microbatches, with their rows."""
        part = self.hidden.part(microbatches)
        output = None if self.output is None else part.with_rows(self.output.table)
        return StepPlan(part, output, tuple(self.taught_by[m] for m in microbatches))

    def of_teacher(self, teacher: int) -> StepPlan | None:
        """The microbatches of one teacher; None if it has no rows."""
        part = self.part([m for m, taught_by in enumerate(self.taught_by) if taught_by == teacher])
        return part if len(part.hidden.table) or (part.output is not None and len(part.output.table)) else None

    def for_teacher(self, layout: Layout, num_responses: int, token_budget: int) -> StepPlan:
        """The same rows in the sequences that the teacher reads, packed for its layout."""
        output = None if self.output is None else self.output.table.as_read_by_teacher()
        return StepPlan.build(self.hidden.table.as_read_by_teacher(), output, num_responses, layout, token_budget)
