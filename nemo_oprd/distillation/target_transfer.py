"""Moves targets from the teacher ranks that computed them to the student ranks that need them.

The two roles may differ in every parallel size, and may share ranks or not. Each rank plans its messages by index
arithmetic, without communication and without a central process. Each supervised (layer, row) is sent at most once, and
not at all if sender and receiver are the same rank. Student tensor ranks that need the same rows receive an equal part
each and gather the parts among themselves. Ranks exchange a few layers at a time, and free sent values, so that a
rank of both roles never holds much more than the larger of the sent and the received values.

n rows of a message or a rank, D width of a target (bridge rank R where the teacher sends projections).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np
import torch
import torch.distributed as dist

from nemo_oprd.batch.layout import Coordinates
from nemo_oprd.batch.plan import BatchPlan
from nemo_oprd.config.memory_bounds import LAYERS_AT_A_TIME_BYTES
from nemo_oprd.megatron.parallel import Role, device, on_device


@dataclass(frozen=True)
class Transfer:
    """One message: the targets of these student layers for these rows (table indices), from one rank to another."""

    source: int
    target: int
    layers: tuple[int, ...]
    rows: np.ndarray


def plan_transfers(
    teacher: BatchPlan, student: BatchPlan, layers: dict[int, int], teacher_depth: int, student_depth: int, rank: int
) -> list[Transfer]:
    """Returns the messages that `rank` sends or receives, in the same order on both ends.

    Args:
        teacher, student: the plans of the same rows for the two roles.
        layers: student layer -> teacher layer, both 1-based.
        teacher_depth, student_depth: number of layers of the two models.
    """
    of_teacher = _owners(teacher, layers, teacher_depth)
    of_student = _owners(student, {s: s for s in layers}, student_depth)
    transfers = []
    if rank in teacher.layout.ranks:
        coords = teacher.layout.coordinates(rank)
        for rows, holder in _holders(teacher.owned_rows(coords), student):
            for pipeline, owned in enumerate(of_student):
                shared = tuple(sorted(of_teacher[coords.pipeline] & owned))
                if shared:
                    target = student.layout.rank(replace(holder, pipeline=pipeline))
                    transfers.append(Transfer(rank, target, shared, rows))
    if rank in student.layout.ranks:
        coords = student.layout.coordinates(rank)
        for rows, holder in _holders(student.owned_rows(coords), teacher):
            for pipeline, owned in enumerate(of_teacher):
                shared = tuple(sorted(owned & of_student[coords.pipeline]))
                source = teacher.layout.rank(replace(holder, pipeline=pipeline))
                if shared and source != rank:  # a rank's message to itself is above
                    transfers.append(Transfer(source, rank, shared, rows))
    return sorted(transfers, key=lambda transfer: (transfer.source, transfer.target))


def _holders(rows: np.ndarray, other: BatchPlan) -> list[tuple[np.ndarray, Coordinates]]:
    """Groups `rows` by the rank of `other` that owns them: (table indices, ascending; coordinates on stage 0)."""
    if not len(rows):
        return []
    rows = np.sort(rows)
    places = other.places(other.table.response[rows])
    places = places.select(np.searchsorted(places.table_index, rows))
    layout = other.layout
    rank = (places.data * layout.context + places.context) * layout.tensor + places.tensor
    order = np.argsort(rank, kind="stable")
    starts = np.flatnonzero(np.diff(rank[order], prepend=-1))
    return [
        (rows[chosen], layout.coordinates(layout.first_rank + int(rank[chosen[0]])))
        for chosen in np.split(order, starts[1:])
    ]


def _owners(plan: BatchPlan, layers: dict[int, int], depth: int) -> list[set[int]]:
    """Returns, per pipeline rank of the plan's role, the student layers whose layer in `layers` the rank owns."""
    owners: list[set[int]] = [set() for _ in range(plan.layout.pipeline)]
    for student_layer, owned_layer in layers.items():
        owners[plan.layout.stage_of_layer(owned_layer, depth)[0]].add(student_layer)
    return owners


