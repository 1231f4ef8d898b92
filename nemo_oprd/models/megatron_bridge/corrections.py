"""What Megatron-Bridge reads otherwise than transformers from a config.json, or does not read, set right.

Each of these would give no error and another model. What cannot be set right is refused; the frequencies, windows and
routing of the built model are compared or replaced in `build.py`.
"""

from __future__ import annotations

from typing import Any

from nemo_oprd.models.megatron_bridge.gemma3 import PROVIDER as GEMMA3
from nemo_oprd.models.megatron_bridge.gemma3 import windowed_layers
from nemo_oprd.models.rope import Rope


def correct(provider: Any, complete: dict, rope: Rope, local: Rope | None = None) -> None:
    """Changes the fields of a new provider.

    Args:
        complete: the HF config with transformers' defaults filled in.
        rope: as parsed from it.
        local: that of layers with windows, where it is another one.

    Raises:
        ValueError: Megatron-Bridge would give other layers windows than the config, or would let no token attend to
            later ones, where the config does.
    """
    # 0.6.2 reads the share where transformers 4 had it in most families, else rotates all channels
    provider.rotary_percent = rope.share
    # transformers leaves out the layers for multi-token prediction, which stand behind the model's own
    provider.mtp_num_layers = None
    if getattr(provider, "multi_latent_attention", False):
        _set_latent_rope(provider, rope)
    elif rope.kind == "yarn":
        _set_yarn(provider, rope)
    if complete.get("use_bidirectional_attention"):
        raise ValueError(
            "use_bidirectional_attention=true: tokens would attend to later ones; expected a model that generates: "
            "choose another one"
        )
    kinds = complete.get("layer_types")
    if kinds and getattr(provider, "experimental_attention_variant", None) == "gated_delta_net":
        # 0.6.2 has one number for all layers
        provider.linear_attention_freq = [int(kind == "linear_attention") for kind in kinds]
    if type(provider).__name__ == GEMMA3:
        assert local is not None
        provider.rotary_base = (local.theta, rope.theta)
        provider.rope_scaling_factor = rope.get("factor") or 1.0
        given = tuple(kind == "sliding_attention" for kind in kinds or ())
        if given != windowed_layers(provider):
            raise ValueError(
                f"layer_types={kinds} but Megatron-Bridge gives all layers windows except those whose number is a "
                f"multiple of {sum(provider.interleaved_attn_pattern)}; expected these: choose another model"
            )
    elif kinds and getattr(provider, "window_size", None) is not None:
        # 0.6.2 says in the families' code which layers have windows
        provider.window_size = (complete["sliding_window"] - 1, 0)
        provider.window_attn_skip_freq = [int(kind == "sliding_attention") for kind in kinds]
    limit = complete.get("swiglu_limit")
    if limit is not None:
        provider.activation_func_clamp_value = limit


def _set_latent_rope(provider: Any, rope: Rope) -> None:
    """The rotation of multi-latent attention, which is YaRN's in Megatron-Bridge also where the config has none."""
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
    """YaRN's settings; 0.6.2 has those of the published gpt-oss in its code, and ignores the config's."""
    provider.yarn_rotary_scaling_factor = rope.get("factor")
    provider.yarn_original_max_position_embeddings = rope.get("original_max_position_embeddings")
    for field, name in (("yarn_beta_fast", "beta_fast"), ("yarn_beta_slow", "beta_slow")):
        if rope.get(name) is not None:
            setattr(provider, field, rope.get(name))
    truncate = rope.get("truncate")
    provider.yarn_correction_range_round_to_int = True if truncate is None else truncate
