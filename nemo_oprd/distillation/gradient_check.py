"""The gradient check before training: one forward and backward pass on random tokens, before anything is sampled."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from nemo_oprd.batch.types import Rollout
from nemo_oprd.data.token_ids import TokenIds
from nemo_oprd.distillation.distiller import Distiller
from nemo_oprd.distillation.metrics.step_metrics import StepMetrics
from nemo_oprd.distillation.step import StepResult


def check_gradients(distiller: Distiller, accumulate: Callable[..., StepResult]) -> str:
    """Runs one forward and backward pass on a few short random responses; returns the result as a line for the user.

    Args:
        accumulate: `train.accumulate_gradients`.

    Raises:
        CaptureError: a supervised layer does not receive its gradient exactly once on the stage that owns it.
        ValueError: a loss or a gradient is not finite.
    """
    batch = distiller.batch(_random_rollouts(distiller), distiller.objective_of(None))
    metrics = accumulate(distiller, batch).metrics
    if metrics is not None and metrics.nonfinite_reason:
        raise ValueError(
            f"{metrics.nonfinite_reason}, on random tokens before the first step: expected finite numbers; the "
            "weights of student or teacher are damaged or too large for this precision; check both models"
        )
    findings = _findings(distiller, metrics) or ["no loss has a weight above 0, so nothing is trained"]
    return "gradient check: " + "; ".join(findings)


def _random_rollouts(distiller: Distiller) -> list[Rollout]:
    """Returns two short rollouts per teacher for every data-parallel rank of the student."""
    config, objective = distiller.config, distiller.objective
    draw = np.random.default_rng(config.seed)
    shared = TokenIds(objective.student.vocab_size) if objective.sampled is None else objective.sampled
    for match in objective.teachers:
        shared &= match.shared
    known = np.flatnonzero(shared.mask)
    uniform = np.full(8, -math.log(len(known)))  # the log-probabilities of ids that are drawn with equal probability
    rollouts = []
    for number in range(len(distiller.teachers)):
        source = distiller.routing.example(number)
        ids = known[draw.integers(0, len(known), (2 * distiller.student.role.layout.data, 16))]
        for row in ids:
            teacher_prompt = row[12:] if config.has_own_prompt(number) else None
            rollouts.append(
                Rollout(row[:4], row[4:12], data_source=source, teacher_prompt_ids=teacher_prompt, logprobs=uniform)
            )
    return rollouts


def _findings(distiller: Distiller, metrics: StepMetrics | None) -> list[str]:
    objective = distiller.objective_of(None)
    findings, layers = [], len(objective.run.layers)
    if objective.weight > 0 and layers and (metrics is None or not metrics.identical_layers):
        findings.append(f"each of the {layers} supervised layers received its gradient once, on its own stage")
    elif objective.weight > 0 and layers and metrics is not None:
        findings.append(
            f"student and teacher are identical at {len(metrics.identical_layers)} of the {layers} supervised "
            "layers, where a gradient of zero is correct; each other layer received its gradient once, on its own stage"
        )
    if objective.run.trains_head:
        findings.append("the output loss had one backward pass per microbatch")
    return findings
