"""What Megatron-core's multi-latent attention does not take from its settings (DeepSeek-V3, GLM 4.7 Flash, Moonlight).

With norms of the narrow states, Megatron-core 0.19 also norms the input of queries that are projected without a narrow
state (`q_lora_rank=null`, as in Moonlight), which has a norm before the layer already. Their model has no such norm.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from megatron.core.transformer.spec_utils import ModuleSpec

from nemo_oprd.models.architecture import LatentAttention
from nemo_oprd.models.megatron.parallel import Role


class DirectQueries(MLASelfAttention):
    """Latent attention whose queries are projected from the layer's normed input."""

    def _resolve_qk_norm_config(self, submodules: Any) -> dict[str, Any]:
        # Megatron gives this projection no group, so that it would ask the global ones
        chosen = ModuleSpec(submodules.linear_q_proj, params={"tp_group": self.pg_collection.tp})
        return {**super()._resolve_qk_norm_config(submodules), "linear_q_proj": chosen}


def with_direct_queries(block: Callable[..., Any]) -> Callable[..., Any]:
    """A provider's `transformer_layer_spec` whose latent attention is `DirectQueries`."""

    @functools.wraps(block)  # Megatron-Bridge looks at its parameters
    def made(*args: Any, **kwargs: Any) -> Any:
        found = block(*args, **kwargs)
        layers = [_with_direct_queries(layer) for layer in found.layer_specs]
        return dataclasses.replace(found, layer_specs=layers)

    return made


def _with_direct_queries(layer: Any) -> Any:
    attention = layer.submodules.self_attention
    if attention.module is not MLASelfAttention:
        raise ValueError(
            f"Megatron-Bridge builds latent attention as {attention.module.__name__}; expected MLASelfAttention: use "
            "the version of Megatron-Bridge that docs/nemo.md names"
        )
    chosen = dataclasses.replace(attention, module=DirectQueries)
    return dataclasses.replace(layer, submodules=dataclasses.replace(layer.submodules, self_attention=chosen))


def prepare(model: Any, latent: LatentAttention, role: Role) -> None:
    """Sets the epsilon and the groups of a chunk's latent attention.

    The norms of the narrow states get their epsilon: Megatron has one for all norms. The projections to the narrow
    states, which every tensor rank holds, get the ranks' group, by which a checkpoint tells the copies apart.

    Raises:
        ValueError: the softmax's scale is not transformers'.
    """
    for layer in model.decoder.layers:
        scale = layer.self_attention.softmax_scale
        if not math.isclose(scale, latent.scale, rel_tol=1e-6):
            raise ValueError(
                f"Megatron-Bridge multiplies the products of queries and keys by {scale:g}, transformers by "
                f"{latent.scale:g}; expected the same: choose a model with other RoPE settings"
            )
        for name in ("q", "kv"):
            down, up = (getattr(layer.self_attention, f"linear_{name}_{way}_proj", None) for way in ("down", "up"))
            if down is not None:
                down._tp_group = role.member_groups.tp
            if up is not None and hasattr(up, "layer_norm_weight"):
                up.eps = latent.norm_eps
