"""Derives Megatron's config, and the layers of each model chunk of a rank, from a `ModelSpec` and a role."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.transformer.transformer_config import TransformerConfig

from nemo_oprd.batch.layout import Layout
from nemo_oprd.megatron.experts import expert_settings
from nemo_oprd.megatron.parallel import Role
from nemo_oprd.models import ModelSpec

# Megatron's own fused kernels are off: this project's layers bring what they need
PLAIN_KERNELS = dict.fromkeys(
    (
        "masked_softmax_fusion",
        "bias_activation_fusion",
        "bias_dropout_fusion",
        "apply_rope_fusion",
        "persist_layer_norm",
    ),
    False,
)


def transformer_config(
    spec: ModelSpec, role: Role, dtype: torch.dtype, *, accumulates: bool = False, **training: Any
) -> TransformerConfig:
    """Returns Megatron's config for `spec` and `role`; `training`: recompute settings, and `moe_router_dtype`.

    `accumulates`: whether Megatron's own linear layers add weight gradients inside the matrix product (Apex).
    """
    return TransformerConfig(
        num_layers=spec.num_layers,
        hidden_size=spec.hidden_size,
        ffn_hidden_size=spec.ffn_size,
        num_attention_heads=spec.num_heads,
        num_query_groups=spec.num_kv_heads,
        kv_channels=spec.head_dim,
        normalization="RMSNorm",
        layernorm_epsilon=spec.norm_eps,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        add_qkv_bias=spec.qkv_bias,
        qk_layernorm=spec.qk_norm,
        **layout_settings(spec, role, dtype),
        **expert_settings(spec.experts, role.layout),
        **PLAIN_KERNELS,
        gradient_accumulation_fusion=accumulates,
        **training,
    )


def _dispatcher_type(layout: Layout) -> str:
    # Packs differ in length, so p2p shapes are exchanged per microbatch, which Megatron refuses with its allgather
    # dispatcher; `build_chunks` puts this project's in the place of the all-to-all one. DeepEP is "flex" there.
    sends_tokens = layout.expert * layout.expert_tensor > 1
    return "flex" if layout.dispatcher == "deepep" and sends_tokens else "alltoall"


def layout_settings(spec: ModelSpec, role: Role, dtype: torch.dtype) -> dict[str, Any]:
    """Returns the fields of a Megatron config for a model's split, storage and training, not for what it computes."""
    layout = role.layout
    stages = layout.layers_per_stage(spec.num_layers)
    even = len(set(stages)) == 1
    return {
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "tensor_model_parallel_size": layout.tensor,
        "pipeline_model_parallel_size": layout.pipeline,
        "virtual_pipeline_model_parallel_size": layout.virtual_pipeline if layout.virtual_pipeline > 1 else None,
        "num_layers_in_first_pipeline_stage": None if even else stages[0],
        # with two stages the first count determines the last; given both, Megatron would divide by zero inner stages
        "num_layers_in_last_pipeline_stage": None if even or layout.pipeline == 2 else stages[-1],
        "context_parallel_size": layout.context,
        "sequence_parallel": layout.sequence and layout.tensor > 1,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype == torch.bfloat16,
        "variable_seq_lengths": True,
        "moe_token_dispatcher_type": _dispatcher_type(layout),
        # At PP2 with virtual stages both neighbours are the same rank, and batched p2p confuses the two directions.
        "batch_p2p_comm": layout.virtual_pipeline == 1,
        "overlap_p2p_comm": layout.virtual_pipeline > 1,
        # With overlapped sends Megatron frees an output whose send may be under way. On CUDA the order of the streams
        # protects the bytes; gloo would send what the next tensor has written there.
        "deallocate_pipeline_outputs": layout.pipeline > 1
        and (layout.virtual_pipeline == 1 or torch.cuda.is_available()),
        # Injected gradients already contain 1 / counts; with this setting data parallelism sums and nothing is
        # rescaled.
        "calculate_per_token_loss": True,
        "perform_initialization": False,
        "use_cpu_initialization": not torch.cuda.is_available(),
    }


@dataclass(frozen=True)
class ChunkSpan:
    """A model chunk of a pipeline rank: its number among the rank's chunks, and its layers (1-based).

    `first` and `last` say whether it begins with the embedding and ends with the final norm and the head.
    """

    number: int
    layers: tuple[int, ...]
    first: bool
    last: bool

    def virtual_stage(self, layout: Layout) -> int | None:
        """Returns Megatron's `vp_stage`."""
        return self.number if layout.virtual_pipeline > 1 else None


def chunk_spans(spec: ModelSpec, role: Role) -> Iterator[ChunkSpan]:
    """Yields the model chunks that this rank holds for a role, in the order of their layers."""
    layout, pipeline = role.layout, role.member_coords.pipeline
    for chunk in range(layout.virtual_pipeline):
        layers = range(1, spec.num_layers + 1)
        yield ChunkSpan(
            chunk,
            tuple(i for i in layers if layout.stage_of_layer(i, spec.num_layers) == (pipeline, chunk)),
            first=pipeline == 0 and chunk == 0,
            last=pipeline == layout.pipeline - 1 and chunk == layout.virtual_pipeline - 1,
        )


def chunk_training(training: dict[str, Any], layers: int) -> dict[str, Any]:
    """Returns `training`, with "uniform" recomputation adapted to a chunk of `layers` layers.

    The number of layers recomputed together becomes the largest divisor of `layers` that is at most the requested
    number, as Megatron would otherwise run past the chunk's end. This changes memory use, never a result.
    """
    if training.get("recompute_method") != "uniform":
        return training
    most = max(1, training["recompute_num_layers"])
    return {**training, "recompute_num_layers": max(i for i in range(1, min(layers, most) + 1) if layers % i == 0)}
