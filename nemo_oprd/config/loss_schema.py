"""The keys of `loss`: the terms, their weights and what they compare (docs/design.md, "Loss semantics")."""

from __future__ import annotations

from dataclasses import field
from typing import Any, Literal

from pydantic import model_validator
from pydantic.dataclasses import dataclass

from nemo_oprd.config.types import STRICT, Decay, Free, Learned, PositiveInt
from nemo_oprd.config.weight_schedule import Weight, largest
from nemo_oprd.losses.output_loss import DivergenceOptions
from nemo_oprd.losses.registry import check_row_loss


@dataclass(config=STRICT)
class AdaptiveConfig:
    """Weights of layers and of positions that follow the measured gap between student and teacher.

    `losses/adaptive.py` has the formula.
    """

    layers: bool = False
    """weigh layers by their measured gap"""
    positions: bool = False
    """weigh positions by their measured gap"""
    decay: Decay = 0.9
    """decay of the gap's moving average over the updates"""


@dataclass(config=STRICT)
class RepresentationLossConfig:
    """The hidden-state term."""

    weight: Weight = 1.0
    """weight of the hidden-state term (the paper's mu), or its schedule over the updates

    A schedule is a list of stages such as [{until: 100, weight: 0}, {until: 500, start: 0, weight: 1}] (docs/runs.md,
    "Schedules").
    """
    kind: str = "mse"
    """mse, normalized_mse, cosine, or MODULE:FUNCTION of your own

    The distance between two hidden states (docs/losses.md).
    """
    kind_args: dict[str, Any] = field(default_factory=dict)
    """arguments of a function of your own"""
    layers: Literal["all", "last", "even", "odd", "none"] | list[int] = "all"
    """supervised student layers, counted from 1

    `none` removes the term and its measurement, for runs that have output-space terms only.
    """
    positions: Literal["all", "last_k", "first_k"] = "last_k"
    """which response tokens: all, or the last or first `k` with mask 1"""
    k: PositiveInt = 2000
    """number of these tokens per response"""
    position: Literal["token", "predicting"] = "token"
    """state where the token is the input, or one earlier, where it is predicted"""
    final_norm: bool = True
    """take the last layer's state after the final norm"""
    aggregation: Literal["sequence_mean", "token_mean"] = "sequence_mean"
    """mean per response and then over responses, or over all tokens"""
    dim_reduction: Literal["mean", "sum"] = "mean"
    """mean or sum over the width"""
    layer_weights: list[float] | dict[str, float] | None = None
    """weights of the layers in their mean; null: equal ones

    One weight per supervised layer, or {layer: weight}, where all other layers have weight 1. With weights w_l the term
    is sum_l w_l L_l / sum_l w_l.
    """
    layer_map: dict[str, int] | None = None
    """teacher layer of each student layer; null: the paper's rule

    {student: teacher} for every supervised layer. A bridge is fitted between these pairs.
    """
    adaptive: AdaptiveConfig = field(default_factory=AdaptiveConfig)

    @model_validator(mode="after")
    def _check(self) -> RepresentationLossConfig:
        check_row_loss(self.kind, self.kind_args)
        given = self.layer_weights or []
        for weight in given.values() if isinstance(given, dict) else given:
            if weight <= 0:
                raise ValueError(
                    f"loss.representation.layer_weights holds {weight}: expected numbers above 0; leave a layer that "
                    "must not count out of loss.representation.layers"
                )
        if self.layers == "none" and (self.adaptive.layers or self.adaptive.positions):
            raise ValueError(
                f"loss.representation.adaptive.layers={str(self.adaptive.layers).lower()} and positions="
                f"{str(self.adaptive.positions).lower()} with loss.representation.layers=none: nothing has weights to "
                "adapt; expected false: set both, or choose layers"
            )
        return self


@dataclass(config=STRICT, frozen=True)
class OutputLossConfig(DivergenceOptions):
    """The output-space term: a divergence (`losses/output_loss.py` has its keys), its weight, and its computation."""

    k: PositiveInt = 16
    weight: Weight = 0.0
    """weight of the output-space term, or its schedule over the updates"""
    chunk_tokens: Free[PositiveInt] = 1024
    """rows whose logits are in memory at a time"""
    aggregation: Literal["sequence_mean", "token_mean"] = "sequence_mean"
    """as `loss.representation.aggregation`, over all response tokens"""

    @model_validator(mode="after")
    def _check(self) -> OutputLossConfig:
        if self.is_off and largest(self.weight) > 0:
            given = "a schedule" if isinstance(self.weight, list) else self.weight
            raise ValueError(f"loss.output.weight={given} with loss.output.kind=none; choose a kind, or weight 0")
        return self


@dataclass(config=STRICT)
class LossConfig:
    """The terms of the total loss."""

    representation: Learned[RepresentationLossConfig] = field(default_factory=RepresentationLossConfig)
    output: Learned[OutputLossConfig] = field(default_factory=OutputLossConfig)

    @model_validator(mode="after")
    def _check(self) -> LossConfig:
        if self.representation.layers == "none" and self.output.is_off:
            raise ValueError(
                "loss.representation.layers=none and loss.output.kind=none: expected something to learn; choose layers "
                "or a kind"
            )
        return self
