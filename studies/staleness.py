r"""The bias of gradients from responses of earlier weights, exactly, on models whose responses can all be enumerated.

    python -m studies.staleness                # seconds; writes studies/results/staleness.json and prints tables

Responses y of `TOKENS` tokens come from mu, the weights some updates ago, and the gradient is meant for pi, the weights
now. At position t a loss gives each token the gradient g_t(y_1..y_t), by this package's own losses and correction, and

    bias_t = E_mu g_t - E_pi g_t = (E_{mu prefix, mu token} - E_{mu prefix, pi token}) g_t      the part of the token
                                 + (E_{mu prefix, pi token} - E_{pi prefix, pi token}) g_t      the part of the prefix

With 4 tokens and 5 positions, expectations are sums over all 1,024 responses in float64, so there is no Monte Carlo
error. Student and teacher are recurrent networks of width 4; updates are exact gradient steps on the reverse KL along
the student's own responses, and every loss is measured at the same pi and mu. The numbers are medians over 20 pairs.

Legend: V tokens, D width, P parameters, n = V^t prefixes of t tokens; a list over t holds [n, ...] tensors.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from nemo_oprd.losses.correction import Correction
from nemo_oprd.losses.divergences import output_rows
from nemo_oprd.losses.output_loss import OutputLoss
from nemo_oprd.losses.representation import mse
from nemo_oprd.losses.vocab_parallel import VocabShard
from studies.real_study import write_json

VOCABULARY, TOKENS, WIDTH = 4, 5, 4
MODELS, UPDATES, RATE = 20, 40, 0.5
LAGS = (1, 2, 4, 8)
LAG = 8  # at which bounds, residuals and products of weights are measured
RESIDUALS = (1.0, 0.1, 0.01)  # the remaining part of the teacher's distance from pi
RESULT = Path(__file__).parent / "results" / "staleness.json"

SHAPES = {"start": (WIDTH,), "embedding": (VOCABULARY, WIDTH), "step": (WIDTH, WIDTH), "head": (VOCABULARY, WIDTH)}
SHARD = VocabShard(0, VOCABULARY, VOCABULARY)
LOSSES = {
    "mse, token": None,
    "mse, predicting": None,
    "forward KL": OutputLoss("forward_kl"),
    "reverse KL": OutputLoss("full_vocab"),
    "sampled token": OutputLoss("sampled_token"),
    "sampled token, truncated at 2": OutputLoss("sampled_token", correction=Correction("truncate", 0, 2)),
    "sampled token, corrected": OutputLoss("sampled_token", correction=Correction("truncate", 0, math.inf)),
}


def random_weights(seed: int) -> torch.Tensor:
    """Float64 [P]: the weights of one model."""
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(sum(math.prod(shape) for shape in SHAPES.values()), generator=draw, dtype=torch.float64)


def outputs(weights_P: torch.Tensor) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """States [n, D] behind every prefix of 0 to `TOKENS` tokens, and the next token's logits [n, V]."""
    parts = weights_P.split([math.prod(shape) for shape in SHAPES.values()])
    start, embedding, step, head = (part.view(shape) for part, shape in zip(parts, SHAPES.values(), strict=True))
    states = [start[None].tanh()]
    for _ in range(TOKENS):
        states.append((states[-1] @ step.T)[:, None].add(embedding).flatten(0, 1).tanh())
    return states, [state @ head.T for state in states]


@dataclass(frozen=True)
class Policy:
    """Probabilities of `prefixes` [n] of every length, and log-probabilities `log_next` [n, V] of the next token."""

    prefixes: list[torch.Tensor]
    log_next: list[torch.Tensor]

    @staticmethod
    def of(weights_P: torch.Tensor) -> Policy:
        """Of a model's weights."""
        log_next = [logits.log_softmax(-1) for logits in outputs(weights_P)[1]]
        prefixes = [torch.ones(1, dtype=torch.float64)]
        for rows in log_next[:-1]:
            prefixes.append((prefixes[-1][:, None] * rows.exp()).flatten())
        return Policy(prefixes, log_next)


