"""Entries that a checkpoint needs for models of Transformer Engine's modules, whatever its own model is made of.

Every module of Transformer Engine has an extra state, which is empty without FP8, and Megatron's loader fails where a
checkpoint lacks one that the model asks for. Models of local layers have none in their attention and norms, and
`DistillingModel` leaves out those of its norms, so that it can load checkpoints that lack them.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from megatron.core.dist_checkpointing.mapping import ShardedObject

# every kind of layer has this one
_PRESENT = "self_attention.linear_proj._extra_state"
_OF_A_LAYER = ("self_attention.core_attention",)
_OF_A_LAYER_WITH_QK_NORM = ("self_attention.q_layernorm", "self_attention.k_layernorm")
# of a layer with experts; elsewhere this norm belongs to the matrix after it
_ROUTER, _NORM_BEFORE_ROUTER = "mlp.router.weight", "pre_mlp_layernorm"
_FINAL_NORM = "decoder.final_layernorm"


def add_extra_states(state: dict[str, Any], *, qk_norm: bool) -> None:
    """Adds the missing extra states, all empty, to a model chunk's sharded state dict, in place.

    Args:
        qk_norm: whether the layers have norms of queries and keys.
    """
    modules = _OF_A_LAYER + (_OF_A_LAYER_WITH_QK_NORM if qk_norm else ())
    for name, present in [entry for entry in state.items() if entry[0].endswith(_PRESENT)]:
        layer, stored = name.removesuffix(_PRESENT), present.key.removesuffix(_PRESENT)
        for module in (*modules, *((_NORM_BEFORE_ROUTER,) if layer + _ROUTER in state else ())):
            added = f"{module}._extra_state"
            state.setdefault(layer + added, replace(present, key=stored + added, data=None))
    weight = state.get(f"{_FINAL_NORM}.weight")
    if weight is not None:
        name = f"{_FINAL_NORM}._extra_state"
        state.setdefault(name, ShardedObject(name, None, (1,), (0,), weight.replica_id))
