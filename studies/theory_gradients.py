"""Gradient estimators at one response position, given the prefix, in closed form: every next token is enumerated.

Given the prompt and the tokens before position t, the only random quantity is the token v ~ p that the student samples.
If the vocabulary is small enough to enumerate, the mean and the variance of an estimator g(v) are sums over v, without
a Monte Carlo error. The estimators are those of one training position, for all parameters at once:

    sampled     g(v) = u(v) grad log p(v),  u = log p - log q         sampled-token OPD as it is trained
    baseline    g(v) = (u(v) - KL(p || q)) grad log p(v)              the same with the mean reward subtracted
    written     g(v) = grad log p(v)                                  derivative of log p(v) - log q(v) for fixed v
    token       g(v) = grad mean_l ||h_S - h_T||^2 / D, states where v is the input
    predicting  the same, states one position earlier, which predict v

Plain PyTorch on Hugging Face models, one sequence at a time. The effect of v on later positions is not included;
`theory_rollouts` measures whole responses.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Moments:
    """`signal` = ||E g||^2 and `variance` = trace Cov g of one estimator; their quotient is the paper's SNR."""

    signal: float
    variance: float


@dataclass(frozen=True)
class Target:
    """The teacher's outputs at one position.

    `log_q` is [V]; `hidden_LV2D` [L, V, 2, D] holds, for each next token, the states at the predicting position and at
    the token.
    """

    log_q: torch.Tensor
    hidden_LV2D: torch.Tensor


@dataclass(frozen=True)
class Position:
    """The student's outputs at one position: `log_p` [V], its derivatives `scores` [V, P], and hidden-state losses.

    `losses` and `gradients` map `token` and `predicting` to [V] and [V, P], as a run that sampled v would compute them.
    `predicting` is computed for each v too; that its values are equal is a result, not an assumption.
    """

    log_p: torch.Tensor
    scores: torch.Tensor
    losses: dict[str, torch.Tensor]
    gradients: dict[str, torch.Tensor]


def forward(model: Any, ids_BS: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits [B, S, V] and the outputs of all layers [L, B, S, D], the last one after the final norm."""
    out = model(input_ids=ids_BS, output_hidden_states=True, use_cache=False)
    return out.logits, torch.stack(out.hidden_states[1:])


def squared_distance(student_L_D: torch.Tensor, teacher_L_D: torch.Tensor) -> torch.Tensor:
    """Mean over layers and width, one number per position: [L, ..., D] x 2 -> [...]."""
    return (student_L_D - teacher_L_D).square().mean(-1).mean(0)


def flat_gradient(value: torch.Tensor, parameters: list[torch.nn.Parameter]) -> torch.Tensor:
    """[P]: the derivative of a scalar by all parameters, zero for those it does not depend on; keeps the graph."""
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


def position(student: Any, prefix: list[int], target: Target) -> Position:
    """Runs the student on the prefix followed by each token of the vocabulary, with derivatives."""
    parameters = list(student.parameters())
    losses: dict[str, list[torch.Tensor]] = {"predicting": [], "token": []}
    gradients: dict[str, list[torch.Tensor]] = {"predicting": [], "token": []}
    for v in range(student.config.vocab_size):
        _, hidden = forward(student, torch.tensor([[*prefix, v]]))
        loss_2 = squared_distance(hidden[:, 0, -2:], target.hidden_LV2D[:, v])
        for name, loss in zip(losses, loss_2, strict=True):
            losses[name].append(loss.detach())
            gradients[name].append(flat_gradient(loss, parameters))
    stacked = [{name: torch.stack(rows) for name, rows in found.items()} for found in (losses, gradients)]
    return Position(*log_probabilities_and_scores(student, prefix), *stacked)


def moments(p_V: torch.Tensor, gradients_VP: torch.Tensor) -> Moments:
    """Exact moments of an estimator that takes the value gradients_VP[v] with probability p_V[v]."""
    mean = p_V @ gradients_VP
    deviations = (gradients_VP - mean).square().sum(-1)
    return Moments(float(mean.square().sum()), float(p_V @ deviations))


def moments_of_products(p_V: torch.Tensor, reward_V: torch.Tensor, gram_VV: torch.Tensor) -> Moments:
    """The same for g(v) = reward[v] * score[v], from the inner products of the scores (a small matrix)."""
    weights = p_V * reward_V
    signal = float(weights @ gram_VV @ weights)
    return Moments(signal, float((weights * reward_V) @ gram_VV.diagonal()) - signal)


def sampled_moments(p_V: torch.Tensor, gradients_VP: torch.Tensor, draws: int, seed: int) -> tuple[float, float, float]:
    """Monte Carlo: (||mean||^2 without bias, variance, standard error of the variance) from `draws` sampled tokens."""
    generator = torch.Generator().manual_seed(seed)
    counts = torch.bincount(torch.multinomial(p_V, draws, True, generator=generator), minlength=len(p_V)).to(p_V)
    mean = counts @ gradients_VP / draws
    deviations = (gradients_VP - mean).square().sum(-1)
    variance = float(counts @ deviations / (draws - 1))
    spread = float((counts @ (deviations - variance).square() / (draws - 1)).sqrt())
    return float(mean.square().sum()) - variance / draws, variance, spread / draws**0.5


def measure_position(found: Position, target: Target) -> dict[str, float]:
    """All measurements of one position.

    `delta` is the paper's symmetric divergence. The derivative of the expected hidden-state loss has two parts:
    `sampling_term` is the norm of the part that no implementation of OPRD computes, sum_v loss(v) grad p(v), which
    exists because p changes too; the computed part has the norm sqrt(`token_signal`).
    """
    p, u = found.log_p.exp(), found.log_p - target.log_q
    gram = found.scores @ found.scores.T
    fisher = torch.linalg.eigvalsh(gram * p.outer(p).sqrt())  # the nonzero eigenvalues of the Fisher matrix
    lost = p * found.losses["token"]
    by_name = {
        "sampled": moments_of_products(p, u, gram),
        "baseline": moments_of_products(p, u - p @ u, gram),
        "written": moments_of_products(p, torch.ones_like(p), gram),
        **{name: moments(p, gradients) for name, gradients in found.gradients.items()},
    }
    return {
        "kl": float(p @ u),
        "delta": float((p - target.log_q.exp()) @ u),
        "variance_of_u": float(p @ (u - p @ u).square()),
        "entropy": float(-(p * found.log_p).sum()),
        "sampling_term": float(lost @ gram @ lost) ** 0.5,
        "rank_of_fisher": float((fisher > 1e-12 * fisher[-1]).sum()),
        **{f"{name}_signal": both.signal for name, both in by_name.items()},
        **{f"{name}_variance": both.variance for name, both in by_name.items()},
    }


def limit_of_sampled(teacher: Any, prefix: list[int], direction_P: torch.Tensor) -> dict[str, float]:
    """The limit of the sampled-token estimator as the student approaches the teacher along `direction_P`.

    With theta = theta_T + e direction, u = e a + O(e^2) where a(v) = grad log q(v) . direction, so that to leading
    order delta = e^2 E[a^2], E g = e E[a s] (the Fisher matrix times the direction) and trace Cov g = e^2 (E[a^2 |s|^2]
    - |E[a s]|^2). All results are divided by e^2.
    """
    log_q, scores = log_probabilities_and_scores(teacher, prefix)
    q, a = log_q.exp(), scores @ direction_P
    both = moments_of_products(q, a, scores @ scores.T)
    return {"delta": float(q @ a.square()), "signal": both.signal, "variance": both.variance}
