"""Schedules the weight of a loss term over a run: a number, or stages; a pure function of the step, exact on resume."""

from __future__ import annotations

from typing import Annotated, TypeAlias

from pydantic import AfterValidator
from pydantic.dataclasses import dataclass

from nemo_oprd.config.types import STRICT, NonNegativeFloat


@dataclass(config=STRICT)
class WeightStage:
    """The `weight` of the steps up to number `until` (null: to the end), counted from the beginning of the run.

    With `start` the weight changes linearly: of n steps, number i (1..n) has start + (weight - start) i / n.
    """

    weight: NonNegativeFloat
    until: int | None = None
    start: NonNegativeFloat | None = None


def _check_stages(stages: list[WeightStage]) -> list[WeightStage]:
    """Refuses stages out of order. `{key}`, the key of the list, is filled in by `config/messages.py`."""
    if not stages:
        raise ValueError("{key}=[]: expected a number, or at least one stage; give one")
    begin = 0
    for i, stage in enumerate(stages):
        if stage.until is None and (i < len(stages) - 1 or stage.start is not None):
            raise ValueError(
                f"{{key}}[{i}] has no end; expected the number of its last step, which only a last stage of constant "
                "weight may leave out: give until"
            )
        if stage.until is not None and stage.until <= begin:
            raise ValueError(
                f"{{key}}[{i}].until={stage.until}: expected more than {begin}, where the stage begins; choose a later "
                "step"
            )
        begin = stage.until or begin
    return stages


Weight: TypeAlias = NonNegativeFloat | Annotated[list[WeightStage], AfterValidator(_check_stages)]


def weight_at(weight: Weight, step: int) -> float:
    """Returns the weight in the step that follows `step` others; the last stage's weight remains after its end.

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
    """Returns the largest weight in a schedule, starts of stages included; no step has a larger one."""
    return max(max(stage.weight, stage.start or 0.0) for stage in weight) if isinstance(weight, list) else weight


def vanishes(weight: Weight) -> bool:
    """Returns whether a term has the weight 0 in some steps."""
    return any(stage.weight == 0 for stage in weight) if isinstance(weight, list) else weight == 0
