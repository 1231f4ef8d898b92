"""Parts of `nemo-oprd rehearse` that need no rehearsal: what ranks must agree on, and where tokens of experts go."""

from __future__ import annotations

from typing import Any

import torch

from nemo_oprd.tools.rehearse import EXPERTS_LOADS, disagreements
from nemo_oprd.tools.rehearse.host_values import LOADS, visits


def exchange(received: list[int], sent: list[int]) -> dict[str, Any]:
    """What a rank saw of one all-to-all of rows of 8 numbers between ranks 0 and 1."""
    message = {
        "kind": "alltoall_base_",
        "ranks": [0, 1],
        "shapes": [[sum(received), 8], [sum(sent), 8]],
        "dtype": "bfloat16",
        "place": "somewhere:1",
        "peer": None,
        "rows": [received, sent],
    }
    return {"phases": {"update": {"messages": [message]}}}


def test_an_uneven_exchange_agrees_in_what_goes_from_one_rank_to_the_other() -> None:
    assert disagreements({0: exchange([3, 5], [3, 2]), 1: exchange([2, 4], [5, 4])}) == []
    (line,) = disagreements({0: exchange([3, 5], [3, 2]), 1: exchange([1, 4], [5, 4])})
    assert line.startswith("rank 0 and rank 1 do not meet at their message 1: alltoall_base_ of [[5, 2], [8]]")
    assert "but alltoall_base_ of [[5, 1], [8]]" in line


def test_stated_loads_of_experts() -> None:
    """Every token visits as many experts as it should; evenly, or all of them the same ones."""
    assert set(LOADS) == set(EXPERTS_LOADS)
    even, one = (visits(load, 32, 8, 2) for load in EXPERTS_LOADS)
    assert torch.equal(even.sum(1), torch.full((32,), 2)) and torch.equal(one.sum(1), torch.full((32,), 2))
    assert even.sum(0).tolist() == [8] * 8
    assert one.sum(0).tolist() == [32, 32, 0, 0, 0, 0, 0, 0]
