"""The models of Megatron-Bridge 0.6.2 that are described, corrected or built in their own way: two tables.

`special(provider)` returns the entry: the fields of a `ModelSpec` that only such models have, what the config decides
in the provider, and how a chunk is built. Gemma's own parts are in `gemma.py`. `as_bridge_reads` goes by `model_type`.

MiMo-V2-Flash: layers with windows have other heads than those without. Megatron-Bridge reads the keys of the published
config.json; transformers has keys of its own, and the published model's values in its code. `_mimo_as_published` sets
Megatron-Bridge's keys to transformers' values, and refuses a config.json that has other ones: transformers would
compute another model than the file asks for.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from nemo_oprd.megatron.experts import Router
from nemo_oprd.megatron.megatron_bridge import gemma
from nemo_oprd.models.architecture import Heads
from nemo_oprd.models.rope import Rope

_GEMMA4 = "gemma4_text"
_SHARE = 0.334  # of the channels that are rotated: transformers' default of this model, which its config leaves out


def _windows(provider: Any) -> dict[str, Any]:
    if getattr(provider, "window_size", None) is None:
        return {}
    return {"window": provider.window_size[0] + 1, "windowed": tuple(map(bool, provider.window_attn_skip_freq))}


def _correct_windows(provider: Any, complete: dict, rope: Rope, local: Rope | None) -> None:
    kinds = complete.get("layer_types")
    if kinds and getattr(provider, "window_size", None) is not None:
        # 0.6.2 has the layers with windows in the families' code, not from the config
        provider.window_size = (complete["sliding_window"] - 1, 0)
        provider.window_attn_skip_freq = [int(kind == "sliding_attention") for kind in kinds]


@dataclass(frozen=True)
class Special:
    """How one provider's models differ from the others'.

    Attributes:
        parts: provider -> fields of the model's `ModelSpec`, without the second RoPE and `layer_heads`.
        layer_heads: provider -> the heads of each layer; empty unless they differ.
        correct: (provider, config with transformers' defaults, its RoPE, that of layers with windows) -> None; sets
            fields of the provider; raises ValueError if it can't be made to fit the config.
        layer_spec: pipeline stage -> `transformer_layer_spec`; None: the provider's own.
        provide: (provider, role, has the embedding, has the final norm, virtual stage) -> a chunk; None: the provider
            builds it.
        router: the class of the routers.
    """

    parts: Callable[[Any], dict[str, Any]] = _windows
    layer_heads: Callable[[Any], tuple[Heads, ...]] = lambda provider: ()
    correct: Callable[[Any, dict, Rope, Rope | None], None] = _correct_windows
    layer_spec: Callable[[int], Any] | None = None
    provide: Callable[..., Any] | None = None
    router: type[Router] = Router


def special(provider: Any) -> Special:
    """Returns the entry of a provider; that of ordinary models if it has none."""
    return _SPECIAL.get(type(provider).__name__, _ORDINARY)


def refuse_unbuilt(hf_config: dict, source: str) -> None:
    """Raises ValueError for a config.json (at `source`) of a Gemma 4 without experts, which is not built."""
    if hf_config.get("model_type") == _GEMMA4 and not hf_config.get("enable_moe_block"):
        raise ValueError(
            f"{source}: a Gemma 4 without experts, which Megatron-Bridge 0.6.2 builds for one pipeline stage and "
            "without packed sequences; expected one with experts (enable_moe_block=true): choose another model"
        )


def as_bridge_reads(config: Any, given: dict) -> Any:
    """Returns transformers' `config` with the keys that Megatron-Bridge reads.

    Args:
        given: the content of config.json.

    Raises:
        ValueError: config.json asks for what transformers or Megatron-Bridge cannot compute.
    """
    change = _PUBLISHED.get(config.model_type)
    return config if change is None else change(config, given)


def _mimo_as_published(config: Any, given: dict) -> Any:
    full, windowed = (config.rope_parameters[f"{kind}_attention"] for kind in ("full", "sliding"))
    for rope in (full, windowed):
        rope.setdefault("partial_rotary_factor", _SHARE)
    values = {
        "hybrid_layer_pattern": [int(kind == "sliding_attention") for kind in config.layer_types],
        "moe_layer_freq": [int(kind == "sparse") for kind in config.mlp_layer_types],
        "rope_theta": full["rope_theta"],
        "swa_rope_theta": windowed["rope_theta"],
        "partial_rotary_factor": full["partial_rotary_factor"],
        "layernorm_epsilon": config.rms_norm_eps,
        "sliding_window_size": config.sliding_window - 1,
        "swa_num_attention_heads": config.num_attention_heads,
        "swa_num_key_value_heads": 2 * config.num_key_value_heads,
        "swa_head_dim": config.head_dim,
        "swa_v_head_dim": config.v_head_dim,
        "scoring_func": "sigmoid",
        "add_swa_attention_sink_bias": True,
        "add_full_attention_sink_bias": False,
    }
    for key, value in values.items():
        if given.get(key, value) != value:
            raise ValueError(
                f"{key}={given[key]!r}, which transformers does not read: it computes with {value!r}; expected the "
                "same: choose another model"
            )
        setattr(config, key, value)
    return config


def _mimo_layer_spec(stage: int) -> Any:
    """Returns MiMo's `transformer_layer_spec` for a pipeline stage; Megatron-Bridge's own asks the global groups."""
    from megatron.bridge.models.mimo_v2_flash import modeling_mimo_v2_flash as theirs
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec

    def made(config: Any, vp_stage: int | None = None) -> Any:
        block = get_gpt_decoder_block_spec(config, use_transformer_engine=True, vp_stage=vp_stage, pp_rank=stage)
        for layer in block.layer_specs:
            layer.submodules.self_attention.module = theirs.MiMoV2FlashSelfAttention
            layer.submodules.self_attention.submodules.core_attention = theirs.MiMoV2FlashTEDotProductAttention
        return block

    return made


def _mimo_layer_heads(provider: Any) -> tuple[Heads, ...]:
    channels = provider.kv_channels, provider.v_head_dim
    counts = provider.full_attn_num_query_groups, provider.swa_num_query_groups
    return tuple(Heads(counts[windowed], *channels) for windowed in provider.hybrid_attention_pattern)


def _mimo_parts(provider: Any) -> dict[str, Any]:
    windowed = tuple(map(bool, provider.hybrid_attention_pattern))
    return {"window": provider.window_size, "windowed": windowed, "sinks": True}


def _correct_mimo(provider: Any, complete: dict, rope: Rope, local: Rope | None) -> None:
    assert local is not None
    provider.rotary_base = (local.theta, rope.theta)
    # 0.6.2 subtracts the token itself from `sliding_window_size`, which does not count it
    provider.window_size = complete["sliding_window"]


_PUBLISHED: dict[str, Callable[[Any, dict], Any]] = {
    "mimo_v2_flash": _mimo_as_published,
    _GEMMA4: lambda config, given: gemma.as_published(config),
}
_ORDINARY = Special()
_SPECIAL = {
    "Gemma2ModelProvider": Special(
        parts=lambda provider: {**_windows(provider), **gemma.caps(provider)}, layer_spec=lambda stage: gemma.layer2
    ),
    "Gemma3ModelProvider": Special(parts=gemma.windows, correct=gemma.correct3, provide=gemma.provide3),
    "Gemma4ModelProvider": Special(
        parts=lambda provider: {**gemma.windows(provider), **gemma.caps(provider)},
        layer_heads=gemma.layer_heads,
        correct=gemma.correct4,
        layer_spec=gemma.layer_spec4,
        provide=gemma.provide4,
        router=gemma.ScaledRouter,
    ),
    "MiMoV2FlashModelProvider": Special(
        parts=_mimo_parts, layer_heads=_mimo_layer_heads, correct=_correct_mimo, layer_spec=_mimo_layer_spec
    ),
}
