"""Families that only Megatron-Bridge has: their architecture and weight mappings, read from Megatron-Bridge.

`bridge_family(directory)` is the family of a Hugging Face model. With it in a `ModelSpec`, everything that moves
weights (loading at any layout, export, weight sync, conversion, `verify`'s gradients) works as with this project's own
families, because Megatron-Bridge's mappings become `ParamMapping`s. Its own loading and export ask Megatron's global
parallel state, which cannot describe a student and a teacher of different layouts in one process.

The names and shapes of the HF tensors come from transformers, which builds the model without data. Every one of them
must have a mapping, so a mapping that Megatron-Bridge lacks is found before anything is loaded.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from nemo_oprd.models import FAMILIES, read_hf_config
from nemo_oprd.models.architecture import (
    ColumnParallel,
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
    source_dtype,
)
from nemo_oprd.models.megatron.param_names import TE_NAMES
from nemo_oprd.models.megatron_bridge.provider_fields import MODEL, REFUSED, changed
from nemo_oprd.models.rope import parse_rope

_LAYER = "decoder.layers.{layer}."
_LOCAL_NAMES = {te: local for local, te in TE_NAMES.items()}
# Megatron's name within a layer or the model -> how the one HF tensor behind it is split
_FORMS: dict[str, Form] = {
    **dict.fromkeys(("embedding.word_embeddings.weight", "output_layer.weight"), Vocabulary()),
    **dict.fromkeys((
        "decoder.final_layernorm.weight", "decoder.final_layernorm.bias", "input_layernorm.weight",
        "input_layernorm.bias", "pre_mlp_layernorm.weight", "pre_mlp_layernorm.bias",
        "self_attention.q_layernorm.weight", "self_attention.k_layernorm.weight", "self_attention.linear_proj.bias",
        "mlp.linear_fc2.bias",
    ), Replicated()),
    **dict.fromkeys(("mlp.linear_fc1.weight", "mlp.linear_fc1.bias"), ColumnParallel()),
    **dict.fromkeys(("self_attention.linear_proj.weight", "mlp.linear_fc2.weight"), RowParallel()),
}  # fmt: skip
# the names that the rest of this project reads directly
_HF_NAMES = {"embedding.word_embeddings.weight": "model.embed_tokens.weight", "output_layer.weight": "lm_head.weight"}


@dataclass(frozen=True)
class BridgeModel:
    """What Megatron-Bridge and transformers say of one config.json."""

    provider: Any  # Megatron-Bridge's `GPTModelProvider`; copied before use, never changed
    complete: dict  # the HF config with transformers' defaults filled in
    shapes: dict[str, tuple[int, ...]]  # of every parameter, by HF name
    mappings: tuple[ParamMapping, ...]  # of all parameters, one per kind


@dataclass(frozen=True)
class BridgeFamily(Family):
    """A family of Megatron-Bridge; which parameters a model has is read from its own config."""

    def param_mappings(self, spec: ModelSpec) -> list[ParamMapping]:
        """As `Family`."""
        return Family.param_mappings(replace(self, mappings=bridge_model(spec.hf_config).mappings), spec)

    def hf_shape(self, name: str, spec: ModelSpec) -> tuple[int, ...] | None:
        """As `Family`: transformers' shape."""
        return bridge_model(spec.hf_config).shapes[name]

    def provider_fields(self, spec: ModelSpec) -> dict[str, Any] | None:
        """As `Family`: those that Megatron-Bridge derives from the config."""
        provider = bridge_model(spec.hf_config).provider
        fields = {name: getattr(provider, name) for name in (*MODEL, "rotary_base", "rotary_percent")}
        # a function as Megatron-Bridge writes it to YAML
        named = {
            name: {"_target_": f"{value.__module__}.{value.__qualname__}", "_call_": False}
            if callable(value)
            else value
            for name, value in fields.items()
        }
        return {"_target_": f"{type(provider).__module__}.{type(provider).__qualname__}", **named}


def bridge_family(directory: str | Path) -> BridgeFamily | None:
    """The family of the HF model in `directory`; None if this project has it.

    Raises:
        ValueError: Megatron-Bridge is not installed, does not have the family, or has what is not supported here.
    """
    hf_config = read_hf_config(directory)
    model_type = hf_config.get("model_type")
    if not isinstance(model_type, str) or model_type in FAMILIES:
        return None  # read_model_spec says what is wrong with another value
    known = bridge_model(hf_config, str(Path(directory) / "config.json"))
    return BridgeFamily(model_type, parse_bridge_model, known.mappings, own=False)


