"""Loss weights that follow the measured gap between student and teacher: a layer or position with a larger gap gets a
larger weight.

For each key (a layer, or a bin of positions), g is an exponential moving average of the key's gaps, which starts at the
first gap: g <- decay g + (1 - decay) gap. The factor of a key is g over the mean of all g, and at least `LEAST`. Before
the first measurement all factors are 1. The gaps of a step take effect in the next step, as numbers without a gradient.

    layers      gap = |student - teacher| / |teacher| over a layer's supervised rows; w_l is multiplied by the factor
    positions   gap = 1 - mean cosine of the deepest supervised layer in a bin; each row's weight is multiplied by its
                bin's factor, and the weights are then scaled to a sum of 1
"""

from __future__ import annotations

import math
from collections.abc import Mapping

# a layer on which the two models agree keeps some weight, so that later updates do not undo the agreement
LEAST = 0.01


class GapFactors:
    """The factors of one kind of key: layers, or bins of positions."""

    def __init__(self, decay: float, gaps: Mapping[int, float] | None = None) -> None:
        self.decay = decay
        self.gaps = dict(gaps or {})

    def update(self, gaps: Mapping[int, float]) -> None:
        """Adds the gaps of a step to the averages; non-finite gaps are ignored."""
        for key, gap in gaps.items():
            if math.isfinite(gap):
                self.gaps[key] = self.decay * self.gaps.get(key, gap) + (1 - self.decay) * gap

    def factor(self, key: int) -> float:
        """The factor of a key; 1 for a key without a measurement.

        >>> factors = GapFactors(0.5)
        >>> factors.update({1: 0.1, 2: 0.3})
        >>> [round(factors.factor(key), 3) for key in (1, 2, 3)]
        [0.5, 1.5, 1.0]
        """
        mean = sum(self.gaps.values()) / max(1, len(self.gaps))
        if key not in self.gaps or mean == 0:
            return 1.0
        return max(LEAST, self.gaps[key] / mean)
