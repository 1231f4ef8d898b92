"""Gradient estimators at one response position, given the prefix, in closed form: every next token is enumerated.

Given the prompt and the tokens before position t, the only thing left to chance is the token v ~ p that the student
samples. With a vocabulary small enough to try all of it, the mean and the variance of an estimator g(v) are sums over
v, and no Monte Carlo error is left. The estimators are those of one training position, for all parameters at once:

    sampled     g(v) = u(v) grad log p(v),  u = log p - log q         sampled-token OPD as it is trained
    baseline    g(v) = (u(v) - KL(p || q)) grad log p(v)              the same, less its mean reward
    written     g(v) = grad log p(v)                                  derivative of log p(v) - log q(v) as it stands
    token       g(v) = grad mean_l ||h_S - h_T||^2 / D, states where v is the input
    predicting  the same, states one position earlier, which predict v

Plain PyTorch on Hugging Face models, one sequence at a time. Left out: what a choice of v does to later positions
(theory_rollouts measures whole responses).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

ESTIMATORS = ("sampled", "baseline", "written", "token", "predicting")


@dataclass(frozen=True)
class Moments:
    """Of one estimator: `signal` = ||E g||^2 and `variance` = trace Cov g, whose quotient is the paper's SNR."""

    signal: float
    variance: float


@dataclass(frozen=True)
class Target:
    """What the teacher says at one position: log-probabilities [V] and states hidden_VLD2.

    `hidden_LV2D` is [L, V, 2, D]: for each next token the states at the predicting and at the token position.
    """

    log_q: torch.Tensor
    hidden_LV2D: torch.Tensor