def parse_bridge_model(family: Family, hf_config: dict, source: str) -> ModelSpec:
    """The architecture that Megatron-Bridge derives from a config.json. Raises ValueError as `bridge_family`."""
    found = bridge_model(hf_config, source)
    provider, complete = found.provider, found.complete
    heads, groups = provider.num_attention_heads, provider.num_query_groups or provider.num_attention_heads
    if heads % groups:
        raise ValueError(
            f"{source}: {heads} attention heads are not a multiple of {groups} key/value heads; correct them"
        )
    head_dim = provider.kv_channels or provider.hidden_size // heads
    check_dtype(source_dtype(hf_config), source)
    return ModelSpec(
        family=family,
        model_type=family.model_type,
        num_layers=provider.num_layers,
        hidden_size=provider.hidden_size,
        ffn_size=provider.ffn_hidden_size,
        num_heads=heads,
        num_kv_heads=groups,
        head_dim=head_dim,
        vocab_size=complete["vocab_size"],
        # its providers and run_config.yaml leave out what other kinds need
        rope=parse_rope(complete, source, head_dim=head_dim, kinds=("default",), partial=True),
        norm_eps=float(provider.layernorm_epsilon),
        max_positions=complete["max_position_embeddings"],
        tied_embeddings=bool(provider.share_embeddings_and_output_weights),
        qkv_bias=bool(provider.add_qkv_bias or provider.add_bias_linear),
        proj_bias=bool(provider.add_bias_linear),
        qk_norm=bool(provider.qk_layernorm),
        dtype=source_dtype(hf_config),
        hf_config=hf_config,
        gated=bool(provider.gated_linear_unit),
        norm_bias=provider.normalization == "LayerNorm",
    )


def bridge_model(hf_config: dict, source: str = "config.json") -> BridgeModel:
    """What Megatron-Bridge and transformers make of a config.json. Raises ValueError as `bridge_family`."""
    try:
        return _bridge_model(json.dumps(hf_config, sort_keys=True))
    except ValueError as error:
        raise ValueError(f"{source}: {error}") from error


@lru_cache(maxsize=16)
def _bridge_model(text: str) -> BridgeModel:
    hf_config = json.loads(text)
    bridge = _described("Megatron-Bridge has no bridge for the model", lambda: _auto_bridge(hf_config))
    provider = _described(
        "Megatron-Bridge cannot describe the model", lambda: bridge.to_megatron_provider(load_weights=False)
    )
    refuse_unsupported(provider)
    complete = bridge.hf_pretrained.to_dict()
    _rotate_part(provider, complete)
    model = _described("transformers cannot build the model", lambda: _empty_model(bridge.hf_pretrained))
    _check_same_computation(provider, model, hf_config.get("architectures"))
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    mappings = _translate(bridge._model_bridge.mapping_registry(), provider, shapes)
    return BridgeModel(provider, complete, shapes, mappings)


def _rotate_part(provider: Any, complete: dict) -> None:
    """Sets the share of rotated channels from `rope_parameters` of the complete HF config, as transformers 5 has it.

    Megatron-Bridge 0.6.2 reads it from where transformers 4 had it in most families, else rotates all channels.
    """
    parameters = complete.get("rope_parameters")
    share = parameters.get("partial_rotary_factor") if isinstance(parameters, dict) else None
    if share is not None:
        provider.rotary_percent = share


def _described(problem: str, compute: Callable[[], Any]) -> Any:
    """The result of `compute`, or a ValueError of one line for whatever the two packages raise for a config."""
    try:
        return compute()
    except Exception as error:
        first = str(error).strip().splitlines()[:1]
        raise ValueError(
            f"{problem} ({type(error).__name__}: {''.join(first):.120}); expected one that both know: use the versions "
            "that docs/nemo.md names, or another model"
        ) from error


def _auto_bridge(hf_config: dict) -> Any:
    from transformers import AutoConfig

    AutoBridge = import_bridge("provider=bridge")
    config = AutoConfig.for_model(**hf_config)
    if not AutoBridge.supports(config):
        raise ValueError(f"architectures={hf_config.get('architectures')!r} is not among its supported models")
    return AutoBridge.from_hf_config(config)


def _empty_model(config: Any) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


def _check_same_computation(provider: Any, model: Any, architectures: Any) -> None:
    """Raises ValueError unless Megatron-Bridge read the same architecture and activation as transformers.

    Its bridges choose by `architectures`, transformers by `model_type`; some set an activation of their own.
    """
    import torch

    if type(model).__name__ not in (architectures or []):
        raise ValueError(
            f"architectures={architectures!r} is not {type(model).__name__}, which model_type names; expected the same "
            "model in both: correct config.json as in the model's source"
        )
    points = torch.linspace(-3, 3, 13)
    activations = [module.act_fn for module in model.modules() if callable(getattr(module, "act_fn", None))]
    ours = provider.activation_func(points)
    if not activations or not all(torch.allclose(act(points), ours, rtol=0, atol=1e-6) for act in activations):
        names = sorted({type(act).__name__ for act in activations}) or ["none that can be found"]
        raise ValueError(
            f"transformers' activation is {' and '.join(names)}, Megatron-Bridge's another one "
            f"({getattr(provider.activation_func, '__name__', provider.activation_func)}); expected the same: choose a "
            "model with the activation that Megatron-Bridge gives this family"
        )


