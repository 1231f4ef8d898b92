"""Gradient estimators over whole responses: variances that remain because the prefix is random too.

One sample is one response to one prompt; its gradient is the mean over response tokens, as in training. The number of
responses is finite, so the result is a Monte Carlo estimate, whose error a jackknife over groups estimates.
"""

from __future__ import annotations

from typing import Any

import torch

from studies.theory_gradients import flat_gradient, forward, squared_distance

ESTIMATORS = ("sampled", "full_vocab", "token", "predicting")
GROUPS = 8


def response_losses(student: Any, teacher: Any, prompt: list[int], response: list[int]) -> dict[str, torch.Tensor]:
    """Scalars whose derivatives are the estimators: sampled token, full-vocabulary KL, hidden states at both positions.

    The value of `sampled` has no meaning; its derivative is mean_t u_t grad log p(y_t).
    """
    ids = torch.tensor([prompt + response])
    logits, hidden = forward(student, ids)
    with torch.no_grad():
        teacher_logits, teacher_hidden = forward(teacher, ids)
    first = len(prompt) - 1
    log_p, log_q = (x[0, first:-1].log_softmax(-1) for x in (logits, teacher_logits))
    chosen = torch.tensor(response)[:, None]
    u = (log_p - log_q).detach().gather(1, chosen)
    rows = squared_distance(hidden[:, 0], teacher_hidden[:, 0])
    return {
        "sampled": (u * log_p.gather(1, chosen)).mean(),
        "full_vocab": (log_p.exp() * (log_p - log_q)).sum(-1).mean(),
        "token": rows[first + 1 :].mean(),
        "predicting": rows[first:-1].mean(),
    }


def measure_rollouts(student: Any, teacher: Any, rollouts: list[tuple[list[int], list[int]]]) -> dict[str, Any]:
    """`signal`, `variance` and `snr` of one response's gradient and `snr_error` (jackknife), for each estimator.

    Args:
        rollouts: (prompt ids, response ids), sampled from `student` at temperature 1; at least 2 * GROUPS.
    """
    if len(rollouts) < 2 * GROUPS:
        raise ValueError(f"{len(rollouts)} rollouts; expected at least {2 * GROUPS} to estimate an error")
    parameters = list(student.parameters())
    size = sum(parameter.numel() for parameter in parameters)
    sums = {name: torch.zeros(GROUPS, size, dtype=parameters[0].dtype) for name in ESTIMATORS}
    squares = {name: [0.0] * GROUPS for name in ESTIMATORS}
    counts = [0] * GROUPS
    kl = 0.0
    for i, (prompt, response) in enumerate(rollouts):
        counts[i % GROUPS] += 1
        losses = response_losses(student, teacher, prompt, response)
        kl += float(losses["full_vocab"].detach()) / len(rollouts)
        for name in ESTIMATORS:
            gradient = flat_gradient(losses[name], parameters)
            sums[name][i % GROUPS] += gradient
            squares[name][i % GROUPS] += float(gradient.square().sum())
    return {"kl": kl, "responses": len(rollouts)} | {
        name: _with_jackknife(sums[name], squares[name], counts) for name in ESTIMATORS
    }


def _with_jackknife(sums_GP: torch.Tensor, squares: list[float], counts: list[int]) -> dict[str, float]:
    total, square, count = sums_GP.sum(0), sum(squares), sum(counts)
    signal, variance = unbiased_moments(total, square, count)
    left_out = []
    for group in range(GROUPS):
        s, v = unbiased_moments(total - sums_GP[group], square - squares[group], count - counts[group])
        left_out.append(s / v)
    center = sum(left_out) / GROUPS
    error = ((GROUPS - 1) / GROUPS * sum((x - center) ** 2 for x in left_out)) ** 0.5
    return {"signal": signal, "variance": variance, "snr": signal / variance, "snr_error": error}


def unbiased_moments(sum_P: torch.Tensor, square: float, count: int) -> tuple[float, float]:
    """(||E g||^2, trace Cov g) from the sum of `count` gradients and the sum of their squared norms, both unbiased."""
    squared_mean = float(sum_P.square().sum()) / count**2
    variance = (square / count - squared_mean) * count / (count - 1)
    return squared_mean - variance / count, variance
