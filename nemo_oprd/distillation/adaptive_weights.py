"""The weights of `loss.representation.adaptive` over the steps of a run: their use, update, metrics and saved state."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from nemo_oprd.batch.plan import BatchPlan
from nemo_oprd.batch.token_table import PROFILE_BINS, row_bins
from nemo_oprd.config.schema import AdaptiveConfig
from nemo_oprd.distillation.metrics.step_metrics import StepMetrics

# Loss weights that follow the measured gap between student and teacher: a layer or position with a larger gap gets a
# larger weight.
#
# For each key (a layer, or a bin of positions), g is an exponential moving average of the key's gaps, which starts at
# the first gap: g <- decay g + (1 - decay) gap. The factor of a key is g over the mean of all g, and at least `LEAST`.
# Before the first measurement all factors are 1. The gaps of a step take effect in the next step, as numbers without a
# gradient.
#
#     layers      gap = |student - teacher| / |teacher| over a layer's supervised rows; w_l is multiplied by the factor
#     positions   gap = 1 - mean cosine of the deepest supervised layer in a bin; each row's weight is multiplied by its
#                 bin's factor, and the weights are then scaled to a sum of 1


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
        """Returns the factor of a key; 1 for a key without a measurement.

        >>> factors = GapFactors(0.5)
        >>> factors.update({1: 0.1, 2: 0.3})
        >>> [round(factors.factor(key), 3) for key in (1, 2, 3)]
        [0.5, 1.5, 1.0]
        """
        mean = sum(self.gaps.values()) / max(1, len(self.gaps))
        if key not in self.gaps or mean == 0:
            return 1.0
        return max(LEAST, self.gaps[key] / mean)


_KINDS = ("layers", "positions")


class AdaptiveWeights:
    """Weight factors of layers and of position bins; 1 for a kind that is not configured.

    `positions` is `loss.representation.positions`; "last_k" counts positions from the end of a response.
    """

    def __init__(self, adaptive: AdaptiveConfig, positions: str) -> None:
        self._counted_as = positions
        self._factors = {kind: GapFactors(adaptive.decay) for kind in _KINDS if getattr(adaptive, kind)}

    def layer_weights(self, weights: dict[int, float]) -> dict[int, float]:
        """Returns each layer's configured weight times its factor."""
        factors = self._factors.get("layers")
        return {layer: w * (factors.factor(layer) if factors else 1.0) for layer, w in weights.items()}

    def position_factors(self) -> np.ndarray | None:
        """Returns the factors of row weights by position bin [PROFILE_BINS]; None if positions are not adapted."""
        factors = self._factors.get("positions")
        return None if factors is None else np.array([factors.factor(j) for j in range(PROFILE_BINS)])

    def update(self, metrics: StepMetrics) -> None:
        """Adds the gaps of an update to the averages; they change the weights from the next update on."""
        gaps = {"layers": metrics.per_layer("relative_error"), "positions": metrics.position_gap}
        for kind, factors in self._factors.items():
            factors.update(gaps[kind])

    def metrics(self, weights: dict[int, float], batch: BatchPlan) -> dict[str, float]:
        """Returns the factors by metric name: layer weights with a mean of 1, and factors of position bins.

        `weights` are those of the layers in this update, with their factors.
        """
        named = {}
        if "layers" in self._factors:
            mean = sum(weights.values()) / max(1, len(weights))
            named = {f"rep/layer_weight/{layer}": weight / mean for layer, weight in weights.items()}
        if "positions" in self._factors:
            bins = np.unique(row_bins(batch.table, self._counted_as)).tolist()
            named |= {f"rep/position_weight/{1 << j}": self._factors["positions"].factor(j) for j in bins}
        return named

    def state(self) -> dict[str, dict[int, float]]:
        """Returns the averaged gaps, by kind and key."""
        return {kind: factors.gaps for kind, factors in self._factors.items()}

    def restore(self, state: dict[str, dict[str, float]]) -> None:
        """Restores a `state` that was read from JSON; kinds that are no longer adapted are ignored."""
        for kind, factors in self._factors.items():
            if kind in state:
                factors.gaps = {int(key): gap for key, gap in state[kind].items()}
