"""One update: its batch, and the gradient of the batch, accumulated over groups of microbatches.

    batch = distiller.batch(rollouts, objective)
    accumulation = distiller.start(batch)
    for group in batch.groups:
        accumulation.forward_backward(group, distiller.targets(batch, group))
    metrics = accumulation.finish()

Every rank runs these lines, whatever its roles; outside the student's ranks `forward_backward` does nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from nemo_oprd.batch.plan import StepPlan
from nemo_oprd.batch.types import Rollout, TeacherTargets
from nemo_oprd.distillation.hidden_state_loss import HiddenStateLoss
from nemo_oprd.distillation.metrics.injection_counts import check_injections, check_output_passes
from nemo_oprd.distillation.metrics.step_metrics import MetricSums, StepMetrics
from nemo_oprd.distillation.metrics.token_metrics import TokenSlots
from nemo_oprd.distillation.microbatch_targets import MicrobatchGroup, layer_targets, output_head_losses
from nemo_oprd.distillation.objective import StepObjective
from nemo_oprd.distillation.output_head import OutputHeadLoss
from nemo_oprd.distillation.router_losses import RouterMicrobatch, RouterTerm, count_choices
from nemo_oprd.distillation.student import Student
from nemo_oprd.distillation.trained_projectors import projectors_of
from nemo_oprd.models.megatron.parallel import device
from nemo_oprd.models.megatron.pipeline_schedule import Microbatch, make_microbatch, run_schedule
from nemo_oprd.models.megatron.router_replay import Routes


@dataclass
class KeptResults:
    """Results of the first update on a step's rollouts that its later updates use (`train.updates_per_rollout`).

    `targets` holds the targets by the teacher's number; it is None if the batch has more than one group.
    `sampled_logprobs` holds, per microbatch, the response tokens' log-probabilities under the weights that sampled
    them; it is None during the first update.
    """

    targets: dict[int, TeacherTargets] | None = None
    sampled_logprobs: list[torch.Tensor | None] | None = None


@dataclass(frozen=True)
class StepBatch:
    """The rollouts of one update, planned for the student, with the update's objective.

    `groups` divides the microbatches of `plan`. The models process one group after the other, the gradients of the
    groups add up, and only one group's targets are in memory at a time. `is_last` says that no other update on the same
    rollouts follows.
    """

    rollouts: list[Rollout]
    objective: StepObjective
    plan: StepPlan
    groups: list[StepPlan]
    kept: KeptResults
    is_last: bool = True

    @cached_property
    def token_slots(self) -> TokenSlots | None:
        """The responses whose values per token are kept; None if there are none."""
        return TokenSlots.choose(self.rollouts, self.objective.kept_responses)

    @cached_property
    def routers(self) -> RouterTerm | None:
        """What the update computes of the student's routers; None for a student without experts."""
        return RouterTerm.build(self.plan, self.objective, len(self.rollouts))


