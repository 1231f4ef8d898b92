"""The observed transformer layer, which passes its output to the observer of the microbatch.

An `Observer` reads or changes the layers' outputs (the teacher captures hidden states, the student attaches losses). It
is stored in the `PackedSeqParams` that Megatron passes to every layer, even when Megatron recomputes a layer. Hooks do
not work: inside a recomputed region they see tensors without gradient. Modules hold no state of a microbatch, so 1F1B
and interleaved schedules may run microbatches in any order.

This project's models are built of `ObservedLayer`. A model that another program has built gets classes of its own
layers with `ObservedLayer` before them (`megatron/adopt.py`).

Layer numbers are 1-based over the whole model.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.transformer_block import TransformerBlock
from megatron.core.transformer.transformer_layer import TransformerLayer

from nemo_oprd.megatron.attention import AttentionPlan
from nemo_oprd.megatron.router_replay import Routes


class Observer(Protocol):
    """Sees the output of every layer that this stage owns, in order."""

    def at_layer(self, layer: int, hidden: torch.Tensor, *, stage_ends: bool) -> torch.Tensor:
        """Gets the layer's output [S, B, D] (a sequence-parallel rank's part); returns the input of the next layer.

        B is 1 for packed sequences, hence in all of this project's own models.

        Args:
            layer: 1-based number of the layer.
            stage_ends: whether the output leaves this pipeline stage for another one.
        """
        ...

    def after_final_norm(self, hidden: torch.Tensor) -> torch.Tensor:
        """Gets the output [S, B, D] of the final norm; returns the output to use. Called only on the last stage."""
        ...


@dataclass
class ObservedSequences(PackedSeqParams):
    """The packed sequences of one microbatch, with their observer.

    `depth` is the deepest layer to run; deeper layers return their input, because no loss needs their output.
    `positions` int64 [S] are the positions of this rank's tokens in their sequences, `sequence_lengths` int64 [S] the
    lengths of the tokens' whole sequences, including tokens after the last computed one. `rotation` holds the cosines
    and sines of the tokens (`attention.packed_rotation`); the model's forward computes them once for all layers.

    `routes` holds the experts that the microbatch's tokens visit, see `router_replay.Routes`; None: none are kept.
    `most_tokens` is the largest number of tokens of this microbatch on any rank, see `experts.PaddedAllGather`.

    `packed` is False for an ordinary batch [S, B, D], which has no packed sequences: the object then only carries the
    observer, and layers compute as if they had been given no `PackedSeqParams`. Only adopted models run such batches.
    """

    attention_plan: AttentionPlan | None = None
    observer: Observer | None = None
    depth: int | None = None
    positions: torch.Tensor | None = None
    sequence_lengths: torch.Tensor | None = None
    rotation: tuple[torch.Tensor, torch.Tensor] | None = None
    routes: Routes | None = None
    most_tokens: int | None = None
    packed: bool = True


class ObservedLayer(TransformerLayer):
    """Megatron's transformer layer with an observer. The layer spec names it in place of `TransformerLayer`.

    It is a mixin, too: before a subclass of `TransformerLayer` among the bases of a class, it observes that subclass.
    """

    # set on the last layer of a stage whose output is sent to another stage
    stage_ends = False

    def forward(self, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Runs the next class's forward; passes the output through the microbatch's `Observer`."""
        sequences = kwargs.get("packed_seq_params")
        router = getattr(self.mlp, "router", None)
        if router is not None:
            router.routes = getattr(sequences, "routes", None)
            self.mlp.token_dispatcher.most_tokens = getattr(sequences, "most_tokens", None)
        if not isinstance(sequences, ObservedSequences):
            return super().forward(*args, **kwargs)
        if sequences.depth is not None and self.layer_number > sequences.depth:
            return kwargs["hidden_states"], kwargs.get("context")
        if not sequences.packed:
            kwargs["packed_seq_params"] = None
        hidden, context = super().forward(*args, **kwargs)
        if sequences.observer is not None:
            hidden = sequences.observer.at_layer(self.layer_number, hidden, stage_ends=self.stage_ends)
        return hidden, context


def observe_block_output(block: TransformerBlock, hidden: torch.Tensor, sequences: Any) -> torch.Tensor:
    """Returns the output [S, B, D] of a `TransformerBlock`; on the last stage, the observer gets the final norm's.

    Args:
        sequences: the `packed_seq_params` of the microbatch; other objects than `ObservedSequences` have no effect.
    """
    if not isinstance(sequences, ObservedSequences):
        return hidden
    if not block.post_process and sequences.depth is not None:
        last = block.layers[-1].layer_number if len(block.layers) else 0
        if last > sequences.depth:
            # the schedule frees a stage's output, so the output must not be the input (or, under recompute, its view)
            hidden = hidden.clone()
    if block.final_layernorm is not None and sequences.observer is not None:
        hidden = sequences.observer.after_final_norm(hidden)
    return hidden


def refuse_schedule_plan(*_: Any, **__: Any) -> None:
    """Stands in for `GPTModel.build_schedule_plan`: a plan runs the parts of a layer without the layer's forward.

    Raises:
        ValueError: always.
    """
    raise ValueError(
        "overlap_moe_expert_parallel_comm=True (a schedule plan) bypasses the layers' forward, where hidden states "
        "are captured; expected overlap_moe_expert_parallel_comm=False"
    )
