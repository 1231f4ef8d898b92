"""Llama 2 and 3.x: tied or untied embeddings, optional attention biases."""

from __future__ import annotations

from nemo_oprd.models.architecture import Family, ModelSpec, refuse_sliding_window
from nemo_oprd.models.families.dense import PARAM_MAPPINGS, parse_dense


def _parse(family: Family, hf_config: dict, source: str) -> ModelSpec:
    refuse_sliding_window(hf_config, source)
    if hf_config.get("mlp_bias"):
        raise ValueError(
            f"{source}: mlp_bias={hf_config['mlp_bias']!r} is not supported; expected false: choose a model without "
            "biases in its feed-forward layers"
        )
    bias = bool(hf_config.get("attention_bias", False))
    # Llama 2's configs have no rope_theta
    return parse_dense(family, hf_config, source, qkv_bias=bias, proj_bias=bias, default_theta=10000.0)


LLAMA = Family("llama", _parse, PARAM_MAPPINGS)
