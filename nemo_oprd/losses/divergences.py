"""Divergences between the student's and the teacher's next-token distributions, with their derivatives (paper, section
"Three Output-Space Variants"), for a head that is split over tensor-parallel ranks and for rows taken chunk by chunk.

Values and derivatives are written out instead of left to autograd, because autograd would keep every [rows, vocabulary]
tensor it met. Of a chunk, three [c, V] tensors are alive at most: the student's logits (which end as the gradient), the
teacher's, and their difference. Nothing is computed twice: value, gradient and metrics come from one pair of products.

With z the raw student logits, tau the temperature of both models, p = softmax(z / tau), q the teacher's and
d = log p - log q:

    sampled_token   log p_y - log q_y             gradient  d_y ([v = y] - p_v), the score-function estimator
    full_vocab      KL(p|q) = sum p d             gradient  p (d - KL)
    forward_kl      KL(q|p) = -sum q d            gradient  p - q
    jsd             b KL(q|m) + (1-b) KL(p|m)     gradient  (1-b) p (u - sum p u), m = b q + (1-b) p, u = log p - log m
    top_k           either KL on a support S of ids that is held constant, see `_support_term`

The gradients above are with respect to z / tau; those returned are with respect to z, so they carry a factor 1 / tau.
No tau^2 compensates it: value and gradient belong to the same function. Adding a divergence: a branch in `_dense_term_`
and its name in `KINDS`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from nemo_oprd.losses.vocab_parallel import (
    VocabShard,
    add_at_ids_,
    contains,
    dot,
    gather_ids,
    log_softmax_,
    slabs,
    top_k_ids,
)

KINDS = ("sampled_token", "top_k", "full_vocab", "forward_kl", "jsd")
SUPPORTS = ("student", "teacher", "union", "intersection")


@dataclass(frozen=True)
class OutputLoss:
    """Which divergence.

    `k` is the size of each model's top set: of the support for `top_k`; for the other kinds it only asks for the
    metrics of the support and may be None, which saves the search.

    `support`: the student's k largest ids, the teacher's, or the union or intersection of the two.
    `support_weight`: whose probabilities weigh the log ratio on the support; "student" is the reverse KL, "teacher" the
    forward KL (log q - log p). `normalizer`: "renormalized" compares the distributions conditioned on the support,
    "full" takes the support's terms out of the sum over the whole vocabulary.

    `clip` is PPO's epsilon, or how far the ratio may fall below and rise above 1; it acts where log-probabilities of
    the sampling policy are given.
    """

    kind: str
    k: int | None = None
    temperature: float = 1.0
    support: str = "student"
    normalizer: str = "renormalized"
    support_weight: str = "student"
    jsd_beta: float = 0.5
    clip: float | tuple[float, float] | None = None

    def __post_init__(self) -> None:
        for name, value, legal in (
            ("kind", self.kind, KINDS),
            ("support", self.support, SUPPORTS),
            ("normalizer", self.normalizer, ("renormalized", "full")),
            ("support_weight", self.support_weight, ("student", "teacher")),
        ):
            if value not in legal:
                raise ValueError(f"output loss {name}={value!r}: expected one of {', '.join(legal)}")
        if not self.temperature > 0:
            raise ValueError(f"output loss temperature={self.temperature}: expected a number above 0")
        if self.clip is not None and not min(self.ratio_range[1] - 1, 1 - self.ratio_range[0]) > 0:
            raise ValueError(f"output loss clip={self.clip}: expected numbers above 0, or none for no clipping")
        if not 0 < self.jsd_beta < 1:
            raise ValueError(
                f"output loss jsd_beta={self.jsd_beta}: expected a number between 0 and 1, both excluded; "
                "divided by it, or by 1 - it, the limits are the kinds forward_kl and full_vocab"
            )
        if (self.k is None and self.kind == "top_k") or (self.k is not None and self.k < 1):
            raise ValueError(f"output loss k={self.k} with kind {self.kind}: expected a whole number from 1 on")
        if self.kind == "top_k" and self.k == 1 and self.normalizer == "renormalized" and self.support != "union":
            raise ValueError(
                f"output loss kind=top_k with k=1 and support {self.support} is identically zero: a distribution "
                "renormalised on one id is 1. Choose k of 2 or more, or kind=sampled_token (the paper's top-1)"
            )

    @property
    def ratio_range(self) -> tuple[float, float]:
        """Between which numbers the ratio to the sampling policy counts."""
        if self.clip is None:
            return 0.0, math.inf
        low, high = self.clip if isinstance(self.clip, tuple) else (self.clip, self.clip)
        return 1 - low, 1 + high


@dataclass(frozen=True)
class OutputRows:
    """Of c rows: the loss `value` [c], `grad_logits` [c, V] = d value / d raw student logits (None if not asked for)
    and `metrics` [c]; the gradient is this rank's columns, the rest is the same on every tensor-parallel rank.

    Metrics: student_logprob, teacher_logprob (of the sampled token), student_entropy (nats); with the teacher's
    distribution teacher_entropy, reverse_kl; with `k` overlap (share of common ids of the two top sets), student_mass,
    teacher_mass (probability on the support), empty_support (1 or 0); with the sampling policy's log-probabilities
    ratio, clipped (1 or 0).
    """

    value: torch.Tensor
    grad_logits: torch.Tensor | None
    metrics: dict[str, torch.Tensor]


@dataclass(frozen=True)
class _Support:
    """Ids [c, K] of each row's support, of which only the `valid` count, and the overlap of the two top sets [c]."""

    ids: torch.Tensor
    valid: torch.Tensor
    overlap: torch.Tensor


