"""The weight of a loss term over a run: a number, or stages. A pure function of the step, so that resuming is exact."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias


@dataclass
class WeightStage:
    """The `weight` of the updates up to number `until` (null: to the end), counted from the run's beginning.

    With `start` the weight changes linearly: of n updates, number i (1..n) has start + (weight - start) i / n.
    """

    weight: float
    until: int | None = None
    start: float | None = None


Weight: TypeAlias = "float | list[WeightStage]"


def weight_at(weight: Weight, step: int) -> float:
    """The weight of the update after `step` others; after the last stage its weight stays.

    >>> [weight_at([WeightStage(0.0, until=1), WeightStage(1.0, until=3, start=0.0)], step) for step in range(4)]
    [0.0, 0.5, 1.0, 1.0]
    """
    if not isinstance(weight, list):
        return weight
    begin = 0
    for stage in weight:
        if stage.until is None or step < stage.until:
            if stage.start is None or stage.until is None:
                return stage.weight
            done = (step + 1 - begin) / (stage.until - begin)
            return (1 - done) * stage.start + done * stage.weight
        begin = stage.until
    return weight[-1].weight


def largest(weight: Weight) -> float:
    """The largest weight that a term has in any step."""
    if not isinstance(weight, list):
        return weight
    return max(max(stage.weight, stage.start or 0.0) for stage in weight)


def vanishes(weight: Weight) -> bool:
    """Whether a term has no weight in some steps."""
    return any(stage.weight == 0 for stage in weight) if isinstance(weight, list) else weight == 0
