"""Entries that a checkpoint needs for models of Transformer Engine's modules, whatever its own model is made of.

Every module of Transformer Engine has an extra state, which is empty without FP8, and Megatron's loader fails where a
checkpoint lacks one that the model asks for. Models of local layers have none in their attention and norms, and
`DistillingModel` leaves out those of its norms, so that it can load checkpoints that lack them.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor

# every layer with attention has this one
_PRESENT = "self_attention.linear_proj._extra_state"
_ATTENTION = "self_attention.core_attention"
# how the weight of a norm is stored that is a module of its own, and not part of the matrix behind it
_OF_A_NORM = "norm.weight"
_FINAL_NORM = "decoder.final_layernorm"


def add_extra_states(state: dict[str, Any]) -> None:
    """Adds the missing extra states, all empty, to a model chunk's sharded state dict, in place."""
    for name, present in [entry for entry in state.items() if entry[0].endswith(_PRESENT)]:
        layer, stored = name.removesuffix(_PRESENT), present.key.removesuffix(_PRESENT)
        # where layers are stored together, the keys of all layers begin alike
        norms = [
            value.key.removeprefix(stored).removesuffix(".weight")
            for key, value in state.items()
            if key.startswith(layer) and isinstance(value, ShardedTensor) and value.key.endswith(_OF_A_NORM)
        ]
        for module in (_ATTENTION, *norms):
            added = f"{module}._extra_state"
            state.setdefault(layer + added, replace(present, key=stored + added, data=None))
    weight = state.get(f"{_FINAL_NORM}.weight")
    if weight is not None:
        name = f"{_FINAL_NORM}._extra_state"
        state.setdefault(name, ShardedObject(name, None, (1,), (0,), weight.replica_id))
