"""Tiny random models of many families, whose hidden states every part of a layer changes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers

WINDOW = 16
SIZES: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.15,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "norm_topk_prob": True}
DELTA_NET = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
HEAD = {"head_dim": 8}
# family -> (class of transformers' config, its settings beyond SIZES)
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2": ("Qwen2Config", {}),
    "qwen3": ("Qwen3Config", HEAD),
    "llama": ("LlamaConfig", HEAD),
    "mistral": ("MistralConfig", {**HEAD, "sliding_window": WINDOW}),
    "phi3": ("Phi3Config", {}),
    "gemma3_text": (
        "Gemma3TextConfig",
        {**HEAD, "sliding_window": WINDOW, "query_pre_attn_scalar": 8, "sliding_window_pattern": 3},
    ),
    "gemma2": ("Gemma2Config", {**HEAD, "sliding_window": WINDOW, "query_pre_attn_scalar": 8}),
    "gpt_oss": (
        "GptOssConfig",
        {**HEAD, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": WINDOW},
    ),
    "qwen3_moe": ("Qwen3MoeConfig", {**HEAD, **EXPERTS, "mlp_only_layers": [1]}),
    "mixtral": ("MixtralConfig", {"num_local_experts": 4}),
    "olmoe": ("OlmoeConfig", {"num_experts": 4, "num_experts_per_tok": 2}),
    "olmo2": ("Olmo2Config", {}),
    "granite": ("GraniteConfig", {"residual_multiplier": 0.3, "embedding_multiplier": 3.0}),
    "glm4": ("Glm4Config", {**HEAD, "partial_rotary_factor": 0.5}),
    "glm4_moe": ("Glm4MoeConfig", {**HEAD, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1}),
    "cohere2": ("Cohere2Config", {"sliding_window": WINDOW}),
    "gpt2": ("GPT2Config", {"n_embd": 32, "n_layer": 4, "n_head": 4, "n_positions": 512}),
    "deepseek_v3": (
        "DeepseekV3Config",
        {"num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8}
        | {"v_head_dim": 8, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1}
        | {"moe_intermediate_size": 24, "n_shared_experts": 1, "first_k_dense_replace": 1},
    ),
    "qwen3_5_text": ("Qwen3_5TextConfig", {**HEAD, **DELTA_NET}),
    "qwen3_next": ("Qwen3NextConfig", {**HEAD, **DELTA_NET, **EXPERTS, "shared_expert_intermediate_size": 24}),
    "falcon_h1": (
        "FalconH1Config",
        {**HEAD, "mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_n_groups": 1, "mamba_d_state": 16},
    ),
    "ernie4_5": ("Ernie4_5Config", HEAD),
    "exaone4": ("Exaone4Config", {**HEAD, "sliding_window": WINDOW}),
    "stablelm": ("StableLmConfig", {}),
    "phimoe": ("PhimoeConfig", {"num_local_experts": 4, "num_experts_per_tok": 2}),
}


def save_model(family: str, directory: Path, *, spoil: Callable[[Any], None] | None = None, **changed: Any) -> None:
    """Writes a random model of `family`, with other settings than usual where `changed` says so.

    The same weights are drawn for the same shapes; then `spoil` changes the model.
    """
    cls, settings = FAMILIES[family]
    sizes = {key: value for key, value in SIZES.items() if family != "gpt2" or "token_id" in key}
    if family == "gpt2":
        sizes |= {"vocab_size": SIZES["vocab_size"], "initializer_range": 0.15}
    config = getattr(transformers, cls)(**{**sizes, **settings, **changed})
    torch.manual_seed(1)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").float()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:  # norms and biases are all ones or zeros otherwise
                parameter.add_(0.2 * torch.randn_like(parameter))
        if spoil is not None:
            spoil(model)
    model.save_pretrained(directory, max_shard_size="100KB")


def whole_model_states(directory: Path, prompts: list[list[int]], dtype: torch.dtype) -> list[tuple[torch.Tensor, ...]]:
    """Per prompt, transformers' hidden states [T, D] of embeddings and layers, from the whole model."""
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=dtype, attn_implementation="eager")
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")
    with torch.no_grad():
        outs = [model(torch.tensor([ids]), output_hidden_states=True, use_cache=False) for ids in prompts]
    return [tuple(state[0].float() for state in out.hidden_states) for out in outs]
