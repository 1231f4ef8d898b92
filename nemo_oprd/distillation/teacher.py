"""A teacher: reads its rollouts and hands every student rank what it is to match.

Its model is one of its own, frozen, or the student's own chunks (`teacher.weights`). No gradients, no DDP buffers, no
layer deeper than the deepest one that is asked for; the LM head only where the output term wants log-probabilities of
sampled tokens. What leaves a layer is compacted to the supervised rows at once, and projected where there is a bridge.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist

from nemo_oprd.batch.plan import BatchPlan, LocalRows, StepPlan
from nemo_oprd.batch.types import Rollout, TeacherTargets
from nemo_oprd.distillation.capture import HiddenStateCapture
from nemo_oprd.distillation.objective import SAMPLED_COLUMNS, Objective
from nemo_oprd.distillation.output_head import rows_of, vocab_shard
from nemo_oprd.distillation.target_transfer import RowShard, exchange, gather_replicas, plan_transfers
from nemo_oprd.losses.chunked import chunked_logprob
from nemo_oprd.megatron.model import DistillingModel
from nemo_oprd.megatron.parallel import Role, device
from nemo_oprd.megatron.pipeline_schedule import make_microbatch, run_schedule


@dataclass
class Teacher:
    """The teacher on this rank; on ranks without the role `chunks` is None and it only takes part in transfers."""

    objective: Objective
    role: Role
    chunks: list[DistillingModel] | None
    dtype: torch.dtype
    host_weights: list[torch.Tensor] | None = None

    @torch.no_grad()
    def targets(self, rollouts: list[Rollout], plan: StepPlan, student_plan: StepPlan, student: Role) -> TeacherTargets:
        """Forward over what it reads of `rollouts`, then the exchange. Every rank of the world calls this.

        Args:
            plan: the rollouts packed for the teacher's layout.
            student_plan: the same rollouts packed for the student's layout.
        """
        objective, term = self.objective, self.objective.output
        hidden, output = self._read(rollouts, plan) if self.chunks is not None else (None, None)
        # r numbers are few: a projection is not rounded to the run's precision
        dtype = self.dtype if objective.project_teacher is None else torch.float32
        carrier = TargetTransfer(plan.hidden, student_plan.hidden, student, objective)
        targets = TeacherTargets(*carrier.send(hidden, objective.layers, objective.target_width, dtype))
        if term is not None:
            assert plan.output is not None and student_plan.output is not None
            carrier = TargetTransfer(plan.output, student_plan.output, student, objective)
            last = {objective.student.num_layers: objective.teacher.num_layers}
            width, dtype = objective.teacher.hidden_size, self.dtype
            if term.sampled:
                width, dtype = SAMPLED_COLUMNS, torch.float32
            states, received = carrier.send(output, last, width, dtype)
            targets.output = states.get(objective.student.num_layers)
            targets.bytes_received += received
        return targets

    def offload(self) -> None:
        """Moves the weights to host memory (pinned where there is CUDA); `targets` brings them back while it runs."""
        if self.host_weights is None:
            pin = torch.cuda.is_available()
            # frozen, so one copy serves for ever
            self.host_weights = [
                p.detach().to("cpu", copy=True).pin_memory() if pin else p.detach().clone() for p in self._parameters()
            ]
        for parameter in self._parameters():
            parameter.data = parameter.data.new_empty(0)

    @contextmanager
    def _weights_here(self) -> Iterator[None]:
        if self.host_weights is None:
            yield
            return
        for parameter, host in zip(self._parameters(), self.host_weights, strict=True):
            parameter.data = host.to(device(), non_blocking=True, copy=True)
        yield
        self.offload()

    def _parameters(self) -> list[torch.nn.Parameter]:
        return [p for chunk in self.chunks or [] for p in chunk.parameters()]

    def _read(self, rollouts: list[Rollout], plan: StepPlan) -> tuple[RowShard, RowShard | None]:
        """Forward on this rank: its share of the supervised rows, keyed by student layer, and of the output rows."""
        assert self.role.coords is not None and self.chunks is not None
        at, objective = self.role.coords, self.objective
        mine = plan.hidden.owned_rows(at)
        wanted_here = np.zeros(len(plan.hidden.table), dtype=bool)
        wanted_here[mine] = True
        wanted = self._wanted()
        output_rows, read = self._output_rows(plan), [rollout.as_read_by_teacher() for rollout in rollouts]
        observers, microbatches = [], []
        for m, (pack, held) in enumerate(zip(plan.hidden.packs[at.data], plan.hidden.local_rows(at), strict=True)):
            rows = torch.from_numpy(held.local[wanted_here[held.row]]).to(device())
            final = rows_of(output_rows[m], self.role) if output_rows else None
            observer = HiddenStateCapture(rows, wanted, objective.teacher_final, objective.project_teacher, final)
            observers.append(observer)
            microbatches.append(make_microbatch(pack, read, self.role, observer, objective.teacher_depth))
        with self._weights_here():
            run_schedule(self.chunks, self.role, microbatches, forward_only=True)
            output = self._output(rollouts, plan, observers, output_rows) if output_rows else None
        names = sorted(name for names in wanted.values() for name in names)
        return RowShard(mine, {name: torch.cat([o.captured[name] for o in observers]) for name in names}), output

    def _wanted(self) -> dict[int, list[int]]:
        """Teacher layer of this stage -> the student layers that are matched to it."""
        assert self.role.coords is not None
        owned = self.role.layout.owned_layers(self.role.coords.pipeline, self.objective.teacher.num_layers)
        wanted: dict[int, list[int]] = {}
        for student_layer, teacher_layer in self.objective.layers.items():
            if teacher_layer in owned:
                wanted.setdefault(teacher_layer, []).append(student_layer)
        return wanted

    def _output_rows(self, plan: StepPlan) -> list[LocalRows]:
        """Per microbatch the output rows of this rank; none before the last stage."""
        at = self.role.coords
        if plan.output is None or at is None or at.pipeline != self.role.layout.pipeline - 1:
            return []
        return plan.output.local_rows(at)

    def _output(
        self, rollouts: list[Rollout], plan: StepPlan, observers: list[HiddenStateCapture], held: list[LocalRows]
    ) -> RowShard:
        """This rank's share of what the output term wants of the final hidden states."""
        term = self.objective.output
        assert term is not None and plan.output is not None and self.role.coords is not None and self.chunks is not None
        values = torch.cat([observer.final for observer in observers if observer.final is not None])
        rows = np.concatenate([part.row for part in held])
        if term.sampled:
            tokens = torch.from_numpy(plan.output.table.tokens(rollouts)[rows]).to(device())
            shard = vocab_shard(self.chunks[-1], self.role, term.vocab_size)
            settings = {"temperature": term.loss.temperature, "chunk_tokens": term.chunk_tokens}
            head = self.chunks[-1].output_weight()
            values = torch.stack(chunked_logprob(values, head, tokens, shard, **settings), dim=1)  # type: ignore[arg-type]
        share = plan.output.owned_rows(self.role.coords)
        last = self.objective.student.num_layers
        return RowShard(share, {last: RowShard(rows, {last: values}).pick(last, share)})


