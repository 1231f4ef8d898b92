"""The families of this project: Llama, Qwen2 and Qwen3, Phi-3, Qwen3-MoE and Mixtral, and their shared dense parts."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from nemo_oprd.models.architecture import (
    Experts,
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
    concatenated,
    positive_integer,
    refuse_sliding_window,
    require,
    source_dtype,
)
from nemo_oprd.models.rope import number, parse_rope

if TYPE_CHECKING:
    import torch

# The parts that dense decoder-only families share: weight mappings for separate q, k, v, and the config's keys.


def layer_mapping(megatron: str, hf: Sequence[str], form: Form, **kind: Any) -> ParamMapping:
    """Returns the mapping of a layer's parameter, from names within a layer; `kind`: other `ParamMapping` fields."""
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


# Llama 2 and 3.x: tied or untied embeddings, optional attention biases.


def _parse_llama(family: Family, hf_config: dict, source: str) -> ModelSpec:
    refuse_sliding_window(hf_config, source)
    if hf_config.get("mlp_bias"):
        raise ValueError(
            f"{source}: mlp_bias={hf_config['mlp_bias']!r} is not supported; expected false: choose a model without "
            "biases in its feed-forward layers"
        )
    bias = bool(hf_config.get("attention_bias", False))
    # Llama 2's configs have no rope_theta
    return parse_dense(family, hf_config, source, qkv_bias=bias, proj_bias=bias, default_theta=10000.0)


LLAMA = Family("llama", _parse_llama, PARAM_MAPPINGS)


# Qwen2 / Qwen2.5 (biases on q, k, v) and Qwen3 (RMSNorm on q and k, explicit head_dim).


def _parse_qwen2(family: Family, hf_config: dict, source: str) -> ModelSpec:
    require(hf_config, "num_key_value_heads", source)
    refuse_sliding_window(hf_config, source)
    return parse_dense(family, hf_config, source, qkv_bias=True)


def parse_qwen3(family: Family, hf_config: dict, source: str) -> ModelSpec:
    """Parses Qwen3's config, and Qwen3-MoE's without its experts."""
    require(hf_config, "num_key_value_heads", source)
    refuse_sliding_window(hf_config, source)
    bias = bool(hf_config.get("attention_bias", False))
    return parse_dense(family, hf_config, source, qkv_bias=bias, proj_bias=bias, qk_norm=True)


QWEN2 = Family("qwen2", _parse_qwen2, PARAM_MAPPINGS)
QWEN3 = Family("qwen3", parse_qwen3, PARAM_MAPPINGS)


# Phi-3 and Phi-4-mini: q, k, v in one tensor, gate and up in another, partial rotary embeddings, LongRoPE.
#
# Hugging Face's model applies the config's sliding window in every layer. That is full attention if the window covers
# all positions of the model; a shorter window is rejected.


class FusedQKV(GroupedQKV):
    """One tensor [(A+2G)*C, ..] that stacks q, k and v -> the rows interleaved by group."""

    def join(self, tensors: Sequence[torch.Tensor], spec: ModelSpec) -> torch.Tensor:
        """(qkv,) -> interleaved by group."""
        heads = (spec.num_heads, spec.num_kv_heads, spec.num_kv_heads)
        return super().join(tensors[0].split([count * spec.head_dim for count in heads]), spec)

    def split_to_hf(self, tensor: torch.Tensor, spec: ModelSpec) -> tuple[torch.Tensor, ...]:
        """Interleaved by group -> (qkv,)."""
        return (concatenated(super().split_to_hf(tensor, spec)),)


class FusedGateUp(GateUp):
    """One tensor that stacks gate and up, in Megatron's order; split over TP ranks like `GateUp`."""

    def join(self, tensors: Sequence[torch.Tensor], spec: ModelSpec) -> torch.Tensor:
        """(gate_up,) -> gate_up."""
        return tensors[0]

    def split_to_hf(self, tensor: torch.Tensor, spec: ModelSpec) -> tuple[torch.Tensor, ...]:
        """gate_up -> (gate_up,)."""
        return (tensor,)


_PHI3_FUSED: dict[str, tuple[str, Form]] = {
    "linear_qkv.weight": ("self_attn.qkv_proj", FusedQKV()),
    "linear_fc1.weight": ("mlp.gate_up_proj", FusedGateUp()),
}


def _fused(mapping: ParamMapping) -> ParamMapping:
    for name, (hf, form) in _PHI3_FUSED.items():
        if mapping.megatron.endswith(name):
            return replace(mapping, hf=("model.layers.{layer}." + hf + ".weight",), form=form)
    return mapping


def _parse_phi3(family: Family, hf_config: dict, source: str) -> ModelSpec:
    for key in ("attention_bias", "mlp_bias"):
        if hf_config.get(key):
            raise ValueError(f"{source}: {key}={hf_config[key]!r}, but Phi-3 models have no biases; expected false")
    settings = hf_config.get("rope_scaling") or hf_config.get("rope_parameters")
    longrope = isinstance(settings, dict) and "short_factor" in settings
    if longrope and hf_config.get("original_max_position_embeddings") is None:
        raise ValueError(
            f"{source}: key 'original_max_position_embeddings' is missing; expected it at top level, where "
            "transformers reads it (4096 without it): add the model's value"
        )
    spec = parse_dense(family, hf_config, source, kinds=("default", "longrope"), default_theta=10000.0, partial=True)
    window = hf_config.get("sliding_window")
    if window is not None and number("sliding_window", window, source) < spec.max_positions:
        raise ValueError(
            f"{source}: sliding_window={window} is shorter than max_position_embeddings={spec.max_positions}, and "
            "sliding-window attention is not supported; expected null or a window that covers all positions: choose "
            "such a model"
        )
    return spec


