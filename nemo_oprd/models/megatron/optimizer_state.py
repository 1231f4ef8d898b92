"""The state of Megatron's optimizer in a checkpoint: what is saved of it, and how PyTorch's AdamW takes it back."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import LocalNonpersistentObject


def sharded_optimizer_state(
    optimizer: Any, model: dict[str, Any], metadata: dict[str, Any], *, is_loading: bool
) -> dict[Any, Any]:
    """Megatron's sharded state of the optimizer.

    Args:
        model: the sharded state of the model with a key per layer. A key over all layers may not have holes, and layers
            above the deepest supervised one have no optimizer state.
        metadata: of the checkpoint's content, as Megatron takes it.
    """
    with _counted_in_empty_parts(optimizer):
        state = optimizer.sharded_state_dict(model, is_loading=is_loading, metadata=metadata)
    _count_in_empty_parts(optimizer, state)
    _leave_out_ungathered_state(state)
    return state


def prepare_adam_for_loading(optimizer: Any) -> None:
    """Prepares PyTorch's AdamW so that Megatron's distributed optimizer, made for Apex's or TE's Adam, can load it.

    Megatron loads into existing state only, so AdamW gets the state that a first step would create. Megatron also
    copies every entry of that state but never loads "step", which comes with the parameter groups, so the copy gets
    "step" back unchanged.
    """
    for part in optimizer.chained_optimizers:
        if not isinstance(part.optimizer, torch.optim.AdamW):
            continue
        for group in part.optimizer.param_groups:
            for p in group["params"]:
                if p not in part.optimizer.state:
                    state = {"exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}
                    part.optimizer.state[p] = {"step": torch.zeros(()), **state}
        if hasattr(part, "_set_main_param_and_optimizer_states"):
            copy = type(part)._set_main_param_and_optimizer_states
            part._set_main_param_and_optimizer_states = functools.partial(_copy_with_step, part, copy)


def load_optimizer_state(optimizer: Any, state: dict[Any, Any]) -> None:
    """Loads what `dist_checkpointing.load` returned, after `prepare_adam_for_loading`.

    Megatron loads one step counter for all parameters, and AdamW would then increment it once per parameter and update,
    so every parameter gets a counter of its own.
    """
    optimizer.load_state_dict(state)
    for part in optimizer.chained_optimizers:
        if isinstance(part.optimizer, torch.optim.AdamW):
            for kept in part.optimizer.state.values():
                kept["step"] = torch.as_tensor(kept["step"]).clone()


def _copy_with_step(part: Any, copy: Any, model_param: torch.nn.Parameter, tensors: dict[str, torch.Tensor]) -> None:
    group, order = part.model_param_group_index_map[model_param]
    main_param = part.optimizer.param_groups[group]["params"][order]
    copy(part, model_param, {**tensors, "step": part.optimizer.state[main_param]["step"]})


def _empty_parts(optimizer: Any) -> list[int]:
    """The parts of Megatron's optimizer that have no parameters on this rank, unless all are so.

    Experts have a part of their own. A pipeline stage that trains no expert has it, too, and has nothing in it. What is
    not sharded, such as the number of updates, is saved by rank 0 for all ranks.
    """
    parts = optimizer.chained_optimizers
    empty = [i for i, part in enumerate(parts) if not any(group["params"] for group in part.param_groups)]
    return [] if len(empty) == len(parts) else empty


@contextmanager
def _counted_in_empty_parts(optimizer: Any) -> Iterator[None]:
    """Within the context, empty parts of a distributed optimizer say the number of updates that the others have done.

    Megatron reads the number from the state of parameters, and an empty part has none.
    """
    parts, empty = optimizer.chained_optimizers, _empty_parts(optimizer)
    chosen = [parts[i] for i in empty if hasattr(parts[i], "gbuf_ranges")]
    for part in chosen:
        (full, *_) = (other for i, other in enumerate(parts) if i not in empty)
        part.state_dict = functools.partial(_state_of_empty_part, part, full)
    try:
        yield
    finally:
        for part in chosen:
            del part.state_dict


def _state_of_empty_part(part: Any, full: Any) -> dict[str, Any]:
    counted = [group["step"] for group in full.state_dict()["optimizer"]["param_groups"] if "step" in group]
    groups = [
        {k: v for k, v in group.items() if k != "params"} for group in part.optimizer.state_dict()["param_groups"]
    ]
    return {"optimizer": {"param_groups": [{**group, **({"step": counted[0]} if counted else {})} for group in groups]}}


def _count_in_empty_parts(optimizer: Any, state: dict[Any, Any]) -> None:
    """The same in the sharded state of an optimizer that is not distributed: `common_step` of its parts."""

    def inner(i: int) -> Any:
        return state[i].get("optimizer", state[i]).get("state", {})

    empty = _empty_parts(optimizer)
    for i in empty:
        counted = [inner(j).get("common_step") for j in range(len(optimizer.chained_optimizers)) if j not in empty]
        if counted[0] is not None:
            inner(i)["common_step"] = counted[0]


def _leave_out_ungathered_state(state: dict[Any, Any]) -> None:
    """Marks the parts of the optimizer's state that another data-parallel rank has gathered as nothing to be saved.

    Megatron gives those ranks a plain None there, which counts as a value that all ranks should share: every checkpoint
    would come with a warning per rank that "common state dicts" differ.
    """
    for part in (state, *(part for part in state.values() if isinstance(part, dict))):
        if part.get("param_state", ...) is None:
            part["param_state"] = LocalNonpersistentObject(None)
