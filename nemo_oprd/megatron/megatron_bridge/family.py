"""Families that only Megatron-Bridge has: their architecture and weight mappings, read from Megatron-Bridge.

`bridge_family(directory)` returns the family of a Hugging Face model. With it in a `ModelSpec`, everything that moves
weights (loading at any layout, export, weight sync, conversion, `verify`'s gradients) works as with this project's own
families, because Megatron-Bridge's mappings become `ParamMapping`s. Megatron-Bridge's loading and export ask Megatron's
global parallel state, which cannot describe a student and a teacher of different layouts in one process.

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

from nemo_oprd.megatron.megatron_bridge.mappings import correct, shape_of, translate
from nemo_oprd.megatron.megatron_bridge.provider_fields import REFUSED, changed, described
from nemo_oprd.megatron.megatron_bridge.special_models import as_bridge_reads, refuse_unbuilt, special
from nemo_oprd.megatron.param_names import LAYER_SCALE
from nemo_oprd.models import FAMILIES, read_hf_config
from nemo_oprd.models.architecture import (
    DeltaNet,
    Experts,
    Family,
    LatentAttention,
    ModelSpec,
    ParamMapping,
    check_dtype,
    source_dtype,
)
from nemo_oprd.models.megatron_bridge_families import KINDS, NEEDED_VERSION
from nemo_oprd.models.quantization import read_quantization, unquantized
from nemo_oprd.models.rope import Rope, parse_ropes

_SOURCE = "config.json: "  # before messages, until `bridge_model` says which file
_BIAS = "e_score_correction_bias"  # of routers in transformers: a buffer that checkpoints have


@dataclass(frozen=True)
class BridgeModel:
    """The results of Megatron-Bridge and transformers for one config.json."""

    provider: Any  # Megatron-Bridge's `GPTModelProvider`; copied before use, never changed
    complete: dict  # the HF config with transformers' defaults filled in
    rope: Rope
    shapes: dict[str, tuple[int, ...]]  # of parameters, routers' biases, scales of layers; transformers' names
    latent: tuple[float, float] | None  # of multi-latent attention: see `_check_norms`; None: there is none
    mappings: tuple[ParamMapping, ...]  # of all parameters, one per kind
    local_rope: Rope | None = None  # of layers with windows, where it is another one


@dataclass(frozen=True)
class BridgeFamily(Family):
    """A family of Megatron-Bridge; which parameters a model has is read from its own config."""

    def param_mappings(self, spec: ModelSpec) -> list[ParamMapping]:
        """Returns the mappings of all parameters, as in `Family`."""
        return Family.param_mappings(replace(self, mappings=bridge_model(spec.hf_config).mappings), spec)

    def hf_shape(self, name: str, spec: ModelSpec) -> tuple[int, ...] | None:
        """Returns the shape of a tensor in transformers, as in `Family`."""
        return shape_of(name, bridge_model(spec.hf_config).shapes)

    def provider_fields(self, spec: ModelSpec) -> dict[str, Any] | None:
        """Returns the fields that Megatron-Bridge derives from the config, corrected, as in `Family`.

        None for delta nets: Megatron-Bridge stores the weight of their norms minus 1. Checkpoints of this project hold
        the weight itself, because the difference is not exact in bfloat16, and no field says so. None for latent
        attention whose queries have no narrow state: Megatron-Bridge builds another model of it. None for Gemma 4,
        whose description Megatron-Bridge writes and does not read.
        """
        direct = spec.latent is not None and not spec.latent.query_rank
        other = spec.delta is not None or direct or any(heads.tied for heads in spec.layer_heads)
        return None if other else described(bridge_model(spec.hf_config).provider)


def bridge_family(directory: str | Path) -> BridgeFamily | None:
    """Returns the family of the HF model in `directory`; None if this project has it, or `model_type` is no text.

    Raises:
        ValueError: Megatron-Bridge is not installed, lacks the family, or has a part that is not supported here.
    """
    hf_config = read_hf_config(directory)
    model_type = hf_config.get("model_type")
    if not isinstance(model_type, str) or model_type in FAMILIES:
        return None  # read_model_spec says what is wrong with another value
    known = bridge_model(hf_config, str(Path(directory) / "config.json"))
    return BridgeFamily(model_type, parse_bridge_model, known.mappings, own=False)


def parse_bridge_model(family: Family, hf_config: dict, source: str) -> ModelSpec:
    """Returns the architecture that Megatron-Bridge derives from a config. Raises ValueError as `bridge_family`."""
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
        ffn_size=provider.ffn_hidden_size or 0,  # none where all layers have experts and the config names no size
        num_heads=heads,
        num_kv_heads=groups,
        head_dim=head_dim,
        vocab_size=complete["vocab_size"],
        rope=found.rope,
        norm_eps=float(provider.layernorm_epsilon),
        max_positions=complete["max_position_embeddings"],
        tied_embeddings=bool(provider.share_embeddings_and_output_weights),
        qkv_bias=bool(provider.add_qkv_bias or provider.add_bias_linear),
        proj_bias=bool(provider.add_bias_linear),
        qk_norm=bool(provider.qk_layernorm),
        dtype=source_dtype(hf_config),
        hf_config=hf_config,
        gated=bool(provider.gated_linear_unit),
        silu=_gate_is_silu(provider),
        norm_bias=provider.normalization == "LayerNorm",
        **_special_parts(found),
    )


def _gate_is_silu(provider: Any) -> bool:
    name = getattr(provider.activation_func, "__name__", "")
    return name == "silu" and getattr(provider, "activation_func_clamp_value", None) is None


def _special_parts(found: BridgeModel) -> dict[str, Any]:
    """Returns the `ModelSpec` fields of parts that most models lack, such as delta nets and experts."""
    provider, layers = found.provider, found.provider.num_layers
    parts: dict[str, Any] = {}
    if getattr(provider, "multi_latent_attention", False):
        assert found.latent is not None
        ranks = provider.q_lora_rank or 0, provider.kv_lora_rank
        sizes = provider.qk_head_dim, provider.qk_pos_emb_head_dim, provider.v_head_dim
        parts["latent"] = LatentAttention(*ranks, *sizes, *found.latent)
    else:
        norms = [shape for name, shape in found.shapes.items() if name.endswith("self_attn.q_norm.weight")]
        parts["whole_qk_norm"] = bool(norms) and norms[0] != (provider.kv_channels,)
    if getattr(provider, "experimental_attention_variant", None) == "gated_delta_net":
        parts["output_gate"] = bool(provider.attention_output_gate)
        parts["delta"] = DeltaNet(
            tuple(map(bool, provider.linear_attention_freq)),
            provider.linear_num_key_heads,
            provider.linear_num_value_heads,
            provider.linear_key_head_dim,
            provider.linear_value_head_dim,
            provider.linear_conv_kernel_dim,
        )
    parts["layer_heads"], parts["local_rope"] = special(provider).layer_heads(provider), found.local_rope
    parts |= special(provider).parts(provider)
    parts.setdefault("sinks", getattr(provider, "softmax_type", "vanilla") == "learnable")
    if provider.num_moe_experts:
        frequency = provider.moe_layer_freq
        sparse = frequency if isinstance(frequency, list) else [i % frequency == 0 for i in range(layers)]
        score, normalized = provider.moe_router_score_function, bool(found.complete.get("norm_topk_prob", False))
        if "delta" in parts or parts["layer_heads"] or score == "sigmoid":
            # transformers' is the softmax or sigmoid of all; Qwen3.5, Gemma 4 and MiniMax M2 have no setting and always
            # divide
            normalized = found.complete.get("norm_topk_prob", True)
        elif score == "softmax" and not provider.moe_router_pre_softmax:
            score = "softmax_of_chosen"
        parts["experts"] = Experts(
            provider.num_moe_experts,
            provider.moe_router_topk,
            ffn_size=provider.moe_ffn_hidden_size or provider.ffn_hidden_size,
            normalized=normalized,
            sparse=tuple(map(bool, sparse)),
            score=score,
            groups=provider.moe_router_num_groups or 1,
            chosen_groups=provider.moe_router_group_topk or 1,
            scale=float(provider.moe_router_topk_scaling_factor or 1.0),
            shared_ffn_size=provider.moe_shared_expert_intermediate_size or 0,
            biases=bool(provider.add_bias_linear),
            shared_gate=bool(getattr(provider, "moe_shared_expert_gate", False)),
        )
    return parts


def bridge_model(hf_config: dict, source: str = "config.json") -> BridgeModel:
    """Reads a config.json with Megatron-Bridge and transformers. Raises ValueError as `bridge_family`."""
    read_quantization(hf_config, source)
    refuse_unbuilt(hf_config, source)
    try:
        return _bridge_model(json.dumps(unquantized(hf_config), sort_keys=True))
    except ValueError as error:
        raise ValueError(f"{source}: {str(error).removeprefix(_SOURCE)}") from error


@lru_cache(maxsize=16)
def _bridge_model(text: str) -> BridgeModel:
    hf_config = json.loads(text)
    bridge, config = _described("Megatron-Bridge has no bridge for the model", lambda: _auto_bridge(hf_config))
    provider = _described(
        "Megatron-Bridge cannot describe the model", lambda: bridge.to_megatron_provider(load_weights=False)
    )
    complete = config.to_dict()
    model_type = hf_config["model_type"]
    refuse_unsupported(provider, model_type)
    head_dim = provider.kv_channels or provider.hidden_size // provider.num_attention_heads
    if getattr(provider, "multi_latent_attention", False):
        head_dim = provider.qk_pos_emb_head_dim
    kinds = KINDS[model_type].ropes if model_type in KINDS else ("default",)
    axes = getattr(provider, "experimental_attention_variant", None) == "gated_delta_net"
    rope, local = parse_ropes(
        complete, _SOURCE.removesuffix(": "), head_dim=head_dim, kinds=kinds, partial=True, axes=axes
    )
    correct(provider, complete, rope, local)
    model = _described("transformers cannot build the model", lambda: _empty_model(config))
    _check_same_computation(provider, model, config.architectures)
    latent = _check_norms(provider, model)
    buffers = (name for name, _ in model.named_buffers() if name.endswith((_BIAS, LAYER_SCALE)))
    stored = {*dict(model.named_parameters()), *buffers}
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items() if name in stored}
    mappings = translate(bridge._model_bridge.mapping_registry(), provider, shapes)
    return BridgeModel(provider, complete, rope=rope, shapes=shapes, latent=latent, mappings=mappings, local_rope=local)


def _described(problem: str, compute: Callable[[], Any]) -> Any:
    """Returns the result of `compute`; turns any error of the two packages into a ValueError of one line."""
    try:
        return compute()
    except Exception as error:
        first = str(error).strip().splitlines()[:1]
        raise ValueError(
            f"{problem} ({type(error).__name__}: {''.join(first):.120}); expected one that both know: use the versions "
            "that docs/nemo.md names, or another model"
        ) from error


def _auto_bridge(hf_config: dict) -> tuple[Any, Any]:
    """Returns (Megatron-Bridge's bridge of the model, transformers' config of it)."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig

    AutoBridge = import_bridge("provider=bridge")
    config = AutoConfig.for_model(**hf_config)
    if not config.architectures and type(config) in MODEL_FOR_CAUSAL_LM_MAPPING:
        config.architectures = [MODEL_FOR_CAUSAL_LM_MAPPING[type(config)].__name__]
    described = as_bridge_reads(config, hf_config)
    if not AutoBridge.supports(config):
        raise ValueError(f"architectures={config.architectures!r} is not among its supported models")
    return AutoBridge.from_hf_config(described), config


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
    points = torch.linspace(-9, 9, 25)
    activations = [module.act_fn for module in model.modules() if callable(getattr(module, "act_fn", None))]
    ours = provider.activation_func(points)
    gates = [module for module in model.modules() if hasattr(module, "limit") and hasattr(module, "_apply_gate")]
    if gates:  # gate and up take turns; both are clamped
        activations = [
            lambda x, gate=gate: gate._apply_gate(torch.stack([x, x.flip(0)], -1).flatten()) for gate in gates
        ]
        limit = provider.activation_func_clamp_value
        clamped = provider.activation_func(points.clamp(max=limit))
        ours = clamped * (points.flip(0).clamp(-limit, limit) + provider.glu_linear_offset)
    if not activations or not all(torch.allclose(act(points), ours, rtol=1e-6, atol=1e-6) for act in activations):
        names = sorted({type(act).__name__ for act in activations}) or ["none that can be found"]
        raise ValueError(
            f"transformers' activation is {' and '.join(names)}, Megatron-Bridge's another one "
            f"({getattr(provider.activation_func, '__name__', provider.activation_func)}); expected the same: choose a "
            "model with the activation that Megatron-Bridge gives this family"
        )


