"""Layouts and packing as arithmetic: nothing lost, nothing twice, whatever the sizes."""

from __future__ import annotations

import numpy as np
import pytest

from nemo_oprd.batch.layout import Layout
from nemo_oprd.batch.packing import Pack, fill_microbatches, make_packs, partition_by_length
from nemo_oprd.batch.plan import BatchPlan, StepPlan
from nemo_oprd.batch.token_table import make_rows
from nemo_oprd.batch.types import Rollout
from nemo_oprd.distillation.target_transfer import plan_transfers

LAYOUTS = [
    Layout(),
    Layout(tensor=2),
    Layout(tensor=2, sequence=True),
    Layout(context=2, data=2),
    Layout(tensor=2, sequence=True, context=2),
    Layout(tensor=2, data=2, pipeline=2),
    Layout(context=2, pipeline=2, virtual_pipeline=2, data=3),
]


def rollouts(seed: int = 0, count: int = 13) -> list[Rollout]:
    rng = np.random.default_rng(seed)
    made = []
    for _ in range(count):
        prompt, response = int(rng.integers(1, 9)), int(rng.integers(1, 30))
        mask = rng.integers(0, 2, response).tolist()
        made.append(Rollout([1] * prompt, [2] * response, mask))
    return made


@pytest.mark.parametrize("layout", LAYOUTS, ids=Layout.describe)
def test_ranks_and_coordinates_are_inverse(layout: Layout) -> None:
    assert [layout.rank(layout.coordinates(rank)) for rank in layout.ranks] == list(layout.ranks)
    assert len({layout.coordinates(rank) for rank in layout.ranks}) == layout.size


@pytest.mark.parametrize(
    ("layers", "layout", "expected"),
    [
        (4, Layout(pipeline=2), [2, 2]),
        (3, Layout(pipeline=2), [2, 1]),
        (30, Layout(pipeline=4), [7, 8, 8, 7]),
        (6, Layout(pipeline=4), [1, 2, 2, 1]),
        (9, Layout(pipeline=6), [3, 1, 1, 1, 1, 2]),
        (8, Layout(pipeline=3, first_stage_layers=2), [2, 3, 3]),
        (8, Layout(pipeline=3, last_stage_layers=2), [3, 3, 2]),
    ],
)
def test_layers_per_stage(layers: int, layout: Layout, expected: list[int]) -> None:
    assert layout.layers_per_stage(layers) == expected
    owned = [layout.owned_layers(stage, layers) for stage in range(layout.pipeline)]
    assert sorted(sum(owned, [])) == list(range(1, layers + 1))


def test_virtual_stages_alternate() -> None:
    layout = Layout(pipeline=2, virtual_pipeline=2)
    assert [layout.stage_of_layer(i, 8) for i in range(1, 9)] == [
        (0, 0), (0, 0), (1, 0), (1, 0), (0, 1), (0, 1), (1, 1), (1, 1),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("layers", "layout"),
    [
        (2, Layout(pipeline=3)),
        (7, Layout(pipeline=3, first_stage_layers=2)),
        (6, Layout(pipeline=2, virtual_pipeline=2)),
    ],
)
def test_impossible_splits_are_refused(layers: int, layout: Layout) -> None:
    with pytest.raises(ValueError, match="pipeline"):
        layout.layers_per_stage(layers)


def test_partition_balances() -> None:
    lengths = np.random.default_rng(1).integers(1, 1000, 64).tolist()
    parts = partition_by_length(lengths, 4)
    assert sorted(sum(parts, [])) == list(range(64))
    loads = [sum(lengths[i] for i in part) for part in parts]
    assert max(loads) - min(loads) <= max(lengths)


def test_microbatches_respect_the_budget() -> None:
    lengths = [5, 90, 30, 30, 30, 7, 200]
    packs = fill_microbatches(list(range(7)), lengths, 100)
    assert sorted(sum(packs, [])) == list(range(7))
    assert all(sum(lengths[i] for i in pack) <= 100 or len(pack) == 1 for pack in packs)


@pytest.mark.parametrize("layout", LAYOUTS, ids=Layout.describe)
def test_every_row_is_held_once_per_replica_group(layout: Layout) -> None:
    batch = rollouts()
    table = make_rows(batch, positions="last_k", k=5, position="token", aggregation="token_mean")
    plan = BatchPlan.build(table, [r.length for r in batch], layout, token_budget=40)
    seen = np.zeros(len(table), dtype=int)
    for rank in layout.ranks:
        at = layout.coordinates(rank)
        if at.pipeline == 0:
            np.add.at(seen, plan.owned_rows(at), 1)
    assert (seen == 1).all()


