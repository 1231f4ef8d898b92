"""A config.json of each family, as its models on the Hugging Face Hub spell it."""

from __future__ import annotations

QWEN2 = {
    "model_type": "qwen2",
    "num_hidden_layers": 3,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "vocab_size": 301,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 21,
}
QWEN3 = {**QWEN2, "model_type": "qwen3", "head_dim": 16, "attention_bias": False}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
LLAMA = {**QWEN2, "model_type": "llama", "rope_scaling": LLAMA3_ROPE}
# 6 of 8 channels rotated
PHI3 = {
    **QWEN2,
    "model_type": "phi3",
    "partial_rotary_factor": 0.75,
    "rope_scaling": {"type": "longrope", "short_factor": [1.0, 1.1, 1.2], "long_factor": [1.0, 2.0, 8.0]},
    "original_max_position_embeddings": 128,
    "max_position_embeddings": 512,
    "pad_token_id": None,
    "auto_map": {"AutoConfig": "configuration_phi3.Phi3Config"},
}
QWEN3_MOE = {
    **QWEN3,
    "model_type": "qwen3_moe",
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [1],
}
MIXTRAL = {
    **QWEN2,
    "model_type": "mixtral",
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "sliding_window": None,
}
# DeepSeek-R1-Distill-Qwen-1.5B
QWEN_1P5B = {
    "model_type": "qwen2",
    "num_hidden_layers": 28,
    "hidden_size": 1536,
    "intermediate_size": 8960,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
    "vocab_size": 151936,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000,
    "hidden_act": "silu",
    "torch_dtype": "bfloat16",
    "tie_word_embeddings": False,
}
