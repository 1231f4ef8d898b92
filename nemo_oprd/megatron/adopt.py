"""Makes models of another program observable: `adopt` changes a model in place, `observed` prepares a microbatch.

A built layer can't be exchanged for a layer of another class: its parameters are already in the gradient buffers of
Megatron's DDP and in optimizers, and checkpoints have their names. `adopt` therefore changes the class of the objects,
and leaves parameters, buffers and hooks as they are. The new class is the old one with `ObservedLayer` before it, so
whatever the old class does is still done. Forward hooks would not work: see `megatron/observed_layer.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.transformer_block import TransformerBlock
from megatron.core.transformer.transformer_layer import TransformerLayer

from nemo_oprd.megatron.model import DistillingModel
from nemo_oprd.megatron.observed_layer import (
    ObservedLayer,
    ObservedSequences,
    Observer,
    observe_block_output,
    refuse_schedule_plan,
)
from nemo_oprd.megatron.refusals import (
    check_rope,
    refuse_freed_sends,
    refuse_rescaling_buffers,
    refuse_unservable,
    refuse_untrainable,
)


class ObservedBlock(TransformerBlock):
    """Shows the state after the final norm to the observer; a mixin for `TransformerBlock` and its subclasses."""

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Runs the next class's forward, and shows its output to the observer."""
        return observe_block_output(self, super().forward(*args, **kwargs), kwargs.get("packed_seq_params"))


@cache
def _joined(mixin: type, cls: type) -> type:
    """Returns one class per pair, so that layers of one class stay layers of one class."""
    return type(f"Observed{cls.__name__}", (mixin, cls), {"__module__": __name__})


def _observe(module: torch.nn.Module, mixin: type) -> None:
    if not isinstance(module, mixin):
        cls: Any = type(module)
        module.__class__ = _joined(mixin, cls)


def unwrapped(chunk: torch.nn.Module) -> Any:
    """Returns the model inside wrappers such as DDP and `Float16Module`, which hold what they wrap as `module`."""
    while not hasattr(chunk, "decoder") and isinstance(getattr(chunk, "module", None), torch.nn.Module):
        chunk = chunk.module  # type: ignore[assignment]
    return chunk


def adopt(chunks: Sequence[torch.nn.Module], *, hf_config: str | Path | dict | None = None) -> Sequence[Any]:
    """Makes the layers of built `GPTModel` chunks pass their outputs to the observer of a microbatch.

    Parameters, buffers, names, hooks and wrappers stay as they are. Without an observer the models compute what they
    computed before. Adopting a model again changes nothing.

    Args:
        chunks: this rank's model chunks, one per virtual pipeline stage, wrapped (DDP, `Float16Module`) or not.
        hf_config: the directory, or the contents of the `config.json`, of the Hugging Face model that the weights come
            from; its rotary embeddings are then compared with those of the model. None leaves out the comparison.

    Returns:
        `chunks`.

    Raises:
        ValueError: a chunk cannot be served; nothing has been changed then. docs/nemo.md lists the reasons.
    """
    if isinstance(chunks, torch.nn.Module):
        raise ValueError(
            f"adopt was given a {type(chunks).__name__}; expected a list of model chunks: pass [model], or all chunks "
            "of the virtual pipeline stages"
        )
    models = [unwrapped(chunk) for chunk in chunks]
    for number, model in enumerate(models):
        if isinstance(model, DistillingModel):
            raise ValueError(
                f"model chunk {number} was built by nemo_oprd, which observes it already; expected a stock GPTModel: "
                "leave out adopt"
            )
        decoder = getattr(model, "decoder", None)
        if not isinstance(decoder, TransformerBlock):
            raise ValueError(
                f"model chunk {number} is a {type(model).__name__} without a TransformerBlock as its decoder; expected "
                "Megatron-core's GPTModel: adopt the language model inside, if there is one"
            )
        for layer in decoder.layers:
            if not isinstance(layer, TransformerLayer):
                raise ValueError(
                    f"layer {getattr(layer, 'layer_number', '?')} of model chunk {number} is a {type(layer).__name__}; "
                    "expected a TransformerLayer or a subclass of it: build the model with a layer spec of "
                    "TransformerLayers"
                )
        refuse_unservable(model.config)
        refuse_freed_sends(model.config)
        if any(parameter.requires_grad for parameter in model.parameters()):
            refuse_untrainable(model.config)
            refuse_rescaling_buffers(chunks[number])
        if hf_config is not None:
            check_rope(model, hf_config)
    for model in models:
        for layer in model.decoder.layers:
            _observe(layer, ObservedLayer)
        if len(model.decoder.layers) and not model.post_process:
            model.decoder.layers[-1].stage_ends = True
        _observe(model.decoder, ObservedBlock)
        # `overlap_moe_expert_parallel_comm`, refused above, may also be switched on later
        model.build_schedule_plan = refuse_schedule_plan
    return chunks


def observed(
    packed_seq_params: PackedSeqParams | None,
    observer: Observer | None,
    depth: int | None = None,
    *,
    sequence_length: int | None = None,
) -> ObservedSequences:
    """Returns the `packed_seq_params` of a microbatch with its observer, for the forward pass of an adopted model.

    Args:
        packed_seq_params: those of the microbatch; None for an ordinary batch [B, S].
        observer: from `HiddenStateDistillation`, or an `Observer` of your own; None observes nothing.
        depth: the deepest layer to run (1-based); deeper layers return their input, so the model's logits mean nothing.
            None runs all layers.
        sequence_length: without packed sequences, the S of the whole batch, before context and sequence parallelism
            divide it; Megatron then reads the length of the rotary embeddings from here.

    Raises:
        ValueError: there are neither packed sequences nor a sequence length.
    """
    if packed_seq_params is None:
        if sequence_length is None:
            raise ValueError(
                "observed was given neither packed_seq_params nor sequence_length; expected one of them: for an "
                "ordinary batch pass sequence_length=tokens.shape[1] times the context parallel size"
            )
        length = sequence_length
        return ObservedSequences(
            qkv_format="sbhd", max_seqlen_q=length, max_seqlen_kv=length, observer=observer, depth=depth, packed=False
        )
    sequences = ObservedSequences()
    # also what a subclass or a newer Megatron-core has stored beside the fields of this version
    sequences.__dict__.update(packed_seq_params.__dict__)
    sequences.observer, sequences.depth = observer, depth
    return sequences
