"""The names of a rank's parameters in the weight mappings, where layers are numbered over the whole model."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import torch
from megatron.core.models.gpt.gpt_model import GPTModel

from nemo_oprd.models import ModelSpec
from nemo_oprd.models.architecture import ParamMapping

# Transformer Engine fuses a norm into the linear layer after it, and names the norm's weight after that layer.
TE_NAMES = {
    "input_layernorm.weight": "self_attention.linear_qkv.layer_norm_weight",
    "input_layernorm.bias": "self_attention.linear_qkv.layer_norm_bias",
    "pre_mlp_layernorm.weight": "mlp.linear_fc1.layer_norm_weight",
    "pre_mlp_layernorm.bias": "mlp.linear_fc1.layer_norm_bias",
}
# of a layer with a gated delta net; another part of the same layer has the name of TE_NAMES
INPUT_NORM_OF_DELTA_NET = "self_attention.in_proj.layer_norm_weight"
# added to a router's scores before it chooses experts; no gradient reaches it, and training leaves it as it is
ROUTER_BIAS = "mlp.router.expert_bias"
# multiplies a layer's output; a buffer of Gemma 4, which training leaves as it is
LAYER_SCALE = "layer_scalar"
_TE_TO_LOCAL = {te: local for local, te in TE_NAMES.items()}
# an expert's parameter in Megatron's sequential experts, or in Transformer Engine's grouped ones
_EXPERT = re.compile(
    r"mlp\.experts\.(?:local_experts\.(?P<local>\d+)\.(?P<matrix>\w+)\.(?P<kind>weight|bias)"
    r"|(?P<grouped>\w+)\.(?P<grouped_kind>weight|bias)(?P<number>\d+))"
)


def local_name(chunk: GPTModel, name: str) -> str:
    """Returns the mappings' name of a chunk's parameter `name`, with global numbers of layers and experts."""
    if not name.startswith("decoder.layers."):
        return name
    _, _, index, rest = name.split(".", 3)
    layer = chunk.decoder.layers[int(index)]
    rest = _TE_TO_LOCAL.get(rest, rest)
    expert = _EXPERT.fullmatch(rest)
    if expert is not None:
        matrix, local = expert["matrix"] or expert["grouped"], int(expert["local"] or expert["number"])
        kind = expert["kind"] or expert["grouped_kind"]
        rest = f"mlp.experts.local_experts.{layer.mlp.local_expert_indices[local]}.{matrix}.{kind}"
    return f"decoder.layers.{layer.layer_number - 1}.{rest}"


def named_parameters(chunks: Sequence[GPTModel]) -> dict[str, torch.nn.Parameter]:
    """Returns name in the mappings -> parameter of this rank. A tied head's copy of the embedding keeps its name."""
    return {local_name(chunk, name): p for chunk in chunks for name, p in chunk.named_parameters()}


def named_weights(chunks: Sequence[GPTModel]) -> dict[str, Any]:
    """Returns `named_parameters`, and the buffers that a checkpoint has: routers' biases, scales of layers."""
    biases = {
        local_name(chunk, name): buffer
        for chunk in chunks
        for name, buffer in chunk.named_buffers()
        if name.endswith((ROUTER_BIAS, LAYER_SCALE)) and buffer is not None
    }
    return {**named_parameters(chunks), **biases}


def mappings_by_name(spec: ModelSpec) -> dict[str, ParamMapping]:
    """Returns all weight mappings of a model, in order, by Megatron name."""
    return {mapping.megatron: mapping for mapping in spec.family.param_mappings(spec)}
