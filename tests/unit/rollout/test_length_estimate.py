"""The order in which servers are asked: by lengths of earlier responses, also of those that were sampled in parts."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from nemo_oprd.batch.types import Rollout
from nemo_oprd.rollout.engine import Request, SamplingParams
from nemo_oprd.vllm.rounds import LengthEstimate, _is_whole

FRESH = [Request([1, 2]), Request([3, 4]), Request([5, 6])]


def test_nothing_is_known_at_first() -> None:
    """The longest prompt first, and what has begun before what has not."""
    begun = Request([1, 2, 7, 7], begun=2)
    assert LengthEstimate().longest_first([*FRESH, begun, Request([1, 2, 3])], range(5)) == [3, 4, 0, 1, 2]


def test_a_prompt_is_as_long_as_its_earlier_responses_in_whatever_parts() -> None:
    estimate = LengthEstimate()
    estimate.learn([Request([1, 2]), Request([3, 4, 9, 9, 9], begun=3)], {0: 4, 1: 20})
    # 4, 23 and on average 13.5 tokens
    assert estimate.longest_first(FRESH, range(3)) == [1, 2, 0]
    # of 23 tokens 20 are there, so 3 are left; of the others 4 and 13.5
    late = Request([3, 4, *[9] * 20], begun=20)
    assert estimate.longest_first([late, *FRESH], range(4)) == [0, 2, 3, 1]
    over = Request([1, 2, *[9] * 10], begun=10)  # longer than ever before
    assert estimate.longest_first([over, FRESH[0]], range(2)) == [0, 1]


def test_an_earlier_turn_comes_first_however_long_the_others_are() -> None:
    estimate = LengthEstimate()
    estimate.learn(FRESH, {0: 1, 1: 90, 2: 50})
    turns = [replace(FRESH[0], turn=3), replace(FRESH[1], turn=4), replace(FRESH[2], turn=4), replace(FRESH[1], turn=3)]
    assert estimate.longest_first(turns, range(4)) == [3, 0, 1, 2]


@pytest.mark.parametrize(
    ("begun", "tokens", "reason", "most", "whole"),
    [
        (0, 3, "stop", None, True),
        (4, 3, "stop", 6, True),
        (0, 8, "length", None, False),  # less than max_new_tokens: a part
        (0, 10, "length", None, True),
        (4, 6, "length", 6, True),
        (4, 5, "length", 5, False),
        (0, 8, "length", None, True),  # all positions of the model
        (0, 8, None, None, False),  # it was cut
    ],
)
def test_whole_responses(begun: int, tokens: int, reason: str | None, most: int | None, whole: bool) -> None:
    request = Request([1, 2, *[7] * begun], begun=begun, most=most)
    positions = 10 if (begun, tokens, whole) == (0, 8, True) else 100
    handle: Any = SimpleNamespace(
        requests=[request], sampling=SamplingParams(1.0, 1.0, 10, (0,)), task=SimpleNamespace(max_positions=positions)
    )
    rollout = Rollout(request.prompt_ids, [5] * tokens, finish_reason=reason)  # type: ignore[arg-type]
    assert _is_whole(handle, 0, rollout) == whole
