"""Qwen2 / Qwen2.5 (biases on q, k, v) and Qwen3 (RMSNorm on q and k, explicit head_dim)."""

from __future__ import annotations

from nemo_oprd.models.architecture import Family, ModelSpec, refuse_sliding_window, require
from nemo_oprd.models.families.dense import PARAM_MAPPINGS, parse_dense


def _parse_qwen2(family: Family, hf_config: dict, source: str) -> ModelSpec:
    require(hf_config, "num_key_value_heads", source)
    refuse_sliding_window(hf_config, source)
    return parse_dense(family, hf_config, source, qkv_bias=True)


def parse_qwen3(family: Family, hf_config: dict, source: str) -> ModelSpec:
    """Qwen3's architecture, and that of Qwen3-MoE without its experts."""
    require(hf_config, "num_key_value_heads", source)
    refuse_sliding_window(hf_config, source)
    bias = bool(hf_config.get("attention_bias", False))
    return parse_dense(family, hf_config, source, qkv_bias=bias, proj_bias=bias, qk_norm=True)


QWEN2 = Family("qwen2", _parse_qwen2, PARAM_MAPPINGS)
QWEN3 = Family("qwen3", parse_qwen3, PARAM_MAPPINGS)
