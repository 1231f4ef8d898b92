"""Families with mixture-of-experts layers: Qwen3-MoE and Mixtral.

Tensors are named as in the checkpoint on disk, one for each expert. transformers fuses the experts of a layer in
memory; `fused_name` says how, for the files that were written that way and for gradients of a transformers model.

A token's router logits become probabilities in float32 (softmax over all experts), its K largest are chosen, and in
Mixtral, and in Qwen3-MoE with `norm_topk_prob`, divided by their sum.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

from nemo_oprd.models.architecture import (
    Experts,
    Family,
    GateUp,
    ModelSpec,
    ParamMapping,
    Replicated,
    RowParallel,
    refuse_sliding_window,
    require,
)
from nemo_oprd.models.families.dense import PARAM_MAPPINGS, parse_dense

_LAYER = "decoder.layers.{layer}.mlp."
_EXPERT = _LAYER + "experts.local_experts.{expert}."


def _expert_mappings(block: str, gate: str, up: str, down: str) -> tuple[ParamMapping, ...]:
    """The mappings of a layer's router and experts, for the HF names of the block and of an expert's matrices."""
    hf = "model.layers.{layer}." + block
    expert = hf + ".experts.{expert}."
    return (
        ParamMapping(_LAYER + "router.weight", (hf + ".gate.weight",), Replicated(), sparse=True),
        ParamMapping(
            _EXPERT + "linear_fc1.weight",
            (f"{expert}{gate}.weight", f"{expert}{up}.weight"),
            GateUp(),
            sparse=True,
        ),
        ParamMapping(_EXPERT + "linear_fc2.weight", (f"{expert}{down}.weight",), RowParallel(), sparse=True),
    )


# (layer, block, expert, matrix) of an expert's HF name
_EXPERT_NAME = re.compile(r"(model\.layers\.\d+)\.(?:mlp|block_sparse_moe)\.experts\.(\d+)\.(\w+)\.weight")
# matrix -> (transformers' fused tensor, which half of it; None: all)
_FUSED = {
    "gate_proj": ("gate_up_proj", 0),
    "up_proj": ("gate_up_proj", 1),
    "down_proj": ("down_proj", None),
    "w1": ("gate_up_proj", 0),
    "w3": ("gate_up_proj", 1),
    "w2": ("down_proj", None),
}


def fused_name(name: str) -> tuple[str, int | None, int | None]:
    """Where transformers holds the tensor `name` of a checkpoint: (its own name, expert, half of the rows).

    A fused `gate_up_proj` is [E, 2F, D] with an expert's gate above its up, `down_proj` is [E, D, F]. Expert and half
    are None for a tensor that transformers holds as it is on disk, perhaps under another name.
    """
    found = _EXPERT_NAME.fullmatch(name)
    if found is None:
        return name.replace(".block_sparse_moe.", ".mlp."), None, None
    layer, expert, matrix = found.groups()
    fused, half = _FUSED[matrix]
    return f"{layer}.mlp.experts.{fused}", int(expert), half


def _integer(hf_config: dict, keys: tuple[str, ...], source: str) -> int:
    """The positive integer under the first of `keys` that the config has."""
    key = next((key for key in keys if hf_config.get(key) is not None), keys[0])
    value: Any = require(hf_config, key, source)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{source}: {key}={value!r}; expected a positive integer as in the model's source")
    return value


def _experts(hf_config: dict, source: str, ffn_key: str, *, normalized: bool, sparse: tuple[bool, ...]) -> Experts:
    count = _integer(hf_config, ("num_experts", "num_local_experts"), source)
    per_token = _integer(hf_config, ("num_experts_per_tok",), source)
    if per_token > count:
        raise ValueError(
            f"{source}: num_experts_per_tok={per_token} is more than the model's {count} experts; expected at most "
            f"{count}: correct it"
        )
    return Experts(count, per_token, _integer(hf_config, (ffn_key,), source), normalized, sparse)


def _parse_qwen3_moe(hf_config: dict, source: str) -> ModelSpec:
    require(hf_config, "num_key_value_heads", source)
    refuse_sliding_window(hf_config, source)
    bias = bool(hf_config.get("attention_bias", False))
    dense = parse_dense(hf_config, source, qkv_bias=bias, proj_bias=bias, qk_norm=True)
    step = _integer(hf_config, ("decoder_sparse_step",), source) if "decoder_sparse_step" in hf_config else 1
    without = hf_config.get("mlp_only_layers") or []
    if not isinstance(without, list) or any(not isinstance(layer, int) for layer in without):
        raise ValueError(f"{source}: mlp_only_layers={without!r}; expected a list of 0-based layers: correct it")
    sparse = tuple(i not in without and (i + 1) % step == 0 for i in range(dense.num_layers))
    if not any(sparse):
        return dense  # none of its layers has experts, whatever the config says of them
    normalized = bool(hf_config.get("norm_topk_prob", False))
    found = _experts(hf_config, source, "moe_intermediate_size", normalized=normalized, sparse=sparse)
    return replace(dense, experts=found)


def _parse_mixtral(hf_config: dict, source: str) -> ModelSpec:
    # transformers ignores sliding_window=null and full windows; a shorter one would limit attention
    window = hf_config.get("sliding_window")
    if window is not None and window < hf_config.get("max_position_embeddings", window):
        raise ValueError(
            f"{source}: sliding_window={window} is shorter than "
            f"max_position_embeddings={hf_config['max_position_embeddings']}, and sliding-window attention is not "
            "supported; expected null: choose a model without a window"
        )
    if hf_config.get("router_jitter_noise"):
        raise ValueError(
            f"{source}: router_jitter_noise={hf_config['router_jitter_noise']!r} makes training random and is not "
            "supported; expected 0: set it to 0"
        )
    dense = parse_dense(hf_config, source, qkv_bias=False, proj_bias=False, qk_norm=False, default_theta=1e6)
    sparse = (True,) * dense.num_layers
    found = _experts(hf_config, source, "intermediate_size", normalized=True, sparse=sparse)
    return replace(dense, experts=found)


QWEN3_MOE = Family(
    "qwen3_moe",
    _parse_qwen3_moe,
    PARAM_MAPPINGS + _expert_mappings("mlp", "gate_proj", "up_proj", "down_proj"),
)
MIXTRAL = Family("mixtral", _parse_mixtral, PARAM_MAPPINGS + _expert_mappings("block_sparse_moe", "w1", "w3", "w2"))
