"""The student on this rank: model chunks, optimizer, and one optimizer step.

How its gradient comes about is `step.py`. On ranks without the role the object exists and does nothing but take part
in what all ranks do together.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from nemo_oprd.batch.plan import BatchPlan
from nemo_oprd.batch.types import Rollout
from nemo_oprd.config.schema import Config
from nemo_oprd.distillation.adaptive_weights import AdaptiveWeights
from nemo_oprd.distillation.capture import HiddenStateCapture
from nemo_oprd.distillation.ema_teacher import EmaTeacher
from nemo_oprd.distillation.objective import Objective, StepObjective
from nemo_oprd.distillation.output_head import load_teacher_head
from nemo_oprd.distillation.step_metrics import StepMetrics
from nemo_oprd.distillation.trained_projectors import attach_projectors
from nemo_oprd.distillation.watched_metrics import ModelNeeds
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
from nemo_oprd.megatron.pipeline_schedule import make_microbatch, run_schedule
from nemo_oprd.models import ModelSpec
from nemo_oprd.weights.hf import TensorReader, gather_hf, load_hf


@dataclass(frozen=True)
class Update:
    """One optimizer step: the learning rate, the gradient's norm before clipping, and why it was skipped, if it was."""

    rate: float
    grad_norm: float
    nonfinite_reason: str | None

    def metrics(self) -> dict[str, float]:
        """Metric names as in metrics.jsonl."""
        skipped = float(self.nonfinite_reason is not None)
        return {"lr": self.rate, "actor/grad_norm": self.grad_norm, "train/skipped_update": skipped}


