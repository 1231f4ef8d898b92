"""The configuration schema of the loss: the terms, their weights and what they compare (keys below `loss`)."""

from __future__ import annotations

from dataclasses import field
from typing import Any, Literal

from pydantic import model_validator
from pydantic.dataclasses import dataclass

from nemo_oprd.config.types import STRICT, Decay, JsdBeta, PositiveFloat, PositiveInt
from nemo_oprd.config.weight_schedule import Weight, largest
from nemo_oprd.losses.registry import check_divergence, check_row_loss


@dataclass(config=STRICT)
class AdaptiveConfig:
    """Weights of layers and of positions that follow the measured gap between student and teacher.

    `losses/adaptive.py` has the formula. `decay` is the decay of the gap's moving average over the updates.
    """

    layers: bool = False
    positions: bool = False
    decay: Decay = 0.9


@dataclass(config=STRICT)
class RepresentationLossConfig:
    """The hidden-state term (docs/design.md, "Loss semantics").

    `weight` is the paper's mu, or its schedule over the updates: a list of stages such as
    [{until: 100, weight: 0}, {until: 500, start: 0, weight: 1}], see `WeightStage`.

    `kind` is the distance between two hidden states: mse, normalized_mse, cosine, or MODULE:FUNCTION for a function of
    your own, which is called with the arguments `kind_args` (docs/losses.md).

    `layers: none` removes the term and its measurement, for runs that have output-space terms only.

    `layer_map` gives the teacher layer of every supervised student layer, {student: teacher}, and replaces the paper's
    rule. A bridge is fitted between these pairs.

    `layer_weights` w_l make the term sum_l w_l L_l / sum_l w_l instead of the plain mean over the supervised layers
    (null): a list with one weight per supervised layer, or {layer: weight}, where all other layers have weight 1.
    """

    weight: Weight = 1.0
    kind: str = "mse"
    kind_args: dict[str, Any] = field(default_factory=dict)
    layers: Literal["all", "last", "even", "odd", "none"] | list[int] = "all"
    positions: Literal["all", "last_k", "first_k"] = "last_k"
    k: PositiveInt = 2000
    position: Literal["token", "predicting"] = "token"
    final_norm: bool = True
    aggregation: Literal["sequence_mean", "token_mean"] = "sequence_mean"
    dim_reduction: Literal["mean", "sum"] = "mean"
    layer_weights: list[float] | dict[str, float] | None = None
    layer_map: dict[str, int] | None = None
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


@dataclass(config=STRICT)
class OutputLossConfig:
    """The output-space term (docs/design.md, "Loss semantics"; `losses/divergences.py` has the equations).

    `weight` is the paper's weight of OPD in the composition, or its schedule over the updates (`WeightStage`).

    `kind` is none, sampled_token, top_k, full_vocab, forward_kl or jsd (docs/losses.md).

    `k`, `support`, `normalizer` and `support_weight` belong to top_k. With the other kinds `k` is the size of the top
    sets whose overlap is measured, and `support` is the set whose probability mass is measured. `clip` belongs to
    sampled_token with train.updates_per_rollout > 1: it is PPO's epsilon, or [low, high], for the probability ratio to
    the student that sampled the rollouts; null means no clipping. `chunk_tokens` is the largest number of rows whose
    logits are in memory at the same time.
    """

    weight: Weight = 0.0
    kind: str = "none"
    k: PositiveInt = 16
    chunk_tokens: PositiveInt = 1024
    aggregation: Literal["sequence_mean", "token_mean"] = "sequence_mean"
    temperature: PositiveFloat = 1.0
    support: Literal["student", "teacher", "union", "intersection"] = "student"
    normalizer: Literal["renormalized", "full"] = "renormalized"
    support_weight: Literal["student", "teacher"] = "student"
    # divided by jsd_beta, or by 1 - jsd_beta, the divergence tends to forward_kl at 0 and to full_vocab at 1
    jsd_beta: JsdBeta = 0.5
    clip: float | tuple[float, float] | None = None

    @model_validator(mode="after")
    def _check(self) -> OutputLossConfig:
        check_divergence(self.kind)
        if self.kind == "none" and largest(self.weight) > 0:
            given = "a schedule" if isinstance(self.weight, list) else self.weight
            raise ValueError(f"loss.output.weight={given} with loss.output.kind=none; choose a kind, or weight 0")
        if (self.kind, self.k, self.normalizer) == ("top_k", 1, "renormalized") and self.support != "union":
            raise ValueError(
                f"loss.output.kind=top_k with loss.output.k=1 and loss.output.support={self.support} is identically "
                "zero: a distribution renormalised on one id is 1; expected 2 or more: choose k of 2 or more, or "
                "kind=sampled_token (the paper's top-1)"
            )
        low, high = self.clip if isinstance(self.clip, tuple) else (self.clip, self.clip)
        if low is not None and high is not None and not (0 < low <= 1 and high > 0):
            raise ValueError(
                f"loss.output.clip={self.clip}: expected a number in (0, 1], or [low, high] with low in (0, 1] and "
                "high above 0; choose e.g. 0.2"
            )
        return self


@dataclass(config=STRICT)
class LossConfig:
    """The terms of the total loss."""

    representation: RepresentationLossConfig = field(default_factory=RepresentationLossConfig)
    output: OutputLossConfig = field(default_factory=OutputLossConfig)

    @model_validator(mode="after")
    def _check(self) -> LossConfig:
        if self.representation.layers == "none" and self.output.kind == "none":
            raise ValueError(
                "loss.representation.layers=none and loss.output.kind=none: expected something to learn; choose layers "
                "or a kind"
            )
        return self
