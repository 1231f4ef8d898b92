"""Replaces parts that Megatron-Bridge 0.6.2 builds for Gemma 2, Gemma 3, and Gemma 4 with experts.

In Gemma 3, Megatron-Bridge differs from transformers, or allows no second model:
- The norms behind attention and feed-forward block get Transformer Engine's default epsilon, 1e-5, in place of the
  config's: this alone causes a tenfold deviation in float32 (`set_epsilon_of_post_norms`).
- The scale of the embeddings is multiplied in float32, where transformers rounds it to the weights' type first.
- Embedding and rotation ask Megatron's global groups, which describe one layout only.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from nemo_oprd.megatron.attention import CappedAttention
from nemo_oprd.megatron.experts import Router
from nemo_oprd.megatron.parallel import Role
from nemo_oprd.models.architecture import Heads
from nemo_oprd.models.rope import Rope

# Gemma 2: this project replaces its attention in Megatron-Bridge 0.6.2 (`Gemma2DotProductAttention`) by its own.
#
# Theirs raises an error for packed sequences and context parallelism, builds its window on CUDA only, and compiles
# FlexAttention with Triton where there is no mask. Everything else of the layer is Transformer Engine's.


def layer2(provider: Any) -> Any:
    """Returns the layer of Gemma 2 with this project's attention, the same on all stages."""
    from megatron.bridge.models.gemma.gemma2_provider import gemma2_layer_spec

    layer = gemma2_layer_spec(provider)
    layer.submodules.self_attention.submodules.core_attention = CappedAttention
    return layer


def caps(provider: Any) -> dict[str, Any]:
    """Returns the `ModelSpec` fields for the cap of logits, Gemma 2's cap in attention, and norms behind blocks."""
    found: dict[str, Any] = {"output_cap": provider.final_logit_softcapping or None, "post_norms": True}
    if hasattr(provider, "attn_logit_softcapping"):
        found["attention_cap"] = float(provider.attn_logit_softcapping or 0)
    return found


def windows(provider: Any) -> dict[str, Any]:
    """Returns the `ModelSpec` fields for the windows of Gemma 3 or 4, and for their norms behind blocks."""
    return {"window": provider.window_size, "windowed": windowed_layers(provider), "post_norms": True}


def correct3(provider: Any, complete: dict, rope: Rope, local: Rope | None) -> None:
    """Sets a `Gemma3ModelProvider`'s two rotations. ValueError if Megatron-Bridge gives windows to other layers."""
    assert local is not None
    provider.rotary_base = (local.theta, rope.theta)
    provider.rope_scaling_factor = rope.get("factor") or 1.0
    _check_windows(provider, complete)


def _check_windows(provider: Any, complete: dict) -> None:
    kinds = complete.get("layer_types")
    if tuple(kind == "sliding_attention" for kind in kinds or ()) != windowed_layers(provider):
        raise ValueError(
            f"layer_types={kinds} but Megatron-Bridge gives all layers windows except those whose number is a "
            f"multiple of {sum(provider.interleaved_attn_pattern)}; expected these: choose another model"
        )


def provide3(provider: Any, role: Role, first: bool, last: bool, vp_stage: int | None) -> Any:
    """Builds a chunk of a `Gemma3ModelProvider`, for the groups of `role`.

    Args:
        first, last: whether the chunk has the embedding, and the final norm.
    """
    from megatron.bridge.models.gemma.gemma3_provider import Gemma3RotaryEmbedding

    local_base, base = provider.rotary_base
    model = _with_scaled_embedding(provider, first, last, vp_stage)
    model.rotary_pos_emb = Gemma3RotaryEmbedding(
        kv_channels=provider.kv_channels,
        rotary_percent=provider.rotary_percent,
        rotary_interleaved=provider.rotary_interleaved,
        seq_len_interpolation_factor=provider.seq_len_interpolation_factor,
        rotary_base=base,
        rotary_base_local=local_base,
        rope_scaling=False,
        rope_scaling_factor=provider.rope_scaling_factor,
        use_cpu_initialization=provider.use_cpu_initialization,
        cp_group=role.member_groups.cp,
    )
    return model


