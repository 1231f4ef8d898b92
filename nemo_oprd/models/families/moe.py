"""Families with mixture-of-experts layers: Qwen3-MoE and Mixtral.

Tensors are named as in the checkpoint on disk, one for each expert. transformers fuses the experts of a layer in
memory; `fused_name` says how, for the files that were written that way and for gradients of a transformers model.

A token's router logits become probabilities in float32 (softmax over all experts), its K largest are chosen, and in
Mixtral, and in Qwen3-MoE with `norm_topk_prob`, divided by their sum.
"""

from __future__ import annotations

import re
from dataclasses import replace

from nemo_oprd.models.architecture import (
    Experts,
    Family,
    GateUp,
    ModelSpec,
    ParamMapping,
    Replicated,
    RowParallel,
    positive_integer,
)
from nemo_oprd.models.families.dense import PARAM_MAPPINGS, layer_mapping, parse_dense
from nemo_oprd.models.families.qwen import parse_qwen3


def _expert_mappings(block: str, gate: str, up: str, down: str) -> tuple[ParamMapping, ...]:
    """The mappings of a layer's router and experts, for the HF names of the block and of an expert's matrices."""
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
    dense = parse_dense(family, hf_config, source, default_theta=1e6)
    sparse = (True,) * dense.num_layers
    found = _experts(hf_config, source, "intermediate_size", normalized=True, sparse=sparse)
    return replace(dense, experts=found)


_QWEN3_EXPERTS = _expert_mappings("mlp", "gate_proj", "up_proj", "down_proj")
QWEN3_MOE = Family("qwen3_moe", _parse_qwen3_moe, PARAM_MAPPINGS + _QWEN3_EXPERTS)
MIXTRAL = Family("mixtral", _parse_mixtral, PARAM_MAPPINGS + _expert_mappings("block_sparse_moe", "w1", "w3", "w2"))
