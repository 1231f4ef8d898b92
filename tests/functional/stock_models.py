"""Stock Megatron-core models of the golden pair, built by Megatron's own API over its global groups."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from nemo_oprd.batch.layout import Layout

GOLDEN = Path(__file__).parent.parent / "golden"


@contextmanager
def megatron_groups(layout: Layout) -> Iterator[None]:
    """Megatron's global groups for `layout`, as a training script initialises them; gone afterwards."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    from nemo_oprd.megatron import parallel

    parallel.init_distributed()
    parallel_state._GLOBAL_MEMORY_BUFFER = None
    others = set(distributed_c10d._world.pg_map)
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tensor,
        pipeline_model_parallel_size=layout.pipeline,
        virtual_pipeline_model_parallel_size=layout.virtual_pipeline if layout.virtual_pipeline > 1 else None,
        context_parallel_size=layout.context,
        create_gloo_process_groups=False,
    )
    model_parallel_cuda_manual_seed(1, force_reset_rng=True)
    try:
        yield
    finally:
        parallel_state.destroy_model_parallel()
        # Megatron only forgets its groups; their threads and sockets would add up over the cases of a worker. Groups of
        # roles that were made meanwhile stay: the next role of the same layout takes them.
        kept = others | {group for group in parallel._known_groups.values() if isinstance(group, dist.ProcessGroup)}
        for group in [group for group in distributed_c10d._world.pg_map if group not in kept]:
            dist.destroy_process_group(group)
        parallel_state._set_global_memory_buffer()


def stock_config(layout: Layout, **settings: Any) -> Any:
    """Megatron's config of the golden models."""
    from megatron.core.transformer.transformer_config import TransformerConfig

    values: dict[str, Any] = {
        "num_layers": 3,
        "hidden_size": 32,
        "ffn_hidden_size": 48,
        "num_attention_heads": 4,
        "num_query_groups": 2,
        "kv_channels": 16,
        "normalization": "RMSNorm",
        "layernorm_epsilon": 1e-6,
        "qk_layernorm": True,
        "gated_linear_unit": True,
        "activation_func": torch.nn.functional.silu,
        "add_bias_linear": False,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "attention_softmax_in_fp32": True,
        "masked_softmax_fusion": False,
        "bias_activation_fusion": False,
        "bias_dropout_fusion": False,
        "apply_rope_fusion": False,
        "persist_layer_norm": False,
        "gradient_accumulation_fusion": False,
        "use_cpu_initialization": True,
        "pipeline_dtype": torch.float32,
        "calculate_per_token_loss": True,
        "tensor_model_parallel_size": layout.tensor,
        "sequence_parallel": layout.sequence,
        "pipeline_model_parallel_size": layout.pipeline,
        "context_parallel_size": layout.context,
        "deallocate_pipeline_outputs": layout.pipeline > 1,
    }
    if layout.virtual_pipeline > 1:
        # four stages for three layers: one stage has no layer, and the final norm is apart from the last layer
        values["pipeline_model_parallel_layout"] = [["embedding", "decoder"], ["decoder"], ["decoder"], ["loss"]]
        # both neighbours are the same rank here, and batched p2p confuses the two directions
        values |= {"virtual_pipeline_model_parallel_size": layout.virtual_pipeline, "batch_p2p_comm": False}
        # gloo sends outputs while the schedule would free them, see `refuse_freed_sends`
        values |= {"overlap_p2p_comm": True, "deallocate_pipeline_outputs": False}
    elif layout.pipeline > 1:
        values["num_layers_in_first_pipeline_stage"] = 2
    return TransformerConfig(**{**values, **settings})


def stock_model(
    name: str,
    layout: Layout,
    backend: str = "local",
    *,
    rotary_base: int = 50000,
    scaling: dict[str, Any] | None = None,
    **settings: Any,
) -> list[Any]:
    """This rank's `GPTModel` chunks with a golden model's weights; `backend` is "local" or "transformer_engine".

    Args:
        scaling: rope_scaling in the golden model's config.json. The model is built from the fields that
            Megatron-Bridge has for it.
    """
    from megatron.core import parallel_state
    from megatron.core.models.gpt.gpt_layer_specs import (
        get_gpt_layer_local_spec,
        get_gpt_layer_with_transformer_engine_spec,
    )
    from megatron.core.models.gpt.gpt_model import GPTModel

    from nemo_oprd.megatron.parallel import Role
    from nemo_oprd.megatron.weights.hf import HFCheckpoint, load_hf
    from nemo_oprd.models import parse_model_spec, read_model_spec
    from nemo_oprd.models.megatron_bridge_config import provider_fields

    spec = read_model_spec(GOLDEN / name)
    if backend == "local":
        layer_spec = get_gpt_layer_local_spec(qk_layernorm=True, normalization="RMSNorm")
    else:
        layer_spec = get_gpt_layer_with_transformer_engine_spec(qk_layernorm=True)
    config = stock_config(layout, **settings)
    fields = provider_fields(parse_model_spec({**spec.hf_config, "rope_scaling": scaling}))
    for key in [key for key in fields if key.startswith("yarn_")]:
        setattr(config, key, fields[key])  # as in Megatron-Bridge, whose config is Megatron's with more fields
    chunks = []
    for stage in range(layout.virtual_pipeline):
        place = {"ignore_virtual": False, "vp_stage": stage if layout.virtual_pipeline > 1 else None}
        chunks.append(
            GPTModel(
                config=config,
                transformer_layer_spec=layer_spec,
                vocab_size=spec.padded_vocab(layout.tensor),
                max_sequence_length=64,
                pre_process=parallel_state.is_pipeline_first_stage(**place),
                post_process=parallel_state.is_pipeline_last_stage(**place),
                position_embedding_type=fields["position_embedding_type"],
                rotary_base=rotary_base,
                seq_len_interpolation_factor=fields["seq_len_interpolation_factor"],
                vp_stage=place["vp_stage"],
            )
        )
    role = Role(name, layout, None, layout.coordinates(dist.get_rank()))
    load_hf(chunks, spec, role, HFCheckpoint(GOLDEN / name).__getitem__, name)
    return chunks


def wrapped(chunks: list[Any], **settings: Any) -> list[Any]:
    """The chunks in Megatron's DDP, one bucket each."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    config = DistributedDataParallelConfig(grad_reduce_in_fp32=True, overlap_grad_reduce=False, **settings)
    return [DistributedDataParallel(chunk.config, config, chunk) for chunk in chunks]