class Student:
    """The trainable role. Build it on every rank; `role.is_member` says whether this rank has a part of the model.

    Attributes:
        chunks: this rank's model chunks; none outside the role.
        ddp: the same, wrapped for gradients.
        adaptive: the weights of layers and positions that follow the measured gap.
        average: the teacher that is the student's moving average, where there is one (`teacher.weights=ema`).
    """

    def __init__(
        self,
        config: Config,
        role: Role,
        objective: Objective,
        needs: ModelNeeds,
        read: TensorReader,
        read_teachers: list[TensorReader],
        *,
        source: str,
        trainable: bool = True,
    ) -> None:
        """Builds, loads and wraps this rank's part.

        Args:
            needs: says for which updates the last stage needs the teachers' heads.
            read: gives HF tensors by name to start from.
            read_teachers: the same of the teachers.
            source: where the student comes from, for messages.
            trainable: False leaves out gradients and optimizer, for `hidden_states` alone.

        Raises:
            ValueError: the layout does not fit the model, or the weights don't fit its config.
        """
        self.config, self.role, self.objective, self.needs = config, role, objective, needs
        self.dtype = torch.bfloat16 if config.precision == "bf16" else torch.float32
        representation = config.loss.representation
        self.adaptive = AdaptiveWeights(representation.adaptive, representation.positions)
        self.chunks: list[DistillingModel] = []
        self.ddp: list[Any] = []
        self.optimizer: Any = None
        self.average: EmaTeacher | None = None
        self._teacher_heads: list[torch.Tensor | None] = [None] * len(objective.teachers)
        if not role.is_member:
            if trainable:
                join_optimizer_creation()
            return
        self.chunks = build_chunks(self.spec, role, self.dtype, **_recompute(config))
        load_hf(self.chunks, self.spec, role, read, source)
        if not trainable:
            for chunk in self.chunks:
                chunk.requires_grad_(False)
                chunk.eval()
            return
        self._mark_trained_parameters()
        if config.teacher.weights in ("own", "initial") and needs.teacher_states:  # others change with the student
            self._teacher_heads = [
                load_teacher_head(self.chunks[-1], role, self.dtype, match, read_teacher)
                for match, read_teacher in zip(objective.teachers, read_teachers, strict=True)
            ]
        self.ddp = wrap_ddp(self.chunks, role, distributed_optimizer=config.train.distributed_optimizer)
        self.optimizer = make_optimizer(self.ddp, role, config.train, self.dtype)
        self.partial_training = PartialTraining(self.optimizer, active=objective.trains_in_parts)

    def _mark_trained_parameters(self) -> None:
        """Freezes what no term reaches, adds trained projectors, and marks what is trained in some updates only."""
        objective, final_norm = self.objective, self.objective.final_layer is not None
        reached = final_norm or objective.trains_head
        freeze_unreached(self.chunks, objective.trained_depth, final_norm=reached, head=objective.trains_head)
        if objective.trains_bridge:
            attach_projectors(self.chunks, self.role, objective, self.config.seed)
        if objective.trains_in_parts:
            mark_partial(self.chunks, max(objective.layers, default=0), final_norm=final_norm, head=False)

    @property
    def spec(self) -> ModelSpec:
        """The student's architecture."""
        return self.objective.student

    def teacher_head(self, number: int) -> torch.Tensor | None:
        """A teacher's LM head as it is now, [V, D]; on the last stage, where the teacher sends final hidden states."""
        if self.config.teacher.weights not in ("student", "ema"):
            return self._teacher_heads[number]
        # that of this rank: such a teacher has the student's layout
        chunks = self.chunks if self.average is None else self.average.chunks
        return chunks[-1].output_weight().detach()

    def zero_gradients(self) -> None:
        """Clears the gradients of the update before."""
        # Megatron's fp32 optimizer leaves parameters with their gradient buffer as .grad; the next backward pass would
        # add to it, and then add it to itself
        self.optimizer.zero_grad()
        for chunk in self.ddp:
            chunk.train()
            chunk.zero_grad_buffer()

    def optimizer_step(self, step: int, objective: StepObjective, metrics: StepMetrics | None) -> Update | None:
        """One optimizer step with the accumulated gradients, unless they or the loss are not finite.

        Args:
            step: steps before this one, which decide the learning rate.
            objective: that the gradients are of.
            metrics: of the same batch; None on ranks outside the role.
        """
        if metrics is None:
            return None
        self.adaptive.measure(metrics)
        rate = learning_rate(step, self.config.train)
        set_learning_rate(self.optimizer, rate, self.config.train.weight_decay)
        # asked before the step, which would spread what is not finite over all weights
        self.optimizer.prepare_grads()
        norm = float(self.optimizer.get_grad_norm())
        nonfinite_reason = metrics.nonfinite_reason
        if nonfinite_reason is None and not math.isfinite(norm):
            nonfinite_reason = f"the gradient's norm is {norm}: {self._nonfinite_parameters()}"
        if nonfinite_reason is None:
            with self.partial_training.step(reached=objective.output_weight > 0):
                self.optimizer.step()
            if self.average is not None:
                self.average.update(self.chunks)
        return Update(rate, norm, nonfinite_reason)

    def _nonfinite_parameters(self) -> str:
        """The parameters whose gradients are not finite, over all ranks of the role."""
        mine = [
            name
            for name, p in named_parameters(self.chunks).items()
            if p.requires_grad and not bool(torch.isfinite(p.main_grad).all())  # type: ignore[attr-defined]
        ]
        parts: list[list[str]] = [[] for _ in range(self.role.layout.size)]
        dist.all_gather_object(parts, mine, group=self.role.member_groups.intra_dist_opt)
        names = sorted({name for part in parts for name in part})
        return f"that of {', '.join(names[:3])}" + (f" and {len(names) - 3} more" if len(names) > 3 else "")

    @torch.no_grad()
    def hidden_states(self, rollouts: list[Rollout], plan: BatchPlan) -> dict[int, torch.Tensor]:
        """Layer -> [n, D] of this rank's rows in the order of its microbatches, for its supervised layers."""
        coords, objective = self.role.coords, self.objective
        if coords is None:
            return {}
        owned = plan.layout.owned_layers(coords.pipeline, self.spec.num_layers)
        layers = [layer for layer in objective.layers if layer in owned]
        captures = [
            HiddenStateCapture(
                torch.from_numpy(rows.local).to(device()), {layer: [layer] for layer in layers}, objective.final_layer
            )
            for rows in plan.local_rows(coords)
        ]
        microbatches = [
            make_microbatch(pack, rollouts, self.role, capture, max(objective.layers))
            for pack, capture in zip(plan.packs[coords.data], captures, strict=True)
        ]
        run_schedule(self.chunks, self.role, microbatches, forward_only=True)
        return {layer: torch.cat([capture.captured[layer] for capture in captures]) for layer in layers}

    def hf_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(HF name, whole tensor) on every student rank; nothing on ranks outside the role."""
        if self.role.is_member:
            yield from gather_hf(self.chunks, self.spec, self.role)

    def hf_gradients(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(HF name, whole float32 gradient), where gradients are whole on every rank; nothing outside the role.

        Parameters without a gradient path are absent.
        """

        def gradient(parameter: torch.nn.Parameter) -> torch.Tensor | None:
            return parameter.main_grad.float() if parameter.requires_grad else None  # type: ignore[attr-defined]

        if self.role.is_member:
            yield from gather_hf(self.chunks, self.spec, self.role, gradient)


def _recompute(config: Config) -> dict[str, Any]:
    """Megatron's settings of activation recomputation."""
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