class GradientAccumulation:
    """Accumulates the gradient and the metrics of one batch on this rank."""

    def __init__(self, student: Student, batch: StepBatch, *, whole_gradients: bool = False) -> None:
        """Clears the gradients of the previous update.

        Args:
            whole_gradients: reduce gradients so that every student rank has the complete sums, also with the
                distributed optimizer.
        """
        self._student, self._batch, self._whole_gradients = student, batch, whole_gradients
        self._finished_groups: list[StepPlan] = []
        self._targets_bytes = 0
        self._logprobs: list[torch.Tensor | None] = []
        self._sums = MetricSums.zeros(
            student.objective.layers, len(batch.rollouts), device(), batch.token_slots, batch.routers
        )
        self._routers: list[RouterMicrobatch] = []  # of the microbatches that are still to come
        if student.role.is_member:
            student.zero_gradients()

    def forward_backward(self, group: StepPlan, targets: dict[int, TeacherTargets]) -> None:
        """Adds the gradient of one group; the call for the last group reduces the gradients over ranks.

        Args:
            group: the next of the batch's groups.
            targets: by the teacher's number, for the teachers that have rows in the group.
        """
        coords = self._student.role.coords
        if coords is None:
            return
        batch = self._batch
        if not self._finished_groups:
            self._routers = self._routers_of_all_microbatches()
        routers, self._routers = self._routers[: len(group.taught_by)], self._routers[len(group.taught_by) :]
        observers, microbatches = self._microbatches(
            MicrobatchGroup(batch.rollouts, group, targets, coords, batch.token_slots),
            [router.routes for router in routers] or [None] * len(group.taught_by),
        )
        self._finished_groups.append(group)
        run_schedule(
            self._student.ddp,
            self._student.role,
            microbatches,
            forward_only=False,
            finalize=len(self._finished_groups) == len(self._batch.groups),
            force_all_reduce=self._whole_gradients,
        )
        self._targets_bytes = max(
            self._targets_bytes, sum(teacher_targets.bytes_held for teacher_targets in targets.values())
        )
        for router in routers:
            self._sums.add_routers(router.losses)
        for observer in observers:
            self._sums.add(observer)
            sums = None if observer.output is None else observer.output.sums
            self._logprobs.append(None if sums is None else sums.student_logprob)
            if observer.output is not None:
                self._sums.add_output(observer.output, counts_rows=coords.tensor == 0)

    def finish(self) -> StepMetrics | None:
        """The metrics of all groups, after the gradient check has passed; None on ranks outside the role.

        Raises:
            CaptureError: a supervised layer did not receive the planned number of gradients.
        """
        student, objective = self._student, self._batch.objective
        if not student.role.is_member:
            return None
        if self._batch.kept.sampled_logprobs is None and not self._batch.is_last:
            self._batch.kept.sampled_logprobs = self._logprobs
        sums = self._sums.reduced(student.role.member_groups.intra_dist_opt)
        metrics = StepMetrics.from_sums(sums, self._batch.plan, self._finished_groups, objective, self._targets_bytes)
        metrics.weight_metrics |= student.adaptive.metrics(objective.layer_weights, self._batch.plan.hidden)
        if objective.weight > 0:
            counts = {layer: int(count) for layer, count in sums.column("injections").items()}
            identical, squared_norms = set(metrics.identical_layers), sums.column("squared_gradient")
            plans = [group.hidden for group in self._finished_groups]
            check_injections(counts, squared_norms, plans, student.spec.num_layers, identical=identical)
        if objective.output is not None:
            check_output_passes(int(sums.output[0]), [group.output for group in self._finished_groups if group.output])
        return metrics

    @torch.no_grad()
    def _routers_of_all_microbatches(self) -> list[RouterMicrobatch]:
        """Per microbatch of the batch, what its routers do; empty for a student without experts.

        With a load-balancing loss, a pass without gradients counts first how often each expert is chosen.
        """
        student, batch = self._student, self._batch
        role, term, spec = student.role, batch.routers, student.spec
        packs = batch.plan.hidden.packs[role.member_coords.data]
        if term is None:
            return []
        routers = [RouterMicrobatch.build(term, pack, batch.rollouts, role, spec) for pack in packs]
        if term.aux and term.layers:
            depth = max(term.layers)
            run_schedule(
                student.chunks,
                role,
                [
                    make_microbatch(pack, batch.rollouts, role, None, depth, routes=router.routes.unobserved())
                    for pack, router in zip(packs, routers, strict=True)
                ],
                forward_only=True,
            )
            fractions = count_choices(term, routers, role)
            for router in routers:
                router.losses.fractions = fractions
        return routers

    def _microbatches(
        self, group: MicrobatchGroup, routes: Sequence[Routes | None]
    ) -> tuple[list[HiddenStateLoss], list[Microbatch]]:
        """Per microbatch of the group: the losses of its hidden states, and its tokens with these losses attached.

        Args:
            routes: per microbatch, the experts of its tokens.
        """
        student, step = self._student, self._batch.objective
        plan, run = group.plan.hidden, step.run
        targets, output_losses = layer_targets(group, step), self._output_head_losses(group)
        projections = [self._projection(number) for number in range(len(run.teachers))]
        parameters = {layer: list(projector.parameters()) for layer, projector in projectors_of(student.chunks).items()}
        observers = [
            HiddenStateLoss(
                microbatch_targets,
                run.row_loss,
                run.dim_reduction,
                len(group.rollouts),
                run.final_layer,
                counts_rows=not plan.replicated or group.coords.tensor == 0,
                project=projections[teacher],
                projector_parameters=lambda layer: parameters.get(layer, ()),
                output=output_loss,
            )
            for microbatch_targets, output_loss, teacher in zip(
                targets, output_losses, group.plan.taught_by, strict=True
            )
        ]
        microbatches = [
            make_microbatch(pack, group.rollouts, student.role, observer, step.depth, routes=experts)
            for pack, observer, experts in zip(plan.packs[group.coords.data], observers, routes, strict=True)
        ]
        return observers, microbatches

    def _output_head_losses(self, group: MicrobatchGroup) -> Sequence[OutputHeadLoss | None]:
        """Per microbatch, its output loss; None before the last stage, and without an output loss."""
        student, objective = self._student, self._batch.objective
        term, last = objective.output, student.chunks[-1]
        if group.plan.output is None or term is None or not last.post_process:
            return [None] * len(group.plan.taught_by)
        earlier = sum(len(finished.taught_by) for finished in self._finished_groups)
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
        """(Layer, student states [n, D]) -> the projection [n, R] to compare; None where the states are compared."""
        run = self._batch.objective.run
        if run.trains_bridge:
            projectors = projectors_of(self._student.chunks)
            return lambda layer, rows_ND: projectors[layer](rows_ND)
        bridge = run.teachers[number].bridge
        return None if bridge is None else bridge.project_student
