"""`OPRDForwardStep`: Megatron-Bridge's training loop with the hidden-state loss on recorded rollouts.

    step = OPRDForwardStep(config.model, teacher, loss)  # the recipe's model provider and one for the teacher
    finetune(config, step)

The loop calls the step for one microbatch after the other, on each pipeline stage when the student's schedule reaches
it. The step runs the teacher's stage on the microbatch just before the student's, and sends the teacher's output to the
next stage by itself, over groups of its own. So no stage waits for another one that has not been called yet, whatever
the schedule's order, and only the targets of microbatches in flight are kept.

The models are built, adopted and checked in a hook of the student's provider, which the loop calls on every rank at the
same place. Nothing stays in the model's config after an update, because the loop writes it into checkpoints.

B sequences of a microbatch, S their tokens, D width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.utils import get_batch_on_this_cp_rank, get_model_config

from nemo_oprd.config.loss_schema import RepresentationLossConfig
from nemo_oprd.megatron.observed_layer import ObservedSequences
from nemo_oprd.megatron.pipeline_schedule import zero_loss
from nemo_oprd.nemo.adopt import adopt, observed, unwrapped
from nemo_oprd.nemo.hidden_states import HiddenStateDistillation

# settings of a model provider that the teacher's must share with the student's: layout, precision, and where it is
_SHARED = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "context_parallel_size",
    "sequence_parallel",
    "num_layers_in_first_pipeline_stage",
    "num_layers_in_last_pipeline_stage",
    "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split",
    "pipeline_model_parallel_layout",
    "expert_model_parallel_size",
    "expert_tensor_parallel_size",
    "bf16",
    "params_dtype",
    "pipeline_dtype",
    "autocast_dtype",
    "attention_backend",
)


class OPRDForwardStep:
    """A `forward_step_func` for `finetune` and `pretrain` of Megatron-Bridge.

    Microbatches are dictionaries with `tokens` int64 [B, S] and `weight` float32 [B, S], as `RolloutDataset` gives
    them. The models' logits are not used; the last stage reports `rep/loss` of the update to the loop's log.

    Attributes:
        metrics: of the last update, by their names in docs/runs.md; equal on all ranks.
    """

    def __init__(self, student: Any, teacher: Any, loss: RepresentationLossConfig | None = None) -> None:
        """Asks the student's provider to build the teacher after the student; nothing is built yet.

        Args:
            student: the recipe's model provider, `config.model`.
            teacher: a provider of the teacher that loads its weights, such as
                `AutoBridge.from_hf_pretrained(...).to_megatron_provider()`. It gets the student's layout and precision.
            loss: the hidden-state term, by default the paper's (docs/losses.md).

        Raises:
            ValueError: a provider is none, or the student has virtual pipeline stages.
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
        self._teacher: torch.nn.Module | None = None
        self._oprd: HiddenStateDistillation | None = None
        self._reported: torch.Tensor | None = None
        self._sent: tuple[dist.Work, torch.Tensor] | None = None
        self._links: _Links | None = None
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
        """The hook: adopts the student's chunk, which is not wrapped yet, and builds the teacher in its groups."""
        self._refuse_virtual_stages()  # the recipe may have changed since
        student, provider = self._providers
        adopt(chunks, hf_config=_local_hf_config(student))
        groups = unwrapped(chunks[0]).pg_collection
        for name in _SHARED:
            if hasattr(student, name) and hasattr(provider, name):
                setattr(provider, name, getattr(student, name))
        provider.finalize()
        models = provider.provide_distributed_model(
            wrap_with_ddp=False,
            data_parallel_random_init=False,
            use_cpu_initialization=student.use_cpu_initialization,
            pg_collection=groups,
        )
        for model in models:
            model.requires_grad_(False)
            model.eval()
        adopt(models, hf_config=_local_hf_config(provider))
        (self._teacher,) = models
        # after adopt, which asks whether the stage is the last one: no loss needs the teacher's logits
        unwrapped(self._teacher).post_process = False
        self._links = _Links(groups.pp)
        return chunks

    def __call__(
        self, state: Any, data_iterator: Iterator[dict[str, Any]], model: Any, return_schedule_plan: bool = False
    ) -> tuple[torch.Tensor, Callable[..., Any]]:
        """Runs teacher and student on the next microbatch; returns the student's output and the loss function.

        Args:
            state: the loop's state. Its name makes the loop pass it.

        Raises:
            ValueError: the loop evaluates, asks for a schedule plan, or has models that cannot be served.
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
        oprd = self._distillation(model)
        batch = next(data_iterator)
        place = next(model.parameters()).device
        batch = {name: batch[name].to(place, non_blocking=True) for name in ("tokens", "weight")}
        length = batch["tokens"].shape[1]
        if get_model_config(model).context_parallel_size > 1:
            batch = get_batch_on_this_cp_rank(batch, unwrapped(model).pg_collection.cp)
        tokens_BS, weight_BS = batch["tokens"], batch["weight"]
        capture = oprd.capture(weight_BS)
        self._teach(tokens_BS, observed(None, capture, sequence_length=length))
        losses = oprd.losses(weight_BS, capture.captured)
        sequences = observed(None, losses, sequence_length=length)
        return model(tokens_BS, None, None, packed_seq_params=sequences), self._report

    def _distillation(self, model: Any) -> HiddenStateDistillation:
        """The observers' maker. At the first microbatch of an update, arranges that `_finish` is called at its end."""
        if self._teacher is None:
            raise ValueError(
                "the student's provider has built no teacher; expected it to build the student: pass the step the "
                "provider that the loop uses, config.model"
            )
        if self._oprd is None:
            adopt([model])  # adopted already; now that DDP wraps it, its gradient buffers are checked, too
            self._oprd = HiddenStateDistillation([model], [self._teacher], self._loss)
        if self._reported is None:
            self._reported = torch.zeros(1, device=next(model.parameters()).device)
            config = get_model_config(model)
            original = config.finalize_model_grads_func

            def finalize(*args: Any, **kwargs: Any) -> None:
                config.finalize_model_grads_func = original
                if original is not None:
                    original(*args, **kwargs)
                self._finish()

            # Megatron calls it on every rank after the last backward pass of an update
            config.finalize_model_grads_func = finalize
        return self._oprd

    def _teach(self, tokens_BS: torch.Tensor, sequences: ObservedSequences) -> None:
        """The forward pass of this stage of the teacher, with a hand-over from and to its neighbours."""
        assert self._teacher is not None and self._links is not None
        model = unwrapped(self._teacher)
        if self._sent is not None:  # the microbatch before; its receiver has been called by now
            self._sent[0].wait()
            self._sent = None
        with torch.no_grad():
            if self._links.previous is not None:
                received = self._links.receive(_hidden_shape(tokens_BS, model), model.config, tokens_BS.device)
                model.set_input_tensor(received)
            hidden_SBD = self._teacher(tokens_BS, None, None, packed_seq_params=sequences)
        if self._links.next is not None:
            self._sent = self._links.send(hidden_SBD.contiguous())

    def _report(self, output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
        """The loss function: a zero, with a place for the metric that `_finish` fills before the loop reads it."""
        zero, count, _ = zero_loss(output)
        assert self._reported is not None
        return zero, count, {"rep/loss": self._reported}

    def _finish(self) -> None:
        """The metrics of an update, and the check that every layer received its gradient; all ranks call this."""
        assert self._oprd is not None and self._reported is not None
        if self._sent is not None:
            self._sent[0].wait()
            self._sent = None
        self.metrics = self._oprd.finish()
        self._reported.fill_(self.metrics["rep/loss"])
        self._reported = None


class _Links:
    """A stage's neighbours in the pipeline, as the teacher's outputs pass them, in groups apart from the student's."""

    def __init__(self, pipeline: dist.ProcessGroup) -> None:
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, dist.get_process_group_ranks(pipeline))
        mine: list[int] = []
        for ranks in sorted({tuple(ranks) for ranks in everyone}):  # every rank takes part in making every group
            group = dist.new_group(list(ranks)) if len(ranks) > 1 else None
            if dist.get_rank() in ranks:
                self._group, mine = group, list(ranks)
        place = mine.index(dist.get_rank())
        self.previous = mine[place - 1] if place > 0 else None
        self.next = mine[place + 1] if place + 1 < len(mine) else None

    def send(self, hidden_SBD: torch.Tensor) -> tuple[dist.Work, torch.Tensor]:
        """(Handle to wait for, the tensor, which must live until then)."""
        work = dist.isend(hidden_SBD, self.next, group=self._group)
        assert work is not None
        return work, hidden_SBD

    def receive(self, shape: tuple[int, int, int], config: Any, place: torch.device) -> torch.Tensor:
        """The hidden state of the stage before."""
        received = torch.empty(shape, dtype=config.pipeline_dtype or config.params_dtype, device=place)
        dist.recv(received, self.previous, group=self._group)
        return received


def _hidden_shape(tokens_BS: torch.Tensor, model: Any) -> tuple[int, int, int]:
    """[S, B, D] of the state that a stage of `model` receives."""
    batch, length = tokens_BS.shape
    parts = model.decoder.tp_group.size() if model.config.sequence_parallel else 1
    return length // parts, batch, model.config.hidden_size


def _local_hf_config(provider: Any) -> Path | None:
    """The directory of the Hugging Face model that a provider was made of, if it is on this machine."""
    name = getattr(provider, "hf_model_id", None)
    return Path(name) if name and (Path(name) / "config.json").is_file() else None
