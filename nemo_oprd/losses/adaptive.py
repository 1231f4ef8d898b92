"""Weights that follow the measured gap between student and teacher: more where they differ more.

For each key (a layer, or a bin of positions) g is an exponential moving average of its gap, g <- decay g + (1 - decay)
gap, which begins with the first gap. The factor of a key is g over the mean of all g, at least `LEAST`; it is 1 for all
as long as nothing was measured. The gaps of a step count from the next step on, as numbers without a gradient.

    layers      gap = |student - teacher| / |teacher| over a layer's supervised rows; w_l is multiplied by the factor
    positions   gap = 1 - mean cosine of the deepest supervised layer in a bin; rows' weights are multiplied by their
                bin's factor, and brought back to a sum of 1
"""

from __future__ import annotations

import math
from collections.abc import Mapping

# a layer on which the two models agree keeps some weight: it is to stay that way
LEAST = 0.01


class GapFactors:
    """The factors of one kind of key."""

    def __init__(self, decay: float, gaps: Mapping[int, float] | None = None) -> None:
        self.decay = decay
        self.gaps = dict(gaps or {})

    def measure(self, gaps: Mapping[int, float]) -> None:
        """Takes the gaps of a step in; those that are not finite are left out."""
        for key, gap in gaps.items():
            if math.isfinite(gap):
                self.gaps[key] = self.decay * self.gaps.get(key, gap) + (1 - self.decay) * gap

    def factor(self, key: int) -> float:
        """The factor of a key; 1 for one that was not measured yet.

        >>> factors = GapFactors(0.5)
        >>> factors.measure({1: 0.1, 2: 0.3})
        >>> [round(factors.factor(key), 3) for key in (1, 2, 3)]
        [0.5, 1.5, 1.0]
        """
        mean = sum(self.gaps.values()) / max(1, len(self.gaps))
        if key not in self.gaps or mean == 0:
            return 1.0
        return max(LEAST, self.gaps[key] / mean)
