"""One update: its batch, and the gradient of the batch, accumulated over groups of microbatches.

    batch = distiller.batch(rollouts, objective)
    accumulation = distiller.start(batch)
    for group in batch.groups:
        accumulation.forward_backward(group, distiller.targets(batch, group))
    metrics = accumulation.finish()

Every rank runs these lines, whatever its roles; outside the student's ranks `forward_backward` does nothing. Later
updates on the same rollouts use the `KeptResults` of the first one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import torch

from nemo_oprd.batch.plan import StepPlan
from nemo_oprd.batch.types import TeacherTargets
from nemo_oprd.distillation.hidden_state_loss import HiddenStateLoss, layer_sums
from nemo_oprd.distillation.metrics.injection_counts import check_injections, check_output_passes
from nemo_oprd.distillation.metrics.step_metrics import StepMetrics, step_metrics, step_sums
from nemo_oprd.distillation.microbatch_targets import MicrobatchGroup, layer_targets, output_head_losses
from nemo_oprd.distillation.router_losses import RouterMicrobatch, count_choices
from nemo_oprd.distillation.step_batch import StepBatch
from nemo_oprd.distillation.student import Student
from nemo_oprd.distillation.trained_projectors import projectors_of, student_projection
from nemo_oprd.megatron.parallel import device
from nemo_oprd.megatron.pipeline_schedule import Microbatch, make_microbatch, run_schedule
from nemo_oprd.megatron.router_replay import Routes

# Per microbatch of a batch, the log-probabilities [n] of the output loss's tokens, and those among the ids that can be
# sampled (None without a correction); None on ranks without these rows.
Logprobs: TypeAlias = list[tuple[torch.Tensor, torch.Tensor | None] | None]


@dataclass(frozen=True)
class KeptResults:
    """Results of the first update on a step's rollouts that its later updates use (`train.updates_per_rollout`)."""

    targets: dict[int, TeacherTargets] | None = None  # by the teacher's number; None for more than one group
    sampled_logprobs: Logprobs | None = None  # under the weights that sampled the tokens; None: the current ones did


class StepResult(NamedTuple):
    """The metrics of an update, None on ranks outside the student, and the results that later updates use again."""

    metrics: StepMetrics | None
    kept: KeptResults


class GradientAccumulation:
    """Accumulates the gradient and the metrics of one batch on this rank."""

    def __init__(
        self,
        student: Student,
        batch: StepBatch,
        sampled_logprobs: Logprobs | None = None,
        *,
        whole_gradients: bool = False,
    ) -> None:
        """Clears the gradients of the previous update; `sampled_logprobs` are those of `KeptResults`.

        With `whole_gradients` every student rank gets the complete sums, also with the distributed optimizer.
        """
        self._student, self._batch, self._whole_gradients = student, batch, whole_gradients
        self._sampled_logprobs = sampled_logprobs
        self.logprobs: Logprobs = []  # of the groups so far, under the student's current weights
        self._targets_bytes = 0
        self._layers = student.objective.layers
        self._sums = step_sums(self._layers, batch, device())
        self._routers: list[RouterMicrobatch] = []  # of the microbatches that are still to come
        if student.role.is_member:
            student.zero_gradients()

    def forward_backward(self, group: StepPlan, targets: dict[int, TeacherTargets]) -> None:
        """Adds the gradient of the batch's next group; the call for the last group reduces the gradients over ranks.

        `targets` are by the teacher's number, for the teachers that have rows in the group.
        """
        student, coords = self._student, self._student.role.coords
        if coords is None:
            return
        batch, count = self._batch, len(group.taught_by)
        if not self.logprobs:
            self._routers = self._routers_of_all_microbatches()
        routers, self._routers = self._routers[:count], self._routers[count:]
        routes: list[Routes | None] = [router.routes for router in routers] or [None] * count
        own = MicrobatchGroup(batch.rollouts, group, targets, coords, batch.token_slots)
        observers, microbatches = self._microbatches(own, routes)
        last = len(self.logprobs) + count == len(batch.plan.taught_by)
        run_schedule(
            student.ddp,
            student.role,
            microbatches,
            forward_only=False,
            finalize=last,
            force_all_reduce=self._whole_gradients,
        )
        self._targets_bytes = max(self._targets_bytes, sum(sent.bytes_held for sent in targets.values()))
        for router in routers:
            self._sums.add(router.losses.sums)
        slots = 0 if batch.token_slots is None else batch.token_slots.count
        for observer in observers:
            self._sums.add(observer.sums)
            output = observer.output
            sums = None if output is None else output.sums
            self.logprobs.append(None if sums is None else (sums.student_logprob, sums.sampler_logprob))
            if output is not None:
                self._sums.add(output.named_sums(len(batch.rollouts), slots, counts_rows=coords.tensor == 0))

    def finish(self) -> StepMetrics | None:
        """Checks the gradients; returns the metrics of all groups, None on ranks outside the role.

        Raises:
            CaptureError: a supervised layer did not receive the planned number of gradients.
        """
        student, batch = self._student, self._batch
        if not student.role.is_member:
            return None
        sums = self._sums.reduced(student.role.member_groups.intra_dist_opt)
        layers = layer_sums(sums["layers"], self._layers)
        adaptive = student.adaptive.metrics(batch.objective.layer_weights, batch.plan.hidden)
        metrics = step_metrics(sums, layers, batch, adaptive, self._targets_bytes)
        if batch.objective.weight > 0:
            check_injections(layers, batch.plan.hidden, student.spec.num_layers)
        if batch.plan.output is not None:
            check_output_passes(int(sums["output_passes"]), batch.plan.output)
        return metrics

    @torch.no_grad()
    def _routers_of_all_microbatches(self) -> list[RouterMicrobatch]:
        """The routers of each microbatch of the batch; empty for a student without experts.

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
            microbatches = [
                make_microbatch(pack, batch.rollouts, role, None, depth, routes=router.routes.unobserved())
                for pack, router in zip(packs, routers, strict=True)
            ]
            run_schedule(student.chunks, role, microbatches, forward_only=True)
            fractions = count_choices(term, routers, role)
            for router in routers:
                router.losses.fractions = fractions
        return routers

    def _microbatches(
        self, group: MicrobatchGroup, routes: Sequence[Routes | None]
    ) -> tuple[list[HiddenStateLoss], list[Microbatch]]:
        """Per microbatch of the group: the losses of its hidden states, and its tokens with these losses attached."""
        student, objective, run = self._student, self._batch.objective, self._batch.objective.run
        sampled = None if self._sampled_logprobs is None else self._sampled_logprobs[len(self.logprobs) :]
        projectors = projectors_of(student.chunks).items()
        parameters = {layer: list(projector.parameters()) for layer, projector in projectors}
        plan, taught_by = group.plan.hidden, group.plan.taught_by
        observers = [
            HiddenStateLoss(
                targets,
                run.row_loss,
                run.dim_reduction,
                self._layers,
                len(group.rollouts),
                run.final_layer,
                counts_rows=not plan.replicated or group.coords.tensor == 0,
                project=student_projection(student.chunks, run, teacher),
                projector_parameters=parameters,
                output=output,
            )
            for targets, output, teacher in zip(
                layer_targets(group, objective),
                output_head_losses(group, student, objective, sampled),
                taught_by,
                strict=True,
            )
        ]
        microbatches = [
            make_microbatch(pack, group.rollouts, student.role, observer, objective.depth, routes=experts)
            for pack, observer, experts in zip(plan.packs[group.coords.data], observers, routes, strict=True)
        ]
        return observers, microbatches
