"""Finds steps whose loss is far above its usual size, and steps with a non-finite loss or gradient."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping

from nemo_oprd.distillation.metrics.step_metrics import StepMetrics

# A term is compared with the median size of its last WINDOW values, once there are MIN_VALUES of them.
WINDOW, MIN_VALUES = 50, 10
TERMS = ("rep/loss", "output/loss")


class LossSpikeDetector:
    """Compares each term of the loss with its own past values, because the weights of the terms may follow schedules.

    Args:
        factor: a term is a spike if its absolute value exceeds `factor` times the median; 0 switches the detector off.
        history: term -> its values before a resume, the latest last.
    """

    def __init__(self, factor: float, history: Mapping[str, list[float]]) -> None:
        self._factor = factor
        self._recent = {name: list(history.get(name, ()))[-WINDOW:] for name in TERMS}

    def check(self, measured: StepMetrics) -> str | None:
        """Describes the spike or the non-finite loss of a step; None if there is neither. Call once per step."""
        spikes = []
        for name, loss in measured.trained_losses.items():
            recent = self._recent[name]
            # absolute values: an estimate of a divergence has either sign
            usual = statistics.median(map(abs, recent)) if len(recent) >= MIN_VALUES else None
            if usual is not None and not abs(loss) <= self._factor * usual:
                spikes.append(f"{name} is {loss:.4g}; its median size was {usual:.4g}")
            if math.isfinite(loss):
                self._recent[name] = [*recent, loss][-WINDOW:]
        if not self._factor or not (spikes or measured.nonfinite_reason):
            return None
        return "; ".join(spikes) or f"the loss is {measured.loss:.4g}"
