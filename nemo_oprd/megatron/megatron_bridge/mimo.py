"""MiMo-V2-Flash, as Megatron-Bridge 0.6.2 builds it: layers with windows have other heads than those without.

Megatron-Bridge reads the keys of the published config.json, transformers fields of its own class, whose values for the
published model are in its code. `add_published_keys` gives the first those of the second, and refuses a config.json in
which the two differ: transformers would compute another model than the file asks for.
"""

from __future__ import annotations

from typing import Any

from nemo_oprd.megatron.megatron_bridge import gemma
from nemo_oprd.models.architecture import Heads

MODEL_TYPE, PROVIDER = "mimo_v2_flash", "MiMoV2FlashModelProvider"
_SHARE = 0.334  # of the channels that are rotated: transformers' default of this model, which its config leaves out


def add_published_keys(config: Any, given: dict) -> None:
    """Sets the keys that Megatron-Bridge reads in transformers' config.

    Args:
        given: the content of config.json.

    Raises:
        ValueError: config.json has another value.
    """
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


def layer_heads(provider: Any) -> tuple[Heads, ...]:
    """The heads of each layer of a provider; empty unless they differ."""
    if type(provider).__name__ != PROVIDER:
        return gemma.layer_heads(provider)
    channels = provider.kv_channels, provider.v_head_dim
    counts = provider.full_attn_num_query_groups, provider.swa_num_query_groups
    return tuple(Heads(counts[windowed], *channels) for windowed in provider.hybrid_attention_pattern)


def layer_spec(stage: int) -> Any:
    """The `transformer_layer_spec` of a pipeline stage, for which Megatron-Bridge's asks Megatron's global groups."""
    from megatron.bridge.models.mimo_v2_flash import modeling_mimo_v2_flash as theirs
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec

    def made(config: Any, vp_stage: int | None = None) -> Any:
        block = get_gpt_decoder_block_spec(config, use_transformer_engine=True, vp_stage=vp_stage, pp_rank=stage)
        for layer in block.layer_specs:
            layer.submodules.self_attention.module = theirs.MiMoV2FlashSelfAttention
            layer.submodules.self_attention.submodules.core_attention = theirs.MiMoV2FlashTEDotProductAttention
        return block

    return made
