"""The weights of tokens that an engine sampled with slightly other probabilities than the trainer computes.

Engine and trainer run different kernels, so the probabilities that they compute from the same weights differ a little.
An estimate from sampled tokens is then an estimate under the engine's distribution. A token's weight
r = p_trainer(token) / p_engine(token) makes it one under the trainer's distribution, because E_engine[r f] =
E_trainer[f]. docs/losses.md says when this matters.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

CORRECTIONS = ("truncate", "mask")


def check_range(low: float, high: float) -> None:
    """Raises ValueError for a range of ratios that does not hold 1 or is a single number."""
    if not (0 <= low <= 1 <= high and low < high):
        raise ValueError(
            f"rollout.correction_range=[{low}, {high}]: expected [low, high] with 0 <= low <= 1 <= high and low below "
            "high; choose e.g. [0, 2]"
        )


@dataclass(frozen=True)
class Correction:
    """How the ratio r becomes the weight of a token.

    "truncate" moves a ratio outside [low, high] to the nearer bound; "mask" gives such a token the weight 0. Both bound
    the variance at the price of a bias, which is 0 where no ratio is outside the range.

    Raises:
        ValueError: an unknown mode, or a range that does not hold 1 or is a single number.
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
        """The tokens' weights, and which of their ratios are outside the range (1 or 0).

        Args:
            trainer_logprob_C: [c], log-probabilities of the sampled tokens that the trainer computes from the weights
                that sampled them.
            engine_logprob_C: [c], the same in the distribution that the engine sampled from, in any precision.

        Returns: two tensors [c] in the dtype of `trainer_logprob_C`.
        """
        ratio_C = (trainer_logprob_C - engine_logprob_C.to(trainer_logprob_C)).exp()
        outside_C = (ratio_C < self.low) | (ratio_C > self.high)  # false for NaN, which therefore stays visible
        weight_C = ratio_C.clamp(self.low, self.high) if self.mode == "truncate" else ratio_C.masked_fill(outside_C, 0)
        return weight_C, outside_C.to(ratio_C)
