"""The output loss: its divergence, the divergence's options, and corrections. The functions are in `divergences.py`.

`DivergenceOptions` are at the same time the keys of `loss.output` that describe the divergence: the schema inherits
them, with their meanings and checks. No torch is imported here.
"""

from __future__ import annotations

import math
import typing
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Literal

from nemo_oprd.losses.registry import DIVERGENCES, DivergenceEntry, check_divergence

if TYPE_CHECKING:
    import torch

# The weights of tokens that an engine sampled with slightly other probabilities than the trainer computes.
#
# Engine and trainer run different kernels, so the probabilities that they compute from the same weights differ a
# little. An estimate from sampled tokens is then an estimate under the engine's distribution. A token's weight r =
# p_trainer(token) / p_engine(token) makes it one under the trainer's distribution, because E_engine[r f] =
# E_trainer[f]. docs/losses.md says when this matters.


CORRECTIONS = ("truncate", "mask")


def check_range(low: float, high: float) -> None:
    """Raises ValueError unless 0 <= low <= 1 <= high and low < high, where `low` and `high` bound a range of ratios."""
    if not (0 <= low <= 1 <= high and low < high):
        raise ValueError(
            f"rollout.correction_range=[{low}, {high}]: expected [low, high] with 0 <= low <= 1 <= high and low below "
            "high; choose e.g. [0, 2]"
        )


@dataclass(frozen=True)
class Correction:
    """Turns the ratio r into the weight of a token.

    "truncate" moves a ratio outside [low, high] to the nearer bound; "mask" gives such a token the weight 0. Both bound
    the variance at the price of a bias, which is 0 where no ratio is outside the range.

    Raises:
        ValueError: an unknown mode, or a range that `check_range` rejects.
    """

    mode: str
    low: float
    high: float

    def __post_init__(self) -> None:
        if self.mode not in CORRECTIONS:
            raise ValueError(f"correction {self.mode!r}: expected one of {', '.join(CORRECTIONS)}")
        check_range(self.low, self.high)

    def weights(
        self, trainer_logprob_C: torch.Tensor, engine_logprob_C: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the tokens' weights, and which of their ratios are outside the range (1 or 0).

        Args:
            trainer_logprob_C: [c], log-probabilities of the sampled tokens that the trainer computes from the weights
                that sampled them.
            engine_logprob_C: [c], their log-probabilities in the distribution that the engine sampled from, any dtype.

        Returns: two tensors [c] in the dtype of `trainer_logprob_C`.
        """
        ratio_C = (trainer_logprob_C - engine_logprob_C.to(trainer_logprob_C)).exp()
        outside_C = (ratio_C < self.low) | (ratio_C > self.high)  # false for NaN, which therefore stays visible
        weight_C = ratio_C.clamp(self.low, self.high) if self.mode == "truncate" else ratio_C.masked_fill(outside_C, 0)
        return weight_C, outside_C.to(ratio_C)


Support = Literal["student", "teacher", "union", "intersection"]
Normalizer = Literal["renormalized", "full"]
Role = Literal["student", "teacher"]
_CHOICES = {"support": Support, "normalizer": Normalizer, "support_weight": Role}


@dataclass(frozen=True)
class DivergenceOptions:
    """The divergence, "none" or a kind of `DIVERGENCES`, and its options. Messages name the options `loss.output.*`.

    Raises ValueError for an unknown kind, or an option out of range.
    """

    kind: str = "none"
    """none, sampled_token, top_k, full_vocab, forward_kl or jsd"""
    k: int | None = None
    """size of the top sets

    Each model's most probable ids. For other kinds than top_k they are only measured; None saves the search.
    """
    temperature: float = 1.0
    """of both distributions"""
    support: Support = "student"
    """whose most probable ids top_k compares

    With the other kinds it is the set whose probability mass is measured.
    """
    normalizer: Normalizer = "renormalized"
    """compare conditional distributions on the support, or terms of the whole sum"""
    support_weight: Role = "student"
    """whose probabilities weigh the log ratio: reverse or forward KL"""
    jsd_beta: float = 0.5
    """the teacher's share in the mixture of jsd

    Divided by it, or by 1 - it, the divergence tends to forward_kl at 0 and to full_vocab at 1.
    """
    clip: float | tuple[float, float] | None = None
    """PPO's epsilon, or [low, high], for sampled_token with several updates; null: no clipping

    How far the ratio to the probability under the student that sampled may fall below 1 and rise above it.
    """

    def __post_init__(self) -> None:
        check_divergence(self.kind)
        for name, choice in _CHOICES.items():
            given, legal = getattr(self, name), typing.get_args(choice)
            if given not in legal:
                raise ValueError(f"loss.output.{name}={given!r}: expected {' | '.join(legal)}; give one")
        for name, number in (("k", self.k), ("temperature", self.temperature)):
            if number is not None and not number > 0:
                raise ValueError(f"loss.output.{name}={number}: expected more than 0; choose a larger number")
        if not 0 < self.jsd_beta < 1:
            raise ValueError(
                f"loss.output.jsd_beta={float(self.jsd_beta)}: expected a number in (0, 1); choose one, or kind "
                "forward_kl or full_vocab"
            )
        if self.needs_support and self.k is None:
            raise ValueError(f"loss.output.k=None with loss.output.kind={self.kind}: expected a number; give one")
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

    @property
    def is_off(self) -> bool:
        """True if there is no output loss."""
        return self.kind == "none"

    @property
    def from_samples(self) -> bool:
        """True if the divergence is an estimate from the sampled tokens, see `DivergenceEntry`."""
        return not self.is_off and self._entry.from_samples

    @property
    def needs_distribution(self) -> bool:
        """True if the teacher's logits are needed; log-probabilities of the sampled tokens suffice otherwise."""
        return not self.is_off and not self._entry.from_samples

    @property
    def needs_support(self) -> bool:
        """True if the top sets of `k` ids are needed."""
        return not self.is_off and self._entry.needs_support

    @property
    def ratio_range(self) -> tuple[float, float]:
        """The smallest and the largest ratio to the sampling policy that clipping leaves as they are."""
        if self.clip is None:
            return 0.0, math.inf
        low, high = self.clip if isinstance(self.clip, tuple) else (self.clip, self.clip)
        return 1 - low, 1 + high

    @property
    def _entry(self) -> DivergenceEntry:
        return DIVERGENCES[self.kind]


@dataclass(frozen=True)
class OutputLoss(DivergenceOptions):
    """A divergence to compute, so not "none".

    `correction` weighs a token by the ratio of the student's probability to that of the engine that sampled the token;
    None: every token has the weight 1.

    Raises:
        ValueError: as `DivergenceOptions`, or a correction of a divergence that is no estimate from samples.
    """

    correction: Correction | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        assert not self.is_off
        if self.correction is not None and not self.from_samples:
            raise ValueError(f"loss.output.kind={self.kind} with a correction: expected sampled_token, or none")

    @staticmethod
    def of(options: DivergenceOptions, correction: Correction | None = None) -> OutputLoss:
        """Returns the loss with the options of the configuration."""
        given = {each.name: getattr(options, each.name) for each in fields(DivergenceOptions)}
        return OutputLoss(**given, correction=correction)