@dataclass
class RowShard:
    """Some rows on this rank: their table indices [n], and per student layer their values [n, D]."""

    rows: np.ndarray
    values: dict[int, torch.Tensor]

    def pick(self, layer: int, rows: np.ndarray) -> torch.Tensor:
        """Returns the values [m, D] of one layer for m of the rows, given by their table indices [m]."""
        return self.values[layer].index_select(0, _index_of(self.rows, rows))


def _index_of(rows: np.ndarray, chosen: np.ndarray) -> torch.Tensor:
    """Returns the indices of `chosen` in `rows`, int64 on this device; both hold table indices, in any order."""
    order = np.argsort(rows)
    return on_device(order[np.searchsorted(rows, chosen, sorter=order)])


@dataclass(frozen=True)
class _Message:
    """A transfer, with the indices of its rows among the rows that this rank sends, and among those that it receives.

    The indices are copied to the device once for all layers.
    """

    transfer: Transfer
    picked: torch.Tensor | None
    placed: torch.Tensor | None


# a message, its layers that were exchanged, and their values [layers, rows, width]
_Arrival: TypeAlias = tuple[_Message, list[int], torch.Tensor]


@dataclass(frozen=True)
class Exchange:
    """Carries out `plan_transfers` on this rank.

    `layers` are the student layers that any rank receives; the ranks exchange `at_a_time` of them at once.
    """

    layers: list[int]
    at_a_time: int
    width: int  # values per row and layer
    dtype: torch.dtype
    device: torch.device  # this rank's

    def run(
        self, transfers: list[Transfer], outgoing: RowShard | None, wanted: np.ndarray | None, wanted_layers: list[int]
    ) -> tuple[RowShard | None, int]:
        """Returns the rows of `wanted_layers` that this rank receives, and the bytes that came from other ranks.

        Args:
            outgoing: the rows that this rank captured, None on ranks outside the teacher's role; its values are taken
                out, layer by layer.
            wanted: table indices of the rows that this rank receives; None on ranks outside the student's role.
        """
        rank, received = dist.get_rank(), 0
        messages = []
        for transfer in transfers:
            picked = placed = None
            if outgoing is not None and transfer.source == rank:
                picked = _index_of(outgoing.rows, transfer.rows)
            if wanted is not None and transfer.target == rank:
                placed = _index_of(wanted, transfer.rows)
            messages.append(_Message(transfer, picked, placed))
        values: dict[int, torch.Tensor] = {}
        for start in range(0, len(self.layers), self.at_a_time):
            part = self.layers[start : start + self.at_a_time]
            arrived, count = self._send_and_receive(messages, outgoing, part)
            received += count
            if wanted is not None:
                values |= self._put(arrived, len(wanted), [layer for layer in part if layer in wanted_layers])
            if outgoing is not None:
                for layer in part:
                    outgoing.values.pop(layer, None)
        return None if wanted is None else RowShard(wanted, values), received

    def _send_and_receive(
        self, messages: list[_Message], outgoing: RowShard | None, part: list[int]
    ) -> tuple[list[_Arrival], int]:
        """Exchanges the layers `part`; returns (the arrived values, bytes from other ranks)."""
        operations: list[dist.P2POp] = []
        arrived: list[_Arrival] = []
        received = 0
        for message in messages:
            transfer = message.transfer
            layers = [layer for layer in transfer.layers if layer in part]
            if not layers:
                continue
            if message.picked is not None:
                assert outgoing is not None
                payload = torch.stack([outgoing.values[layer].index_select(0, message.picked) for layer in layers])
                if message.placed is not None:
                    arrived.append((message, layers, payload))
                else:
                    operations.append(dist.P2POp(dist.isend, payload, transfer.target))
            else:
                shape = len(layers), len(transfer.rows), self.width
                arrived.append((message, layers, torch.empty(shape, dtype=self.dtype, device=self.device)))
                received += arrived[-1][2].nbytes
                operations.append(dist.P2POp(dist.irecv, arrived[-1][2], transfer.source))
        if operations:
            for request in dist.batch_isend_irecv(operations):
                request.wait()
        return arrived, received

    def _put(self, arrived: list[_Arrival], count: int, layers: list[int]) -> dict[int, torch.Tensor]:
        """Returns layer -> the values [count, width] of all rows that this rank receives."""
        values = {layer: torch.empty(count, self.width, dtype=self.dtype, device=self.device) for layer in layers}
        filled = dict.fromkeys(layers, 0)
        for message, sent, payload in arrived:
            assert message.placed is not None
            for layer, rows in zip(sent, payload, strict=True):
                values[layer].index_copy_(0, message.placed, rows)
                filled[layer] += len(message.transfer.rows)
        assert all(found == count for found in filled.values()), "a supervised row did not arrive"
        return values