@pytest.mark.parametrize("layout", LAYOUTS, ids=Layout.describe)
def test_microbatches_with_rows_are_counted_once_per_rank(layout: Layout) -> None:
    """The count without ranks is what the ranks of a stage count together, also where some hold nothing."""
    batch = rollouts()
    table = make_rows(batch, positions="last_k", k=1, position="token", aggregation="token_mean")
    plan = BatchPlan.build(table, [r.length for r in batch], layout, token_budget=40)
    for group in map(plan.part, plan.group_numbers(2)):
        stage = [coords for coords in map(layout.coordinates, layout.ranks) if coords.pipeline == 0]
        counted = sum(len(rows.table_index) > 0 for coords in stage for rows in group.local_rows(coords))
        assert group.held_microbatches() == counted


@pytest.mark.parametrize("tensor", [2, 3, 5])
def test_replicated_rows_are_owned_in_equal_parts(tensor: int) -> None:
    """Every response's rows are divided among the tensor ranks, equal but for one."""
    batch = rollouts()
    table = make_rows(batch, positions="all", k=1, position="token", aggregation="token_mean")
    plan = BatchPlan.build(table, [r.length for r in batch], Layout(tensor=tensor), token_budget=40)
    owned = [plan.owned_rows(Layout(tensor=tensor).coordinates(rank)) for rank in range(tensor)]
    counts = np.stack([np.bincount(table.response[rows], minlength=len(batch)) for rows in owned])
    assert (counts.max(0) - counts.min(0) <= 1).all() and counts.sum() == len(table)


@pytest.mark.parametrize("layout", LAYOUTS, ids=Layout.describe)
def test_held_rows_point_at_their_tokens(layout: Layout) -> None:
    """Lays out (sequence, position) as the model would see it and looks the rows up there."""
    batch = rollouts()
    table = make_rows(batch, positions="all", k=1, position="token", aggregation="token_mean")
    plan = BatchPlan.build(table, [r.length for r in batch], layout, token_budget=50)
    for rank in layout.ranks:
        at = layout.coordinates(rank)
        for pack, held in zip(plan.packs[at.data], plan.local_rows(at), strict=True):
            whole = np.full((pack.total, 2), -1)
            for i, offset in zip(pack.sequences, pack.offsets, strict=False):
                length = batch[i].length
                whole[offset : offset + length] = [(i, p) for p in range(length)]
            local = whole[pack.context_slice(at.context)]
            if layout.sequence:
                local = np.split(local, layout.tensor)[at.tensor]
            expected = np.stack([table.response[held.table_index], table.position[held.table_index]], axis=1)
            assert (local[held.hidden_index] == expected).all()


def test_packs_are_divisible_and_even_in_number() -> None:
    layout = Layout(tensor=2, sequence=True, context=2, pipeline=2, virtual_pipeline=2, data=3)
    packs = make_packs([3, 9, 4, 4, 11], layout, 12)
    assert len({len(group) for group in packs}) == 1
    assert len(packs[0]) % layout.pipeline == 0
    for pack in sum(packs, []):
        assert pack.total % (layout.context * layout.tensor) == 0
        assert all(length % (2 * layout.context) == 0 for length in pack.padded)


