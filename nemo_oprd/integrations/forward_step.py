"""`OPRDForwardStep`: Megatron-Bridge's training loop with the hidden-state loss on recorded rollouts.

    step = OPRDForwardStep(config.model, teacher, loss)  # the recipe's model provider and one for the teacher
    finetune(config, step)

The loop calls the step for one microbatch after the other, on each pipeline stage when the student's schedule reaches
it. The step runs the teacher's stage on the microbatch just before the student's (`colocated_teacher.py`).

A hook of the student's provider, which the loop calls on every rank at the same place, builds, adopts and checks the
models. After an update the model's config is as before, because the loop writes it into checkpoints.

B sequences of a microbatch, S their tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from megatron.core.utils import get_model_config

from nemo_oprd.config.schema import RepresentationLossConfig
from nemo_oprd.integrations.colocated_teacher import ColocatedTeacher, after_backward, build_teacher, local_hf_config
from nemo_oprd.integrations.hidden_states import HiddenStateDistillation
from nemo_oprd.megatron.adopt import adopt, observed, unwrapped
from nemo_oprd.megatron.pipeline_schedule import zero_loss
from nemo_oprd.megatron.versions import batch_on_this_cp_rank


class OPRDForwardStep:
    """A `forward_step_func` for `finetune` and `pretrain` of Megatron-Bridge.

    Microbatches are dictionaries with `tokens` int64 [B, S] and `weight` float32 [B, S], as `RolloutDataset` gives
    them. The step ignores the models' logits; the last stage reports `rep/loss` of the update to the loop's log.

    Attributes:
        metrics: of the last update, by their names in docs/runs.md; equal on all ranks.
    """

    def __init__(self, student: Any, teacher: Any, loss: RepresentationLossConfig | None = None) -> None:
        """Registers a hook with the student's provider, which builds the teacher after the student.

        Args:
            student: the recipe's model provider, `config.model`.
            teacher: a provider of the teacher that loads its weights, such as
                `AutoBridge.from_hf_pretrained(...).to_megatron_provider()`. It gets the student's layout and precision.
            loss: the hidden-state term, by default the paper's (docs/losses.md).

        Raises:
            ValueError: an argument is no provider, or the student has virtual pipeline stages.
        """
        for role, provider in (("student", student), ("teacher", teacher)):
            if not hasattr(provider, "provide_distributed_model"):
                raise ValueError(
                    f"the {role} is a {type(provider).__name__}; expected a model provider of Megatron-Bridge: pass "
                    "config.model, or AutoBridge.from_hf_pretrained(...).to_megatron_provider()"
                )
        if student is teacher:
            raise ValueError(
                "student and teacher are the same provider; expected two: make another one for the teacher, which "
                "loads the teacher's weights"
            )
        self.metrics: dict[str, float] = {}
        self._providers, self._loss = (student, teacher), loss
        self._teacher: ColocatedTeacher | None = None
        self._oprd: HiddenStateDistillation | None = None
        self._reported: torch.Tensor | None = None
        self._restore: Callable[[], None] | None = None
        self._refuse_virtual_stages()
        student.register_pre_wrap_hook(self._build_teacher)

    def _refuse_virtual_stages(self) -> None:
        size = getattr(self._providers[0], "virtual_pipeline_model_parallel_size", None)
        if size is not None:
            raise ValueError(
                f"virtual_pipeline_model_parallel_size={size}: the teacher runs beside the student on one stage per "
                "rank; expected no virtual stages: set it to None"
            )

    def _build_teacher(self, chunks: Sequence[torch.nn.Module]) -> Sequence[torch.nn.Module]:
        """Adopts the student's chunk, not wrapped yet, and builds the teacher in its groups; a hook of the provider."""
        self._refuse_virtual_stages()  # the recipe may have changed since
        student, provider = self._providers
        adopt(chunks, hf_config=local_hf_config(student))
        self._teacher = build_teacher(student, provider, chunks[0])
        return chunks

    def __call__(
        self, state: Any, data_iterator: Iterator[dict[str, Any]], model: Any, return_schedule_plan: bool = False
    ) -> tuple[torch.Tensor, Callable[..., Any]]:
        """Runs teacher and student on the next microbatch; returns the student's output and the loss function.

        Args:
            state: the loop's state; the loop passes it because the parameter has this name.

        Raises:
            ValueError: the loop evaluates, asks for a schedule plan, or has unsupported models.
        """
        if return_schedule_plan:
            raise ValueError(
                "return_schedule_plan=True (overlap_moe_expert_parallel_comm) bypasses the layers' forward; expected "
                "no schedule plan: set overlap_moe_expert_parallel_comm=False"
            )
        if not torch.is_grad_enabled():
            raise ValueError(
                "the loop evaluates, and OPRDForwardStep has no loss for that; expected no evaluation: set "
                "train.eval_iters=0, and evaluate exported checkpoints with nemo-oprd evaluate"
            )
        oprd, read = self._distillation(model), next(data_iterator)
        place, length = next(model.parameters()).device, read["tokens"].shape[1]
        batch = {name: read[name].to(place, non_blocking=True) for name in ("tokens", "weight")}
        if get_model_config(model).context_parallel_size > 1:
            batch = batch_on_this_cp_rank(batch, unwrapped(model).pg_collection.cp)
        tokens_BS, weight_BS = batch["tokens"], batch["weight"]
        capture = oprd.capture(weight_BS)
        assert self._teacher is not None
        self._teacher.forward(tokens_BS, observed(None, capture, sequence_length=length))
        losses = oprd.losses(weight_BS, capture.captured)
        sequences = observed(None, losses, sequence_length=length)
        return model(tokens_BS, None, None, packed_seq_params=sequences), self._report

    def _distillation(self, model: Any) -> HiddenStateDistillation:
        """Returns the maker of observers; at an update's first microbatch, registers `_finish` for the update's end."""
        if self._teacher is None:
            raise ValueError(
                "the student's provider has built no teacher; expected it to build the student: pass the step the "
                "provider that the loop uses, config.model"
            )
        if self._oprd is None:
            adopt([model])  # adopted already; now that DDP wraps it, its gradient buffers are checked, too
            self._oprd = HiddenStateDistillation([model], [self._teacher.model], self._loss)
        if self._reported is None:
            self._reported = torch.zeros(1, device=next(model.parameters()).device)
            self._restore = after_backward(get_model_config(model), self._finish)
        return self._oprd

    def _report(self, output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
        """Returns, as the loss function, a zero, and a tensor for the metric that `_finish` fills before it is read."""
        zero, count, _ = zero_loss(output)
        assert self._reported is not None
        return zero, count, {"rep/loss": self._reported}

    def _finish(self) -> None:
        """Computes the metrics of an update, and checks that every layer received its gradient; all ranks call this."""
        assert self._oprd and self._teacher and self._restore and self._reported is not None
        self._restore()
        self._teacher.wait()
        self.metrics = self._oprd.finish()
        self._reported.fill_(self.metrics["rep/loss"])
        self._reported = None
