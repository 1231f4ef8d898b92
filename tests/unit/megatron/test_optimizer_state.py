"""Where a checkpoint's step count goes, for each kind of optimizer that loads it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nemo_oprd.megatron.optimizer_state import place_count


def part(*, torchs: bool, distributed: bool) -> Any:
    """A part of Megatron's optimizer with PyTorch's AdamW in it, or one that counts per group."""
    weight = torch.nn.Parameter(torch.zeros(2))
    inner = torch.optim.AdamW([weight]) if torchs else SimpleNamespace()
    return SimpleNamespace(optimizer=inner, **({"gbuf_ranges": []} if distributed else {}))


def saved(counted: str, *, nested: bool) -> dict[str, Any]:
    """A loaded state of two groups, of which the second is empty, with the count 7 as `counted` says."""
    groups: list[dict[str, Any]] = [{"lr": 1.0}, {"lr": 2.0}]
    state: dict[str, Any] = {0: {"exp_avg": torch.zeros(2)}}
    if counted == "state":
        state["common_step"] = torch.tensor(7.0)
    if counted == "groups":
        groups[0]["step"] = 7
    inner = {"state": state, "param_groups": groups}
    return {"optimizer": inner, "fp32_from_fp16_params": []} if nested else inner


@pytest.mark.parametrize("counted", ["state", "groups", "nowhere"])
@pytest.mark.parametrize("torchs", [False, True])
@pytest.mark.parametrize("distributed", [False, True])
@pytest.mark.parametrize("parts", [1, 2])
def test_every_kind_finds_the_count(counted: str, torchs: bool, distributed: bool, parts: int) -> None:
    """With two parts only the first has the count, as where a stage trains no experts."""
    nested = distributed
    optimizer = SimpleNamespace(chained_optimizers=[part(torchs=torchs, distributed=distributed) for _ in range(parts)])
    states = [saved(counted if i == 0 else "nowhere", nested=nested) for i in range(parts)]
    place_count(optimizer, states[0] if parts == 1 else dict(enumerate(states)))
    count = 0 if counted == "nowhere" else 7
    for state in states:
        inner = state["optimizer"] if nested else state
        steps = [group.get("step") for group in inner["param_groups"]]
        common = inner["state"].get("common_step")
        if torchs and not distributed:
            assert steps == [None, None] and float(common) == count
        else:
            assert common is None
            assert steps == ([count, count] if torchs or count else [None, None])
            assert all(step is None or type(step) is int for step in steps)
