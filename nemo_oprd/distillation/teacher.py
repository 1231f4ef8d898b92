"""A teacher: computes the states of its rollouts' supervised rows and sends every student rank its targets.

`Teacher` has the parts that all teachers share; `EmaTeacher` averages the student's weights. `MegatronTeacher` runs a
model in this process: a separate one without gradients, or the student's chunks (`teacher.weights=student`). A separate
model has no DDP buffers and no layer deeper than the deepest one that an update needs. It has an LM head only if the
output loss needs log-probabilities of sampled tokens, or if the model is saved (`teacher.weights=ema`). Only the
supervised rows of a layer's states are kept, or their projections (`TeacherMatch.project`). Teachers behind vLLM
servers are in `vllm/teacher_servers.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch

from nemo_oprd.batch.plan import LocalRows, StepPlan
from nemo_oprd.batch.types import Rollout, TeacherTargets
from nemo_oprd.distillation.capture import HiddenStateCapture
from nemo_oprd.distillation.objective import OutputTerm, StepObjective, TeacherMatch
from nemo_oprd.distillation.output_head import final_state_rows, vocab_shard
from nemo_oprd.distillation.target_transfer import RowShard, send_targets
from nemo_oprd.losses.chunked import chunked_logprob
from nemo_oprd.megatron.model import DistillingModel
from nemo_oprd.megatron.parallel import Role, device, on_device
from nemo_oprd.megatron.param_names import named_parameters
from nemo_oprd.megatron.pipeline_schedule import make_microbatch, run_schedule

# A teacher whose weights are the exponential moving average of the student's weights over the updates.


class EmaTeacher:
    """teacher <- decay * teacher + (1 - decay) * student, for this rank's parameters.

    The average is held in float32: in bfloat16, most changes at decay 0.999 would be lost to rounding. `chunks` are the
    teacher's on this rank, in the student's layout and with the student's weights; `decay` is in [0, 1).
    """

    def __init__(self, chunks: Sequence[DistillingModel], decay: float) -> None:
        self.chunks, self.decay = list(chunks), decay
        self.parameters = named_parameters(self.chunks)
        self.average = {
            name: p.data if p.dtype == torch.float32 else p.data.float() for name, p in self.parameters.items()
        }

    @torch.no_grad()
    def update(self, student: Sequence[DistillingModel]) -> None:
        """Adds the student's current parameters to the average; called after each update of the student."""
        student_parameters = named_parameters(student)
        for name, average in self.average.items():
            average.lerp_(student_parameters[name].float(), 1.0 - self.decay)
        self.copy_to_teacher()

    @contextmanager
    def in_float32(self) -> Iterator[None]:
        """Sets the teacher's parameters to the float32 average in the context, for a checkpoint to save or load."""
        original = {name: p.data for name, p in self.parameters.items()}
        for name, p in self.parameters.items():
            p.data = self.average[name]
        try:
            yield
        finally:
            for name, p in self.parameters.items():
                p.data = original[name]
            self.copy_to_teacher()

    @torch.no_grad()
    def copy_to_teacher(self) -> None:
        """Copies the average to the teacher's parameters, rounded to their precision."""
        for name, p in self.parameters.items():
            p.copy_(self.average[name])


# values per row of the output loss if the teacher sends no states: log-probability of the sampled token, entropy
SAMPLED_COLUMNS = 2


@dataclass
class Teacher:
    """A teacher on this rank; a subclass's `captured` computes its states."""

    number: int  # index of the teacher in the configuration
    role: Role
    dtype: torch.dtype  # the run's precision

    def captured(
        self, rollouts: list[Rollout], plan: StepPlan, objective: StepObjective
    ) -> tuple[RowShard | None, RowShard | None]:
        """Returns the rows that this rank owns, by student layer, and those of the output loss. Every rank calls this.

        Both are None on ranks outside the role, the second one also before the last stage and without such a loss.
        """
        raise NotImplementedError

    def prefetch(self, step: int, rollouts: list[Rollout], plan: StepPlan, objective: StepObjective) -> None:
        """Announces responses of a step's batch to a teacher that can begin to compute; from any thread.

        Args:
            plan: the plan of these responses alone, for the teacher's layout.
        """

    def prefetch_span(self, step: int) -> tuple[float, float] | None:
        """Returns the times of this rank's first early request for a step's batch and the last answer; None without."""
        return None

    def check(self, step: int) -> None:
        """Checks, if that is due before `step`, that a teacher outside this process still computes the right states.

        Raises:
            ValueError: its states are wrong.
        """

    def close(self) -> None:
        """Stops everything that the teacher has started; it cannot be used afterwards."""

    @torch.no_grad()
    def targets(
        self, rollouts: list[Rollout], plan: StepPlan, student_plan: StepPlan, student: Role, objective: StepObjective
    ) -> TeacherTargets:
        """Gets the teacher's states by `captured`, then sends them to the student. Every rank of the world calls this.

        Args:
            plan, student_plan: the teacher's rows, packed for the teacher's layout and for the student's.

        Returns:
            The targets that this rank needs as a student; empty on ranks outside the student's role.
        """
        match, term = objective.run.teachers[self.number], objective.output
        hidden, output = self.captured(rollouts, plan, objective)
        # a projection has only R values per row, so it is sent in float32
        dtype = self.dtype if match.project is None else torch.float32
        depths = match.spec.num_layers, objective.run.student.num_layers
        targets = TeacherTargets(
            *send_targets(hidden, plan.hidden, student_plan.hidden, student, match.layers, depths, match.width, dtype)
        )
        if term is not None:
            assert plan.output is not None and student_plan.output is not None
            width, dtype = match.spec.hidden_size, self.dtype
            if not term.sends_states:
                width, dtype = SAMPLED_COLUMNS, torch.float32
            deepest, last = depths
            states, received = send_targets(
                output, plan.output, student_plan.output, student, {last: deepest}, depths, width, dtype
            )
            targets.output = states.get(last)
            targets.bytes_received += received
        return targets