def _with_scaled_embedding(provider: Any, first: bool, last: bool, vp_stage: int | None) -> Any:
    """Builds a chunk of Gemma 3 or 4, whose rotary embedding is to be replaced."""
    from megatron.bridge.models.gemma.modules import EmbeddingScalingMixin, extend_instance
    from megatron.bridge.models.gpt_provider import GPTModelProvider

    both = provider.rotary_base
    provider.rotary_base = both[0]  # Megatron's own rotary embedding has one
    try:
        model = GPTModelProvider.provide(provider, first, last, vp_stage)
    finally:
        provider.rotary_base = both
    if hasattr(model, "embedding"):
        extend_instance(model.embedding, EmbeddingScalingMixin)
    return model


# Gemma 4 with experts. Layers with windows have other heads than those without, whose keys are the values, too.
#
# Megatron-Bridge 0.6.2 reads one number of heads, which transformers refuses to name for all layers; it asks Megatron's
# global groups for embedding, rotation and stage; and its rotation is a pair, which Megatron's recomputation of layers
# does not pass. Here attention takes the pair from the microbatch. Its router differs from others by the norm of its
# input, and by factors of the weights (`ScaledRouter`).


def as_published(config: Any) -> Any:
    """Returns transformers' config of Gemma 4 without configs per layer, with the keys of a published config.json.

    Raises:
        ValueError: layers of a kind differ in their heads, or one of the two kinds is missing.
    """
    from transformers import PreTrainedConfig

    heads: dict[str, set[tuple[int, int]]] = {}
    for kind, layer in zip(config.layer_types, layer_configs(config), strict=True):
        heads.setdefault(kind, set()).add((layer.num_key_value_heads, layer.head_dim))
    if any(len(found) > 1 for found in heads.values()) or set(heads) != {"sliding_attention", "full_attention"}:
        raise ValueError(
            f"layers have the key/value heads and channels {heads}; expected one of each for layers with windows and "
            "for those without: choose another model"
        )
    ((local_heads, local_channels),), ((count, channels),) = heads["sliding_attention"], heads["full_attention"]
    flat = PreTrainedConfig()
    values = {name: value for name, value in config.to_dict().items() if name != "per_layer_config"}
    values |= {"num_key_value_heads": local_heads, "head_dim": local_channels}
    values |= {"num_global_key_value_heads": count, "global_head_dim": channels}
    for name, value in values.items():
        setattr(flat, name, value)
    return flat


def layer_configs(config: Any) -> list[Any]:
    """Returns transformers' config of each layer."""
    return [config.per_layer_config[layer] for layer in range(config.num_hidden_layers)]


def layer_heads(provider: Any) -> tuple[Heads, ...]:
    """Returns the heads of each layer of a `Gemma4ModelProvider`."""
    local = Heads(provider.num_query_groups, provider.kv_channels, provider.kv_channels)
    channels = provider.global_head_dim
    whole = Heads(provider.num_global_key_value_heads, channels, channels, tied=provider.attention_k_eq_v)
    return tuple(local if windowed else whole for windowed in windowed_layers(provider))


def correct4(provider: Any, complete: dict, rope: Rope, local: Rope | None) -> None:
    """Sets a `Gemma4ModelProvider`'s rotations and window. Raises ValueError as `correct3`."""
    assert local is not None
    provider.rotary_base, provider.global_rotary_percent = (local.theta, rope.theta), rope.share
    provider.window_size = complete["sliding_window"]
    _check_windows(provider, complete)


