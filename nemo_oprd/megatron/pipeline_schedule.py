"""Runs packed microbatches once through Megatron's pipeline schedules, for the student and for teachers.

A microbatch holds its tokens, its packing and the observer that captures hidden states or attaches losses. The loss
function that the schedule calls on the last stage returns zero, as a node that depends on all others, so that backward
runs through them; the training signal is the gradients that layers inject (`distillation/gradient_injection.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from megatron.core.distributed import finalize_model_grads
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func

from nemo_oprd.batch.packing import Pack
from nemo_oprd.batch.types import Rollout
from nemo_oprd.megatron.attention import AttentionPlan
from nemo_oprd.megatron.observed_layer import ObservedSequences, Observer
from nemo_oprd.megatron.parallel import Role, on_device
from nemo_oprd.megatron.router_replay import Routes


def refuse_layer_bypasses(config: Any) -> None:
    """Raises ValueError for settings of a Megatron `TransformerConfig` under which layers run without their forward.

    A replayed CUDA graph repeats kernels without the rows and targets of the current microbatch; a schedule plan calls
    the parts of a layer separately. Either would train nothing, or train on the rows of another microbatch.
    """
    for name, harmless in (
        ("cuda_graph_impl", "none"),
        ("enable_cuda_graph", False),
        ("external_cuda_graph", False),
        ("overlap_moe_expert_parallel_comm", False),
    ):
        value = getattr(config, name, harmless)
        if value not in (harmless, None):
            raise ValueError(
                f"{name}={value}: layers would run without their forward, where hidden states are captured and "
                f"gradients injected; expected {name}={harmless}"
            )


@dataclass
class Microbatch:
    """The tokens int64 [1, S] of this context rank, and the packed sequences with their observer."""

    input_ids: torch.Tensor
    sequences: ObservedSequences
    pack: Pack
    context: int

    def set_sequence_bounds(self, model: Any) -> None:
        """Stores the sequences' bounds where the attention of a model's layers (`ModelStage`) reads them.

        `SDPAttention` reads lengths on the host and follows a plan; Transformer Engine reads lengths on the device.
        """
        engine = model.backend == "transformer_engine"
        if engine:
            cu_seqlens = on_device(self.pack.cu_seqlens.astype(np.int32))
            self.sequences.cu_seqlens_q = self.sequences.cu_seqlens_kv = cu_seqlens
        if not engine or model.own_attention:
            self.sequences.attention_plan = AttentionPlan.build(self.pack, self.context)


def make_microbatch(
    pack: Pack,
    rollouts: list[Rollout],
    role: Role,
    observer: Observer | None,
    depth: int | None,
    *,
    routes: Routes | None = None,
) -> Microbatch:
    """Returns the microbatch of `pack` on this rank; padding tokens have id 0 and are never supervised.

    A model with experts needs `routes` if its layers are computed more than once, or its routers observed or replayed.
    """
    assert role.coords is not None
    ids = np.zeros(pack.total, dtype=np.int64)
    for i, length, offset in zip(pack.sequences, pack.lengths, pack.offsets, strict=False):
        rollout = rollouts[i]
        ids[offset : offset + length] = rollout.ids[:length]
    own = pack.context_slice(role.coords.context)
    positions = np.arange(pack.total) - np.repeat(pack.offsets, pack.padded)
    whole = [rollouts[i].length for i in pack.sequences] or [0]
    lengths = np.repeat(np.array(whole, dtype=np.int64), pack.padded)
    longest = int(pack.padded.max())
    sequences = ObservedSequences(
        qkv_format="thd",
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
        observer=observer,
        depth=depth,
        positions=on_device(positions[own]),
        sequence_lengths=on_device(lengths[own]),
        routes=routes,
        most_tokens=pack.most_tokens,
    )
    return Microbatch(on_device(ids[own])[None], sequences, pack, role.coords.context)


def run_schedule(
    chunks: list[Any],
    role: Role,
    microbatches: list[Microbatch],
    *,
    forward_only: bool,
    finalize: bool = True,
    force_all_reduce: bool = False,
) -> None:
    """Runs forward (and backward, with gradient finalisation) over all microbatches of this data-parallel rank.

    Args:
        chunks: this rank's model chunks, wrapped in DDP where gradients are wanted.
        finalize: reduce the gradients over ranks at the end; False defers that to a later call.
        force_all_reduce: leave complete gradients on every rank, even if the distributed optimizer needs only shards.
    """
    layout, config = role.layout, chunks[0].config
    refuse_layer_bypasses(config)
    model = getattr(chunks[0], "module", chunks[0])  # inside DDP, if there is one
    for microbatch in microbatches:
        microbatch.set_sequence_bounds(model)
    if not forward_only:
        config.finalize_model_grads_func = finalize_model_grads if finalize else None
    virtual = layout.virtual_pipeline if layout.virtual_pipeline > 1 else None
    schedule = get_forward_backward_func(layout.pipeline, virtual)
    communicator = P2PCommunicator(role.member_groups.pp, config) if layout.pipeline > 1 else None
    iterators = [iter(microbatches) for _ in chunks]
    schedule(
        forward_step_func=_forward_step,
        data_iterator=iterators if len(chunks) > 1 else iterators[0],
        model=chunks if len(chunks) > 1 else chunks[0],
        num_microbatches=len(microbatches),
        seq_length=max(m.sequences.max_seqlen_q for m in microbatches),  # unused for p2p: see variable_seq_lengths
        micro_batch_size=1,
        forward_only=forward_only,
        pg_collection=role.groups,
        p2p_communicator=communicator,
        force_all_reduce=force_all_reduce,
    )


def _forward_step(data_iterator: Iterator[Microbatch], model: Any) -> tuple[torch.Tensor, Any]:
    microbatch = next(data_iterator)
    return model(microbatch.input_ids, microbatch.sequences), zero_loss


def zero_loss(output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict]:
    """Returns the schedule's loss, a zero that depends on the model's output, so that backward runs.

    The token count of 0 prevents Megatron from dividing the gradients, which already contain 1 / counts.
    """
    return output.narrow(0, 0, 0).sum(), torch.zeros((), dtype=torch.int, device=output.device), {}
