"""The student on this rank: model chunks, optimizer, and one training step with stage-local losses.

On ranks without the role the object exists and does nothing but take part in what all ranks do together.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from nemo_oprd.batch.plan import BatchPlan, StepPlan
from nemo_oprd.batch.types import Rollout, TeacherTargets
from nemo_oprd.config.schema import Config
from nemo_oprd.distillation.adaptive_weights import AdaptiveWeights
from nemo_oprd.distillation.capture import HiddenStateCapture
from nemo_oprd.distillation.ema_teacher import EmaTeacher
from nemo_oprd.distillation.gradient_check import check_injections, check_output_passes
from nemo_oprd.distillation.hidden_state_loss import HiddenStateLoss
from nemo_oprd.distillation.microbatch_targets import MicrobatchGroup, layer_targets, output_head_losses
from nemo_oprd.distillation.objective import Objective
from nemo_oprd.distillation.output_head import OutputHeadLoss, load_teacher_head
from nemo_oprd.distillation.step_metrics import MetricSums, StepMetrics
from nemo_oprd.distillation.trained_projectors import attach_projectors, projectors_of
from nemo_oprd.megatron.model import DistillingModel, build_chunks
from nemo_oprd.megatron.optimizer import (
    freeze_unreached,
    join_optimizer_creation,
    learning_rate,
    make_optimizer,
    mark_partial,
    set_learning_rate,
    wrap_ddp,
)
from nemo_oprd.megatron.parallel import Role, device
from nemo_oprd.megatron.param_names import named_parameters
from nemo_oprd.megatron.partial_training import PartialTraining
from nemo_oprd.megatron.pipeline_schedule import Microbatch, make_microbatch, run_schedule
from nemo_oprd.models import ModelSpec
from nemo_oprd.weights.hf import gather_hf, load_hf


@dataclass(frozen=True)
class Update:
    """What became of one update: the learning rate, the gradient's norm before clipping, and why it was skipped."""

    rate: float
    grad_norm: float
    nonfinite_reason: str | None

    def metrics(self) -> dict[str, float]:
        """Metric names as in metrics.jsonl."""
        skipped = float(self.nonfinite_reason is not None)
        return {"lr": self.rate, "actor/grad_norm": self.grad_norm, "train/skipped_update": skipped}


