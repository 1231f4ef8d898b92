"""Corrects Megatron-Bridge's reading of a config.json, and translates its weight mappings into this project's form.

Megatron-Bridge names a layer, and within it an expert, by `*`. It has most mappings under several names: Transformer
Engine's or Megatron's norm, grouped or single experts. Here every HF tensor has one mapping.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from nemo_oprd.megatron.megatron_bridge.special_models import special
from nemo_oprd.megatron.param_names import INPUT_NORM_OF_DELTA_NET, LAYER_SCALE, ROUTER_BIAS, TE_NAMES
from nemo_oprd.models.architecture import (
    ColumnParallel,
    DeltaNet,
    Form,
    GateUp,
    GroupedQKV,
    InterleavedGateUp,
    ModelSpec,
    ParamMapping,
    Replicated,
    RowParallel,
    TiedGroupedQKV,
    TransposedRowParallel,
    Vocabulary,
    concatenated,
    stacked_part,
)
from nemo_oprd.models.families import FusedGateUp, fused_name
from nemo_oprd.models.rope import Rope

if TYPE_CHECKING:
    import torch

# Corrections of config values that Megatron-Bridge reads differently from transformers, or does not read.
#
# Each would give no error and another model. What cannot be corrected is refused; the frequencies, windows and
# routing of the built model are compared or replaced in `build.py`.


def correct(provider: Any, complete: dict, rope: Rope, local: Rope | None = None) -> None:
    """Corrects fields of a new provider that Megatron-Bridge does not set as the config asks.

    Args:
        complete: the HF config with transformers' defaults filled in.
        rope: as parsed from it.
        local: the RoPE of layers with windows, if it is another one.

    Raises:
        ValueError: the config bounds queries, keys and values, lets tokens attend to later ones, or gives windows to
            other layers than Megatron-Bridge does.
    """
    # 0.6.2 reads the share where transformers 4 had it in most families, else rotates all channels
    provider.rotary_percent = rope.share
    # transformers leaves out the layers for multi-token prediction, which stand behind the model's own
    provider.mtp_num_layers = None
    if getattr(provider, "multi_latent_attention", False):
        _set_latent_rope(provider, rope)
    elif rope.kind == "yarn":
        _set_yarn(provider, rope)
    if complete.get("clip_qkv") is not None:
        raise ValueError(
            f"clip_qkv={complete['clip_qkv']}, which Megatron-Bridge leaves out: queries, keys and values would not be "
            "bounded; expected null: choose another model"
        )
    # "vision" is of pictures only, which are left out
    if complete.get("use_bidirectional_attention") not in (None, False, "vision"):
        raise ValueError(
            "use_bidirectional_attention=true: tokens would attend to later ones; expected a model that generates: "
            "choose another one"
        )
    kinds = complete.get("layer_types")
    if kinds and getattr(provider, "experimental_attention_variant", None) == "gated_delta_net":
        # 0.6.2 has one number for all layers
        provider.linear_attention_freq = [int(kind == "linear_attention") for kind in kinds]
    special(provider).correct(provider, complete, rope, local)
    limit = complete.get("swiglu_limit")
    if limit is not None:
        provider.activation_func_clamp_value = limit


def _set_latent_rope(provider: Any, rope: Rope) -> None:
    """Sets the RoPE of multi-latent attention, for which Megatron-Bridge takes YaRN even if the config has another."""
    provider.rope_type, provider.rotary_base = "rope", rope.theta
    if rope.kind != "yarn":
        return
    provider.rope_type = "yarn"
    provider.rotary_scaling_factor = rope.get("factor")
    provider.original_max_position_embeddings = rope.get("original_max_position_embeddings")
    for name in ("beta_fast", "beta_slow"):
        if rope.get(name) is not None:
            setattr(provider, name, rope.get(name))
    provider.mscale, provider.mscale_all_dim = rope.get("mscale") or 1.0, rope.get("mscale_all_dim") or 0.0


def _set_yarn(provider: Any, rope: Rope) -> None:
    """Sets YaRN's fields; Megatron-Bridge 0.6.2 takes the published gpt-oss's from its code, and ignores the config."""
    provider.yarn_rotary_scaling_factor = rope.get("factor")
    provider.yarn_original_max_position_embeddings = rope.get("original_max_position_embeddings")
    for field, name in (("yarn_beta_fast", "beta_fast"), ("yarn_beta_slow", "beta_slow")):
        if rope.get(name) is not None:
            setattr(provider, field, rope.get(name))
    truncate = rope.get("truncate")
    provider.yarn_correction_range_round_to_int = True if truncate is None else truncate


# Forms of the tensors of hybrid models (Qwen3-Next, Qwen3.5): gated attention, and the gated delta net's parts.
#
# Megatron joins the delta net's projections of its input into one matrix of sections (queries, keys, values, gates,
# betas, alphas), each of which is split over tensor ranks by heads. Its checkpoints hold every section by itself.


class GatedQKV(Form):
    """q [A * 2C, D] (each head's query, then its gate), k, v -> per group its queries, gates, key and value."""

    axis = 0

    def join(self, tensors: Sequence[torch.Tensor], spec: ModelSpec) -> torch.Tensor:
        """(q, k, v) -> [(2A + 2G) * C, ...]."""
        q, k, v = (tensor.unflatten(0, (spec.num_kv_heads, -1)) for tensor in tensors)
        heads = q.unflatten(1, (-1, 2, spec.head_dim))  # [G, A/G, 2, C, ...]
        queries, gates = (heads[:, :, part].flatten(1, 2) for part in (0, 1))
        return concatenated([queries, gates, k, v], 1).flatten(0, 1)

    def split_to_hf(self, tensor: torch.Tensor, spec: ModelSpec) -> tuple[torch.Tensor, ...]:
        """[(2A + 2G) * C, ...] -> (q, k, v)."""
        channels, heads = spec.head_dim, spec.num_heads // spec.num_kv_heads
        sizes = (heads * channels, heads * channels, channels, channels)
        queries, gates, k, v = tensor.unflatten(0, (spec.num_kv_heads, -1)).split(sizes, dim=1)
        parts = [part.unflatten(1, (heads, 1, channels)) for part in (queries, gates)]
        return concatenated(parts, 2).flatten(0, 3), k.flatten(0, 1), v.flatten(0, 1)


class _Sections(Form):
    """Parts one below the other, each split over tensor ranks."""

    axis = 0

    def shard(self, tensor: torch.Tensor, rank: int, size: int, spec: ModelSpec) -> torch.Tensor:
        """Returns the rank's part of every section."""
        return concatenated([part.chunk(size)[rank] for part in self._parts(tensor, spec)])

    def unshard(self, shards: Sequence[torch.Tensor], spec: ModelSpec) -> torch.Tensor:
        """Inverts `shard`."""
        of_ranks = [self._parts(shard, spec, len(shards)) for shard in shards]
        return concatenated([part for same in zip(*of_ranks, strict=True) for part in same])

    def _parts(self, tensor: torch.Tensor, spec: ModelSpec, ranks: int = 1) -> tuple[torch.Tensor, ...]:
        return tensor.split([rows // ranks for _, rows in self.sections(spec)])


class Convolution(_Sections):
    """[2 * key heads * K + value heads * V, 1, W]: of queries, keys and values, in Megatron as in transformers."""

    def sections(self, spec: ModelSpec) -> tuple[tuple[str, int], ...]:
        """Returns (name, rows) of queries, keys and values."""
        return _projected(_delta(spec))[:3]


class Projections(_Sections):
    """(queries with keys and values, gates, betas, alphas), as Qwen3.5's files have them -> one matrix of sections."""

    def sections(self, spec: ModelSpec) -> tuple[tuple[str, int], ...]:
        """Returns (name, rows) of all six sections."""
        return _projected(_delta(spec))

    def join(self, tensors: Sequence[torch.Tensor], spec: ModelSpec) -> torch.Tensor:
        """Stacks the four tensors."""
        return concatenated(tensors)

    def split_to_hf(self, tensor: torch.Tensor, spec: ModelSpec) -> tuple[torch.Tensor, ...]:
        """Inverts `join`."""
        queries, keys, values, *rest = (rows for _, rows in self.sections(spec))
        return tensor.split([queries + keys + values, *rest])


class GroupedProjections(_Sections):
    """Qwen3-Next's two tensors: per key head its query, key, values and gates; per key head its betas and alphas."""

    def sections(self, spec: ModelSpec) -> tuple[tuple[str, int], ...]:
        """Returns (name, rows) of all six sections."""
        return _projected(_delta(spec))

    def join(self, tensors: Sequence[torch.Tensor], spec: ModelSpec) -> torch.Tensor:
        """(projections, betas and alphas) -> sections."""
        heads = _delta(spec).key_heads
        sizes = [rows // heads for _, rows in self.sections(spec)]
        parts = [
            part
            for tensor, of_head in zip(tensors, (sizes[:4], sizes[4:]), strict=True)
            for part in tensor.unflatten(0, (heads, -1)).split(of_head, dim=1)
        ]
        return concatenated([part.flatten(0, 1) for part in parts])

    def split_to_hf(self, tensor: torch.Tensor, spec: ModelSpec) -> tuple[torch.Tensor, ...]:
        """Inverts `join`."""
        heads = _delta(spec).key_heads
        parts = [part.unflatten(0, (heads, -1)) for part in self._parts(tensor, spec)]
        return tuple(concatenated(each, 1).flatten(0, 1) for each in (parts[:4], parts[4:]))


def _projected(delta: DeltaNet) -> tuple[tuple[str, int], ...]:
    """Returns (Megatron's name of a section, its rows), in Megatron's order."""
    keys, values = delta.key_heads * delta.key_channels, delta.value_heads * delta.value_channels
    states = (("query", keys), ("key", keys), ("value", values), ("z", values))
    return (*states, ("beta", delta.value_heads), ("alpha", delta.value_heads))


def _delta(spec: ModelSpec) -> DeltaNet:
    assert spec.delta is not None, f"{spec.model_type} has no delta net"
    return spec.delta


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
        "pre_shared_expert_layernorm.weight", "post_ffn_layernorm.weight", "mlp.post_moe_layernorm.weight",
        "mlp.post_shared_expert_layernorm.weight", "mlp.router.scale", "mlp.router.per_expert_scale", LAYER_SCALE,
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
# the classes of mappings that versions before 0.6 lack
_HYBRID_FORMS: dict[str, Form] = {
    "GDNConv1dMapping": Convolution(),
    "GDNLinearMapping": GroupedProjections(),
    "GDNLinearMappingSeparate": Projections(),
}
# the names that the rest of this project reads directly
_HF_NAMES = {"embedding.word_embeddings.weight": "model.embed_tokens.weight", "output_layer.weight": "lm_head.weight"}


def translate(registry: Any, provider: Any, shapes: Shapes) -> tuple[ParamMapping, ...]:
    """Returns the mappings of `registry` for the tensors that the model has, in this project's form.

    Args:
        shapes: of the tensors of transformers' model, by name.

    Raises:
        ValueError: a tensor has no mapping, or one without a counterpart here.
    """
    found: dict[str, list[ParamMapping]] = {}
    known: set[tuple[str, int]] = set()  # HF names, before the layer is filled in, with the layer
    for theirs in registry:
        megatron, *names = _names(theirs)
        if megatron.startswith("mtp.") or megatron in found:
            continue
        for hf in _alternatives(theirs, *names):
            here = frozenset(
                layer
                for layer in _layers_with(megatron, provider)
                if all(shape_of(name.format(layer=layer, expert=0), shapes) is not None for name in hf)
                and not known.issuperset((name, layer) for name in hf)
            )
            if not here:
                continue
            known.update((name, layer) for name in hf for layer in here)
            found.setdefault(megatron, []).extend(
                ParamMapping(megatron, hf, form, layers=layers if _LAYER in megatron else None)
                for form, layers in _forms(theirs, megatron, provider, here)
            )
    mappings = [mapping for same in found.values() for mapping in same]
    lost = sorted(set(shapes) ^ _covered(mappings, provider, shapes))
    if lost or not set(_HF_NAMES) - {"output_layer.weight"} <= set(found):
        raise ValueError(
            f"Megatron-Bridge's mappings and the model differ in {len(lost) or 1} tensors, such as "
            f"{(lost or ['the embedding'])[0]!r}; expected a mapping for each: use a version of Megatron-Bridge that "
            "has them, or another model"
        )
    return tuple(mappings)


def _forms(theirs: Any, megatron: str, provider: Any, here: frozenset[int]) -> list[tuple[Form, frozenset[int] | None]]:
    """Returns each form of the mapping `theirs`, with the layers of `here` that have it; None: all of the model's."""
    heads = special(provider).layer_heads(provider)
    if not heads or not megatron.endswith(".linear_qkv.weight"):
        return [(_form(theirs, megatron, provider), None if len(here) == provider.num_layers else here)]
    kinds = dict.fromkeys(heads[layer] for layer in sorted(here))
    return [
        ((TiedGroupedQKV if kind.tied else GroupedQKV)(kind), frozenset(i for i in here if heads[i] == kind))
        for kind in kinds
    ]


def _alternatives(theirs: Any, hf: tuple[str, ...]) -> list[tuple[str, ...]]:
    """Returns the sets of HF tensors that a mapping may have in a layer: Gemma 4's keys may be the values, too."""
    return [hf, hf[:2]] if type(theirs).__name__ == "_Gemma4QKVMapping" else [hf]


def _layers_with(megatron: str, provider: Any) -> list[int]:
    """Returns the layers (0-based) that can have a parameter; the norm before a delta net has its own name."""
    layers = list(range(provider.num_layers))
    if getattr(provider, "experimental_attention_variant", None) != "gated_delta_net":
        return layers
    of_delta_net = {_LAYER + INPUT_NORM_OF_DELTA_NET: True, f"{_LAYER}input_layernorm.weight": False}.get(megatron)
    return [i for i in layers if of_delta_net is None or bool(provider.linear_attention_freq[i]) == of_delta_net]


def shape_of(name: str, shapes: Shapes) -> tuple[int, ...] | None:
    """Returns an HF tensor's shape; transformers may hold it together with other experts'. None: no such tensor."""
    whole, part = stacked_part(name)
    if part is not None:
        return shapes[whole][1:] if whole in shapes else None
    if name in shapes:
        return shapes[name]
    held, expert, half = fused_name(name)
    if expert is None or held not in shapes:
        return shapes.get(held)
    _, rows, columns = shapes[held]
    return (rows if half is None else rows // 2, columns)


def _covered(mappings: Sequence[ParamMapping], provider: Any, shapes: Shapes) -> set[str]:
    """Returns the names of transformers' tensors to which the mappings refer."""
    covered = set()
    for mapping in mappings:
        for template in mapping.hf:
            for layer in mapping.layers or range(provider.num_layers):
                name = stacked_part(template.format(layer=layer, expert=0))[0]
                covered.add(name if name in shapes else fused_name(name)[0])
    return covered


def _names(theirs: Any) -> tuple[str, tuple[str, ...]]:
    """Returns a mapping's names: Megatron's, and those of HF in the order in which the tensors are joined."""
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
    """Returns the form that joins and splits the HF tensors of one of Megatron-Bridge's mappings."""
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
    elif kind.__name__ == "_FullDimQKNormMapping":
        form = Replicated()  # `NormOfAllHeads`
    elif kind is GatedMLPMapping:
        form = GateUp()
    elif kind.__name__ == "FusedGatedExpertMapping":
        form = FusedGateUp()
    elif kind.__name__ == "FusedExpertMapping":
        form = RowParallel()
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
