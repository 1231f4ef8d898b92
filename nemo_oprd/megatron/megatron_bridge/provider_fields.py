"""The treatment of every field of Megatron-Bridge's `GPTModelProvider`, of 0.3.1 and 0.6.2. No torch.

A provider has some 340 fields, and each version brings new ones. Every field is in one of these tables, so that none
is taken over unseen: `kind_of` gives its table, and a test compares the tables with the installed Megatron-Bridge. A
field in none of them is treated as those of `PLAIN`: only its default is accepted. Fields of one version only are named
beside the others, and nothing sets a field that a provider does not have.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

# what the model computes, beside its RoPE: read into a ModelSpec or compared with one
MODEL = (
    "num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups", "kv_channels",
    "layernorm_epsilon", "layernorm_zero_centered_gamma", "normalization", "activation_func", "gated_linear_unit",
    "add_bias_linear", "add_qkv_bias", "qk_layernorm", "share_embeddings_and_output_weights", "position_embedding_type",
    "softmax_scale", "num_moe_experts",
)  # fmt: skip
# compared by the frequencies of the model that is built; a recipe's must be those that Megatron-Bridge derives
ROPE = (
    "rope_scaling", "rope_scaling_factor", "rotary_base", "rotary_percent", "rotary_scaling_factor",
    "seq_len_interpolation_factor", "yarn_beta_fast", "yarn_beta_slow", "yarn_correction_range_round_to_int",
    "yarn_mscale", "yarn_mscale_all_dim", "yarn_original_max_position_embeddings", "yarn_rotary_scaling_factor",
)  # fmt: skip
# which modules a layer is built of: the built model's attention and parameters are checked
LAYERS = ("transformer_layer_spec", "use_transformer_engine_full_layer_spec")
# parts of a model -> their fields; refused unless the family's `Kind` accepts them (`family.refuse_unsupported`)
REFUSED = {
    "experts": ("num_moe_experts",),
    "multi-latent attention": ("multi_latent_attention",),
    "sliding-window attention": ("window_size", "window_attn_skip_freq"),
    "capped attention logits": ("attn_logit_softcapping",),
    "capped output logits": ("final_logit_softcapping",),
    "layers for multi-token prediction": ("mtp_num_layers",),
    "layers of different kinds": (
        "heterogeneous_block_specs", "heterogeneous_layers_config_path", "heterogeneous_layers_config_encoded_json",
        "hybrid_override_pattern", "is_hybrid_model",
    ),
    "layers without RoPE": ("no_rope_freq",),
    "an output gate in attention": ("attention_output_gate",),
    "attention of another kind": ("experimental_attention_variant", "linear_attention_freq"),
    "RoPE of several position axes": ("mrope_section",),
}  # fmt: skip
# arithmetic of which only the defaults are accepted, but for the fields that the family's `Kind` names
PLAIN = (
    "activation_func_clamp_value", "apply_query_key_layer_scaling", "apply_residual_connection_post_layernorm",
    "fp32_residual_connection", "glu_linear_offset", "qk_l2_norm", "rotary_interleaved", "softmax_type", "use_mup",
)  # fmt: skip
# settings of recipes that would bypass the layers' forward, or split, store, round or train the model in another way
OFF: dict[str, Any] = {
    **dict.fromkeys((
        "pipeline_model_parallel_layout", "recompute_granularity", "recompute_method", "recompute_num_layers",
        "recompute_modules", "fp8",
        # in 0.6.2 only, or newly listed: weights gathered for each layer, and lower precision
        "tensor_parallel_num_weight_shards", "expert_tensor_parallel_num_weight_shards", "fp4", "quant_recipe",
    )),
    **dict.fromkeys((
        "account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split",
        "gradient_accumulation_fusion",  # `accumulate_in_products` asks for it where it is possible
        "enable_cuda_graph", "tp_comm_overlap", "cpu_offloading", "fine_grained_activation_offloading", "fp16",
        "should_pad_vocab", "enable_autocast",
        # from here on in 0.6.2 only, or newly listed: schedules that call the parts of a layer themselves
        "overlap_moe_expert_parallel_comm", "overlap_dispatch_backward_with_experts_wgrad",
        "ep_overlap_early_attn_memory_release",
        # modules with other parameters, or with a forward of their own
        "dense_grouped_gemm", "use_grouped_gemm_for_dense_mlp", "fused_residual_rmsnorm",
        "use_inference_optimized_layers", "use_kitchen", "use_kitchen_attention",
        # an optimizer that changes weights by the attention's logits
        "qk_clip", "log_max_attention_logit",
        # weights are loaded here, into memory that exists
        "init_model_with_meta_device", "test_mode",
    ), False),
    "cuda_graph_impl": "none", "parallel_output": True, "scatter_embedding_sequence_parallel": True,
    "gtp_weight_remat_size": 1, "expert_gtp_weight_remat_size": 1, "mlp_chunks_for_training": 1,
}  # fmt: skip
# what a recipe chooses: kernels that compute the same
KERNELS = (
    "apply_rope_fusion", "batch_invariant_mode", "bias_activation_fusion", "bias_dropout_fusion", "cp_comm_type",
    "deterministic_mode", "flash_attention_version", "fused_single_qkv_rope", "high_priority_a2a_comm_stream",
    "masked_softmax_fusion", "memory_efficient_layer_norm", "persist_layer_norm", "use_te_activation_func",
    "use_transformer_engine_op_fuser",
)  # fmt: skip
# what the configuration says instead of a recipe, or what nothing here uses; the model itself is compared
UNUSED = {
    "_pg_collection", "activation_func_fp8_input_store", "activation_offload_fraction",
    "async_tensor_model_parallel_allreduce", "attention_backend",
    "attention_softmax_in_fp32", "autocast_dtype", "barrier_with_L1_time", "batch_p2p_comm", "batch_p2p_sync", "bf16",
    "calculate_per_token_loss", "clone_scatter_output_in_embedding", "config_logger_dir", "context_parallel_size",
    "deallocate_pipeline_outputs", "defer_embedding_wgrad_compute", "delay_offload_until_cuda_graph",
    "delay_wgrad_compute", "delta_offload_bytes_across_pp_ranks",
    "disable_bf16_reduced_precision_matmul", "disable_parameter_transpose_cache", "distribute_saved_activations",
    "experimental_attention_variant_loss_scale_func", "expert_model_parallel_size", "expert_tensor_parallel_size",
    "finalize_model_grads_func", "fine_grained_offloading_max_inflight_offloads",
    "first_last_layers_bf16", "flash_decode",
    "grad_scale_func", "grad_sync_func", "hetereogenous_dist_checkpoint", "hf_model_id", "hf_model_revision",
    "hidden_dropout", "attention_dropout",
    "hierarchical_context_parallel_sizes", "hybrid_context_parallel", "kitchen_attention_backend",
    "make_vocab_size_divisible_by",
    "max_seqlen_per_dp_cp_rank", "microbatch_group_size_per_vp_stage", "min_offloaded_tensor_size",
    "mlp_chunks_for_prefill", "nccl_all_reduce_for_prefill", "no_sync_func",
    "num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage",
    "num_layers_at_end_in_bf16", "num_layers_at_start_in_bf16",
    "num_microbatches_with_partial_activation_checkpoints", "offload_modules", "overlap_p2p_comm",
    "overlap_p2p_comm_warmup_flush", "param_sync_func", "params_dtype", "perform_initialization", "pipeline_dtype",
    "restore_modelopt_state", "seq_length", "sequence_parallel", "symmetric_ar_type",
    "tensor_model_parallel_size", "timers", "transformer_impl", "use_arbitrary_attention_mask",
    "use_cpu_initialization", "use_fused_weighted_squared_relu", "use_grouped_gemm_for_shared_expert",
    "use_mamba_mem_eff_path", "use_ring_exchange_p2p", "use_te_rng_tracker", "variable_seq_lengths",
    "virtual_pipeline_model_parallel_size", "vocab_size", "wgrad_deferral_limit",
}  # fmt: skip
# as UNUSED, by the name's start: details of what is switched off or refused, of initialisation and of generation
UNUSED_GROUPS = (
    "cpu_offloading", "_cpu_offloading", "cross_entropy_", "cuda_graph_", "dsa_", "embedding_init_",
    "external_cuda_graph", "fp16_", "fp4_", "fp8_", "inference_", "init_method", "linear_conv_", "linear_key_",
    "linear_num_", "linear_value_", "mamba_", "moe_", "mtp_", "mup_", "output_layer_init_", "pipeline_model_parallel_",
    "qk_clip_", "recompute_", "tp_comm_", "tp_only_",
)  # fmt: skip
# fields of a checkpoint's description: always, with experts, and (by the name's start) if not the class's default
ALWAYS = (*MODEL, "rotary_base", "rotary_percent")
OF_EXPERTS = ("moe_router_topk",)
STORED = ("moe_", "linear_", "hetereogenous_dist_checkpoint")
_REFUSED_FIELDS = {name for names in REFUSED.values() for name in names}


def is_ours(name: str) -> bool:
    """Returns whether a field says how a model is split, stored, initialised or trained; the configuration sets it."""
    known = name in MODEL or name in _REFUSED_FIELDS
    return not known and (name in OFF or name in UNUSED or name.startswith(UNUSED_GROUPS))


def kind_of(name: str) -> str | None:
    """Returns the name of the table that has a field; None if none has it, as for a field of a later version."""
    tables = {"model": MODEL, "rope": ROPE, "layers": LAYERS, "refused": _REFUSED_FIELDS, "plain": PLAIN}
    tables |= {"kernels": KERNELS, "off": OFF, "unused": UNUSED}
    kinds = [kind for kind, names in tables.items() if name in names]
    return kinds[0] if kinds else "unused" if name.startswith(UNUSED_GROUPS) else None


def changed(provider: Any, cls: type) -> dict[str, Any]:
    """Returns the fields of `cls` that must have their defaults and do not have them in a provider, with their values.

    `cls` is Megatron-Bridge's `GPTModelProvider`; families derive classes from it, with other defaults.
    """
    found = {}
    for field in dataclasses.fields(cls):
        default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        value = getattr(provider, field.name)
        # None and False both switch off
        if kind_of(field.name) in ("plain", None) and value != default and (value or default):
            found[field.name] = value
    return found


def described(provider: Any) -> dict[str, Any]:
    """Returns the fields with which a checkpoint's run_config.yaml says what the model is, as plain YAML.

    They are `ALWAYS`, with experts `OF_EXPERTS`, and all others that differ from the default of the provider's class,
    but for layout, precision, initialisation and kernels. How experts are computed is as Megatron-Bridge chooses it.
    """
    fields: dict[str, Any] = {}
    for field in dataclasses.fields(provider):
        name, value = field.name, getattr(provider, field.name)
        default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        always = name in ALWAYS or (name in OF_EXPERTS and provider.num_moe_experts is not None)
        of_the_model = name.startswith(STORED) or not (is_ours(name) or name in KERNELS)
        if always or (of_the_model and value != default):
            fields[name] = _plain(value)
    if fields.get("moe_layer_freq") == [1] * provider.num_layers:
        fields["moe_layer_freq"] = 1  # else Megatron would look for each layer by itself, not for all in one tensor
    return {"_target_": f"{type(provider).__module__}.{type(provider).__qualname__}", **fields}


def _plain(value: Any) -> Any:
    """Returns a value as Megatron-Bridge writes it to YAML and reads it again."""
    if isinstance(value, functools.partial):
        return {"_target_": _plain(value.func)["_target_"], "_partial_": True, **value.keywords}
    if callable(value):
        return {"_target_": f"{value.__module__}.{value.__qualname__}", "_call_": False}
    return list(value) if isinstance(value, tuple) else value