def forward(model: Any, ids_BS: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits [B, S, V] and the outputs of all layers [L, B, S, D], the last one after the final norm."""
    out = model(input_ids=ids_BS, output_hidden_states=True, use_cache=False)
    return out.logits, torch.stack(out.hidden_states[1:])


def squared_distance(ours_L_D: torch.Tensor, theirs_L_D: torch.Tensor) -> torch.Tensor:
    """Mean over layers and width, one number per position: [L, ..., D] x 2 -> [...]."""
    return (ours_L_D - theirs_L_D).square().mean(-1).mean(0)


def flat_gradient(value: torch.Tensor, parameters: list[torch.nn.Parameter]) -> torch.Tensor:
    """[P]: the derivative of a scalar by all parameters, zero where it does not depend on one; keeps the graph."""
    found = torch.autograd.grad(value, parameters, retain_graph=True, allow_unused=True)
    pairs = zip(found, parameters, strict=True)
    return torch.cat([torch.zeros_like(p).flatten() if g is None else g.flatten() for g, p in pairs])


def flat_parameters(model: Any) -> torch.Tensor:
    """[P], in the order of `flat_gradient`."""
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


@torch.no_grad()
def teacher_target(teacher: Any, prefix: list[int]) -> Target:
    """Runs the teacher on the prefix followed by each token of the vocabulary."""
    ids_VS = torch.tensor([[*prefix, v] for v in range(teacher.config.vocab_size)])
    logits, hidden = forward(teacher, ids_VS)
    return Target(logits[0, -2].log_softmax(-1), hidden[:, :, -2:])


def log_probabilities_and_scores(model: Any, prefix: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """log p [V] of the next token, and its derivatives (the scores) [V, P]."""
    parameters = list(model.parameters())
    logits, _ = forward(model, torch.tensor([prefix]))
    log_p = logits[0, -1].log_softmax(-1)
    return log_p.detach(), torch.stack([flat_gradient(value, parameters) for value in log_p])


def state_gradients(student: Any, prefix: list[int], target: Target, state: str) -> tuple[torch.Tensor, torch.Tensor]:
    """The hidden-state loss [V] and its gradient [V, P] for each sampled token, as the run of that token would give it.

    Args:
        state: `token` or `predicting`. The latter is computed for each token too: that it is always the same is a
            result, not an assumption.
    """
    parameters = list(student.parameters())
    back = {"token": 1, "predicting": 0}[state]
    losses, gradients = [], []
    for v in range(student.config.vocab_size):
        _, hidden = forward(student, torch.tensor([[*prefix, v]]))
        loss = squared_distance(hidden[:, 0, -2 + back], target.hidden_LV2D[:, v, back])
        gradients.append(flat_gradient(loss, parameters))
        losses.append(loss.detach())
    return torch.stack(losses), torch.stack(gradients)


def moments(p_V: torch.Tensor, gradients_VP: torch.Tensor) -> Moments:
    """Exact moments of an estimator that takes the value gradients_VP[v] with probability p_V[v]."""
    mean = p_V @ gradients_VP
    deviations = (gradients_VP - mean).square().sum(-1)
    return Moments(float(mean.square().sum()), float(p_V @ deviations))


def sampled_moments(p_V: torch.Tensor, gradients_VP: torch.Tensor, draws: int, seed: int) -> tuple[float, float, float]:
    """Monte Carlo: (||mean||^2 without bias, variance, standard error of the variance) from `draws` sampled tokens."""
    generator = torch.Generator().manual_seed(seed)
    counts = torch.bincount(torch.multinomial(p_V, draws, True, generator=generator), minlength=len(p_V)).to(p_V)
    mean = counts @ gradients_VP / draws
    deviations = (gradients_VP - mean).square().sum(-1)
    variance = float(counts @ deviations / (draws - 1))
    spread = float((counts @ (deviations - variance).square() / (draws - 1)).sqrt())
    return float(mean.square().sum()) - variance / draws, variance, spread / draws**0.5


def position_gradients(student: Any, prefix: list[int], target: Target) -> tuple[dict[str, Any], torch.Tensor]:
    """All estimators at one position.

    Returns:
        {estimator: [V, P]} with `scores` [V, P], `u` [V] and `token_loss` [V] next to them, and p [V].
    """
    log_p, scores = log_probabilities_and_scores(student, prefix)
    p, u = log_p.exp(), log_p - target.log_q
    token_loss, token = state_gradients(student, prefix, target, "token")
    _, predicting = state_gradients(student, prefix, target, "predicting")
    found = {
        "sampled": u[:, None] * scores,
        "baseline": (u - p @ u)[:, None] * scores,
        "written": scores,
        "token": token,
        "predicting": predicting,
    }
    return {**found, "scores": scores, "u": u, "token_loss": token_loss}, p


def measure_position(student: Any, prefix: list[int], target: Target) -> dict[str, float]:
    """Everything that the report says about one position, as numbers.

    `delta` is the paper's symmetric divergence. `sampling_term` is the part of the derivative of the expected
    hidden-state loss that no implementation of OPRD computes: sum_v loss(v) grad p(v), because p moves too; its norm,
    next to `token_signal` for the part that is computed.
    """
    found, p = position_gradients(student, prefix, target)
    u, scores = found["u"], found["scores"]
    q = target.log_q.exp()
    numbers = {
        "kl": float(p @ u),
        "delta": float((p - q) @ u),
        "variance_of_u": float(p @ (u - p @ u).square()),
        "entropy": float(-(p * (u + target.log_q)).sum()),
        "sampling_term": float(((p * found["token_loss"]) @ scores).norm()),
        "rank_of_fisher": float(torch.linalg.matrix_rank(scores * p.sqrt()[:, None], rtol=1e-10)),
    }
    for name in ESTIMATORS:
        both = moments(p, found[name])
        numbers |= {f"{name}_signal": both.signal, f"{name}_variance": both.variance}
    return numbers


def limit_of_sampled(teacher: Any, prefix: list[int], direction_P: torch.Tensor) -> dict[str, float]:
    """What the sampled-token estimator tends to as the student goes to the teacher along `direction_P`.

    With theta = theta_T + e direction, u = e a + O(e^2) where a(v) = grad log q(v) . direction, so that to leading
    order delta = e^2 E[a^2], E g = e E[a s] (the Fisher matrix times the direction) and trace Cov g = e^2 (E[a^2 |s|^2]
    - |E[a s]|^2). Everything here is per e^2.
    """
    log_q, scores = log_probabilities_and_scores(teacher, prefix)
    q, a = log_q.exp(), scores @ direction_P
    both = moments(q, a[:, None] * scores)
    return {"delta": float(q @ a.square()), "signal": both.signal, "variance": both.variance}
