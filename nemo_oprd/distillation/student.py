"""The student on this rank: model chunks, optimizer, and one optimizer step.

`step.py` computes the gradient. On ranks outside the student's role the object exists, too, and takes part in the
operations that all ranks of the world perform.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from nemo_oprd.batch.plan import BatchPlan
from nemo_oprd.batch.types import Rollout
from nemo_oprd.config.schema import Config, StudentConfig
from nemo_oprd.config.teacher_kinds import TEACHER_KINDS
from nemo_oprd.distillation.adaptive_weights import AdaptiveWeights
from nemo_oprd.distillation.capture import HiddenStateCapture
from nemo_oprd.distillation.metrics.step_metrics import StepMetrics
from nemo_oprd.distillation.metrics.watched_metrics import ModelNeeds
from nemo_oprd.distillation.objective import Objective, StepObjective
from nemo_oprd.distillation.output_head import load_teacher_head
from nemo_oprd.distillation.teacher import EmaTeacher
from nemo_oprd.distillation.trained_projectors import attach_projectors
from nemo_oprd.losses.vocab_parallel import OutputHead
from nemo_oprd.megatron.kernels import accumulate_in_products, chosen_kernels
from nemo_oprd.megatron.model import DistillingModel, build_chunks, layer_backend
from nemo_oprd.megatron.optimizer import (
    freeze_unreached,
    join_optimizer_creation,
    learning_rate,
    make_optimizer,
    mark_partial,
    set_learning_rate,
    step_clipped,
    wrap_ddp,
)
from nemo_oprd.megatron.parallel import Role, compute_dtype, everyones, on_device
from nemo_oprd.megatron.param_names import named_parameters
from nemo_oprd.megatron.partial_training import PartialTraining
from nemo_oprd.megatron.pipeline_schedule import make_microbatch, run_schedule
from nemo_oprd.megatron.weights.hf import TensorReader, gather_hf, load_hf
from nemo_oprd.models import ModelSpec

# builds this rank's chunks of a model: `build_chunks`, or a function with its parameters
ChunkBuilder: TypeAlias = Callable[..., list[DistillingModel]]


@dataclass(frozen=True)
class Update:
    """One optimizer step: the learning rate, the gradient norm before clipping, and the reason if it was skipped."""

    rate: float
    grad_norm: float
    nonfinite_reason: str | None

    def metrics(self) -> dict[str, float]:
        """Returns the metrics by their names in metrics.jsonl."""
        skipped = float(self.nonfinite_reason is not None)
        return {"lr": self.rate, "actor/grad_norm": self.grad_norm, "train/skipped_update": skipped}


class Student:
    """The trained model. Every rank builds it; `role.is_member` says whether this rank holds a part of the model.

    `chunks` are this rank's model chunks (none outside the role), and `ddp` the same, wrapped for gradient reduction.
    With `teacher.weights=ema`, `average` is the teacher; else None. `optimizer_steps` counts those of the whole run,
    including skipped ones, and is the same on every rank.
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
        build: ChunkBuilder = build_chunks,
        average: EmaTeacher | None = None,
        trainable: bool = True,
    ) -> None:
        """Builds, loads and wraps this rank's part.

        Args:
            needs: what the updates compute; `teacher_states` says whether the last stage needs the teachers' heads.
            read, read_teachers: return a tensor of the student, and of each teacher, by its HF name.
            source: the path of the student's weights, for messages.
            average: the teacher that follows the student's weights; None without one, and outside its role.
            trainable: False builds no gradients and no optimizer; then only `hidden_states` can be used.

        Raises:
            ValueError: the layout does not fit the model, or the weights do not fit the model's config.
        """
        self.config, self.role, self.objective, self.needs = config, role, objective, needs
        self.dtype = compute_dtype(config.precision)
        representation = config.loss.representation
        self.adaptive = AdaptiveWeights(representation.adaptive, representation.positions)
        self.chunks: list[DistillingModel] = []
        self.ddp: list[Any] = []
        self.optimizer: Any = None
        self.average = average
        self.optimizer_steps = 0
        self._teacher_heads: list[OutputHead | None] = [None] * len(objective.teachers)
        if not role.is_member:
            if trainable:
                join_optimizer_creation()
            return
        self.chunks = build(self.spec, role, self.dtype, **_training_settings(config.student))
        load_hf(self.chunks, self.spec, role, read, source)
        if not trainable:
            for chunk in self.chunks:
                chunk.requires_grad_(False)
                chunk.eval()
            return
        self._mark_trained_parameters()
        if needs.teacher_states and not TEACHER_KINDS[config.teacher.weights].moves:  # else the heads move, too
            self._teacher_heads = [
                load_teacher_head(self.chunks[-1], role, self.dtype, match, read_teacher)
                for match, read_teacher in zip(objective.teachers, read_teachers, strict=True)
            ]
        accumulate_in_products(self.chunks)
        distributed = config.distributes_optimizer(role.layout) or self._needs_distributed_optimizer()
        self.ddp = wrap_ddp(self.chunks, role, distributed_optimizer=distributed)
        self.optimizer = make_optimizer(self.ddp, role, config.train, self.dtype, distributed=distributed)
        self.partial_training = PartialTraining(self.optimizer, active=objective.trains_in_parts)

    def _needs_distributed_optimizer(self) -> bool:
        """Returns whether `auto` must take the distributed optimizer on all ranks of the role.

        Megatron's plain bf16 optimizer can't save float32 parameters, as some layers of Transformer Engine have.
        """
        if self.dtype != torch.bfloat16 or self.config.train.distributed_optimizer != "auto":
            return False
        found = any(p.requires_grad and p.dtype == torch.float32 for chunk in self.chunks for p in chunk.parameters())
        return any(everyones(found, self.role.member_groups.intra_dist_opt))

    def _mark_trained_parameters(self) -> None:
        """Freezes parameters without a gradient, adds trained projectors, and marks partially trained parameters."""
        objective, final_norm = self.objective, self.objective.final_layer is not None
        norm_is_trained = final_norm or objective.trains_head
        freeze_unreached(self.chunks, objective.trained_depth, final_norm=norm_is_trained, head=objective.trains_head)
        if objective.trains_bridge:
            attach_projectors(self.chunks, self.role, objective, self.config.seed)
        if objective.trains_in_parts:
            mark_partial(self.chunks, max(objective.layers, default=0), final_norm=final_norm, head=False)

    @property
    def spec(self) -> ModelSpec:
        """The student's architecture."""
        return self.objective.student

    def kernels(self) -> dict[str, str]:
        """Returns the implementations that this rank uses, by their purpose."""
        inner = None if self.optimizer is None else self.optimizer.chained_optimizers[0].optimizer
        layers = self.chunks[0].backend if self.chunks else layer_backend(self.dtype)
        return chosen_kernels(layers, self.dtype, inner, delta_net=self.spec.delta is not None)

    def teacher_head(self, number: int) -> OutputHead | None:
        """Returns a teacher's current LM head on the last stage; None for a frozen teacher without final states."""
        if not TEACHER_KINDS[self.config.teacher.weights].moves:
            return self._teacher_heads[number]
        # such a teacher has the student's layout, so this rank holds the shard that it needs
        chunks = self.chunks if self.average is None else self.average.chunks
        return OutputHead(chunks[-1].output_weight().detach(), cap=chunks[-1].output_cap)

    def zero_gradients(self) -> None:
        """Clears the gradients of the previous update."""
        # After a step of Megatron's fp32 optimizer the gradient buffers are also the parameters' .grad. Left there, the
        # next backward pass would add to the buffer twice: once as .grad, once as main_grad.
        self.optimizer.zero_grad()
        for chunk in self.ddp:
            chunk.train()
            chunk.zero_grad_buffer()

    def optimizer_step(self, step: int, objective: StepObjective, metrics: StepMetrics | None) -> Update | None:
        """Does one optimizer step with the accumulated gradients; skips it if a gradient or a loss is not finite.

        Args:
            step: number of steps before this one; it determines the learning rate.
            metrics: of the batch behind the gradients; None outside the role: only counts the step.
        """
        self.optimizer_steps += 1
        if metrics is None:
            return None
        self.adaptive.update(metrics)
        rate = learning_rate(step, self.config.train)
        set_learning_rate(self.optimizer, rate, self.config.train.weight_decay)
        # the norm is checked before the step, because the step would make all weights non-finite
        self.optimizer.prepare_grads()
        norm = float(self.optimizer.get_grad_norm())
        nonfinite_reason = metrics.nonfinite_reason
        if nonfinite_reason is None and not math.isfinite(norm):
            nonfinite_reason = f"the gradient's norm is {norm}; non-finite in {self._nonfinite_parameters()}"
        if nonfinite_reason is None:
            with self.partial_training.step(reached=objective.output_weight > 0):
                step_clipped(self.optimizer, norm, self.config.train.clip_grad)
            if self.average is not None:
                self.average.update(self.chunks)
        return Update(rate, norm, nonfinite_reason)

    def _nonfinite_parameters(self) -> str:
        """Returns the names of the parameters whose gradients are not finite, over all ranks of the role."""
        local_names = [
            name
            for name, p in named_parameters(self.chunks).items()
            if p.requires_grad and not bool(torch.isfinite(p.main_grad).all())  # type: ignore[attr-defined]
        ]
        parts = everyones(local_names, self.role.member_groups.intra_dist_opt)
        names = sorted({name for part in parts for name in part})
        return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")

    @torch.no_grad()
    def hidden_states(self, rollouts: list[Rollout], plan: BatchPlan) -> dict[int, torch.Tensor]:
        """Returns each supervised layer of this rank -> states [n, D] of its rows, in the order of its microbatches."""
        coords, objective = self.role.coords, self.objective
        if coords is None:
            return {}
        owned = plan.layout.owned_layers(coords.pipeline, self.spec.num_layers)
        layers = [layer for layer in objective.layers if layer in owned]
        captures = [
            HiddenStateCapture(
                on_device(rows.hidden_index),
                {layer: [layer] for layer in layers},
                objective.final_layer,
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
        """Yields (HF name, whole tensor) on every student rank; nothing on ranks outside the role."""
        if self.role.is_member:
            yield from gather_hf(self.chunks, self.spec, self.role)

    def hf_gradients(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields (HF name, whole float32 gradient) on every student rank; nothing on ranks outside the role.

        Needs gradients that were accumulated with `whole_gradients`. Frozen parameters are absent.
        """

        def gradient(parameter: torch.nn.Parameter) -> torch.Tensor | None:
            return parameter.main_grad.float() if parameter.requires_grad else None  # type: ignore[attr-defined]

        if self.role.is_member:
            yield from gather_hf(self.chunks, self.spec, self.role, gradient)


def _training_settings(student: StudentConfig) -> dict[str, Any]:
    """Returns Megatron's settings for the precision of routers and for activation recomputation."""
    settings: dict[str, Any] = {"moe_router_dtype": student.router_dtype}
    if student.recompute != "none":
        settings["recompute_granularity"] = student.recompute
    if student.recompute == "selective":
        settings["recompute_modules"] = ["core_attn"]
    elif student.recompute == "full":
        settings |= {name: getattr(student, name) for name in ("recompute_method", "recompute_num_layers")}
    return settings