PHI3 = Family(
    "phi3",
    _parse_phi3,
    tuple(_fused(mapping) for mapping in PARAM_MAPPINGS),
)


# Families with mixture-of-experts layers: Qwen3-MoE and Mixtral.
#
# Tensors are named as in the checkpoint on disk, one for each expert. transformers fuses the experts of a layer in
# memory; `fused_name` says how, for the files that were written that way and for gradients of a transformers model.
# A token's router logits become probabilities in float32 (softmax over all experts), its K largest are chosen, and in
# Mixtral, and in Qwen3-MoE with `norm_topk_prob`, divided by their sum.


def _expert_mappings(block: str, gate: str, up: str, down: str) -> tuple[ParamMapping, ...]:
    """Returns the mappings of a layer's router and experts, for the HF names of the block and of the matrices."""
    megatron, hf = "mlp.experts.local_experts.{expert}.", block + ".experts.{expert}."
    return (
        layer_mapping("mlp.router.weight", [f"{block}.gate.weight"], Replicated(), sparse=True),
        layer_mapping(
            megatron + "linear_fc1.weight", [f"{hf}{gate}.weight", f"{hf}{up}.weight"], GateUp(), sparse=True
        ),
        layer_mapping(megatron + "linear_fc2.weight", [f"{hf}{down}.weight"], RowParallel(), sparse=True),
    )


# (layer, block, expert, matrix) of an expert's HF name
_EXPERT_NAME = re.compile(r"(model\.layers\.\d+)\.(?:mlp|block_sparse_moe)\.experts\.(\d+)\.(\w+)\.weight")
# matrix -> (transformers' fused tensor, which half of it; None: all)
_MOE_FUSED = {
    "gate_proj": ("gate_up_proj", 0),
    "up_proj": ("gate_up_proj", 1),
    "down_proj": ("down_proj", None),
    "w1": ("gate_up_proj", 0),
    "w3": ("gate_up_proj", 1),
    "w2": ("down_proj", None),
}


def fused_name(name: str) -> tuple[str, int | None, int | None]:
    """Returns where transformers holds a checkpoint's tensor `name`: (transformers' name, expert, half of the rows).

    A fused `gate_up_proj` is [E, 2F, D] with an expert's gate (half 0) above its up (1), `down_proj` [E, D, F] (half
    None). Expert and half are None for a tensor that transformers holds as it is on disk, perhaps under another name.
    """
    found = _EXPERT_NAME.fullmatch(name)
    if found is None:
        renamed = name.replace(".block_sparse_moe.", ".mlp.").replace(".attention_sink_bias", ".sinks")
        return renamed, None, None
    layer, expert, matrix = found.groups()
    fused, half = _MOE_FUSED[matrix]
    return f"{layer}.mlp.experts.{fused}", int(expert), half


def _experts(hf_config: dict, source: str, ffn_key: str, *, normalized: bool, sparse: tuple[bool, ...]) -> Experts:
    key = "num_experts"
    if hf_config.get(key) is None and hf_config.get("num_local_experts") is not None:
        key = "num_local_experts"
    count = positive_integer(hf_config, key, source)
    per_token = positive_integer(hf_config, "num_experts_per_tok", source)
    if per_token > count:
        raise ValueError(
            f"{source}: num_experts_per_tok={per_token} is more than the model's {count} experts; expected at most "
            f"{count}: correct it"
        )
    return Experts(count, per_token, positive_integer(hf_config, ffn_key, source), normalized, sparse)


def _parse_qwen3_moe(family: Family, hf_config: dict, source: str) -> ModelSpec:
    dense = parse_qwen3(family, hf_config, source)
    step = positive_integer(hf_config, "decoder_sparse_step", source) if "decoder_sparse_step" in hf_config else 1
    without = hf_config.get("mlp_only_layers") or []
    if not isinstance(without, list) or any(not isinstance(layer, int) for layer in without):
        raise ValueError(f"{source}: mlp_only_layers={without!r}; expected a list of 0-based layers: correct it")
    sparse = tuple(i not in without and (i + 1) % step == 0 for i in range(dense.num_layers))
    if not any(sparse):
        return dense  # none of its layers has experts, whatever the config says of them
    normalized = bool(hf_config.get("norm_topk_prob", False))
    found = _experts(hf_config, source, "moe_intermediate_size", normalized=normalized, sparse=sparse)
    return replace(dense, experts=found)


def _parse_mixtral(family: Family, hf_config: dict, source: str) -> ModelSpec:
    dense = parse_dense(family, hf_config, source, default_theta=1e6)
    # transformers ignores sliding_window=null and full windows; a shorter one would limit attention
    window = hf_config.get("sliding_window")
    if window is not None and number("sliding_window", window, source) < dense.max_positions:
        raise ValueError(
            f"{source}: sliding_window={window} is shorter than max_position_embeddings={dense.max_positions}, and "
            "sliding-window attention is not supported; expected null: choose a model without a window"
        )
    if hf_config.get("router_jitter_noise"):
        raise ValueError(
            f"{source}: router_jitter_noise={hf_config['router_jitter_noise']!r} makes training random and is not "
            "supported; expected 0: set it to 0"
        )
    sparse = (True,) * dense.num_layers
    found = _experts(hf_config, source, "intermediate_size", normalized=True, sparse=sparse)
    return replace(dense, experts=found)


_QWEN3_EXPERTS = _expert_mappings("mlp", "gate_proj", "up_proj", "down_proj")
QWEN3_MOE = Family("qwen3_moe", _parse_qwen3_moe, PARAM_MAPPINGS + _QWEN3_EXPERTS)
MIXTRAL = Family("mixtral", _parse_mixtral, PARAM_MAPPINGS + _expert_mappings("block_sparse_moe", "w1", "w3", "w2"))