class Student:
    """The trainable role. Build it on every rank; `here` says whether this rank has a part of the model."""

    def __init__(
        self,
        config: Config,
        role: Role,
        objectives: list[Objective],
        read: Callable[[str], torch.Tensor],
        read_teachers: list[Callable[[str], torch.Tensor]],
        *,
        trainable: bool = True,
    ) -> None:
        """Builds, loads and wraps this rank's part.

        Args:
            objectives: one per teacher; they differ in the teacher and its bridge only.
            read: gives HF tensors by name to start from.
            read_teachers: the same of the teachers, whose heads the last stage needs for some output-space terms.
            trainable: False leaves out gradients and optimizer, for `hidden_states` alone.

        Raises:
            ValueError: the layout does not fit the model, or the weights don't fit its config.
        """
        self.config, self.role, self.objectives, self.objective = config, role, objectives, objectives[0]
        self.dtype = torch.bfloat16 if config.precision == "bf16" else torch.float32
        representation = config.loss.representation
        self.adaptive = AdaptiveWeights(representation.adaptive, representation.positions)
        self.chunks: list[DistillingModel] = []
        self.ddp: list[Any] = []
        self.optimizer: Any = None
        self.average: EmaTeacher | None = None  # where that is the teacher
        objective = self.objective
        if not role.is_member:
            if trainable:
                join_optimizer_creation()
            return
        self.chunks = build_chunks(self.spec, role, self.dtype, **_recompute(config))
        load_hf(self.chunks, self.spec, role, read, str(config.student.hf_path))
        if not trainable:
            for chunk in self.chunks:
                chunk.requires_grad_(False)
                chunk.eval()
            return
        final_norm = objective.student_final is not None
        reached = final_norm or objective.trains_head
        freeze_unreached(self.chunks, objective.trained_depth, final_norm=reached, head=objective.trains_head)
        if objective.trains_bridge:
            attach_projectors(self.chunks, role, objective, config.seed)
        if objective.trains_in_parts:
            mark_partial(self.chunks, max(objective.layers, default=0), final_norm=final_norm, head=False)
        self.teacher_heads: list[torch.Tensor | None] = [None] * len(objectives)
        if config.teacher.weights in ("own", "initial"):  # others change with the student
            heads = zip(objectives, read_teachers, strict=True)
            self.teacher_heads = [load_teacher_head(self.chunks[-1], role, self.dtype, *each) for each in heads]
        self.ddp = wrap_ddp(self.chunks, role, distributed_optimizer=config.train.distributed_optimizer)
        self.optimizer = make_optimizer(self.ddp, role, config.train, self.dtype)
        self.partial_training = PartialTraining(self.optimizer, active=objective.trains_in_parts)

    @property
    def spec(self) -> ModelSpec:
        """The student's architecture."""
        return self.objective.student

    def _teacher_head(self, number: int) -> torch.Tensor | None:
        """A teacher's head as it is now; None where the teacher sends log-probabilities."""
        if self._now.output is None or self._now.output.sampled:
            return None
        if self.config.teacher.weights not in ("student", "ema"):
            return self.teacher_heads[number]
        # that of this rank: such a teacher has the student's layout
        chunks = self.chunks if self.average is None else self.average.chunks
        return chunks[-1].output_weight().detach()

    def start_step(
        self, plan: StepPlan, num_responses: int, step: int | None = None, reuse: int = 0, *, watch: bool = True
    ) -> None:
        """Clears the gradients and measurements of the step before.

        Args:
            plan: of the whole batch.
            step: steps before, which decides the weights of the terms; None takes their largest.
            reuse: updates made on these very rollouts before.
            watch: False leaves out what is only watched.
        """
        if not reuse:
            self._sampled_with = list[torch.Tensor | None]()
        self._reuse = reuse
        self._whole, self._plans = plan, list[StepPlan]()
        self._now = self.objective if step is None else self.objective.for_step(step, watch=watch)
        self._now = replace(self._now, layer_weights=self.adaptive.of_layers(self._now.layer_weights))
        self._targets_bytes = 0
        if not self.role.is_member:
            return
        self._tally = MetricSums.zeros(list(self.objective.layers), num_responses, device())
        # Megatron's fp32 optimizer leaves parameters with their gradient buffer as .grad; the next backward pass would
        # add to it, and then add it to itself
        self.optimizer.zero_grad()
        for chunk in self.ddp:
            chunk.train()
            chunk.zero_grad_buffer()

    def forward_backward(
        self,
        rollouts: list[Rollout],
        plan: StepPlan,
        targets: dict[int, TeacherTargets],
        *,
        last: bool = True,
        whole_gradients: bool = False,
    ) -> None:
        """Adds the gradient of one wave of the batch; ranks outside the role do nothing.

        Args:
            plan: the wave, packed for the student's layout.
            targets: of each teacher that has rows in it.
            last: no wave follows in this step, so gradients are reduced over ranks.
            whole_gradients: every rank ends up with complete gradients, also under the distributed optimizer.
        """
        if self.role.coords is None:
            return
        observers, microbatches = self._microbatches(MicrobatchGroup(rollouts, plan, targets, self.role.coords))
        run_schedule(
            self.ddp, self.role, microbatches, forward_only=False, finalize=last, force_all_reduce=whole_gradients
        )
        self._plans.append(plan)
        self._targets_bytes = max(self._targets_bytes, sum(each.bytes_held for each in targets.values()))
        for observer in observers:
            self._tally.add(observer)
            sums = None if observer.output is None else observer.output.sums
            if not self._reuse:
                self._sampled_with.append(None if sums is None else sums.student_logprob)
            if observer.output is not None:
                self._tally.add_output(observer.output, counts=self.role.coords.tensor == 0)

    def finish_step(self) -> StepMetrics | None:
        """What the waves measured together, checked by the guard; None on ranks outside the role.

        Every (layer, row) was measured by exactly one rank.

        Raises:
            CaptureError: a supervised layer trained nothing, or not as planned.
        """
        if not self.role.is_member:
            return None
        dist.all_reduce(self._tally.sums, group=self.role.groups.intra_dist_opt)  # type: ignore[attr-defined]
        tally = MetricSums(self._tally.sums.cpu(), self._tally.layers, self._tally.num_responses)
        objective = self._now
        result = StepMetrics.from_sums(tally, self._whole, self._plans, objective, self._targets_bytes)
        result.weights |= self.adaptive.metrics(objective.layer_weights, self._whole.hidden)
        hidden = [plan.hidden for plan in self._plans]
        if objective.weight > 0:
            counts = {layer: int(count) for layer, count in tally.column("injections").items()}
            same = set(result.identical_layers)
            norms = tally.column("squared_gradient")
            check_injections(counts, norms, hidden, self.spec.num_layers, identical=same)
        if objective.output is not None:
            check_output_passes(int(tally.output[0]), [plan.output for plan in self._plans if plan.output])
        return result

    def update(self, step: int, measured: StepMetrics | None) -> Update | None:
        """One optimizer step with the accumulated gradients, unless they or the loss are not finite.

        Args:
            step: steps before this one.
            measured: of this step's batch.
        """
        if not self.role.is_member or measured is None:
            return None
        self.adaptive.measure(measured)
        rate = learning_rate(step, self.config.train)
        set_learning_rate(self.optimizer, rate, self.config.train.weight_decay)
        # asked before the step, which would spread what is not finite over all weights
        self.optimizer.prepare_grads()
        norm = float(self.optimizer.get_grad_norm())
        nonfinite_reason = measured.nonfinite_reason
        if nonfinite_reason is None and not math.isfinite(norm):
            nonfinite_reason = f"the gradient's norm is {norm}: {self._not_finite()}"
        if nonfinite_reason is None:
            with self.partial_training.step(reached=self._now.trains_head):
                self.optimizer.step()
            if self.average is not None:
                self.average.update(self.chunks)
        return Update(rate, norm, nonfinite_reason)

    def _not_finite(self) -> str:
        """The parameters whose gradients are not finite, over all ranks of the role."""
        mine = [
            name
            for name, p in named_parameters(self.chunks).items()
            if p.requires_grad and not bool(torch.isfinite(p.main_grad).all())  # type: ignore[attr-defined]
        ]
        parts: list[list[str]] = [[] for _ in range(self.role.layout.size)]
        dist.all_gather_object(parts, mine, group=self.role.groups.intra_dist_opt)  # type: ignore[attr-defined]
        names = sorted({name for part in parts for name in part})
        return f"that of {', '.join(names[:3])}" + (f" and {len(names) - 3} more" if len(names) > 3 else "")

    @torch.no_grad()
    def hidden_states(self, rollouts: list[Rollout], plan: BatchPlan) -> dict[int, torch.Tensor]:
        """Layer -> [n, D] of this rank's rows in the order of its microbatches, for its supervised layers."""
        at, objective = self.role.coords, self.objective
        if at is None:
            return {}
        owned = plan.layout.owned_layers(at.pipeline, self.spec.num_layers)
        layers = [layer for layer in sorted(objective.layers) if layer in owned]
        observers = [
            HiddenStateCapture(
                torch.from_numpy(held.local).to(device()), {layer: [layer] for layer in layers}, objective.student_final
            )
            for held in plan.local_rows(at)
        ]
        microbatches = [
            make_microbatch(pack, rollouts, self.role, observer, objective.depth)
            for pack, observer in zip(plan.packs[at.data], observers, strict=True)
        ]
        run_schedule(self.chunks, self.role, microbatches, forward_only=True)
        return {layer: torch.cat([observer.captured[layer] for observer in observers]) for layer in layers}

    def hf_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(HF name, whole tensor) on every student rank; nothing on ranks outside the role."""
        if self.role.is_member:
            yield from gather_hf(self.chunks, self.spec, self.role)

    def hf_gradients(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(HF name, whole float32 gradient); needs `whole_gradients`. Parameters without a gradient path are absent."""
        if not self.role.is_member:
            return
        yield from gather_hf(
            self.chunks,
            self.spec,
            self.role,
            lambda p: p.main_grad.float() if p.requires_grad else None,  # type: ignore[attr-defined]
        )

    def _microbatches(self, wave: MicrobatchGroup) -> tuple[list[HiddenStateLoss], list[Microbatch]]:
        """Per microbatch of the wave: what supervises its hidden states, and its tokens with that attached."""
        plan, objective = wave.plan.hidden, self.objective
        of_hidden = layer_targets(wave, self._now, self.adaptive.of_rows(plan.table, self._whole.hidden))
        of_output = self._output_terms(wave)
        projections = [self._projection(each) for each in self.objectives]
        trained = {layer: list(each.parameters()) for layer, each in projectors_of(self.chunks).items()}
        observers = [
            HiddenStateLoss(
                terms,
                objective.row_loss,
                objective.dim_reduction,
                len(wave.rollouts),
                objective.student_final,
                measure=not plan.replicated or wave.coords.tensor == 0,
                project=projections[teacher],
                learned=lambda layer: trained.get(layer, ()),
                output=output,
            )
            for terms, output, teacher in zip(of_hidden, of_output, wave.plan.taught_by, strict=True)
        ]
        microbatches = [
            make_microbatch(pack, wave.rollouts, self.role, observer, self._now.depth)
            for pack, observer in zip(plan.packs[wave.coords.data], observers, strict=True)
        ]
        return observers, microbatches

    def _output_terms(self, wave: MicrobatchGroup) -> Sequence[OutputHeadLoss | None]:
        """Per microbatch, the output-space term; None before the last stage, or without such a term."""
        last = self.chunks[-1]
        if wave.plan.output is None or self._now.output is None or not last.post_process:
            return [None] * len(wave.plan.taught_by)
        before = sum(len(earlier.taught_by) for earlier in self._plans)
        sampled_with = self._sampled_with[before:] if self._reuse else None
        vocab_sizes = [0 if each.output is None else each.output.vocab_size for each in self.objectives]
        return output_head_losses(
            wave, last, self.role, self._now.output, vocab_sizes, self._teacher_head, sampled_with
        )

    def _projection(self, objective: Objective) -> Callable[[int, torch.Tensor], torch.Tensor] | None:
        """(Layer, [n, D]) -> what of the student is compared with a teacher, where that is not its state."""
        if objective.trains_bridge:
            projectors = projectors_of(self.chunks)
            return lambda layer, rows_ND: projectors[layer](rows_ND)
        return None if objective.bridge is None else objective.bridge.project_student


def _recompute(config: Config) -> dict[str, Any]:
    student = config.student
    if student.recompute == "none":
        return {}
    if student.recompute == "selective":
        return {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]}
    return {
        "recompute_granularity": "full",
        "recompute_method": student.recompute_method,
        "recompute_num_layers": student.recompute_num_layers,
    }