def gather_replicas(shard: RowShard, rows: np.ndarray, owner: np.ndarray, group: dist.ProcessGroup) -> RowShard:
    """Joins the parts that replicated tensor ranks received into all rows, on each of these ranks.

    Args:
        shard: the part that this rank received; its values are taken out, layer by layer.
        rows, owner: table indices [n] of all rows, and the tensor rank [n] that received each of them.
    """
    size = dist.get_world_size(group)
    counts = np.bincount(owner, minlength=size).tolist()
    # the index of each row in the parts laid end to end, every part padded to the longest
    part_first = np.argsort(np.argsort(owner, kind="stable"), kind="stable") - (np.cumsum(counts) - counts)[owner]
    gathered_index = on_device(owner * max(counts) + part_first)
    values = {}
    for layer in list(shard.values):
        part = shard.values.pop(layer)
        padded = part.new_zeros(max(counts), part.shape[1])
        padded[: len(part)] = part
        parts = [torch.empty_like(padded) for _ in range(size)]
        dist.all_gather(parts, padded, group=group)
        values[layer] = torch.cat(parts).index_select(0, gathered_index)
    return RowShard(rows, values)


def send_targets(
    shard: RowShard | None,
    plan: BatchPlan,
    student_plan: BatchPlan,
    student: Role,
    layers: dict[int, int],
    depths: tuple[int, int],
    width: int,
    dtype: torch.dtype,
) -> tuple[dict[int, torch.Tensor], int]:
    """Sends targets from one teacher's ranks to the student's, and gathers replicated rows. All ranks call this.

    Args:
        shard: the rows that this rank captured, None on ranks outside the teacher's role; its values are taken out.
        plan, student_plan: the same rows, planned for the teacher's layout and for the student's.
        layers: student layer -> teacher layer, both 1-based.
        depths: number of layers of the teacher and of the student.
        width: values per row and layer.

    Returns:
        (Student layer -> values [n, D] of all rows that this rank needs, bytes that came from other ranks).
    """
    transfers = plan_transfers(plan, student_plan, layers, *depths, rank=dist.get_rank())
    coords, wanted, wanted_layers = student.coords, None, []
    if coords is not None:
        wanted = student_plan.owned_rows(coords)
        owned = student_plan.layout.owned_layers(coords.pipeline, depths[1])
        wanted_layers = [layer for layer in sorted(layers) if layer in owned]
    layer_bytes = max(1, len(plan.table) * width * dtype.itemsize)
    at_a_time = max(1, LAYERS_AT_A_TIME_BYTES // layer_bytes)
    arrived, received = Exchange(sorted(layers), at_a_time, width, dtype, device()).run(
        transfers, shard, wanted, wanted_layers
    )
    if arrived is None or coords is None:
        return {}, received
    if student_plan.replicated:
        arrived = gather_replicas(arrived, *student_plan.tensor_owners(coords), student.member_groups.tp)
    return arrived.values, received
