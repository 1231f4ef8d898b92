"""Moves targets from the teacher ranks that computed them to the student ranks that need them.

The two roles may differ in every parallel size, and may share ranks or not. Each rank plans its messages by index
arithmetic, without communication and without a central process. Each supervised (layer, row) is sent at most once, and
not at all if sender and receiver are the same rank. Student tensor ranks that need the same rows receive an equal part
each and gather the parts among themselves.

n rows of a message or a rank, D width of a target (bridge rank R where the teacher sends projections).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist

from nemo_oprd.batch.plan import BatchPlan
from nemo_oprd.layout import Coordinates
from nemo_oprd.megatron.parallel import Role, device


@dataclass(frozen=True)
class Transfer:
    """One message: the targets of these student layers for these rows (table indices), from one rank to another."""

    source: int
    target: int
    layers: tuple[int, ...]
    rows: np.ndarray


def _owned_by(plan: BatchPlan, rank: int) -> tuple[Coordinates, np.ndarray]:
    """(Coordinates of a global rank, table indices of the rows that it owns)."""
    coords = plan.layout.coordinates(rank)
    return coords, plan.owned_rows(coords)


def plan_transfers(
    teacher: BatchPlan,
    student: BatchPlan,
    layers: dict[int, int],
    teacher_depth: int,
    student_depth: int,
    rank: int,
) -> list[Transfer]:
    """The messages that `rank` sends or receives, in the same order on both ends.

    Args:
        teacher, student: the plans of the same rows for the two roles.
        layers: student layer -> teacher layer, both 1-based.
        teacher_depth, student_depth: number of layers of the two models.
        rank: a rank of the world.
    """
    owned_by_teacher = _owners(teacher, layers, teacher_depth)
    owned_by_student = _owners(student, {s: s for s in layers}, student_depth)
    sources = teacher.layout.ranks
    targets = student.layout.ranks
    if rank not in targets:
        pairs = [(rank, target) for target in targets]
    elif rank not in sources:
        pairs = [(source, rank) for source in sources]
    else:
        pairs = sorted({(rank, target) for target in targets} | {(source, rank) for source in sources})
    sent = {source: _owned_by(teacher, source) for source in {source for source, _ in pairs}}
    wanted = {target: _owned_by(student, target) for target in {target for _, target in pairs}}
    transfers = []
    for source, target in pairs:
        (from_coords, from_rows), (to_coords, to_rows) = sent[source], wanted[target]
        shared = tuple(sorted(owned_by_teacher[from_coords.pipeline] & owned_by_student[to_coords.pipeline]))
        rows = np.intersect1d(from_rows, to_rows, assume_unique=True)
        if shared and len(rows):
            transfers.append(Transfer(source, target, shared, rows))
    return transfers


def _owners(plan: BatchPlan, layers: dict[int, int], depth: int) -> list[set[int]]:
    """Per pipeline rank of the plan's role, the student layers whose layer of this role's model the rank owns.

    Args:
        layers: student layer -> layer of this role's model.
        depth: number of layers of this role's model.
    """
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
        """The values [m, D] of one layer for m of the rows, given by their table indices [m]."""
        order = np.argsort(self.rows)
        index = order[np.searchsorted(self.rows, rows, sorter=order)]
        return self.values[layer].index_select(0, torch.from_numpy(index).to(self.values[layer].device))


def exchange(
    transfers: list[Transfer],
    outgoing: RowShard | None,
    wanted: np.ndarray | None,
    wanted_layers: list[int],
    width: int,
    dtype: torch.dtype,
    place: torch.device,
) -> tuple[RowShard | None, int]:
    """Carries out `plan_transfers` on this rank.

    Args:
        outgoing: the rows that this rank captured; None on ranks outside the teacher's role.
        wanted: table indices of the rows that this rank receives; None on ranks outside the student's role.
        wanted_layers: the student layers that this rank receives.
        width: values per row and layer.
        dtype: dtype of the values.
        place: this rank's device.

    Returns:
        (The received rows, or None on ranks outside the student's role; the bytes that came from other ranks).
    """
    rank = dist.get_rank()
    operations: list[dist.P2POp] = []
    send_buffers: list[torch.Tensor] = []
    arrived: list[tuple[Transfer, torch.Tensor]] = []
    received = 0
    for transfer in transfers:
        if transfer.source == rank:
            assert outgoing is not None
            payload = torch.stack([outgoing.pick(layer, transfer.rows) for layer in transfer.layers])
            if transfer.target == rank:
                arrived.append((transfer, payload))
                continue
            send_buffers.append(payload.contiguous())
            operations.append(dist.P2POp(dist.isend, send_buffers[-1], transfer.target))
        else:
            buffer = torch.empty(len(transfer.layers), len(transfer.rows), width, dtype=dtype, device=place)
            arrived.append((transfer, buffer))
            received += buffer.numel() * buffer.element_size()
            operations.append(dist.P2POp(dist.irecv, buffer, transfer.source))
    if operations:
        for request in dist.batch_isend_irecv(operations):
            request.wait()
    if wanted is None:
        return None, received
    shard = RowShard(
        wanted, {layer: torch.empty(len(wanted), width, dtype=dtype, device=place) for layer in wanted_layers}
    )
    order = np.argsort(wanted)
    filled = dict.fromkeys(wanted_layers, 0)
    for transfer, payload in arrived:
        index = torch.from_numpy(order[np.searchsorted(wanted, transfer.rows, sorter=order)]).to(place)
        for layer, values in zip(transfer.layers, payload, strict=True):
            shard.values[layer].index_copy_(0, index, values)
            filled[layer] += len(transfer.rows)
    assert all(count == len(wanted) for count in filled.values()), "a supervised row did not arrive"
    return shard, received


def gather_replicas(shard: RowShard, full_rows: np.ndarray, group: dist.ProcessGroup) -> RowShard:
    """Joins the equal parts that replicated tensor ranks received into all rows, on each of these ranks.

    Args:
        shard: the part that this rank received.
        full_rows: table indices of all rows, in the order in which `np.array_split` divided them among the ranks.
        group: the tensor-parallel group.
    """
    size = dist.get_world_size(group)
    longest = -(-len(full_rows) // size)
    values = {}
    for layer, part in shard.values.items():
        padded = part.new_zeros(longest, part.shape[1])
        padded[: len(part)] = part
        parts = [torch.empty_like(padded) for _ in range(size)]
        dist.all_gather(parts, padded, group=group)
        counts = [len(split) for split in np.array_split(full_rows, size)]
        values[layer] = torch.cat([p[:count] for p, count in zip(parts, counts, strict=True)])
    return RowShard(full_rows, values)


@dataclass(frozen=True)
class TargetTransfer:
    """Sends targets from one teacher's ranks to the student's ranks.

    Attributes:
        plan: the rows, planned for the teacher's layout.
        student_plan: the same rows, planned for the student's layout.
        student: the student's role.
        teacher_depth, student_depth: number of layers of the two models.
    """

    plan: BatchPlan
    student_plan: BatchPlan
    student: Role
    teacher_depth: int
    student_depth: int

    def send(
        self, shard: RowShard | None, layers: dict[int, int], width: int, dtype: torch.dtype
    ) -> tuple[dict[int, torch.Tensor], int]:
        """Plans the messages, exchanges them and gathers replicated rows. Every rank of the world calls this.

        Args:
            shard: the rows that this rank captured; None on ranks outside the teacher's role.
            layers: student layer -> teacher layer, both 1-based.
            width: values per row and layer.
            dtype: dtype of the values.

        Returns:
            (Student layer -> values [n, D] of all rows that this rank needs, bytes that came from other ranks).
        """
        transfers = plan_transfers(
            self.plan, self.student_plan, layers, self.teacher_depth, self.student_depth, rank=dist.get_rank()
        )
        coords, wanted, wanted_layers = self.student.coords, None, []
        if coords is not None:
            wanted = self.student_plan.owned_rows(coords)
            owned = self.student_plan.layout.owned_layers(coords.pipeline, self.student_depth)
            wanted_layers = [layer for layer in sorted(layers) if layer in owned]
        arrived, received = exchange(transfers, shard, wanted, wanted_layers, width, dtype, device())
        if arrived is None or coords is None:
            return {}, received
        if self.student_plan.replicated:
            full = np.concatenate([local.table_index for local in self.student_plan.local_rows(coords)])
            arrived = gather_replicas(arrived, full, self.student.member_groups.tp)
        return arrived.values, received