@dataclass
class MegatronTeacher(Teacher):
    """A teacher whose model is in this process."""

    chunks: list[DistillingModel] | None = None  # None on ranks outside the role, which only take part in transfers
    host_weights: list[torch.Tensor] | None = None  # copies of the weights in host memory, once `offload` was called

    def captured(
        self, rollouts: list[Rollout], plan: StepPlan, objective: StepObjective
    ) -> tuple[RowShard | None, RowShard | None]:
        """Runs the forward pass, as `Teacher.captured` says."""
        return (None, None) if self.chunks is None else self._forward(rollouts, plan, objective)

    def offload(self) -> None:
        """Moves the weights to host memory, which is pinned with CUDA; `targets` copies them back while it runs."""
        if self.host_weights is None:
            # the weights are frozen, so one copy is enough
            self.host_weights = [_host_copy(parameter) for parameter in self._parameters()]
        for parameter in self._parameters():
            parameter.data = parameter.data.new_empty(0)

    @contextmanager
    def weights_on_device(self) -> Iterator[None]:
        """Keeps offloaded weights on the device in the context."""
        if self.host_weights is None:
            yield
            return
        for parameter, host in zip(self._parameters(), self.host_weights, strict=True):
            parameter.data = host.to(device(), non_blocking=True, copy=True)
        yield
        self.offload()

    def _parameters(self) -> list[torch.nn.Parameter]:
        return [p for chunk in self.chunks or [] for p in chunk.parameters()]

    def _forward(
        self, rollouts: list[Rollout], plan: StepPlan, objective: StepObjective
    ) -> tuple[RowShard, RowShard | None]:
        """Runs the forward pass; returns the rows that this rank owns, by student layer, and those of the output loss
        (None before the last stage and without such a loss)."""
        assert self.chunks is not None
        coords, match = self.role.member_coords, objective.run.teachers[self.number]
        owned = plan.hidden.owned_rows(coords)
        is_owned = np.zeros(len(plan.hidden.table), dtype=bool)
        is_owned[owned] = True
        student_layers = self._student_layers(match)
        output_rows, sequences = self._output_rows(plan), [rollout.as_read_by_teacher() for rollout in rollouts]
        captures, microbatches = [], []
        for m, (pack, local) in enumerate(
            zip(plan.hidden.packs[coords.data], plan.hidden.local_rows(coords), strict=True)
        ):
            rows = on_device(local.hidden_index[is_owned[local.table_index]])
            final = final_state_rows(output_rows[m], pack, self.role) if output_rows else None
            capture = HiddenStateCapture(rows, student_layers, match.final_layer, match.project, final)
            captures.append(capture)
            depth = objective.teacher_depth(self.number)
            microbatches.append(make_microbatch(pack, sequences, self.role, capture, depth))
        with self.weights_on_device():
            run_schedule(self.chunks, self.role, microbatches, forward_only=True)
            output = None
            if output_rows and objective.output is not None:
                states = torch.cat([capture.final for capture in captures if capture.final is not None])
                for capture in captures:
                    capture.final = None
                output = self._output(rollouts, plan, states, output_rows, objective, objective.output)
        layers = sorted(layer for layers in student_layers.values() for layer in layers)
        # the rows of a microbatch are freed as soon as they are joined
        return RowShard(owned, {at: torch.cat([c.captured.pop(at) for c in captures]) for at in layers}), output

    def _student_layers(self, match: TeacherMatch) -> dict[int, list[int]]:
        """Returns matched teacher layer of this stage -> the student layers that are matched with it."""
        owned = self.role.layout.owned_layers(self.role.member_coords.pipeline, match.spec.num_layers)
        student_layers: dict[int, list[int]] = {}
        for student_layer, teacher_layer in match.layers.items():
            if teacher_layer in owned:
                student_layers.setdefault(teacher_layer, []).append(student_layer)
        return student_layers

    def _output_rows(self, plan: StepPlan) -> list[LocalRows]:
        """Returns this rank's output-loss rows per microbatch; empty before the last stage and without such a loss."""
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
        """Returns the output targets that this rank owns, from the final states of its rows `local` in the order of the
        microbatches: these states, or `SAMPLED_COLUMNS` values per row."""
        assert plan.output is not None and self.chunks is not None
        values, match = states_ND, objective.run.teachers[self.number]
        rows = np.concatenate([part.table_index for part in local])
        if not term.sends_states:
            tokens = on_device(plan.output.table.tokens(rollouts)[rows])
            model, temperature = self.chunks[-1], term.loss.temperature
            arguments = states_ND, model.output_weight(), tokens, vocab_shard(model, self.role, match.shared)
            both = chunked_logprob(*arguments, temperature=temperature, chunk_tokens=term.chunk_tokens)
            values = torch.stack(both, dim=1)
        owned, last = plan.output.owned_rows(self.role.member_coords), objective.run.student.num_layers
        if not np.array_equal(owned, rows):
            values = RowShard(rows, {last: values}).pick(last, owned)
        return RowShard(owned, {last: values})


def _host_copy(parameter: torch.Tensor) -> torch.Tensor:
    """Returns a weight in host memory, which is pinned with CUDA."""
    weight = parameter.detach()
    return weight.to("cpu", copy=True).pin_memory() if torch.cuda.is_available() else weight.clone()
