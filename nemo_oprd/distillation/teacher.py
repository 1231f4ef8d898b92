"""A teacher: reads its rollouts and hands every student rank the states to match.

Its model is one of its own, frozen, or the student's own chunks (`teacher.weights`). It has no gradients, no DDP
buffers, and no layer deeper than the deepest one that any update needs; the LM head only where the output term wants
log-probabilities of sampled tokens. A layer's states are compacted to the supervised rows at once, and projected where
there is a bridge.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch

from nemo_oprd.batch.plan import LocalRows, StepPlan
from nemo_oprd.batch.types import Rollout, TeacherTargets
from nemo_oprd.distillation.capture import HiddenStateCapture
from nemo_oprd.distillation.objective import OutputTerm, StepObjective, TeacherMatch
from nemo_oprd.distillation.output_head import rows_of, vocab_shard
from nemo_oprd.distillation.target_transfer import RowShard, TargetTransfer
from nemo_oprd.losses.chunked import chunked_logprob
from nemo_oprd.megatron.model import DistillingModel
from nemo_oprd.megatron.parallel import Role, device
from nemo_oprd.megatron.pipeline_schedule import make_microbatch, run_schedule

# what a teacher sends for each output row without its states: log-probability of the sampled token, entropy
SAMPLED_COLUMNS = 2


@dataclass
class Teacher:
    """A teacher on this rank; on ranks without the role `chunks` is None and it only takes part in transfers.

    `number` is its place among the run's teachers.
    """

    number: int
    role: Role
    chunks: list[DistillingModel] | None
    dtype: torch.dtype
    host_weights: list[torch.Tensor] | None = None

    @torch.no_grad()
    def targets(
        self,
        rollouts: list[Rollout],
        plan: StepPlan,
        student_plan: StepPlan,
        student: Role,
        objective: StepObjective,
    ) -> TeacherTargets:
        """Forward over what it reads of `rollouts`, then the exchange. Every rank of the world calls this.

        Args:
            plan: the rollouts packed for the teacher's layout.
            student_plan: the same rollouts packed for the student's layout.
            objective: of the update that the targets are for.
        """
        match, term = objective.run.teachers[self.number], objective.output
        hidden, output = self._read(rollouts, plan, objective) if self.chunks is not None else (None, None)
        # R numbers are few: a projection is not rounded to the run's precision
        dtype = self.dtype if match.project is None else torch.float32
        depths = match.spec.num_layers, objective.run.student.num_layers
        transfer = TargetTransfer(plan.hidden, student_plan.hidden, student, *depths)
        targets = TeacherTargets(*transfer.send(hidden, match.layers, match.width, dtype))
        if term is not None:
            assert plan.output is not None and student_plan.output is not None
            transfer = TargetTransfer(plan.output, student_plan.output, student, *depths)
            width, dtype = match.spec.hidden_size, self.dtype
            if not term.sends_states:
                width, dtype = SAMPLED_COLUMNS, torch.float32
            last = objective.run.student.num_layers
            states, received = transfer.send(output, {last: match.spec.num_layers}, width, dtype)
            targets.output = states.get(last)
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
    def _weights_on_device(self) -> Iterator[None]:
        if self.host_weights is None:
            yield
            return
        for parameter, host in zip(self._parameters(), self.host_weights, strict=True):
            parameter.data = host.to(device(), non_blocking=True, copy=True)
        yield
        self.offload()

    def _parameters(self) -> list[torch.nn.Parameter]:
        return [p for chunk in self.chunks or [] for p in chunk.parameters()]

    def _read(
        self, rollouts: list[Rollout], plan: StepPlan, objective: StepObjective
    ) -> tuple[RowShard, RowShard | None]:
        """Forward on this rank: its part of the supervised rows, keyed by student layer, and of the output rows."""
        assert self.chunks is not None
        coords, match = self.role.member_coords, objective.run.teachers[self.number]
        owned = plan.hidden.owned_rows(coords)
        sent_from_here = np.zeros(len(plan.hidden.table), dtype=bool)
        sent_from_here[owned] = True
        wanted = self._wanted(match)
        output_rows, read = self._output_rows(plan), [rollout.as_read_by_teacher() for rollout in rollouts]
        captures, microbatches = [], []
        for m, (pack, local) in enumerate(
            zip(plan.hidden.packs[coords.data], plan.hidden.local_rows(coords), strict=True)
        ):
            rows = torch.from_numpy(local.local[sent_from_here[local.row]]).to(device())
            final = rows_of(output_rows[m], self.role) if output_rows else None
            capture = HiddenStateCapture(rows, wanted, match.final_layer, match.project, final)
            captures.append(capture)
            depth = objective.teacher_depth(self.number)
            microbatches.append(make_microbatch(pack, read, self.role, capture, depth))
        with self._weights_on_device():
            run_schedule(self.chunks, self.role, microbatches, forward_only=True)
            output = None
            if output_rows and objective.output is not None:
                states = torch.cat([capture.final for capture in captures if capture.final is not None])
                output = self._output(rollouts, plan, states, output_rows, objective, objective.output)
        layers = sorted(layer for layers in wanted.values() for layer in layers)
        return RowShard(owned, {layer: torch.cat([c.captured[layer] for c in captures]) for layer in layers}), output

    def _wanted(self, match: TeacherMatch) -> dict[int, list[int]]:
        """Teacher layer of this stage -> the student layers that are matched to it."""
        owned = self.role.layout.owned_layers(self.role.member_coords.pipeline, match.spec.num_layers)
        wanted: dict[int, list[int]] = {}
        for student_layer, teacher_layer in match.layers.items():
            if teacher_layer in owned:
                wanted.setdefault(teacher_layer, []).append(student_layer)
        return wanted

    def _output_rows(self, plan: StepPlan) -> list[LocalRows]:
        """Per microbatch the output rows of this rank; none before the last stage."""
        coords = self.role.member_coords
        if plan.output is None or coords.pipeline != self.role.layout.pipeline - 1:
            return []
        return plan.output.local_rows(coords)

    def _output(
        self,
        rollouts: list[Rollout],
        plan: StepPlan,
        states_ND: torch.Tensor,
        local: list[LocalRows],
        objective: StepObjective,
        term: OutputTerm,
    ) -> RowShard:
        """This rank's part of what the output term needs: the final states, or two numbers per row from them."""
        assert plan.output is not None and self.chunks is not None
        values = states_ND
        rows = np.concatenate([part.row for part in local])
        if not term.sends_states:
            tokens = torch.from_numpy(plan.output.table.tokens(rollouts)[rows]).to(device())
            vocab = objective.run.teachers[self.number].shared_vocab
            values = torch.stack(
                chunked_logprob(
                    states_ND,
                    self.chunks[-1].output_weight(),
                    tokens,
                    vocab_shard(self.chunks[-1], self.role, vocab),
                    temperature=term.loss.temperature,
                    chunk_tokens=term.chunk_tokens,
                ),
                dim=1,
            )
        owned, last = plan.output.owned_rows(self.role.member_coords), objective.run.student.num_layers
        return RowShard(owned, {last: RowShard(rows, {last: values}).pick(last, owned)})