class Gradients:
    """The gradient of every token's loss by the student's weights, for one student and one teacher."""

    def __init__(self, student_P: torch.Tensor, teacher_P: torch.Tensor) -> None:
        self.student, self.teacher = outputs(student_P), outputs(teacher_P)
        jacobian: Any = torch.func.jacfwd(outputs)(student_P)
        self.state_slopes, self.logit_slopes = jacobian  # [n, D, P] and [n, V, P]

    def of(self, name: str, position: int, mu: Policy) -> torch.Tensor:
        """[n, V, P]: of every token at a position (from 1) behind every prefix, in a run on samples of `mu`."""
        loss = LOSSES[name]
        if loss is None:
            predicting = "predicting" in name
            at = position - predicting
            states = self.student[0][at].detach().requires_grad_()
            (slope,) = torch.autograd.grad(mse(states, self.teacher[0][at], "mean").sum(), states)
            each_nP = torch.einsum("nd,ndp->np", slope, self.state_slopes[at])
            if predicting:  # the same for every token
                return each_nP[:, None].expand(-1, VOCABULARY, -1)
            return each_nP.unflatten(0, (-1, VOCABULARY))
        at = position - 1
        every = torch.arange(VOCABULARY).repeat(len(self.student[1][at]))  # each token behind each prefix
        student, teacher = (each[1][at].repeat_interleave(VOCABULARY, 0) for each in (self.student, self.teacher))
        rows = output_rows(
            loss, student, every, SHARD, teacher_logits_CV=teacher, engine_logprob_C=mu.log_next[at].flatten()
        )
        assert rows.grad_logits is not None
        slopes = rows.grad_logits.unflatten(0, (-1, VOCABULARY))
        return torch.einsum("nav,nvp->nap", slopes, self.logit_slopes[at])


def mean(gradient_nVP: torch.Tensor, position: int, prefix: Policy, token: Policy) -> torch.Tensor:
    """[P]: the expectation with prefixes of one policy and the token of another."""
    weight = prefix.prefixes[position - 1][:, None] * token.log_next[position - 1].exp()
    return torch.einsum("nv,nvp->p", weight, gradient_nVP)


def train(student_P: torch.Tensor, teacher_P: torch.Tensor, updates: int) -> list[torch.Tensor]:
    """The weights after 0, 1, ... updates on the mean reverse KL of a token along the student's own responses."""
    trail = [student_P]
    _, teacher = outputs(teacher_P)
    for _ in range(updates):
        weights = trail[-1].clone().requires_grad_()
        own = Policy.of(trail[-1])
        total = torch.zeros((), dtype=torch.float64)
        for visits, logits, target in zip(own.prefixes[:-1], outputs(weights)[1][:-1], teacher[:-1], strict=True):
            log_p = logits.log_softmax(-1)
            total = total + visits @ (log_p.exp() * (log_p - target.log_softmax(-1))).sum(-1)
        (slope,) = torch.autograd.grad(total / TOKENS, weights)
        trail.append(trail[-1] - RATE * slope)
    return trail


