"""Megatron-Bridge's weight mappings in this project's form: names, layers, and how tensors are joined and split.

Megatron-Bridge names a layer, and within it an expert, by `*`. It has most mappings under several names: Transformer
Engine's and Megatron's of a norm, grouped and sequential experts. Here every HF tensor has one.
"""

from __future__ import annotations

import re
from typing import Any

from nemo_oprd.models.architecture import (
    ColumnParallel,
    Form,
    GateUp,
    GroupedQKV,
    InterleavedGateUp,
    ParamMapping,
    Replicated,
    RowParallel,
    TransposedRowParallel,
    Vocabulary,
    stacked_part,
)
from nemo_oprd.models.families.moe import fused_name
from nemo_oprd.models.megatron.param_names import INPUT_NORM_OF_DELTA_NET, ROUTER_BIAS, TE_NAMES
from nemo_oprd.models.megatron_bridge.hybrid_forms import Convolution, GatedQKV, GroupedProjections, Projections

Shapes = dict[str, tuple[int, ...]]

_LAYER = "decoder.layers.{layer}."
_EXPERT = "mlp.experts.local_experts.{expert}."
_LOCAL_NAMES = {te: local for local, te in TE_NAMES.items()}
# the norm of a delta net; transformers multiplies by its weight, and so do the models that are built here (`build.py`),
# where Megatron-Bridge stores the weight minus 1 and adds 1 again, which changes bits
_OUT_NORM = "self_attention.out_norm.weight"
# Megatron's name within a layer or the model -> how the one HF tensor behind it is split
_FORMS: dict[str, Form] = {
    **dict.fromkeys(("embedding.word_embeddings.weight", "output_layer.weight"), Vocabulary()),
    **dict.fromkeys((
        "decoder.final_layernorm.weight", "decoder.final_layernorm.bias", "input_layernorm.weight",
        "input_layernorm.bias", "pre_mlp_layernorm.weight", "pre_mlp_layernorm.bias",
        "self_attention.q_layernorm.weight", "self_attention.k_layernorm.weight", "self_attention.linear_proj.bias",
        "mlp.linear_fc2.bias", "mlp.router.weight", "mlp.router.bias", ROUTER_BIAS,
        "self_attention.linear_q_down_proj.weight", "self_attention.linear_kv_down_proj.weight",
        "self_attention.linear_q_up_proj.layer_norm_weight", "self_attention.linear_kv_up_proj.layer_norm_weight",
        INPUT_NORM_OF_DELTA_NET, "mlp.shared_experts.gate_weight",
        "self_attention.linear_proj.post_layernorm.weight", "mlp.linear_fc2.post_layernorm.weight",
    ), Replicated()),
    **dict.fromkeys((
        "mlp.linear_fc1.weight", "mlp.linear_fc1.bias", "self_attention.core_attention.softmax_offset",
        "self_attention.linear_q_proj.weight", "self_attention.linear_q_up_proj.weight",
        "self_attention.linear_kv_up_proj.weight", "self_attention.A_log", "self_attention.dt_bias",
    ), ColumnParallel()),
    **dict.fromkeys((
        "self_attention.linear_proj.weight", "mlp.linear_fc2.weight", "mlp.shared_experts.linear_fc2.weight",
        "self_attention.out_proj.weight", f"{_EXPERT}linear_fc2.weight",
    ), RowParallel()),
}  # fmt: skip
# in which the tensors of a mapping are joined
_ORDER = ("q", "k", "v", "gate", "up", "qkv", "qkvz", "z", "ba", "b", "a")
# the classes of mappings that versions before 0.6 lack
_HYBRID_FORMS: dict[str, Form] = {
    "GDNConv1dMapping": Convolution(),
    "GDNLinearMapping": GroupedProjections(),
    "GDNLinearMappingSeparate": Projections(),
}
# the names that the rest of this project reads directly
_HF_NAMES = {"embedding.word_embeddings.weight": "model.embed_tokens.weight", "output_layer.weight": "lm_head.weight"}


def translate(registry: Any, provider: Any, shapes: Shapes) -> tuple[ParamMapping, ...]:
    """Megatron-Bridge's mappings of the tensors that the model has.

    Args:
        shapes: of transformers' model.

    Raises:
        ValueError: a tensor has no mapping, or one without a counterpart here.
    """
    found: dict[str, ParamMapping] = {}
    known: set[tuple[str, int]] = set()  # HF names, before the layer is filled in, with the layer
    for theirs in registry:
        megatron, hf = _names(theirs)
        if megatron.startswith("mtp.") or megatron in found:
            continue
        here = frozenset(
            layer
            for layer in _layers_with(megatron, provider)
            if all(shape_of(name.format(layer=layer, expert=0), shapes) is not None for name in hf)
            and not known.issuperset((name, layer) for name in hf)
        )
        if not here:
            continue
        known.update((name, layer) for name in hf for layer in here)
        layers = None if len(here) == provider.num_layers or _LAYER not in megatron else here
        found[megatron] = ParamMapping(megatron, hf, _form(theirs, megatron, provider), layers=layers)
    lost = sorted(set(shapes) ^ _covered(found, provider, shapes))
    if lost or not set(_HF_NAMES) - {"output_layer.weight"} <= set(found):
        raise ValueError(
            f"Megatron-Bridge's mappings and the model differ in {len(lost) or 1} tensors, such as "
            f"{(lost or ['the embedding'])[0]!r}; expected a mapping for each: use a version of Megatron-Bridge that "
            "has them, or another model"
        )
    return tuple(found.values())


