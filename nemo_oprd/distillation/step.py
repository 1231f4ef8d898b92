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
from functools import cached_property
from typing import NamedTuple, TypeAlias

import numpy as np
import torch

from nemo_oprd.batch.layout import Coordinates
from nemo_oprd.batch.plan import LocalRows, StepPlan
from nemo_oprd.batch.token_table import profile_bins
from nemo_oprd.batch.types import Rollout, TeacherTargets
from nemo_oprd.distillation.hidden_state_loss import HiddenStateLoss, LayerTarget, layer_sums
from nemo_oprd.distillation.metrics.injection_counts import check_injections, check_output_passes
from nemo_oprd.distillation.metrics.step_metrics import StepMetrics, step_metrics, step_sums
from nemo_oprd.distillation.metrics.token_metrics import LayerTokens, TokenSlots
from nemo_oprd.distillation.objective import StepObjective
from nemo_oprd.distillation.output_head import OutputHeadLoss, final_state_rows, vocab_shard
from nemo_oprd.distillation.router_losses import RouterMicrobatch, count_choices
from nemo_oprd.distillation.step_batch import StepBatch
from nemo_oprd.distillation.student import Student
from nemo_oprd.distillation.trained_projectors import projectors_of, student_projection
from nemo_oprd.megatron.parallel import device, on_device
from nemo_oprd.megatron.pipeline_schedule import Microbatch, make_microbatch, run_schedule
from nemo_oprd.megatron.router_replay import Routes

# The losses of each microbatch of a group on this rank: their rows, weights and targets.


@dataclass(frozen=True)
class MicrobatchGroup:
    """Some microbatches of a batch, with the targets that the rank at `coords` received for them.

    `targets` holds the targets by the teacher's number; their rows are in the order of the teacher's microbatches. A
    teacher without rows in the group has no entry. `slots` are those of the batch; None: no values are kept per token.
    """

    rollouts: list[Rollout]
    plan: StepPlan
    targets: dict[int, TeacherTargets]
    coords: Coordinates
    slots: TokenSlots | None = None

    @cached_property
    def hidden_rows(self) -> list[LocalRows]:
        """Per microbatch, the rows of the representation loss on this rank."""
        return self.plan.hidden.local_rows(self.coords)

    @cached_property
    def output_rows(self) -> list[LocalRows]:
        """Per microbatch, the rows of the output loss on this rank; empty without an output loss."""
        return [] if self.plan.output is None else self.plan.output.local_rows(self.coords)

    def target_slices(self, local_rows: list[LocalRows]) -> list[slice]:
        """Returns, per microbatch, the slice of its rows in the targets that its teacher sent."""
        ends: dict[int, int] = {}
        slices = []
        for teacher, rows in zip(self.plan.taught_by, local_rows, strict=True):
            start = ends.get(teacher, 0)
            ends[teacher] = start + len(rows.table_index)
            slices.append(slice(start, ends[teacher]))
        return slices


def layer_targets(group: MicrobatchGroup, objective: StepObjective) -> list[dict[int, LayerTarget]]:
    """Returns, per microbatch, student layer -> the layer's target on this rank."""
    table = group.plan.hidden.table
    weight, response = torch.from_numpy(table.weight).float(), torch.from_numpy(table.response)
    bins = torch.from_numpy(np.stack([profile_bins(table.from_start), profile_bins(table.from_end)]))
    scale, deepest = objective.layer_scale, max(objective.run.layers, default=0)
    slots = None if group.slots is None else torch.from_numpy(group.slots.of_rows(table))
    weights = objective.layer_weights
    total, each = sum(weights.values()), 1 / max(1, len(weights))
    shares = dict(
        zip(weights, on_device(np.array([(w / total, each) for w in weights.values()]).reshape(-1, 2)), strict=True)
    )
    result = []
    slices = group.target_slices(group.hidden_rows)
    for local, part, teacher in zip(group.hidden_rows, slices, group.plan.taught_by, strict=True):
        row, hidden_index = torch.from_numpy(local.table_index), on_device(local.hidden_index)
        row_weight, row_response = on_device(weight[row]), on_device(response[row])
        sent = group.targets[teacher].hidden if teacher in group.targets else {}
        targets = {
            layer: LayerTarget(hidden_index, row_weight, row_response, target[part], scale[layer])
            for layer, target in sent.items()
        }
        if deepest in targets:
            targets[deepest].bins = on_device(bins[:, row])
        if group.slots is not None and slots is not None:
            for layer, target in targets.items():
                target.tokens = LayerTokens(on_device(slots[row]), group.slots.count, shares[layer])
        result.append(targets)
    return result


def output_head_losses(
    group: MicrobatchGroup,
    student: Student,
    objective: StepObjective,
    sampled_logprobs: list[tuple[torch.Tensor, torch.Tensor | None] | None] | None,
) -> list[OutputHeadLoss | None]:
    """Returns the output loss of each microbatch; None without one, before the last stage, and without output targets.

    `sampled_logprobs` are those of the microbatches, see `KeptResults`.
    """
    term, model = objective.output, student.chunks[-1]
    if group.plan.output is None or term is None or not model.post_process:
        return [None] * len(group.plan.taught_by)
    table = group.plan.output.table
    tokens, weight = torch.from_numpy(table.tokens(group.rollouts)), torch.from_numpy(table.weight).float()
    response = torch.from_numpy(table.response)
    corrected = term.loss.correction is not None
    engine_logprob = torch.from_numpy(table.engine_logprobs(group.rollouts)) if corrected else None
    slots = None if group.slots is None else torch.from_numpy(group.slots.of_rows(table))
    packs = group.plan.output.packs[group.coords.data]
    losses: list[OutputHeadLoss | None] = []
    slices = group.target_slices(group.output_rows)
    for m, (local, part, teacher) in enumerate(zip(group.output_rows, slices, group.plan.taught_by, strict=True)):
        sent = group.targets[teacher].output if teacher in group.targets else None
        if sent is None:
            losses.append(None)
            continue
        row = torch.from_numpy(local.table_index)
        old = None if sampled_logprobs is None else sampled_logprobs[m]
        shared = objective.run.teachers[teacher].shared
        loss = OutputHeadLoss(
            loss=term.loss,
            rows=final_state_rows(local, packs[m], student.role),
            model=model,
            shard=vocab_shard(model, student.role, shared, objective.run.sampled),
            tokens=on_device(tokens[row]),
            weight=on_device(weight[row]),
            response=on_device(response[row]),
            teacher=sent[part],
            teacher_head=student.teacher_head(teacher) if term.sends_states else None,
            scale=term.weight,
            chunk_tokens=term.chunk_tokens,
            old_logprob=None if old is None else old[0],
            old_sampler_logprob=None if old is None else old[1],
            engine_logprob=None if engine_logprob is None else on_device(engine_logprob[row]),
            token_slots=None if slots is None else on_device(slots[row]),
            support_rows=None if table.searched is None else np.flatnonzero(table.searched[local.table_index]),
        )
        losses.append(loss)
    return losses


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

        With `whole_gradients` every student rank gets the complete sums, even with the distributed optimizer.
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
            CaptureError: a layer, the output loss or a router was not reached as planned, or a layer's gradient is 0.
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
        """Returns the routers of each microbatch of the batch; empty for a student without experts.

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
        """Returns, per microbatch of the group, the losses of its hidden states, and its tokens with these attached."""
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
