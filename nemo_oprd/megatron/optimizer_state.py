"""The state of Megatron's optimizer in a checkpoint: its saved form, and its loading into PyTorch's AdamW.

Megatron saves the state of its distributed optimizer and of its plain ones in different forms. Both hold AdamW's
moments under the same keys. They differ in the key of the float32 weights beside bfloat16 ones (`_DISTRIBUTED_WEIGHT`,
`_PLAIN_WEIGHT`; only the distributed form has a second copy of float32 weights), and in the place of parameter groups
and step count. A checkpoint of one form is loaded into an optimizer of the other by asking for the tensors under the
keys that the file has, and moving groups and step count to where the optimizer looks for them.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import LocalNonpersistentObject

_DISTRIBUTED_WEIGHT, _PLAIN_WEIGHT = "optimizer.state.param.", "optimizer.state.fp32_param."
# whether an optimizer is distributed -> the beginning of these keys
WEIGHT_KEYS = {True: _DISTRIBUTED_WEIGHT, False: _PLAIN_WEIGHT}
# the key of the step count in the state of a plain optimizer that counts per parameter
_COUNT = "common_step"


def sharded_optimizer_state(
    optimizer: Any, model: dict[str, Any], metadata: dict[str, Any], *, is_loading: bool
) -> dict[Any, Any]:
    """Returns Megatron's sharded state of the optimizer.

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


def request_saved_form(optimizer: Any, state: dict[Any, Any], saved_keys: Iterable[str]) -> bool:
    """Changes `state`, made by `sharded_optimizer_state` to be loaded, into a request for the form that a file has.

    Args:
        saved_keys: the keys of the tensors in the file.

    Returns:
        Whether that form is another than `optimizer` has, so that `take_other_form` is needed after loading.
    """
    in_file = any(key.startswith(_DISTRIBUTED_WEIGHT) for key in saved_keys)
    if all(is_distributed(part) == in_file for part in optimizer.chained_optimizers):
        return False
    for part, of_part in _parts(optimizer, state):
        if not is_distributed(part):
            for tensor in nested_values(of_part):
                if getattr(tensor, "key", "").startswith(_PLAIN_WEIGHT):
                    tensor.key = _DISTRIBUTED_WEIGHT + tensor.key.removeprefix(_PLAIN_WEIGHT)
            continue
        for parameter, tensors in zip(_parameters(part), of_part["param_state"].values(), strict=True):
            if parameter.dtype == torch.float32:  # the file holds it among the model's weights only
                del tensors["param"]
            else:
                tensors["param"].key = _PLAIN_WEIGHT + tensors["param"].key.removeprefix(_DISTRIBUTED_WEIGHT)
    return True


def take_other_form(optimizer: Any, state: dict[Any, Any]) -> None:
    """Changes `state`, loaded in the form that `optimizer` does not have, into the form that `optimizer` loads.

    The model must have its weights already: a distributed optimizer loads float32 weights from them.
    """
    for part, of_part in _parts(optimizer, state):
        if is_distributed(part):
            plain = of_part.pop("optimizer", of_part)
            counted = {key: value for key, value in plain.pop("state", {}).items() if key == _COUNT}
            groups = [{k: v for k, v in group.items() if k != "params"} for group in plain.pop("param_groups")]
            of_part["optimizer"] = {"param_groups": groups, "state": counted}
            of_part["param_state_sharding_type"] = "fully_reshardable"
            for i, parameter in enumerate(_parameters(part)):
                of_part["param_state"][i].setdefault("param", parameter.detach())
            continue
        groups, inner = of_part["optimizer"]["param_groups"], _inner_state(part, of_part)
        for group, here in zip(groups, inner["param_groups"], strict=True):
            group["params"] = here["params"]
        inner["param_groups"] = groups


def place_count(optimizer: Any, state: dict[Any, Any]) -> None:
    """Writes the number of updates in a loaded state to where each part of `optimizer` looks for it.

    PyTorch's AdamW counts per parameter, which Megatron's plain optimizers save as `common_step`. Apex's and
    Transformer Engine's count per group, and so does every distributed optimizer in a file. A file has one number for
    all, but empty groups may lack it.
    """
    parts = [(part, _inner_state(part, of_part)) for part, of_part in _parts(optimizer, state)]
    found = [inner.get("state", {}).pop(_COUNT, None) for _, inner in parts]
    found += [group.pop("step", None) for _, inner in parts for group in inner["param_groups"]]
    count = next((int(each) for each in found if each is not None), 0)
    for part, inner in parts:
        is_torch = isinstance(part.optimizer, torch.optim.AdamW)
        if is_torch and not is_distributed(part):
            inner.setdefault("state", {})[_COUNT] = torch.tensor(float(count))
        elif is_torch or count:
            for group in inner["param_groups"]:
                group["step"] = count