def _check_norms(provider: Any, model: Any) -> tuple[float, float] | None:
    """Returns the epsilon of latent attention's norms of narrow states, and its softmax's scale; None without it.

    Raises:
        ValueError: another norm of transformers' model has another epsilon than Megatron-Bridge gives all norms.
    """
    narrow = None
    for name, module in model.named_modules():
        eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
        if not isinstance(eps, float):
            continue
        if name.endswith(("q_a_layernorm", "kv_a_layernorm")):
            narrow = eps
        elif eps != provider.layernorm_epsilon:
            raise ValueError(
                f"transformers' {name} has the epsilon {eps}, Megatron-Bridge's {provider.layernorm_epsilon}; expected "
                "the same: choose another model"
            )
    return None if narrow is None else (narrow, float(model.model.layers[0].self_attn.scaling))


def import_bridge(key: str) -> Any:
    """Returns Megatron-Bridge's `AutoBridge`; raises ValueError, beginning with `key`, if it can't be imported."""
    try:
        from megatron.bridge import AutoBridge
    except ImportError as error:
        raise ValueError(
            f"{key}: Megatron-Bridge cannot be imported ({error}); expected its environment, which has Transformer "
            "Engine: NVIDIA's container of NeMo, or scripts/setup_nemo_bridge.sh with the stand-in (docs/nemo.md)"
        ) from error
    return AutoBridge