@dataclass(frozen=True)
class _SparseTerm:
    """A value [c] whose gradient with respect to z / tau is `background` * p everywhere plus `on_ids` at `ids`."""

    value: torch.Tensor
    background: torch.Tensor
    ids: torch.Tensor
    on_ids: torch.Tensor


@torch.no_grad()
def output_rows(
    loss: OutputLoss,
    student_logits_CV: torch.Tensor,
    tokens_C: torch.Tensor,
    shard: VocabShard,
    *,
    teacher_logits_CV: torch.Tensor | None = None,
    teacher_logprob_C: torch.Tensor | None = None,
    old_logprob_C: torch.Tensor | None = None,
    with_grad: bool = True,
) -> OutputRows:
    """Value, gradient and metrics of c rows.

    Args:
        student_logits_CV: [c, size], float32 or float64. Overwritten, as are the teacher's: its memory becomes the
            gradient's. What stands in padding columns is ignored.
        tokens_C: the sampled token of each row.
        teacher_logits_CV: or, for sampled_token, `teacher_logprob_C`: of the sampled tokens, at the loss's temperature.
        old_logprob_C: log-probabilities of the sampled tokens under the policy that sampled them, at the loss's
            temperature. None says that the student is that policy, as in the first update after a rollout.

    Raises:
        ValueError: the kind needs the teacher's distribution and it is not given.
    """
    if teacher_logits_CV is None and (loss.kind != "sampled_token" or teacher_logprob_C is None):
        alternative = ", or its log-probabilities of the sampled tokens" if loss.kind == "sampled_token" else ""
        raise ValueError(f"output loss kind={loss.kind}: expected the teacher's logits{alternative}; got neither")
    # each holds logits, then log-probabilities, then probabilities; the student's ends as the gradient
    models = [z[:, : shard.real] for z in (student_logits_CV, teacher_logits_CV) if z is not None]
    support = _find_support(loss, models, shard) if len(models) == 2 and loss.k else None
    entropies = log_softmax_(models, shard, loss.temperature)
    ids_CK = tokens_C[:, None] if support is None else torch.cat([tokens_C[:, None], support.ids], dim=1)
    logprobs_MCK = gather_ids(models, ids_CK, shard)
    metrics = {"student_logprob": logprobs_MCK[0, :, 0], "student_entropy": entropies[0]}
    metrics["teacher_logprob"] = logprobs_MCK[1, :, 0] if teacher_logprob_C is None else teacher_logprob_C.to(entropies)

    difference_CV = models[0] - models[1] if len(models) == 2 else None
    for model_CV in models:
        model_CV.exp_()
    if difference_CV is not None:
        mean_p_C, mean_q_C = shard.sum_(torch.stack([dot(model_CV, difference_CV) for model_CV in models]))
        metrics |= {"teacher_entropy": entropies[1], "reverse_kl": mean_p_C}
    if support is not None:
        on_support_MCK = logprobs_MCK[:, :, 1:].masked_fill(~support.valid, -torch.inf)
        metrics |= _support_metrics(support, on_support_MCK)

    if loss.kind in ("sampled_token", "top_k"):
        if loss.kind == "sampled_token":
            term, of_the_ratio = _sampled_term(loss, metrics, tokens_C, old_logprob_C)
            metrics |= of_the_ratio
        else:
            assert support is not None
            term = _support_term(loss, support, on_support_MCK)
        value_C = term.value
        if with_grad:
            models[0].mul_(term.background[:, None])
            add_at_ids_(models[0], term.ids, term.on_ids, shard)
    else:
        assert difference_CV is not None
        value_C = _dense_term_(loss, models, difference_CV, mean_p_C, mean_q_C, shard)
    if not with_grad:
        return OutputRows(value_C, None, metrics)
    models[0].div_(loss.temperature)
    student_logits_CV[:, shard.real :] = 0
    return OutputRows(value_C, student_logits_CV, metrics)