def measure(found: Gradients, name: str, pi: Policy, mu: Policy) -> dict[str, Any]:
    """Norms by position: of the exact gradient, of the bias, and of its two parts; norm and bound of the bias of all.

    The bound, 2 TV(mu, pi) sup |sum of gradients|, is of an average of the same gradients under mu and under pi; with a
    correction, which is a part of the gradient, there is none (None).
    """
    exact_of = "sampled token" if name.startswith("sampled") else name
    rows: dict[str, list[float]] = {key: [] for key in ("exact", "bias", "token", "prefix")}
    whole, responses = torch.zeros(()), torch.zeros(1, 1)
    for position in range(1, TOKENS + 1):
        given, wanted = (found.of(each, position, mu) for each in (name, exact_of))
        exact = mean(wanted, position, pi, pi)
        token = mean(given, position, mu, mu) - mean(wanted, position, mu, pi)
        prefix = mean(wanted, position, mu, pi) - exact
        for key, vector in (("exact", exact), ("bias", token + prefix), ("token", token), ("prefix", prefix)):
            rows[key].append(float(vector.norm()))
        whole = whole + token + prefix
        responses = (responses[:, None] + given).flatten(0, 1)
    bound = 2 * variation(pi, mu, TOKENS) * float(responses.norm(dim=1).max())
    return {**rows, "whole": float(whole.norm()), "bound": bound if name == exact_of else None}


def variation(pi: Policy, mu: Policy, length: int) -> float:
    """The total variation distance between two policies' first `length` tokens."""
    return float((mu.prefixes[length] - pi.prefixes[length]).abs().sum()) / 2


def weighted_by_products(found: Gradients, pi: Policy, mu: Policy) -> float:
    """The largest deviation from the exact gradient if each token also has the weights of all tokens before it."""
    worst = 0.0
    for position in range(1, TOKENS + 1):
        gradient = found.of("sampled token, corrected", position, mu)
        ratio = pi.prefixes[position - 1] / mu.prefixes[position - 1]
        whole = mean(gradient * ratio[:, None, None], position, mu, mu)
        exact = mean(found.of("sampled token", position, mu), position, pi, pi)
        worst = max(worst, float((whole - exact).norm() / exact.norm()))
    return worst


def weighted_predicting(found: Gradients, pi: Policy, mu: Policy) -> float:
    """The largest change of the mean gradient of `predicting` states by the weights pi / mu of their tokens."""
    worst = 0.0
    for position in range(1, TOKENS + 1):
        gradient = found.of("mse, predicting", position, mu)
        weight = (pi.log_next[position - 1] - mu.log_next[position - 1]).exp()
        plain, weighted = (mean(each, position, mu, mu) for each in (gradient, gradient * weight[:, :, None]))
        worst = max(worst, float((weighted - plain).norm() / plain.norm()))
    return worst


def pair(seed: int, updates: int = UPDATES) -> tuple[list[torch.Tensor], torch.Tensor]:
    """The trail of a student's weights, which ends at pi, and its teacher's weights."""
    student, teacher = random_weights(2 * seed), random_weights(2 * seed + 1)
    return train(student, teacher, updates), teacher


def study() -> dict[str, Any]:
    """The contents of the result file."""
    lags: dict[str, Any] = {name: {lag: [] for lag in LAGS} for name in LOSSES}
    residuals: dict[str, Any] = {name: {residual: [] for residual in RESIDUALS} for name in LOSSES}
    products, predicting, variations = [], [], []
    for seed in range(MODELS):
        trail, teacher = pair(seed)
        now = trail[-1]
        pi, found = Policy.of(now), Gradients(now, teacher)
        for lag in LAGS:
            mu = Policy.of(trail[-1 - lag])
            for name in LOSSES:
                lags[name][lag].append(measure(found, name, pi, mu))
        mu = Policy.of(trail[-1 - LAG])
        variations.append([variation(pi, mu, length) for length in range(1, TOKENS + 1)])
        products.append(weighted_by_products(found, pi, mu))
        predicting.append(weighted_predicting(found, pi, mu))
        for residual in RESIDUALS:
            nearer = Gradients(now, now + residual * (teacher - now))
            for name in LOSSES:
                residuals[name][residual].append(measure(nearer, name, pi, mu)["whole"])
    return {
        "settings": {"vocabulary": VOCABULARY, "tokens": TOKENS, "width": WIDTH, "models": MODELS, "updates": UPDATES,
                     "rate": RATE},
        "variation_by_position": np.median(variations, 0).tolist(),
        "losses": {name: summary(lags[name], residuals[name]) for name in LOSSES},
        "weighted_by_products": max(products),
        "weighted_predicting": max(predicting),
    }  # fmt: skip