def _is_new_enough() -> bool:
    """Returns whether families with special parts were compared with the installed Megatron-Bridge."""
    from megatron.bridge.package_info import __version__

    return tuple(int(part) for part in __version__.split(".")[:2]) >= NEEDED_VERSION


def refuse_unsupported(provider: Any, model_type: str) -> None:
    """Raises ValueError for a provider of a model whose layers, head or weights this project does not handle."""
    from megatron.bridge.models.gpt_provider import GPTModelProvider

    accepted = KINDS[model_type].parts if model_type in KINDS and _is_new_enough() else frozenset()
    found = [what for what, names in REFUSED.items() if any(getattr(provider, name, None) for name in names)]
    if getattr(provider, "softmax_type", "vanilla") != "vanilla":
        found.append("another softmax")
    found = [what for what in found if what not in accepted]
    if getattr(provider, "position_embedding_type", None) not in ("rope", "yarn"):
        found.append(f"position_embedding_type={getattr(provider, 'position_embedding_type', None)!r}")
    if found:
        raise ValueError(
            f"Megatron-Bridge's {type(provider).__name__} has {' and '.join(found)}; expected a dense decoder with "
            "RoPE and full attention: choose another model (docs/nemo.md lists what is supported)"
        )
    others = changed(provider, GPTModelProvider) if isinstance(provider, GPTModelProvider) else {}
    others = {name: value for name, value in others.items() if name not in accepted}
    if others:
        given = ", ".join(f"{name}={value!r:.40}" for name, value in others.items())
        raise ValueError(
            f"Megatron-Bridge's {type(provider).__name__} has {given}; expected Megatron's defaults of these, because "
            "this project has no other values of them: choose another model (docs/nemo.md lists what is supported)"
        )
