"""The weights of `loss.representation.adaptive` over a run's steps: applied, measured, logged, kept in checkpoints."""

from __future__ import annotations

import numpy as np

from nemo_oprd.batch.plan import BatchPlan
from nemo_oprd.batch.position_bins import PROFILE_BINS, row_bins
from nemo_oprd.config.schema import AdaptiveConfig
from nemo_oprd.distillation.step_metrics import StepMetrics
from nemo_oprd.losses.adaptive import GapFactors


class AdaptiveWeights:
    """Factors of layers and of position bins, each where the configuration asks for it; 1 elsewhere.

    Args:
        adaptive: which of the two, and the decay of the averages.
        positions: `loss.representation.positions`, which says from which end positions are counted.
    """

    def __init__(self, adaptive: AdaptiveConfig, positions: str) -> None:
        self._kind = positions
        self._layers = GapFactors(adaptive.decay) if adaptive.layers else None
        self._positions = GapFactors(adaptive.decay) if adaptive.positions else None

    def of_layers(self, weights: dict[int, float]) -> dict[int, float]:
        """Layer -> its weight by the objective times its factor."""
        return {layer: w * (self._layers.factor(layer) if self._layers else 1.0) for layer, w in weights.items()}

    def position_factors(self) -> np.ndarray | None:
        """[PROFILE_BINS] factors of the rows by their place in the response; None where positions are not adapted."""
        if self._positions is None:
            return None
        return np.array([self._positions.factor(j) for j in range(PROFILE_BINS)])

    def measure(self, result: StepMetrics) -> None:
        """Takes in what a step measured; it counts from the next one on."""
        if self._layers is not None:
            self._layers.measure(result.relative_error_per_layer)
        if self._positions is not None:
            self._positions.measure(result.position_gap)

    def metrics(self, weights: dict[int, float], batch: BatchPlan) -> dict[str, float]:
        """Names as in metrics.jsonl: weights of layers with a mean of 1, factors of the batch's position bins.

        Args:
            weights: of the layers in this step, factors included.
        """
        named = {}
        if self._layers is not None:
            mean = sum(weights.values()) / max(1, len(weights))
            named = {f"rep/layer_weight/{layer}": weight / mean for layer, weight in weights.items()}
        if self._positions is not None:
            bins = np.unique(row_bins(batch.table, self._kind)).tolist()
            named |= {f"rep/position_weight/{1 << j}": self._positions.factor(j) for j in bins}
        return named

    def state(self) -> dict[str, dict[int, float]]:
        """The averaged gaps, for a checkpoint."""
        kinds = {"layers": self._layers, "positions": self._positions}
        return {name: factors.gaps for name, factors in kinds.items() if factors is not None}

    def restore(self, state: dict[str, dict[str, float]]) -> None:
        """Takes `state` back from JSON; kinds that aren't adapted any more are left out."""
        for name, factors in (("layers", self._layers), ("positions", self._positions)):
            if factors is not None and name in state:
                factors.gaps = {int(key): gap for key, gap in state[name].items()}
