"""The parts that dense decoder-only families share: weight mappings for separate q, k, v, and the config's keys."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from nemo_oprd.models.architecture import (
    Family,
    Form,
    GateUp,
    GroupedQKV,
    ModelSpec,
    ParamMapping,
    Replicated,
    RowParallel,
    Vocabulary,
    check_dtype,
    positive_integer,
    source_dtype,
)
from nemo_oprd.models.rope import number, parse_rope


def layer_mapping(megatron: str, hf: Sequence[str], form: Form, **kind: Any) -> ParamMapping:
    """The mapping of a layer's parameter, from the names within a layer; `kind`: other fields of `ParamMapping`."""
    names = tuple("model.layers.{layer}." + name for name in hf)
    return ParamMapping("decoder.layers.{layer}." + megatron, names, form, **kind)


def _attention(megatron: str, hf: Sequence[str], form: Form, **kind: Any) -> ParamMapping:
    return layer_mapping(f"self_attention.{megatron}", [f"self_attn.{name}" for name in hf], form, **kind)


PARAM_MAPPINGS = (
    ParamMapping("embedding.word_embeddings.weight", ("model.embed_tokens.weight",), Vocabulary()),
    layer_mapping("input_layernorm.weight", ["input_layernorm.weight"], Replicated()),
    _attention("linear_qkv.weight", [f"{part}_proj.weight" for part in "qkv"], GroupedQKV()),
    _attention("linear_qkv.bias", [f"{part}_proj.bias" for part in "qkv"], GroupedQKV(), present=lambda s: s.qkv_bias),
    _attention("q_layernorm.weight", ["q_norm.weight"], Replicated(), present=lambda spec: spec.qk_norm),
    _attention("k_layernorm.weight", ["k_norm.weight"], Replicated(), present=lambda spec: spec.qk_norm),
    _attention("linear_proj.weight", ["o_proj.weight"], RowParallel()),
    _attention("linear_proj.bias", ["o_proj.bias"], Replicated(), present=lambda spec: spec.proj_bias),
    layer_mapping("pre_mlp_layernorm.weight", ["post_attention_layernorm.weight"], Replicated()),
    layer_mapping("mlp.linear_fc1.weight", ["mlp.gate_proj.weight", "mlp.up_proj.weight"], GateUp(), sparse=False),
    layer_mapping("mlp.linear_fc2.weight", ["mlp.down_proj.weight"], RowParallel(), sparse=False),
    ParamMapping("decoder.final_layernorm.weight", ("model.norm.weight",), Replicated()),
    ParamMapping(
        "output_layer.weight", ("lm_head.weight",), Vocabulary(), present=lambda spec: not spec.tied_embeddings
    ),
)


def parse_dense(
    family: Family,
    hf_config: dict,
    source: str,
    *,
    qkv_bias: bool = False,
    proj_bias: bool = False,
    qk_norm: bool = False,
    **rope: Any,
) -> ModelSpec:
    """Parses the keys that all families share. `num_key_value_heads` defaults to `num_attention_heads`.

    Args:
        rope: the kinds of rotary embeddings that the family supports: arguments of `parse_rope`.

    Raises:
        ValueError: a key is missing, wrong, or asks for something unsupported.
    """

    def integer(key: str) -> int:
        return positive_integer(hf_config, key, source)

    if hf_config.get("hidden_act", "silu") != "silu":
        raise ValueError(f"{source}: hidden_act={hf_config['hidden_act']!r} is not supported; expected 'silu'")
    heads = integer("num_attention_heads")
    kv_heads = integer("num_key_value_heads") if hf_config.get("num_key_value_heads") is not None else heads
    if heads % kv_heads:
        raise ValueError(
            f"{source}: {heads} attention heads are not a multiple of {kv_heads} key/value heads; correct them"
        )
    if hf_config.get("head_dim") is None and integer("hidden_size") % heads:
        raise ValueError(
            f"{source}: hidden_size={hf_config['hidden_size']} is not a multiple of num_attention_heads={heads}; "
            "correct them, or add the model's head_dim"
        )
    head_dim = integer("head_dim") if hf_config.get("head_dim") is not None else integer("hidden_size") // heads
    check_dtype(source_dtype(hf_config), source)
    return ModelSpec(
        family=family,
        model_type=family.model_type,
        num_layers=integer("num_hidden_layers"),
        hidden_size=integer("hidden_size"),
        ffn_size=integer("intermediate_size"),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        vocab_size=integer("vocab_size"),
        rope=parse_rope(hf_config, source, head_dim=head_dim, **rope),
        norm_eps=number("rms_norm_eps", hf_config.get("rms_norm_eps", 1e-6), source),
        max_positions=integer("max_position_embeddings"),
        tied_embeddings=bool(hf_config.get("tie_word_embeddings", False)),
        qkv_bias=qkv_bias,
        proj_bias=proj_bias,
        qk_norm=qk_norm,
        dtype=source_dtype(hf_config),
        hf_config=hf_config,
    )
