"""One update: its batch, and the gradient of that batch, accumulated group by group of microbatches.

    batch = models.batch(rollouts, objective)
    accumulation = models.start(batch)
    for group in batch.groups:
        accumulation.forward_backward(group, models.targets(batch, group))
    metrics = accumulation.finish()

Every rank does this, whatever roles it has; outside the student's ranks `forward_backward` does nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from nemo_oprd.batch.plan import StepPlan
from nemo_oprd.batch.types import Rollout, TeacherTargets
from nemo_oprd.distillation.gradient_check import check_injections, check_output_passes
from nemo_oprd.distillation.hidden_state_loss import HiddenStateLoss
from nemo_oprd.distillation.microbatch_targets import MicrobatchGroup, layer_targets, output_head_losses
from nemo_oprd.distillation.objective import StepObjective
from nemo_oprd.distillation.output_head import OutputHeadLoss
from nemo_oprd.distillation.step_metrics import MetricSums, StepMetrics
from nemo_oprd.distillation.student import Student
from nemo_oprd.distillation.trained_projectors import projectors_of
from nemo_oprd.megatron.parallel import device
from nemo_oprd.megatron.pipeline_schedule import Microbatch, make_microbatch, run_schedule


@dataclass
class KeptResults:
    """What the first update on a step's rollouts computes for those that follow (`train.updates_per_rollout`).

    `targets` are the teachers', kept if one group holds the batch. `sampled_logprobs` are the log-probabilities of the
    response tokens under the student that sampled them, per microbatch; None until the first update is done.
    """

    targets: dict[int, TeacherTargets] | None = None
    sampled_logprobs: list[torch.Tensor | None] | None = None


@dataclass(frozen=True)
class StepBatch:
    """The rollouts of one update, planned for the student, with the update's objective.

    `groups` are the parts of `plan` that go through the models one after the other: their gradients add up, and the
    targets of one group at a time are in memory. `is_last` says that no update on the same rollouts follows.
    """

    rollouts: list[Rollout]
    objective: StepObjective
    plan: StepPlan
    groups: list[StepPlan]
    kept: KeptResults
    is_last: bool = True


class GradientAccumulation:
    """Adds up the gradient of one batch on this rank, and what is measured on the way."""

    def __init__(self, student: Student, batch: StepBatch, *, whole_gradients: bool = False) -> None:
        """Clears the gradients of the update before.

        Args:
            whole_gradients: every rank ends up with complete gradients, also under the distributed optimizer.
        """
        self._student, self._batch, self._whole_gradients = student, batch, whole_gradients
        self._done: list[StepPlan] = []
        self._targets_bytes = 0
        self._logprobs: list[torch.Tensor | None] = []
        self._sums = MetricSums.zeros(student.objective.layers, len(batch.rollouts), device())
        if student.role.is_member:
            student.zero_gradients()

    def forward_backward(self, group: StepPlan, targets: dict[int, TeacherTargets]) -> None:
        """Adds the gradient of one group; with the last one, gradients are reduced over ranks.

        Args:
            targets: of each teacher that has rows in the group.
        """
        coords = self._student.role.coords
        if coords is None:
            return
        observers, microbatches = self._microbatches(MicrobatchGroup(self._batch.rollouts, group, targets, coords))
        self._done.append(group)
        run_schedule(
            self._student.ddp,
            self._student.role,
            microbatches,
            forward_only=False,
            finalize=len(self._done) == len(self._batch.groups),
            force_all_reduce=self._whole_gradients,
        )
        self._targets_bytes = max(self._targets_bytes, sum(each.bytes_held for each in targets.values()))
        for observer in observers:
            self._sums.add(observer)
            sums = None if observer.output is None else observer.output.sums
            self._logprobs.append(None if sums is None else sums.student_logprob)
            if observer.output is not None:
                self._sums.add_output(observer.output, counts=coords.tensor == 0)

    def finish(self) -> StepMetrics | None:
        """What the groups measured together, once the gradient check has passed; None on ranks outside the role.

        Every (layer, row) was measured by exactly one rank.

        Raises:
            CaptureError: a supervised layer trained nothing, or not as planned.
        """
        student, objective = self._student, self._batch.objective
        if not student.role.is_member:
            return None
        if self._batch.kept.sampled_logprobs is None and not self._batch.is_last:
            self._batch.kept.sampled_logprobs = self._logprobs
        sums = self._sums.reduced(student.role.member_groups.intra_dist_opt)
        metrics = StepMetrics.from_sums(sums, self._batch.plan, self._done, objective, self._targets_bytes)
        metrics.weights |= student.adaptive.metrics(objective.layer_weights, self._batch.plan.hidden)
        if objective.weight > 0:
            counts = {layer: int(count) for layer, count in sums.column("injections").items()}
            same, norms = set(metrics.identical_layers), sums.column("squared_gradient")
            hidden = [plan.hidden for plan in self._done]
            check_injections(counts, norms, hidden, student.spec.num_layers, identical=same)
        if objective.output is not None:
            check_output_passes(int(sums.output[0]), [plan.output for plan in self._done if plan.output])
        return metrics

    def _microbatches(self, group: MicrobatchGroup) -> tuple[list[HiddenStateLoss], list[Microbatch]]:
        """Per microbatch of the group: the loss of its hidden states, and its tokens with that loss attached."""
        student, step = self._student, self._batch.objective
        plan, run = group.plan.hidden, step.run
        targets, output = layer_targets(group, step), self._output_head_losses(group)
        projections = [self._projection(number) for number in range(len(run.teachers))]
        trained = {layer: list(each.parameters()) for layer, each in projectors_of(student.chunks).items()}
        observers = [
            HiddenStateLoss(
                of_layers,
                run.row_loss,
                run.dim_reduction,
                len(group.rollouts),
                run.final_layer,
                measure=not plan.replicated or group.coords.tensor == 0,
                project=projections[teacher],
                learned=lambda layer: trained.get(layer, ()),
                output=of_output,
            )
            for of_layers, of_output, teacher in zip(targets, output, group.plan.taught_by, strict=True)
        ]
        microbatches = [
            make_microbatch(pack, group.rollouts, student.role, observer, step.depth)
            for pack, observer in zip(plan.packs[group.coords.data], observers, strict=True)
        ]
        return observers, microbatches

    def _output_head_losses(self, group: MicrobatchGroup) -> Sequence[OutputHeadLoss | None]:
        """Per microbatch, the output-space term; None before the last stage, or without such a term."""
        student, objective = self._student, self._batch.objective
        term, last = objective.output, student.chunks[-1]
        if group.plan.output is None or term is None or not last.post_process:
            return [None] * len(group.plan.taught_by)
        earlier = sum(len(plan.taught_by) for plan in self._done)
        kept = self._batch.kept.sampled_logprobs
        return output_head_losses(
            group,
            last,
            student.role,
            term,
            [match.shared_vocab for match in objective.run.teachers],
            student.teacher_head if term.sends_states else lambda number: None,
            None if kept is None else kept[earlier:],
        )

    def _projection(self, number: int) -> Callable[[int, torch.Tensor], torch.Tensor] | None:
        """(Layer, [n, D] of the student) -> what is compared with this teacher; None where it is the state itself."""
        run = self._batch.objective.run
        if run.trains_bridge:
            projectors = projectors_of(self._student.chunks)
            return lambda layer, rows_ND: projectors[layer](rows_ND)
        bridge = run.teachers[number].bridge
        return None if bridge is None else bridge.project_student