def _layers_with(megatron: str, provider: Any) -> list[int]:
    """The layers (0-based) that can have a parameter; the norm before a gated delta net has a name of its own."""
    layers = list(range(provider.num_layers))
    if getattr(provider, "experimental_attention_variant", None) != "gated_delta_net":
        return layers
    of_delta_net = {_LAYER + INPUT_NORM_OF_DELTA_NET: True, f"{_LAYER}input_layernorm.weight": False}.get(megatron)
    return [i for i in layers if of_delta_net is None or bool(provider.linear_attention_freq[i]) == of_delta_net]


def shape_of(name: str, shapes: Shapes) -> tuple[int, ...] | None:
    """The shape of an HF tensor, which transformers may hold together with those of other experts; None: no tensor."""
    whole, part = stacked_part(name)
    if part is not None:
        return shapes[whole][1:] if whole in shapes else None
    if name in shapes:
        return shapes[name]
    held, expert, half = fused_name(name)
    if expert is None or held not in shapes:
        return None
    _, rows, columns = shapes[held]
    return (rows if half is None else rows // 2, columns)


def _covered(found: dict[str, ParamMapping], provider: Any, shapes: Shapes) -> set[str]:
    """The names of transformers' tensors that the mappings have."""
    covered = set()
    for mapping in found.values():
        for template in mapping.hf:
            for layer in mapping.layers or range(provider.num_layers):
                name = stacked_part(template.format(layer=layer, expert=0))[0]
                covered.add(name if name in shapes else fused_name(name)[0])
    return covered


def _names(theirs: Any) -> tuple[str, tuple[str, ...]]:
    """The names of one of their mappings: Megatron's, and those of HF in the order in which the tensors are joined."""
    megatron = theirs.megatron_param.replace("decoder.layers.*.", _LAYER, 1)
    if megatron.startswith(_LAYER):
        rest = megatron.removeprefix(_LAYER).replace("local_experts.*.", "local_experts.{expert}.")
        rest = re.sub(r"mlp\.experts\.(\w+)\.(weight|bias)\*", rf"{_EXPERT}\1.\2", rest)
        megatron = _LAYER + _LOCAL_NAMES.get(rest, rest)
    given = theirs.hf_param
    if isinstance(given, str):
        names = [given]
    else:
        order = [
            name for name in (*("q", "k", "v", "gate", "up"), *("qkv", "qkvz", "z", "ba", "b", "a")) if name in given
        ]
        names = [given[name] for name in [*order, *(given.keys() - set(order))]]
    names = [name.replace("*", "{layer}", 1).replace("*", "{expert}", 1) for name in names]
    if "{expert}" in megatron:  # one tensor may hold all experts
        names = [name if "{expert}" in name else name + "[{expert}]" for name in names]
    return megatron, tuple(names)


def _form(theirs: Any, megatron: str, provider: Any) -> Form:
    """How the HF tensors of one of Megatron-Bridge's mappings are joined and split."""
    from megatron.bridge.models.conversion.param_mapping import (
        AutoMapping,
        GatedMLPMapping,
        QKVMapping,
        ReplicatedMapping,
    )

    kind, name = type(theirs), megatron.removeprefix(_LAYER)
    form: Form | None = _HYBRID_FORMS.get(kind.__name__)
    if kind is QKVMapping:
        form = GatedQKV() if getattr(provider, "attention_output_gate", False) else GroupedQKV()
    elif kind.__name__ == "RMSNorm2ZeroCenteredRMSNormMapping":
        form = Replicated() if name == _OUT_NORM else None
    elif kind is ReplicatedMapping:
        form = _FORMS.get(name) if isinstance(_FORMS.get(name), Replicated) else None
    elif kind is GatedMLPMapping:
        form = GateUp()
    elif kind.__name__ == "GPTOSSMLPGateUpProjMapping":
        form = InterleavedGateUp()
    elif kind.__name__ == "GPTOSSMLPDownProjMapping":
        form = Replicated() if name.endswith(".bias") else TransposedRowParallel()
    elif kind is AutoMapping and not theirs.permute_dims and _HF_NAMES.get(name, theirs.hf_param) == theirs.hf_param:
        # one tensor for both parts of a gated block would need to be cut first
        form = None if name.startswith("mlp.linear_fc1.") and provider.gated_linear_unit else _FORMS.get(name)
    if form is None:
        raise ValueError(
            f"Megatron-Bridge maps {theirs.hf_param!r} to {theirs.megatron_param!r} with a "
            f"{kind.__name__}, which has no counterpart here; expected a plain copy, or separate q, k, v, gate and up: "
            "choose another model"
        )
    return form