def summary(by_lag: dict[int, list[dict[str, Any]]], by_residual: dict[float, list[float]]) -> dict[str, Any]:
    """Medians over models, in units of the exact gradient's norm at that position; the worst cases of claims."""

    def relative(rows: list[dict[str, Any]], key: str) -> list[float]:
        return np.median([np.array(row[key]) / np.array(row["exact"]) for row in rows], 0).tolist()

    at_lag = by_lag[LAG]
    return {
        "lags": {str(lag): {key: relative(rows, key) for key in ("bias", "token", "prefix")}
                 for lag, rows in by_lag.items()},
        "largest_token_part": max(max(np.array(row["token"]) / np.array(row["exact"])) for row in at_lag),
        "smallest_token_part": min(max(np.array(row["token"]) / np.array(row["exact"])) for row in at_lag),
        "share_of_bound": max((row["whole"] / row["bound"] for row in at_lag if row["bound"]), default=None),
        "bias_by_residual": {f"{residual:g}": float(np.median(values)) for residual, values in by_residual.items()},
    }  # fmt: skip


def tables(found: dict[str, Any]) -> str:
    """The table of docs/results_rollouts.md."""
    heading = " | ".join(f"lag {lag}" for lag in LAGS)
    parts = f"its token's part, lag {LAG} | its prefix's part, lag {LAG}"
    lines = [f"| bias of token {TOKENS} | {heading} | {parts} | residual 0.1 / 1 | 0.01 / 0.1 | share of the bound |"]
    lines.append("|---" * (6 + len(LAGS)) + "|")
    for name, loss in found["losses"].items():
        cells = [_cell(loss["lags"][str(lag)]["bias"][-1]) for lag in LAGS]
        cells += [_cell(loss["lags"][str(LAG)][part][-1]) for part in ("token", "prefix")]
        far, near, nearest = loss["bias_by_residual"].values()
        share = loss["share_of_bound"]
        cells += [f"{near / far:.3f}", f"{nearest / near:.3f}", "-" if share is None else f"{share:.2f}"]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def details(found: dict[str, Any]) -> str:
    """What only the command prints: the two parts of the bias at every position, and the worst cases of claims."""
    positions = range(1, found["settings"]["tokens"] + 1)
    lines = [f"| lag {LAG}, part of the bias | " + " | ".join(f"token {t}" for t in positions) + " |"]
    lines.append("|---" * (1 + len(positions)) + "|")
    for name, loss in found["losses"].items():
        for part in ("token", "prefix"):
            values = loss["lags"][str(LAG)][part]
            lines.append(f"| {name}: {part} | " + " | ".join(_cell(value) for value in values) + " |")
    values = found["variation_by_position"]
    lines.append("| TV(mu, pi) of the tokens so far | " + " | ".join(_cell(value) for value in values) + " |")
    checks = {
        "smallest part of the token, sampled token": found["losses"]["sampled token"]["smallest_token_part"],
        "largest part of the token, sampled token, corrected":
            found["losses"]["sampled token, corrected"]["largest_token_part"],
        "deviation of the sampled token with products of weights": found["weighted_by_products"],
        "change of `predicting` by a token's weight": found["weighted_predicting"],
    }  # fmt: skip
    lines += ["", "| relative to the exact gradient, over 20 pairs | |", "|---|---|"]
    return "\n".join([*lines, *(f"| {name} | {value:.1e} |" for name, value in checks.items())])


def _cell(value: float) -> str:
    return "0" if value < 1e-9 else f"{value:.3f}"


def main() -> None:
    """Writes the result file and prints its tables."""
    found = study()
    write_json(RESULT, found)
    print(f"{tables(found)}\n\n{details(found)}")


if __name__ == "__main__":
    main()
