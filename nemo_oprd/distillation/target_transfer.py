"""Moves hidden states from the teacher ranks that computed them to the student ranks that need them.

The two roles may differ in every parallel size, share ranks or not. Who sends what to whom is planned by index
arithmetic that each rank does for itself; each supervised (layer, row) travels at most once, in the run's precision,
and stays where it is if sender and receiver are the same rank. Replicated student tensor ranks receive a part each and
gather it among themselves. Nothing passes through a central process.

N rows, D width (R with a bridge).
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
    """One message: these student layers (their teacher states) of these rows, from one rank to another."""

    source: int
    target: int
    layers: tuple[int, ...]
    rows: np.ndarray


def _spread(plan: BatchPlan, rank: int) -> tuple[Coordinates, np.ndarray]:
    at = plan.layout.coordinates(rank)
    return at, plan.owned_rows(at)


def plan_transfers(
    teacher: BatchPlan,
    student: BatchPlan,
    layers: dict[int, int],
    teacher_depth: int,
    student_depth: int,
    rank: int,
) -> list[Transfer]:
    """The messages that `rank` sends or receives, in an order that both ends agree on.

    Args:
        layers: student layer -> teacher layer, 1-based.
        teacher_depth, student_depth: number of layers of the two models.
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
    involved = {source for source, _ in pairs}, {target for _, target in pairs}
    held = {source: _spread(teacher, source) for source in involved[0]}
    wanted = {target: _spread(student, target) for target in involved[1]}
    transfers = []
    for source, target in pairs:
        (from_at, from_rows), (to_at, to_rows) = held[source], wanted[target]
        shared = tuple(sorted(owned_by_teacher[from_at.pipeline] & owned_by_student[to_at.pipeline]))
        rows = np.intersect1d(from_rows, to_rows, assume_unique=True)
        if shared and len(rows):
            transfers.append(Transfer(source, target, shared, rows))
    return transfers


def _owners(plan: BatchPlan, layers: dict[int, int], depth: int) -> list[set[int]]:
    """Per pipeline rank, the student layers whose (teacher or student) layer it owns."""
    owners: list[set[int]] = [set() for _ in range(plan.layout.pipeline)]
    for student_layer, owned_layer in layers.items():
        owners[plan.layout.stage_of_layer(owned_layer, depth)[0]].add(student_layer)
    return owners


@dataclass
class RowShard:
    """Rows [n] (global numbers) and per layer their values [n, D] on this rank."""

    rows: np.ndarray
    values: dict[int, torch.Tensor]

    def pick(self, layer: int, rows: np.ndarray) -> torch.Tensor:
        """[len(rows), D] of one layer."""
        order = np.argsort(self.rows)
        where = order[np.searchsorted(self.rows, rows, sorter=order)]
        return self.values[layer].index_select(0, torch.from_numpy(where).to(self.values[layer].device))


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
        outgoing: what this rank captured, keyed by student layer; None off the teacher.
        wanted: rows of this rank's share as a student; None off the student.

    Returns:
        The received shard keyed by student layer (None off the student), and the payload bytes that came from others.
    """
    rank = dist.get_rank()
    operations: list[dist.P2POp] = []
    keep: list[torch.Tensor] = []
    arrived: list[tuple[Transfer, torch.Tensor]] = []
    received = 0
    for transfer in transfers:
        if transfer.source == rank:
            assert outgoing is not None
            payload = torch.stack([outgoing.pick(layer, transfer.rows) for layer in transfer.layers])
            if transfer.target == rank:
                arrived.append((transfer, payload))
                continue
            keep.append(payload.contiguous())
            operations.append(dist.P2POp(dist.isend, keep[-1], transfer.target))
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
        where = torch.from_numpy(order[np.searchsorted(wanted, transfer.rows, sorter=order)]).to(place)
        for layer, values in zip(transfer.layers, payload, strict=True):
            shard.values[layer].index_copy_(0, where, values)
            filled[layer] += len(transfer.rows)
    assert all(count == len(wanted) for count in filled.values()), "a supervised row did not arrive"
    return shard, received


def gather_replicas(shard: RowShard, full_rows: np.ndarray, group: dist.ProcessGroup) -> RowShard:
    """Joins the parts that replicated tensor ranks received (in rank order) into the rows that all of them need."""
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
    """Carries rows from one teacher's ranks to the student's: plan, exchange, and the gathering of replicas."""

    plan: BatchPlan
    student_plan: BatchPlan
    student: Role
    teacher_depth: int
    student_depth: int

    def send(
        self, shard: RowShard | None, layers: dict[int, int], width: int, dtype: torch.dtype
    ) -> tuple[dict[int, torch.Tensor], int]:
        """Every rank of the world calls this.

        Args:
            shard: what this rank captured, keyed by student layer; None off the teacher.
            layers: student layer -> teacher layer.
            width: numbers per row and layer.

        Returns:
            (Student layer -> states of all rows that this rank needs, bytes that came from other ranks).
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
            full = np.concatenate([local.row for local in self.student_plan.local_rows(coords)])
            arrived = gather_replicas(arrived, full, self.student.member_groups.tp)
        return arrived.values, received