def test_every_rank_knows_the_most_tokens_of_a_microbatch() -> None:
    layout = Layout(tensor=2, sequence=True, context=2, data=2)
    packs = make_packs([9, 5, 5, 3], layout, 9)
    assert [pack.total for pack in packs[0]] != [pack.total for pack in packs[1]]
    for alike in zip(*packs, strict=True):
        held = [len(pack.context_slice(0)) // layout.tensor for pack in alike]
        assert [pack.most_tokens for pack in alike] == [max(held)] * layout.data


def test_context_slices_cover_a_pack() -> None:
    pack = Pack.build([0, 1], [13, 6], Layout(context=3))
    slices = np.concatenate([pack.context_slice(rank) for rank in range(3)])
    assert sorted(slices.tolist()) == list(range(pack.total))


@pytest.mark.parametrize("teacher", LAYOUTS, ids=Layout.describe)
@pytest.mark.parametrize("student", LAYOUTS, ids=Layout.describe)
@pytest.mark.parametrize("dedicated", [False, True])
def test_every_layer_and_row_travels_once(teacher: Layout, student: Layout, dedicated: bool) -> None:
    """All ranks together plan each (layer, row) exactly once, and both ends of a message plan the same one."""
    depth = 8
    if dedicated:
        teacher = Layout(**{**vars(teacher), "first_rank": student.size})
    batch = rollouts()
    table = make_rows(batch, positions="last_k", k=4, position="token", aggregation="token_mean")
    lengths = [r.length for r in batch]
    plans = BatchPlan.build(table, lengths, teacher, 64), BatchPlan.build(table, lengths, student, 48)
    layers = {2: 2, 3: 3, 8: 8}
    ranks = sorted(set(teacher.ranks) | set(student.ranks))
    planned = {rank: plan_transfers(*plans, layers, depth, depth, rank) for rank in ranks}
    sent = [t for rank in ranks for t in planned[rank] if t.source == rank]
    received = [t for rank in ranks for t in planned[rank] if t.target == rank]

    def key(t) -> tuple:
        return (t.source, t.target, t.layers, tuple(t.rows.tolist()))

    assert sorted(map(key, sent)) == sorted(map(key, received))
    count = {layer: np.zeros(len(table), dtype=int) for layer in layers}
    for transfer in received:
        for layer in transfer.layers:
            np.add.at(count[layer], transfer.rows, 1)
    assert all((count[layer] == 1).all() for layer in layers)


@pytest.mark.parametrize("layout", LAYOUTS, ids=Layout.describe)
@pytest.mark.parametrize("microbatches", [1, 2, 3, None])
def test_groups_split_a_batch_and_keep_its_weights(layout: Layout, microbatches: int | None) -> None:
    """The groups together hold each row once, with its weight in the whole batch; no group exceeds the limit."""
    batch = rollouts()
    table = make_rows(batch, positions="last_k", k=5, position="token", aggregation="sequence_mean")
    plan = BatchPlan.build(table, table.needed_tokens(len(batch)), layout, token_budget=40)
    groups = [plan.part(numbers) for numbers in plan.group_numbers(microbatches)]
    unit = layout.pipeline if layout.virtual_pipeline > 1 else 1  # an interleaved schedule takes multiples of this
    for group in groups:
        assert len({len(packs) for packs in group.packs}) == 1
        assert len(group.packs[0]) % unit == 0
        assert microbatches is None or len(group.packs[0]) <= max(microbatches, unit)
    columns = [zip(*map(np.ndarray.tolist, _columns(group.table)), strict=True) for group in groups]
    seen = [row for rows in columns for row in rows]
    assert sorted(seen) == sorted(zip(*map(np.ndarray.tolist, _columns(table)), strict=True))
    assert microbatches is not None or len(groups) == 1


def _columns(table) -> tuple:
    return table.response, table.position, table.weight


def test_nothing_is_computed_that_no_row_depends_on() -> None:
    batch = [Rollout([1, 2], [3, 4, 5, 6]), Rollout([1], [2], [0]), Rollout([1], [2, 3, 4], [0, 1, 0])]
    table = make_rows(batch, positions="first_k", k=2, position="token", aggregation="token_mean")
    assert table.needed_tokens(3) == [4, 0, 3]
    plan = StepPlan.build(table, None, 3, Layout(), token_budget=100)
    (pack,) = plan.hidden.packs[0]
    assert (pack.sequences, pack.lengths) == ((0, 2), (4, 3))
    moved = plan.for_teacher(Layout(context=2), 3, 4)
    assert [pack.sequences for pack in moved.hidden.packs[0]] == [(0,), (2,)]


@pytest.mark.parametrize("sizes", [{}, {"data": 2}, {"pipeline": 2, "virtual_pipeline": 2}])
def test_a_microbatch_has_one_teacher(sizes: dict[str, int]) -> None:
    """Every response is in one of its teacher's microbatches, also in each group."""
    batch = [
        Rollout([1, 2], [3] * length, [0] * length if i == 4 else None) for i, length in enumerate((9, 3, 7, 5, 6))
    ]
    table = make_rows(batch, positions="all", k=1, position="token", aggregation="token_mean")
    taught_by = [2, 0, 2, 0, 1]
    plan = StepPlan.build(table, table, 5, Layout(**sizes), token_budget=9, taught_by=taught_by)
    for whole in (plan, *plan.microbatch_groups(1)):
        for m, teacher in enumerate(whole.taught_by):
            assert {taught_by[i] for packs in whole.hidden.packs for i in packs[m].sequences} <= {teacher}
    assert plan.of_teacher(1) is None
    parts = [part for part in (plan.of_teacher(teacher) for teacher in (0, 2)) if part is not None]
    assert [np.unique(part.hidden.table.response).tolist() for part in parts] == [[1, 3], [0, 2]]
    assert sum(part.hidden.table.weight.sum() for part in parts) == pytest.approx(1.0)
    assert all(part.output is not None and len(part.output.table) == len(part.hidden.table) for part in parts)
