"""The plan of one training batch: its supervised rows, its packs, and the ranks that hold each row.

Planning is index arithmetic. Every rank computes the same plan from the same rollouts, without communication.
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
    """The supervised rows of one microbatch whose hidden states one rank holds.

    Attributes:
        table_index: int64 [n], indices of the rows in the batch's `TokenTable`, ascending.
        hidden_index: int64 [n], indices of the same rows in the rank's hidden state [S, 1, D] of the microbatch.
    """

    table_index: np.ndarray
    hidden_index: np.ndarray


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

    def microbatch_groups(self, microbatches: int | None) -> list[BatchPlan]:
        """The batch in groups of at most `microbatches` microbatches per data-parallel rank (None: one group).

        Rows keep the weights that they have in the whole batch, so the gradients of the groups add up to the gradient
        of the batch. An interleaved schedule needs groups whose size is a positive multiple of the pipeline size.
        """
        return [self.part(numbers) for numbers in self.group_numbers(microbatches)]

    def group_numbers(self, microbatches: int | None) -> list[range]:
        """The microbatch numbers of each group."""
        count = len(self.packs[0])
        size = count if microbatches is None else microbatches
        if self.layout.virtual_pipeline > 1:
            size = max(1, size // self.layout.pipeline) * self.layout.pipeline
        return [range(start, min(start + size, count)) for start in range(0, count, size)]

    def part(self, microbatches: Sequence[int]) -> BatchPlan:
        """The plan of some of the microbatches, with their rows."""
        return self._part(self.table, [[packs[m] for m in microbatches] for packs in self.packs])

    def _part(self, table: TokenTable, packs: list[list[Pack]]) -> BatchPlan:
        responses = [i for part in packs for pack in part for i in pack.sequences]
        return BatchPlan(table.for_responses(responses), self.layout, packs)

    def with_rows(self, table: TokenTable) -> BatchPlan:
        """The plan of other rows in the same packed sequences, without sequence parallelism.

        The indices of these rows count in hidden states that are whole on every tensor rank.
        """
        layout = replace(self.layout, sequence=False)
        packs = [[replace(pack, layout=layout) for pack in part] for part in self.packs]
        return BatchPlan(self.table, layout, packs)._part(table, packs)

    @cached_property
    def _place(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Per supervised row: its data-parallel rank, its microbatch, and the slot of its sequence in the pack."""
        place_of_response = {
            i: (d, m, slot)
            for d, packs in enumerate(self.packs)
            for m, pack in enumerate(packs)
            for slot, i in enumerate(pack.sequences)
        }
        places = np.array([place_of_response[i] for i in self.table.response.tolist()], dtype=np.int64).reshape(-1, 3)
        return places[:, 0], places[:, 1], places[:, 2]

    def local_rows(self, coords: Coordinates) -> list[LocalRows]:
        """Per microbatch, the rows in the hidden states of the rank at `coords`, the same ones for all its layers."""
        data, microbatch, slot = self._place
        result = []
        for m, pack in enumerate(self.packs[coords.data]):
            rows = np.flatnonzero((data == coords.data) & (microbatch == m))
            held, hidden_index = pack.local_rows(slot[rows], self.table.position[rows], coords)
            result.append(LocalRows(rows[held], hidden_index))
        return result

    def owned_rows(self, coords: Coordinates) -> np.ndarray:
        """Table indices of the rows that the rank at `coords` sends or receives, in the order of its microbatches.

        Under tensor parallelism without sequence parallelism all tensor ranks hold the same rows. Each of them owns an
        equal part, so that no row is sent twice.
        """
        rows = np.concatenate([local.table_index for local in self.local_rows(coords)])
        return np.array_split(rows, self.layout.tensor)[coords.tensor] if self.replicated else rows

    @property
    def replicated(self) -> bool:
        """Whether tensor ranks hold copies of the same hidden states."""
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
            hidden: the rows of the representation loss.
            output: the rows of the output loss; None without such a loss.
            num_responses: responses in the batch.
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
        """See `BatchPlan.microbatch_groups`."""
        return [self.part(numbers) for numbers in self.hidden.group_numbers(microbatches)]

    def part(self, microbatches: Sequence[int]) -> StepPlan:
        """The plan of some of the microbatches, with their rows."""
        part = self.hidden.part(microbatches)
        output = None if self.output is None else part.with_rows(self.output.table)
        return StepPlan(part, output, tuple(self.taught_by[m] for m in microbatches))

    def of_teacher(self, teacher: int) -> StepPlan | None:
        """The plan of one teacher's microbatches; None if the teacher has no rows."""
        part = self.part([m for m, taught_by in enumerate(self.taught_by) if taught_by == teacher])
        return part if len(part.hidden.table) or (part.output is not None and len(part.output.table)) else None

    def for_teacher(self, layout: Layout, num_responses: int, token_budget: int) -> StepPlan:
        """The plan of the same rows in the sequences that the teacher reads, packed for the teacher's layout."""
        output = None if self.output is None else self.output.table.as_read_by_teacher()
        return StepPlan.build(self.hidden.table.as_read_by_teacher(), output, num_responses, layout, token_budget)