def _inner_state(part: Any, of_part: dict[str, Any]) -> dict[str, Any]:
    """Returns the dict that holds groups and counts in `of_part`, the state of `part`."""
    nested = is_distributed(part) or "fp32_from_fp16_params" in of_part
    found: dict[str, Any] = of_part["optimizer"] if nested else of_part
    return found


def _parameters(part: Any) -> Iterator[torch.nn.Parameter]:
    """Returns the parameters of a part of a distributed optimizer, in the order of its saved state."""
    return (parameter for buffer in part.buffers for parameter in buffer.param_index_map)


def _parts(optimizer: Any, state: dict[Any, Any]) -> Iterator[tuple[Any, dict[str, Any]]]:
    """Returns the parts of Megatron's optimizer, each with its part of a sharded state."""
    parts = optimizer.chained_optimizers
    return zip(parts, [state] if len(parts) == 1 else [state[i] for i in range(len(parts))], strict=True)


def is_distributed(part: Any) -> bool:
    """Returns whether a part of Megatron's optimizer is a distributed one."""
    return hasattr(part, "gbuf_ranges")


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
                    part.optimizer.state[p] = first_state(p)
        if hasattr(part, "_set_main_param_and_optimizer_states"):
            copy = type(part)._set_main_param_and_optimizer_states
            part._set_main_param_and_optimizer_states = functools.partial(_copy_with_step, part, copy)


def first_state(parameter: torch.Tensor, *, counted: bool = True) -> dict[str, torch.Tensor]:
    """Returns the state that AdamW's first step creates for a parameter; `counted`: with PyTorch's step count.

    The count lies where fused kernels expect it, on the parameter's device.
    """
    state = {"exp_avg": torch.zeros_like(parameter), "exp_avg_sq": torch.zeros_like(parameter)}
    return {"step": torch.zeros((), device=parameter.device), **state} if counted else state


def load_optimizer_state(optimizer: Any, state: dict[Any, Any]) -> None:
    """Loads what `dist_checkpointing.load` returned, after `prepare_adam_for_loading`.

    Megatron loads one step counter for all parameters, and AdamW would then increment it once per parameter and update,
    so every parameter gets a counter of its own. Which implementation of AdamW runs is not taken from the file.
    """
    fused = [[group.get("fused") for group in part.optimizer.param_groups] for part in _inner(optimizer)]
    optimizer.load_state_dict(state)
    for part, of_part in zip(_inner(optimizer), fused, strict=True):
        for group, value in zip(part.optimizer.param_groups, of_part, strict=True):
            group["fused"] = value
        for parameter, kept in part.optimizer.state.items():
            kept["step"] = torch.as_tensor(kept["step"], device=parameter.device).clone()


def _inner(optimizer: Any) -> list[Any]:
    """Returns the parts of Megatron's optimizer that hold PyTorch's AdamW."""
    return [part for part in optimizer.chained_optimizers if isinstance(part.optimizer, torch.optim.AdamW)]


def _copy_with_step(part: Any, copy: Any, model_param: torch.nn.Parameter, tensors: dict[str, torch.Tensor]) -> None:
    group, order = part.model_param_group_index_map[model_param]
    main_param = part.optimizer.param_groups[group]["params"][order]
    copy(part, model_param, {**tensors, "step": part.optimizer.state[main_param]["step"]})


def _empty_parts(optimizer: Any) -> list[int]:
    """Returns the indices of the optimizer's parts without parameters on this rank; none if all parts are empty.

    Experts have a part of their own, which is empty on a pipeline stage that trains no expert. What is not sharded,
    such as the number of updates, is saved by rank 0 for all ranks.
    """
    parts = optimizer.chained_optimizers
    empty = [i for i, part in enumerate(parts) if not any(group["params"] for group in part.param_groups)]
    return [] if len(empty) == len(parts) else empty


@contextmanager
def _counted_in_empty_parts(optimizer: Any) -> Iterator[None]:
    """Makes empty parts of a distributed optimizer report the other parts' number of updates, within the context.

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
    """Copies the number of updates (`common_step`) to empty parts in the sharded state of a plain optimizer."""

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
