"""The weights of `loss.representation.adaptive` over the steps of a run: their use, update, metrics and saved state."""

from __future__ import annotations

import numpy as np

from nemo_oprd.batch.plan import BatchPlan
from nemo_oprd.batch.position_bins import PROFILE_BINS, row_bins
from nemo_oprd.config.schema import AdaptiveConfig
from nemo_oprd.distillation.metrics.step_metrics import StepMetrics
from nemo_oprd.losses.adaptive import GapFactors

_KINDS = ("layers", "positions")


class AdaptiveWeights:
    """Weight factors of layers and of position bins (`losses/adaptive.py`); 1 for a kind that is not configured.

    `positions` is `loss.representation.positions`; "last_k" counts positions from the end of a response.
    """

    def __init__(self, adaptive: AdaptiveConfig, positions: str) -> None:
        self._counted_as = positions
        self._factors = {kind: GapFactors(adaptive.decay) for kind in _KINDS if getattr(adaptive, kind)}

    def layer_weights(self, weights: dict[int, float]) -> dict[int, float]:
        """Layer -> its configured weight times its factor."""
        factors = self._factors.get("layers")
        return {layer: w * (factors.factor(layer) if factors else 1.0) for layer, w in weights.items()}

    def position_factors(self) -> np.ndarray | None:
        """Factors of the rows' weights by position bin [PROFILE_BINS]; None if positions are not adapted."""
        factors = self._factors.get("positions")
        return None if factors is None else np.array([factors.factor(j) for j in range(PROFILE_BINS)])

    def update(self, metrics: StepMetrics) -> None:
        """Adds the gaps of an update to the averages; they change the weights from the next update on."""
        gaps = {"layers": metrics.per_layer("relative_error"), "positions": metrics.position_gap}
        for kind, factors in self._factors.items():
            factors.update(gaps[kind])

    def metrics(self, weights: dict[int, float], batch: BatchPlan) -> dict[str, float]:
        """The factors by their names in metrics.jsonl: layer weights with a mean of 1, factors of position bins.

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
        """The averaged gaps, by kind and key."""
        return {kind: factors.gaps for kind, factors in self._factors.items()}

    def restore(self, state: dict[str, dict[str, float]]) -> None:
        """Restores a `state` that was read from JSON; kinds that are no longer adapted are ignored."""
        for kind, factors in self._factors.items():
            if kind in state:
                factors.gaps = {int(key): gap for key, gap in state[kind].items()}
