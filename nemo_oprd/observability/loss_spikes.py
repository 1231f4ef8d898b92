"""Losses that stand out against what they were, and steps whose numbers are not finite."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping

from nemo_oprd.distillation.step_metrics import StepMetrics

# a term is a spike against the median size of its last WINDOW values, once there are ENOUGH of them
WINDOW, ENOUGH = 50, 10
TERMS = ("rep/loss", "output/loss")


class LossSpikeDetector:
    """Compares each term of the loss with its own past: their weights may follow schedules.

    Args:
        factor: how many times the usual size is a spike; 0: nothing stands out.
        history: term -> its values before a resume, the latest last.
    """

    def __init__(self, factor: float, history: Mapping[str, list[float]]) -> None:
        self._factor = factor
        self._recent = {name: list(history.get(name, ()))[-WINDOW:] for name in TERMS}

    def see(self, measured: StepMetrics) -> str | None:
        """What stands out in this step, in words; None if nothing does."""
        spikes = []
        for name, loss in measured.trained_losses.items():
            recent = self._recent[name]
            # in size: an estimate of a divergence has either sign
            usual = statistics.median(map(abs, recent)) if len(recent) >= ENOUGH else None
            if usual is not None and not abs(loss) <= self._factor * usual:
                spikes.append(f"{name} is {loss:.4g}; its median size was {usual:.4g}")
            if math.isfinite(loss):
                self._recent[name] = [*recent, loss][-WINDOW:]
        if not self._factor or not (spikes or measured.nonfinite_reason):
            return None
        return "; ".join(spikes) or f"the loss is {measured.loss:.4g}"