def _dense_term_(
    loss: OutputLoss,
    models: list[torch.Tensor],
    difference_CV: torch.Tensor,
    mean_p_C: torch.Tensor,
    mean_q_C: torch.Tensor,
    shard: VocabShard,
) -> torch.Tensor:
    """The value [c] of a divergence over the whole vocabulary; p becomes its gradient with respect to z / tau.

    Args:
        models: p and q, overwritten, as is `difference_CV` = d = log p - log q.
        mean_p_C: sum p d over all ranks; `mean_q_C` is sum q d.
    """
    p_CV, q_CV = models
    if loss.kind == "full_vocab":
        p_CV.mul_(difference_CV.sub_(mean_p_C[:, None]))
        return mean_p_C
    if loss.kind == "forward_kl":
        p_CV.sub_(q_CV)
        return -mean_q_C
    assert loss.kind == "jsd"
    # u = log p - log m = -log(1 - b + b exp(-d)) and log q - log m = -log(b + (1 - b) exp(d)), each from logarithms:
    # the exponentials overflow, and u - d would cancel where p has nothing
    beta = loss.jsd_beta
    log_beta, log_rest = difference_CV.new_tensor([math.log(beta), math.log1p(-beta)])
    teacher_kl_C = torch.zeros_like(mean_p_C)
    for columns in slabs(p_CV.shape[1]):
        log_m_over_q = torch.logaddexp(difference_CV[:, columns] + log_rest, log_beta)
        teacher_kl_C -= (q_CV[:, columns] * log_m_over_q).sum(1)
    u_CV = torch.logaddexp(difference_CV.neg_().add_(log_beta), log_rest, out=difference_CV).neg_()
    teacher_kl_C, student_kl_C = shard.sum_(torch.stack([teacher_kl_C, dot(p_CV, u_CV)]))
    p_CV.mul_(u_CV.sub_(student_kl_C[:, None])).mul_(1 - beta)
    return beta * teacher_kl_C + (1 - beta) * student_kl_C


def _sampled_term(
    loss: OutputLoss, metrics: dict[str, torch.Tensor], tokens_C: torch.Tensor, old_logprob_C: torch.Tensor | None
) -> tuple[_SparseTerm, dict[str, torch.Tensor]]:
    """log p_y - log q_y with the score-function gradient; with the sampling policy's log-probabilities PPO's surrogate.

    A = log q_y - log p_y is held constant and r = p_y / p_old_y: value -min(r A, clip(r, 1 - low, 1 + high) A),
    gradient -r A grad log p_y, or none where the clipped product is the smaller. At r = 1 this is the plain estimator.
    """
    advantage_C = metrics["teacher_logprob"] - metrics["student_logprob"]
    slope_C, value_C = -advantage_C, -advantage_C  # slope: d value / d log p_y
    of_the_ratio = {}
    if old_logprob_C is not None:
        ratio_C = (metrics["student_logprob"] - old_logprob_C.to(advantage_C)).exp()
        bounded_C = ratio_C if loss.clip is None else ratio_C.clamp(*loss.ratio_range)
        clipped_C = bounded_C * advantage_C < ratio_C * advantage_C
        value_C = -torch.minimum(ratio_C * advantage_C, bounded_C * advantage_C)
        slope_C = (-ratio_C * advantage_C).masked_fill(clipped_C, 0)
        of_the_ratio = {"ratio": ratio_C, "clipped": clipped_C.to(ratio_C)}
    return _SparseTerm(value_C, -slope_C, tokens_C[:, None], slope_C[:, None]), of_the_ratio


