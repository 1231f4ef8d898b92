"""Gemma 2, whose attention in Megatron-Bridge 0.6.2 (`Gemma2DotProductAttention`) this project replaces by its own.

Theirs raises an error for packed sequences and context parallelism, builds its window on CUDA only, and compiles
FlexAttention with Triton where there is no mask. Everything else of the layer is Transformer Engine's.
"""

from __future__ import annotations

from typing import Any

from nemo_oprd.models.megatron.capped_attention import CappedAttention

PROVIDER = "Gemma2ModelProvider"


def layer_spec(provider: Any) -> Any:
    """The layer of a `Gemma2ModelProvider` with this project's attention."""
    from megatron.bridge.models.gemma.gemma2_provider import gemma2_layer_spec

    layer = gemma2_layer_spec(provider)
    layer.submodules.self_attention.submodules.core_attention = CappedAttention
    return layer
