"""Phi-3 and Phi-4-mini: q, k, v in one tensor, gate and up in another, partial rotary embeddings, LongRoPE.

Hugging Face's model applies the config's sliding window in every layer. That is full attention if the window covers all
positions of the model; a shorter window is rejected.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from nemo_oprd.models.architecture import Family, Form, GateUp, GroupedQKV, ModelSpec, ParamMapping, concatenated
from nemo_oprd.models.families.dense import PARAM_MAPPINGS, parse_dense
from nemo_oprd.models.rope import number

if TYPE_CHECKING:
    import torch


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
        """Stacked -> (gate_up,)."""
        return (tensor,)


_FUSED: dict[str, tuple[str, Form]] = {
    "linear_qkv.weight": ("self_attn.qkv_proj", FusedQKV()),
    "linear_fc1.weight": ("mlp.gate_up_proj", FusedGateUp()),
}


def _fused(mapping: ParamMapping) -> ParamMapping:
    for name, (hf, form) in _FUSED.items():
        if mapping.megatron.endswith(name):
            return replace(mapping, hf=("model.layers.{layer}." + hf + ".weight",), form=form)
    return mapping


def _parse(family: Family, hf_config: dict, source: str) -> ModelSpec:
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
    _parse,
    tuple(_fused(mapping) for mapping in PARAM_MAPPINGS),
    # entries of the models' configs; transformers' built-in classes compute the same
    known_code=frozenset({"configuration_phi3.Phi3Config", "modeling_phi3.Phi3ForCausalLM"}),
)
