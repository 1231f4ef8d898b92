"""Builds Gemma 2's attention, and three parts of Gemma 3, otherwise than Megatron-Bridge 0.6.2.

In Gemma 3, Megatron-Bridge differs from transformers, or allows no second model:
- The norms behind attention and feed-forward block get Transformer Engine's default epsilon, 1e-5, in place of the
  config's: this is the whole of the tenfold deviation in float32 (`set_epsilon_of_post_norms`).
- The scale of the embeddings is multiplied in float32, where transformers rounds it to the weights' type first.
- Embedding and rotation ask Megatron's global groups, which describe one layout only.
"""

from __future__ import annotations

from typing import Any

from nemo_oprd.megatron.attention import CappedAttention
from nemo_oprd.megatron.parallel import Role

# Gemma 2: this project replaces its attention in Megatron-Bridge 0.6.2 (`Gemma2DotProductAttention`) by its own.
#
# Theirs raises an error for packed sequences and context parallelism, builds its window on CUDA only, and compiles
# FlexAttention with Triton where there is no mask. Everything else of the layer is Transformer Engine's.


GEMMA2_PROVIDER = "Gemma2ModelProvider"


def layer_spec(provider: Any) -> Any:
    """The layer of a `Gemma2ModelProvider` with this project's attention."""
    from megatron.bridge.models.gemma.gemma2_provider import gemma2_layer_spec

    layer = gemma2_layer_spec(provider)
    layer.submodules.self_attention.submodules.core_attention = CappedAttention
    return layer


GEMMA3_PROVIDER = "Gemma3ModelProvider"


def provide(provider: Any, role: Role, first: bool, last: bool, vp_stage: int | None) -> Any:
    """Builds a chunk of a `Gemma3ModelProvider`, for the groups of `role`.

    Args:
        first, last: whether the chunk has the embedding, and the final norm.
    """
    from megatron.bridge.models.gemma.gemma3_provider import Gemma3RotaryEmbedding
    from megatron.bridge.models.gemma.modules import EmbeddingScalingMixin, extend_instance
    from megatron.bridge.models.gpt_provider import GPTModelProvider

    local_base, base = provider.rotary_base
    provider.rotary_base = local_base  # Megatron's own rotary embedding, replaced below, has one
    try:
        model = GPTModelProvider.provide(provider, first, last, vp_stage)
    finally:
        provider.rotary_base = (local_base, base)
    if hasattr(model, "embedding"):
        extend_instance(model.embedding, EmbeddingScalingMixin)
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


def set_epsilon_of_post_norms(model: Any) -> None:
    """Gives the norms behind row-parallel layers the epsilon of the model's other norms."""
    for layer in model.decoder.layers:
        for linear in (layer.self_attention.linear_proj, layer.mlp.linear_fc2):
            if hasattr(linear, "post_layernorm"):
                linear.post_layernorm.eps = model.config.layernorm_epsilon


def windowed_layers(provider: Any) -> tuple[bool, ...]:
    """For each layer, whether Megatron-Bridge gives it a sliding window: one of every few has none."""
    period = sum(provider.interleaved_attn_pattern)
    return tuple(number % period != 0 for number in range(1, provider.num_layers + 1))