def import_bridge(key: str) -> Any:
    """Megatron-Bridge's `AutoBridge`, or a ValueError, beginning with `key`, if it cannot be imported."""
    try:
        from megatron.bridge import AutoBridge
    except ImportError as error:
        raise ValueError(
            f"{key}: Megatron-Bridge cannot be imported ({error}); expected its environment, which has Transformer "
            "Engine: NVIDIA's container of NeMo, or scripts/setup_nemo_bridge.sh with the stand-in (docs/nemo.md)"
        ) from error
    return AutoBridge


def refuse_unsupported(provider: Any) -> None:
    """Raises ValueError for a provider of a model whose layers, head or weights this project does not handle."""
    from megatron.bridge.models.gpt_provider import GPTModelProvider

    found = [what for what, names in REFUSED.items() if any(getattr(provider, name, None) for name in names)]
    if getattr(provider, "softmax_type", "vanilla") != "vanilla":
        found.append("another softmax")
    if getattr(provider, "position_embedding_type", None) not in ("rope", "yarn"):
        found.append(f"position_embedding_type={getattr(provider, 'position_embedding_type', None)!r}")
    if found:
        raise ValueError(
            f"Megatron-Bridge's {type(provider).__name__} has {' and '.join(found)}; expected a dense decoder with "
            "RoPE and full attention: choose another model (docs/nemo.md lists what is supported)"
        )
    others = changed(provider, GPTModelProvider) if isinstance(provider, GPTModelProvider) else {}
    if others:
        given = ", ".join(f"{name}={value!r:.40}" for name, value in others.items())
        raise ValueError(
            f"Megatron-Bridge's {type(provider).__name__} has {given}; expected Megatron's defaults of these, because "
            "this project has no other values of them: choose another model (docs/nemo.md lists what is supported)"
        )


def _translate(registry: Any, provider: Any, shapes: dict[str, tuple[int, ...]]) -> tuple[ParamMapping, ...]:
    """Megatron-Bridge's mappings of the parameters that the model has, in this project's form."""
    found: dict[str, ParamMapping] = {}
    for theirs in registry:
        hf = tuple(name.replace("*", "{layer}") for name in _hf_names(theirs.hf_param))
        if any(name.format(layer=0) not in shapes for name in hf):
            continue
        megatron = theirs.megatron_param.replace("layers.*.", "layers.{layer}.", 1)
        if megatron.startswith(_LAYER):
            rest = megatron.removeprefix(_LAYER)
            megatron = _LAYER + _LOCAL_NAMES.get(rest, rest)
        if megatron not in found:  # their registry has the norms by both names
            found[megatron] = ParamMapping(megatron, hf, _form(theirs, megatron, provider))
    names = [name for mapping in found.values() for name in mapping.hf]
    covered = {name.format(layer=layer) for layer in range(provider.num_layers) for name in names}
    lost = sorted(set(shapes) ^ covered)
    if lost or not set(_HF_NAMES) - {"output_layer.weight"} <= set(found):
        raise ValueError(
            f"Megatron-Bridge's mappings and the model differ in {len(lost) or 1} tensors, such as "
            f"{(lost or ['the embedding'])[0]!r}; expected a mapping for each, alike in all layers: use a version of "
            "Megatron-Bridge that has them, or another model"
        )
    # q_norm over all heads is split over tensor ranks, that over one head is not
    for name in ("q_layernorm", "k_layernorm"):
        mapping = found.get(f"{_LAYER}self_attention.{name}.weight")
        if mapping and shapes[mapping.hf[0].format(layer=0)] != (provider.kv_channels,):
            raise ValueError(f"{mapping.hf[0]} normalises all heads together; expected a norm per head")
    return tuple(found.values())


def _hf_names(given: str | dict[str, str]) -> list[str]:
    """The HF names of one of their mappings, in the order in which this project joins the tensors."""
    if isinstance(given, str):
        return [given]
    order = [name for name in ("q", "k", "v", "gate", "up") if name in given]
    return [given[name] for name in [*order, *(given.keys() - set(order))]]


def _form(theirs: Any, megatron: str, provider: Any) -> Form:
    """How the HF tensors of one of Megatron-Bridge's mappings are joined and split."""
    from megatron.bridge.models.conversion.param_mapping import AutoMapping, GatedMLPMapping, QKVMapping

    kind, name = type(theirs), megatron.removeprefix(_LAYER)
    form: Form | None = None
    if kind is QKVMapping:
        form = GroupedQKV()
    elif kind is GatedMLPMapping:
        form = GateUp()
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