def _support_term(loss: OutputLoss, support: _Support, on_support_MCK: torch.Tensor) -> _SparseTerm:
    """KL on a support S that is held constant; sums run over S, p(S) is the mass of S, [v in S] an indicator.

    normalizer "renormalized", with p' = p / p(S), q' = q / q(S), d' = log p' - log q':
        student weights   KL(p'|q') = sum p' d'     gradient  [v in S] p' (d' - KL)
        teacher weights   KL(q'|p') = -sum q' d'    gradient  [v in S] (p' - q')
    normalizer "full": terms of the whole vocabulary's KL, so not bounded below by 0
        student weights   F = sum p d               gradient  [v in S] p (d + 1) - p (F + p(S))
        teacher weights   F = -sum q d              gradient  p q(S) - [v in S] q

    A row whose support is empty has value and gradient 0.
    """
    renormalized = loss.normalizer == "renormalized"
    log_mass_MC = on_support_MCK.logsumexp(2)
    if renormalized:
        # an empty support has log mass -inf, and -inf - -inf is not a number
        on_support_MCK = on_support_MCK - log_mass_MC.masked_fill(log_mass_MC == -torch.inf, 0)[:, :, None]
    p_CK, q_CK = on_support_MCK.exp()
    mass_p_C, mass_q_C = log_mass_MC.exp()
    difference_CK = (on_support_MCK[0] - on_support_MCK[1]).masked_fill(~support.valid, 0)
    if loss.support_weight == "student":
        value_C = (p_CK * difference_CK).sum(1)
        offset_C = -value_C if renormalized else torch.ones_like(value_C)
        on_ids_CK = p_CK * (difference_CK + offset_C[:, None])
        background_C = -(value_C + mass_p_C)
    else:
        value_C = -(q_CK * difference_CK).sum(1)
        on_ids_CK = p_CK - q_CK if renormalized else -q_CK
        background_C = mass_q_C
    if renormalized:
        background_C = torch.zeros_like(value_C)
    return _SparseTerm(value_C, background_C, support.ids, on_ids_CK)


def _find_support(loss: OutputLoss, logits: list[torch.Tensor], shard: VocabShard) -> _Support:
    """The support of `loss` and the overlap |S_p and S_q| / k of the top sets, from both models' logits."""
    assert loss.k is not None
    student_CK, teacher_CK = (top_k_ids(logits_CV, loss.k, shard) for logits_CV in logits)
    shared_CK = contains(teacher_CK, student_CK)
    everywhere = torch.ones_like(shared_CK)
    ids_CK, valid_CK = {
        "student": (student_CK, everywhere),
        "teacher": (teacher_CK, everywhere),
        "intersection": (student_CK, shared_CK),
        "union": (
            torch.cat([student_CK, teacher_CK], dim=1),
            torch.cat([everywhere, ~contains(student_CK, teacher_CK)], dim=1),
        ),
    }[loss.support]
    return _Support(ids_CK, valid_CK, shared_CK.to(logits[0].dtype).mean(1))


def _support_metrics(support: _Support, on_support_MCK: torch.Tensor) -> dict[str, torch.Tensor]:
    student_mass_C, teacher_mass_C = on_support_MCK.exp().sum(2)
    empty_C = ~support.valid.any(1)
    return {
        "overlap": support.overlap,
        "student_mass": student_mass_C,
        "teacher_mass": teacher_mass_C,
        "empty_support": empty_C.to(student_mass_C),
    }
