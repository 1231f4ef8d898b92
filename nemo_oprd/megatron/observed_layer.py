"""The observed transformer layer: each layer's output is shown to the observer of the microbatch.

What a microbatch wants from the layers (capture for the teacher, a loss for the student) is an `Observer` on the
`PackedSeqParams` that Megatron hands to every layer, also when it recomputes one. Hooks would not do: inside a
recomputed region they see tensors without gradient. Nothing is kept on modules, and no order has to be kept in 1F1B or
interleaved schedules.

Layer numbers are 1-based over the whole model.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.transformer_layer import TransformerLayer

from nemo_oprd.megatron.attention import AttentionPlan


class Observer(Protocol):
    """Sees the output of every layer that this stage owns, in order."""

    def at_layer(self, layer: int, hidden: torch.Tensor, *, stage_ends: bool) -> torch.Tensor:
        """Gets [S, 1, D] (a sequence-parallel rank's part of it); returns what the next layer shall get."""
        ...

    def after_final_norm(self, hidden: torch.Tensor) -> torch.Tensor:
        """The same for the output of the final norm; only on the last stage."""
        ...


@dataclass
class ObservedSequences(PackedSeqParams):
    """The packed sequences of one microbatch, with their observer.

    `depth` is the deepest layer to run: those above pass their input through (nobody asks for their output).
    `total_lengths` are the tokens of each whole sequence, also those behind the last one that is computed.
    """

    attention_plan: AttentionPlan | None = None
    observer: Observer | None = None
    depth: int | None = None
    total_lengths: tuple[int, ...] = ()


class ObservedLayer(TransformerLayer):
    """Megatron's transformer layer, observed. Named in the layer spec in place of `TransformerLayer`."""

    # set by `DistillingModel` on the last layer of a stage whose output travels on to another stage
    stage_ends = False

    def forward(self, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        """As the parent's; see `Observer` for what happens to the output."""
        sequences = kwargs.get("packed_seq_params")
        if not isinstance(sequences, ObservedSequences):
            return super().forward(*args, **kwargs)
        if sequences.depth is not None and self.layer_number > sequences.depth:
            return kwargs["hidden_states"], kwargs.get("context")
        hidden, context = super().forward(*args, **kwargs)
        if sequences.observer is not None:
            hidden = sequences.observer.at_layer(self.layer_number, hidden, stage_ends=self.stage_ends)
        return hidden, context
