"""Finds the decoder layers of a model of vLLM or transformers, for the teacher's worker and for the canary."""

from __future__ import annotations

import torch

# names of lists of decoder layers, and parts of the names of a model's other towers
_LISTS, _OTHER_TOWERS = ("layers", "h", "blocks"), ("vis", "audio")


def find_layers(model: torch.nn.Module, count: int) -> str:
    """Returns the name of the list of the `count` decoder layers; raises ValueError unless there is exactly one."""
    found = [
        name
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.ModuleList)
        and len(module) == count
        and name.rpartition(".")[2] in _LISTS
        and not any(tower in name for tower in _OTHER_TOWERS)
    ]
    if len(found) != 1:
        raise ValueError(
            f"{type(model).__name__} has {len(found)} lists of {count} decoder layers named {', '.join(_LISTS)} "
            f"({', '.join(found) or 'none'}); expected exactly one: this model can't be read"
        )
    return found[0]
