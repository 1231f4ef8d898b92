"""A frozen teacher in the student's process and parallel layout, for loops of other programs.

The loop runs the student's stages in an order of its own. This stage of the teacher runs on a microbatch just before
the student's stage does, and sends its output to the next stage over groups of its own. So no stage waits for another
one that the schedule calls later, whatever the schedule's order, and memory holds only the targets of microbatches in
flight.

B sequences of a microbatch, S their tokens, D width, V vocabulary of one tensor rank.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from nemo_oprd.megatron.adopt import adopt, unwrapped
from nemo_oprd.megatron.observed_layer import ObservedSequences

# settings of a model provider that the teacher's shares with the student's: layout, precision, device
_SHARED = (
    "tensor_model_parallel_size pipeline_model_parallel_size context_parallel_size sequence_parallel "
    "num_layers_in_first_pipeline_stage num_layers_in_last_pipeline_stage pipeline_model_parallel_layout "
    "account_for_embedding_in_pipeline_split account_for_loss_in_pipeline_split expert_model_parallel_size "
    "expert_tensor_parallel_size bf16 params_dtype pipeline_dtype autocast_dtype attention_backend"
)


class ColocatedTeacher:
    """This rank's stage of an adopted, frozen teacher; `model` may be wrapped."""

    def __init__(self, model: torch.nn.Module, pipeline: dist.ProcessGroup) -> None:
        """Makes groups like the student's `pipeline`; every rank of the job calls this at the same place."""
        self.model = model
        self._last = bool(unwrapped(model).post_process)
        self._links = _Links(pipeline)
        self._sent: tuple[dist.Work, torch.Tensor] | None = None

    def forward(
        self,
        tokens_BS: torch.Tensor,
        sequences: ObservedSequences,
        attention_mask: torch.Tensor | None = None,
        *,
        logits: bool = False,
    ) -> torch.Tensor | None:
        """Runs this stage's forward pass, receives from the stage before and sends to the next one.

        Args:
            tokens_BS: the next tokens of the student's stage.
            sequences: with the teacher's observer.
            logits: whether the last stage returns its logits [B, S, V]; the same on all stages.
        """
        model: Any = unwrapped(self.model)
        # on the last stage a GPTModel without post_process returns its final hidden state
        model.post_process = self._last and logits
        self.wait()  # for the last microbatch; its receiver has run by now
        with torch.no_grad():
            if self._links.previous is not None:
                model.set_input_tensor(self._links.receive(tokens_BS, model))
            output = self.model(tokens_BS, None, attention_mask, packed_seq_params=sequences)
        if self._links.next is not None:
            self._sent = self._links.send(output.contiguous())
        return output if model.post_process else None

    def wait(self) -> None:
        """Waits until the next stage has received the last output; also called at the end of an update."""
        if self._sent is not None:
            self._sent[0].wait()
            self._sent = None


def build_teacher(student: Any, provider: Any, chunk: torch.nn.Module) -> ColocatedTeacher:
    """Builds the teacher from Megatron-Bridge's model provider, in the student's layout, groups and precision.

    Args:
        student: the student's model provider.
        provider: the teacher's, which loads its weights. Its layout and precision are overwritten.
        chunk: the student's only chunk on this rank.

    Raises:
        ValueError: as `adopt`.
    """
    groups = unwrapped(chunk).pg_collection
    for name in _SHARED.split():
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
    (model,) = adopt(models, hf_config=local_hf_config(provider))
    return ColocatedTeacher(model, groups.pp)


def after_backward(config: Any, then: Callable[[], None]) -> Callable[[], None]:
    """Makes Megatron call `then` after the last backward pass of every update, on every rank, before the optimizer.

    Megatron's schedules call the `finalize_model_grads_func` of a model's config there. Returns a function that
    restores the config; call it before anything writes the config into a checkpoint.
    """
    original = config.finalize_model_grads_func

    def finalize(*args: Any, **kwargs: Any) -> None:
        if original is not None:
            original(*args, **kwargs)
        then()

    def restore() -> None:
        config.finalize_model_grads_func = original

    config.finalize_model_grads_func = finalize
    return restore


def local_hf_config(provider: Any) -> Path | None:
    """Returns the directory of the Hugging Face model behind a provider, if it is on this machine."""
    name = getattr(provider, "hf_model_id", None)
    return Path(name) if name and (Path(name) / "config.json").is_file() else None


class _Links:
    """A stage's neighbours in the pipeline, for the teacher's outputs, in groups apart from the student's."""

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
        """Sends an output; returns (handle to wait for, the tensor, which must live until then)."""
        work = dist.isend(hidden_SBD, self.next, group=self._group)
        assert work is not None
        return work, hidden_SBD

    def receive(self, tokens_BS: torch.Tensor, model: Any) -> torch.Tensor:
        """Receives the hidden state [S, B, D] of the stage before, the input of this stage of `model`."""
        (batch, length), config = tokens_BS.shape, model.config
        parts = model.decoder.tp_group.size() if config.sequence_parallel else 1
        dtype = config.pipeline_dtype or config.params_dtype
        received = torch.empty(length // parts, batch, config.hidden_size, dtype=dtype, device=tokens_BS.device)
        dist.recv(received, self.previous, group=self._group)
        return received
