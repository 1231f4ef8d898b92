"""The student on this rank: model chunks, optimizer, and one training step with stage-local losses.

On ranks without the role the object exists and does nothing but take part in what all ranks do together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from nemo_oprd.batch import BatchPlan
from nemo_oprd.config import Config
from nemo_oprd.families import ModelSpec
from nemo_oprd.megatron.capture import LayerTerm, Supervision
from nemo_oprd.megatron.guard import check_injections
from nemo_oprd.megatron.model import DistillingModel, build_chunks
from nemo_oprd.megatron.optimizer import (
    freeze_unreached,
    join_optimizer_creation,
    learning_rate,
    make_optimizer,
    set_learning_rate,
    wrap_ddp,
)
from nemo_oprd.megatron.parallel import Role, device
from nemo_oprd.megatron.step import Microbatch, make_microbatch, run_schedule
from nemo_oprd.megatron.weights import gather_hf, load_hf
from nemo_oprd.objective import Objective
from nemo_oprd.types import Rollout, TeacherTargets


@dataclass
class StepResult:
    """What one forward/backward measured, the same on every student rank."""

    loss: float
    rep_loss: float
    rep_loss_per_layer: dict[int, float]
    cosine_per_layer: dict[int, float]
    relative_error_per_layer: dict[int, float]
    gradient_norm_per_layer: dict[int, float]

    def metrics(self) -> dict[str, float]:
        """Metric names as in metrics.jsonl."""
        cosines = self.cosine_per_layer.values()
        named = {
            "loss/total": self.loss,
            "rep/loss": self.rep_loss,
            "rep/cosine_similarity": sum(cosines) / len(cosines),
        }
        for layer in self.rep_loss_per_layer:
            named[f"rep/loss_layer/{layer}"] = self.rep_loss_per_layer[layer]
            named[f"rep/cosine_similarity_layer/{layer}"] = self.cosine_per_layer[layer]
            named[f"rep/relative_error_layer/{layer}"] = self.relative_error_per_layer[layer]
            named[f"rep/gradient_norm_layer/{layer}"] = self.gradient_norm_per_layer[layer]
        return named


class Student:
    """The trainable role. Build it on every rank; `here` says whether this rank has a part of the model."""

    def __init__(
        self, config: Config, role: Role, objective: Objective, read: Callable[[str], torch.Tensor] | None
    ) -> None:
        """`read` gives HF tensors by name to start from; None leaves the weights to a checkpoint that is loaded next.

        Raises:
            ValueError: the layout does not fit the model, or the weights don't fit its config.
        """
        self.config, self.role, self.objective = config, role, objective
        self.dtype = torch.bfloat16 if config.precision == "bf16" else torch.float32
        self.chunks: list[DistillingModel] = []
        self.ddp: list[Any] = []
        self.optimizer: Any = None
        if not role.here:
            join_optimizer_creation()
            return
        self.chunks = build_chunks(self.spec, role, self.dtype, **_recompute(config))
        if read is not None:
            load_hf(self.chunks, self.spec, role, read, str(config.student.hf_path))
        freeze_unreached(self.chunks, objective.depth, final_norm=objective.student_final is not None, head=False)
        self.ddp = wrap_ddp(self.chunks, role, distributed_optimizer=config.train.distributed_optimizer)
        self.optimizer = make_optimizer(self.ddp, role, config.train, self.dtype)

    @property
    def spec(self) -> ModelSpec:
        """The student's architecture."""
        return self.objective.student

    def forward_backward(
        self, rollouts: list[Rollout], plan: BatchPlan, targets: TeacherTargets, *, whole_gradients: bool = False
    ) -> StepResult | None:
        """Accumulates the gradient of the total loss of the batch; None on ranks outside the role.

        Args:
            plan: the rollouts packed for the student's layout.
            whole_gradients: every rank ends up with complete gradients, also under the distributed optimizer.
        """
        if not self.role.here:
            return None
        for chunk in self.ddp:
            chunk.train()
            chunk.zero_grad_buffer()
        observers, microbatches = self._microbatches(rollouts, plan, targets)
        run_schedule(self.ddp, self.role, microbatches, forward_only=False, force_all_reduce=whole_gradients)
        return self._reduce(observers, plan)

    def update(self, step: int) -> dict[str, float]:
        """One optimizer step with the accumulated gradients; returns its metrics."""
        if not self.role.here:
            return {}
        rate = learning_rate(step, self.config.train)
        set_learning_rate(self.optimizer, rate, self.config.train.weight_decay)
        _, grad_norm, _ = self.optimizer.step()
        return {"lr": rate, "actor/grad_norm": float(grad_norm)}

    def hf_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(HF name, whole tensor) on every student rank."""
        return gather_hf(self.chunks, self.spec, self.role)

    def hf_gradients(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(HF name, whole float32 gradient); needs `whole_gradients`. Parameters without a gradient path are absent."""
        return gather_hf(
            self.chunks,
            self.spec,
            self.role,
            lambda p: p.main_grad.float() if p.requires_grad else None,  # type: ignore[attr-defined]
        )

    def _microbatches(
        self, rollouts: list[Rollout], plan: BatchPlan, targets: TeacherTargets
    ) -> tuple[list[Supervision], list[Microbatch]]:
        at, here = self.role.at, device()
        assert at is not None
        weight = torch.from_numpy(plan.table.weight).float()
        scale = self.objective.weight / len(self.objective.layers)
        observers, microbatches, start = [], [], 0
        for pack, held in zip(plan.packs[at.data], plan.held(at), strict=True):
            part = slice(start, start + len(held.row))
            start = part.stop
            rows = torch.from_numpy(held.local).to(here)
            weights = weight[torch.from_numpy(held.row)].to(here)
            terms = {layer: LayerTerm(rows, weights, target[part], scale) for layer, target in targets.hidden.items()}
            observer = Supervision(
                terms,
                self.objective.row_loss,
                self.objective.dim_reduction,
                self.objective.student_final,
                measure=not plan.replicated or at.tensor == 0,
            )
            observers.append(observer)
            microbatches.append(make_microbatch(pack, rollouts, self.role, observer, self.objective.depth))
        return observers, microbatches

    def _reduce(self, observers: list[Supervision], plan: BatchPlan) -> StepResult:
        """Adds up what all ranks measured; every (layer, row) was measured by exactly one of them."""
        layers = sorted(self.objective.layers)
        sums = torch.zeros(len(layers), len(Supervision.SUMS) + 2, dtype=torch.float64, device=device())
        for observer in observers:
            for i, layer in enumerate(layers):
                if layer in observer.measured:
                    sums[i, :-2] += observer.measured[layer]
                if observer.measure and layer in observer.injected:
                    sums[i, -2] += observer.injected[layer]
                sums[i, -1] += observer.injections[layer]
        dist.all_reduce(sums, group=self.role.groups.intra_dist_opt)  # type: ignore[attr-defined]
        loss, cosine, error, target, squared, injections = sums.cpu().unbind(1)
        if self.objective.weight > 0:
            counts = dict(zip(layers, map(int, injections.tolist()), strict=True))
            norms = dict(zip(layers, squared.tolist(), strict=True))
            same = {layer for layer, e in zip(layers, error.tolist(), strict=True) if e == 0.0}
            check_injections(counts, norms, plan, self.spec.num_layers, identical=same)
        per_layer = dict(zip(layers, loss.tolist(), strict=True))
        rep_loss = sum(per_layer.values()) / len(layers)
        return StepResult(
            loss=self.objective.weight * rep_loss,
            rep_loss=rep_loss,
            rep_loss_per_layer=per_layer,
            cosine_per_layer=dict(zip(layers, (cosine / len(plan.table)).tolist(), strict=True)),
            relative_error_per_layer=dict(zip(layers, (error / target).sqrt().tolist(), strict=True)),
            gradient_norm_per_layer=dict(zip(layers, squared.sqrt().tolist(), strict=True)),
        )


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