@dataclass
class TargetTransfer:
    """Carries rows from the teacher's ranks to the student's."""

    plan: BatchPlan
    student_plan: BatchPlan
    student: Role
    objective: Objective

    def send(
        self, shard: RowShard | None, layers: dict[int, int], width: int, dtype: torch.dtype
    ) -> tuple[dict[int, torch.Tensor], int]:
        """(Student layer -> states of all rows that this rank needs, bytes that came from other ranks)."""
        teacher_depth, student_depth = self.objective.teacher.num_layers, self.objective.student.num_layers
        transfers = plan_transfers(
            self.plan, self.student_plan, layers, teacher_depth, student_depth, rank=dist.get_rank()
        )
        at, wanted, wanted_layers = self.student.coords, None, []
        if at is not None:
            wanted = self.student_plan.owned_rows(at)
            owned = self.student_plan.layout.owned_layers(at.pipeline, student_depth)
            wanted_layers = [layer for layer in sorted(layers) if layer in owned]
        arrived, received = exchange(transfers, shard, wanted, wanted_layers, width, dtype, device())
        if arrived is None or at is None:
            return {}, received
        if self.student_plan.replicated:
            full = np.concatenate([held.row for held in self.student_plan.local_rows(at)])
            arrived = gather_replicas(arrived, full, self.student.groups.tp)  # type: ignore[attr-defined]
        return arrived.values, received