def layer_spec4(stage: int) -> Any:
    """Returns Gemma 4's `transformer_layer_spec` for a pipeline stage; Megatron-Bridge's own asks the global groups."""
    from megatron.bridge.models.gemma.modeling_gemma4 import gemma4_block_spec

    def made(config: Any, vp_stage: int | None = None) -> Any:
        return gemma4_block_spec(config, use_transformer_engine=True, vp_stage=vp_stage, pp_rank=stage)

    return made


def provide4(provider: Any, role: Role, first: bool, last: bool, vp_stage: int | None) -> Any:
    """Builds a chunk of a `Gemma4ModelProvider`; the arguments are those of `provide3`."""
    from megatron.bridge.models.gemma.modeling_gemma4 import Gemma4RotaryEmbedding

    local_base, base = provider.rotary_base
    model = _with_scaled_embedding(provider, first, last, vp_stage)
    model.rotary_pos_emb = Gemma4RotaryEmbedding(
        kv_channels=provider.kv_channels,
        rotary_interleaved=provider.rotary_interleaved,
        seq_len_interpolation_factor=provider.seq_len_interpolation_factor,
        rotary_base=base,
        rotary_base_local=local_base,
        rope_scaling=False,
        use_cpu_initialization=provider.use_cpu_initialization,
        global_kv_channels=provider.global_head_dim,
        global_rotary_percent=provider.global_rotary_percent,
        cp_group=role.member_groups.cp,
    )
    for layer, heads in zip(model.decoder.layers, _heads_of(model, provider), strict=True):
        attention = layer.self_attention
        attention._tied_kv = heads.tied
        cls: Any = type(attention)
        attention.__class__ = _with_rotations(cls)
    return model


def _heads_of(model: Any, provider: Any) -> list[Heads]:
    heads = layer_heads(provider)
    return [heads[layer.layer_number - 1] for layer in model.decoder.layers]


@functools.cache
def _with_rotations(cls: Any) -> Any:
    class Rotated(cls):
        """Attention that takes the angles of both kinds of layers from the microbatch."""

        def forward(self, *args: Any, packed_seq_params: Any = None, **kwargs: Any) -> Any:
            kwargs["rotary_pos_emb"] = packed_seq_params.rotations
            return super().forward(*args, packed_seq_params=packed_seq_params, **kwargs)

        def sharded_state_dict(self, *args: Any, **kwargs: Any) -> Any:
            # under the names of all layers, which are stored one by one
            return super(cls, self).sharded_state_dict(*args, **kwargs)

    return Rotated


class ScaledRouter(Router):
    """The router of Gemma 4: its input is normed and scaled, and each expert's weights are multiplied by a factor."""

    def gating(self, input: torch.Tensor) -> torch.Tensor:
        """Computes the logits [S, B, E] of [S, B, D]."""
        values = input.float()
        normed = values * (values.square().mean(-1, keepdim=True) + self.config.layernorm_epsilon).rsqrt()
        return super().gating(normed.to(input.dtype) * self.scale * self.config.hidden_size**-0.5)

    def routing(
        self, logits: torch.Tensor, padding_mask: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Routes as `Router`, and multiplies each expert's weights by the expert's factor."""
        weights, where = super().routing(logits, padding_mask)
        return weights * self.per_expert_scale, where


def set_epsilon_of_post_norms(model: Any) -> None:
    """Gives the norms behind row-parallel layers the epsilon of the model's other norms."""
    for layer in model.decoder.layers:
        for linear in (layer.self_attention.linear_proj, getattr(layer.mlp, "linear_fc2", None)):
            if linear is not None and hasattr(linear, "post_layernorm"):
                linear.post_layernorm.eps = model.config.layernorm_epsilon


def windowed_layers(provider: Any) -> tuple[bool, ...]:
    """Returns for each layer whether Megatron-Bridge gives it a sliding window: the last of each period has none."""
    period = sum(provider.interleaved_attn_pattern)
    return tuple(number % period != 0 for number in range(1, provider.num_layers + 1))
