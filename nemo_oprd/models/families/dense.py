"""The parts that dense decoder-only families share: weight mappings for separate q, k, v, and the config's keys."""

from __future__ import annotations

from typing import Any

from nemo_oprd.models.architecture import (
    GateUp,
    GroupedQKV,
    ModelSpec,
    ParamMapping,
    Replicated,
    RowParallel,
    Vocabulary,
    check_dtype,
    require,
    source_dtype,
)
from nemo_oprd.models.rope import number, parse_rope

_HF = "model.layers.{layer}."
_MEGATRON = "decoder.layers.{layer}."
_QKV = ("q_proj", "k_proj", "v_proj")

PARAM_MAPPINGS = (
    ParamMapping("embedding.word_embeddings.weight", ("model.embed_tokens.weight",), Vocabulary()),
    ParamMapping(_MEGATRON + "input_layernorm.weight", (_HF + "input_layernorm.weight",), Replicated()),
    ParamMapping(
        _MEGATRON + "self_attention.linear_qkv.weight",
        tuple(f"{_HF}self_attn.{name}.weight" for name in _QKV),
        GroupedQKV(),
    ),
    ParamMapping(
        _MEGATRON + "self_attention.linear_qkv.bias",
        tuple(f"{_HF}self_attn.{name}.bias" for name in _QKV),
        GroupedQKV(),
        present=lambda spec: spec.qkv_bias,
    ),
    ParamMapping(
        _MEGATRON + "self_attention.q_layernorm.weight",
        (_HF + "self_attn.q_norm.weight",),
        Replicated(),
        present=lambda spec: spec.qk_norm,
    ),
    ParamMapping(
        _MEGATRON + "self_attention.k_layernorm.weight",
        (_HF + "self_attn.k_norm.weight",),
        Replicated(),
        present=lambda spec: spec.qk_norm,
    ),
    ParamMapping(_MEGATRON + "self_attention.linear_proj.weight", (_HF + "self_attn.o_proj.weight",), RowParallel()),
    ParamMapping(
        _MEGATRON + "self_attention.linear_proj.bias",
        (_HF + "self_attn.o_proj.bias",),
        Replicated(),
        present=lambda spec: spec.proj_bias,
    ),
    ParamMapping(_MEGATRON + "pre_mlp_layernorm.weight", (_HF + "post_attention_layernorm.weight",), Replicated()),
    ParamMapping(
        _MEGATRON + "mlp.linear_fc1.weight",
        (_HF + "mlp.gate_proj.weight", _HF + "mlp.up_proj.weight"),
        GateUp(),
        sparse=False,
    ),
    ParamMapping(_MEGATRON + "mlp.linear_fc2.weight", (_HF + "mlp.down_proj.weight",), RowParallel(), sparse=False),
    ParamMapping("decoder.final_layernorm.weight", ("model.norm.weight",), Replicated()),
    ParamMapping(
        "output_layer.weight", ("lm_head.weight",), Vocabulary(), present=lambda spec: not spec.tied_embeddings
    ),
)


def parse_dense(
    hf_config: dict,
    source: str,
    *,
    qkv_bias: bool,
    proj_bias: bool,
    qk_norm: bool,
    **rope: Any,
) -> ModelSpec:
    """Parses the keys that all families share. `num_key_value_heads` defaults to `num_attention_heads`.

    Args:
        rope: the kinds of rotary embeddings that the family supports: arguments of `parse_rope`.

    Raises:
        ValueError: a key is missing, wrong, or asks for something unsupported.
    """

    def integer(key: str) -> int:
        value: Any = require(hf_config, key, source)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{source}: {key}={value!r}; expected a positive integer as in the model's source")
        return value

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
        model_type=hf_config["model_type"],
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
