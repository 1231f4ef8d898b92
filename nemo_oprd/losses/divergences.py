"""Divergences between the student's and the teacher's next-token distributions, with their derivatives (paper, section
"Three Output-Space Variants"), for a head that is split over tensor-parallel ranks and for rows taken chunk by chunk.

Values and derivatives are written out instead of left to autograd, because autograd would keep every [c, V] tensor that
it meets. At most three [c, V] tensors of a chunk are alive at a time: the student's logits (whose memory becomes the
gradient), the teacher's logits, and their difference. Nothing is computed twice: value, gradient and metrics come from
one product of each model's rows with its head.

Legend: c rows of a chunk (dimension C in names), V vocabulary columns on this rank, M models (student, teacher), K ids.

With z the raw student logits, tau the temperature of both models, p = softmax(z / tau), q the teacher's and
d = log p - log q:

    sampled_token   log p_y - log q_y             gradient  d_y ([v = y] - p_v), the score-function estimator
    full_vocab      KL(p|q) = sum p d             gradient  p (d - KL)
    forward_kl      KL(q|p) = -sum q d            gradient  p - q
    jsd             b KL(q|m) + (1-b) KL(p|m)     gradient  (1-b) p (u - sum p u), m = b q + (1-b) p, u = log p - log m
    top_k           either KL on a support S of ids that is held constant, see `top_k`

The gradients above are with respect to z / tau; those returned are with respect to z, so they carry a factor 1 / tau.
No tau^2 compensates it: value and gradient belong to the same function. docs/losses.md says how a divergence is added.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from nemo_oprd.losses.output_loss import OutputLoss
from nemo_oprd.losses.registry import resolve_divergence
from nemo_oprd.losses.vocab_parallel import (
    VocabShard,
    add_at_ids_,
    contains,
    dot,
    gather_ids,
    leave_out_gaps_,
    log_sampled_mass,
    log_softmax_,
    slabs,
    top_k_ids,
)

# the metrics for which the top sets are searched
SUPPORT_METRICS = ("overlap", "student_mass", "teacher_mass", "empty_support")


@dataclass(frozen=True)
class OutputRows:
    """Results for c rows: the loss `value` [c], `grad_logits` [c, V] = d value / d raw student logits (None if the
    gradient was not asked for) and `metrics` [c] each. `grad_logits` has this rank's columns; value and metrics are the
    same on every tensor-parallel rank. `sampler_logprob` [c] is the student's log-probability of the sampled token,
    renormalized over the ids that can be sampled; None without a correction.

    Metrics: student_logprob, teacher_logprob (of the sampled token), student_entropy (nats); with the teacher's
    distribution also teacher_entropy, reverse_kl; with `k` also overlap (share of ids that the two top sets have in
    common), student_mass, teacher_mass (probability on the support), empty_support (1 or 0); of sampled_token, with
    `old_logprob_C`, also ratio, clipped (1 or 0); with a correction also correction (the token's weight),
    correction_squared, correction_outside (1 or 0). Those of `SUPPORT_METRICS` are [m] where they were measured on m of
    the rows.
    """

    value: torch.Tensor
    grad_logits: torch.Tensor | None
    metrics: dict[str, torch.Tensor]
    sampler_logprob: torch.Tensor | None = None


@dataclass(frozen=True)
class Support:
    """The support of c rows: ids [c, K], of which only those with `valid` [c, K] count, both models' log-probabilities
    at the ids [M, c, K] (-inf where not valid), and the `overlap` of the two top sets [c]."""

    ids: torch.Tensor
    valid: torch.Tensor
    overlap: torch.Tensor
    logprobs: torch.Tensor


@dataclass
class Chunk:
    """The input of a divergence: c rows, this rank's V real ids, models at the loss's temperature.

    A divergence overwrites `p_CV`, the student's probabilities, with its gradient; it may overwrite the other [c, V]
    tensors, too.

    Attributes:
        q_CV, log_ratio_CV: the teacher's probabilities, and d = log p - log q; None where only the teacher's
            log-probabilities of the sampled tokens are known.
        mean_ratio_p_C, mean_ratio_q_C: sum p d and sum q d over the whole vocabulary, all ranks included; None if
            `log_ratio_CV` is None.
        tokens_C: the sampled tokens; `student_logprob_C` and `teacher_logprob_C` are their log-probabilities.
        old_logprob_C: their log-probabilities under the policy that sampled them; None if the student is that policy.
        sampler_logprob_C, engine_logprob_C: their log-probabilities among the ids that can be sampled, from that
            policy's weights, as the trainer and as the engine compute them; None without a correction.
    """

    shard: VocabShard
    p_CV: torch.Tensor
    q_CV: torch.Tensor | None
    log_ratio_CV: torch.Tensor | None
    mean_ratio_p_C: torch.Tensor | None
    mean_ratio_q_C: torch.Tensor | None
    tokens_C: torch.Tensor
    old_logprob_C: torch.Tensor | None
    sampler_logprob_C: torch.Tensor | None
    engine_logprob_C: torch.Tensor | None
    support: Support | None  # None without `OutputLoss.k`
    with_grad: bool  # whether the gradient is wanted
    metrics: dict[str, torch.Tensor]  # name -> [c]; a divergence may add its own

    @property
    def student_logprob_C(self) -> torch.Tensor:
        """Log-probabilities [c] of the sampled tokens under the student."""
        return self.metrics["student_logprob"]

    @property
    def teacher_logprob_C(self) -> torch.Tensor:
        """Log-probabilities [c] of the sampled tokens under the teacher."""
        return self.metrics["teacher_logprob"]

    def set_gradient_at_ids_(self, background_C: torch.Tensor, ids_CK: torch.Tensor, on_ids_CK: torch.Tensor) -> None:
        """Overwrites p with the gradient `background_C` * p everywhere, plus `on_ids_CK` at the columns `ids_CK`."""
        if self.with_grad:
            self.p_CV.mul_(background_C[:, None])
            add_at_ids_(self.p_CV, ids_CK, on_ids_CK, self.shard)


# (which divergence, the chunk) -> value [c], the same on every rank; p_CV becomes its gradient with respect to z / tau
Divergence = Callable[[OutputLoss, Chunk], torch.Tensor]


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
    old_sampler_logprob_C: torch.Tensor | None = None,
    engine_logprob_C: torch.Tensor | None = None,
    support_rows: torch.Tensor | None = None,
    with_grad: bool = True,
) -> OutputRows:
    """Returns the value, gradient and metrics of c rows.

    Args:
        student_logits_CV: [c, size], float32 or float64. Both models' logits are overwritten, and the memory of the
            student's becomes the gradient's. The values in padding columns are ignored.
        tokens_C: the sampled token of each row.
        teacher_logits_CV: the teacher's logits. A kind that does not need its distribution also works with
            `teacher_logprob_C`, the teacher's log-probabilities of the sampled tokens at the loss's temperature.
        old_logprob_C: log-probabilities of the sampled tokens under the policy that sampled them, at the loss's
            temperature. None means that the student is that policy, as in the first update after a rollout.
        old_sampler_logprob_C: `old_logprob_C`, renormalized over the ids that can be sampled.
        engine_logprob_C: log-probabilities of the sampled tokens in the distribution that the engine sampled from. It
            and `old_sampler_logprob_C` are read with a correction only.
        support_rows: int64 [m], ascending: the rows in which the top sets are searched, for metrics alone. None: all.
        with_grad: False leaves out the gradient.

    Raises:
        ValueError: the teacher's distribution or the engine's log-probabilities are needed and not given, or
            `support_rows` are given and the loss needs the top sets of all rows.
    """
    _check_given(loss, teacher_logits_CV, teacher_logprob_C, engine_logprob_C, support_rows)
    # each tensor holds logits, then log-probabilities, then probabilities; the student's ends as the gradient
    given = (z[:, : shard.real] for z in (student_logits_CV, teacher_logits_CV) if z is not None)
    models = [leave_out_gaps_(z_CV, shard) for z_CV in given]
    found = _find_support(loss, models, shard, support_rows) if len(models) == 2 and loss.k else None
    entropies = log_softmax_(models, shard, loss.temperature)
    ids_CK = tokens_C[:, None] if found is None else torch.cat([tokens_C[:, None], found[0]], dim=1)
    logprobs_MCK = gather_ids(models, ids_CK, shard)
    metrics = {"student_logprob": logprobs_MCK[0, :, 0], "student_entropy": entropies[0]}
    metrics["teacher_logprob"] = logprobs_MCK[1, :, 0] if teacher_logprob_C is None else teacher_logprob_C.to(entropies)

    log_ratio_CV = models[0] - models[1] if len(models) == 2 else None
    for model_CV in models:
        model_CV.exp_()
    mean_ratio_p_C = mean_ratio_q_C = support = None
    sampler_logprob_C = None if loss.correction is None else _among_sampled(logprobs_MCK[0, :, 0], models[0], shard)
    if log_ratio_CV is not None:
        mean_ratio_p_C, mean_ratio_q_C = shard.sum_(torch.stack([dot(model_CV, log_ratio_CV) for model_CV in models]))
        metrics |= {"teacher_entropy": entropies[1], "reverse_kl": mean_ratio_p_C}
    if found is not None:
        support = Support(*found, logprobs_MCK[:, :, 1:].masked_fill(~found[1], -torch.inf))
        metrics |= _support_metrics(support, support_rows)

    both = models[0], models[1] if len(models) == 2 else None, log_ratio_CV
    recorded = old_logprob_C, sampler_logprob_C if old_logprob_C is None else old_sampler_logprob_C, engine_logprob_C
    chunk = Chunk(shard, *both, mean_ratio_p_C, mean_ratio_q_C, tokens_C, *recorded, support, with_grad, metrics)
    divergence: Divergence = resolve_divergence(loss.kind)
    value_C = divergence(loss, chunk)
    if not with_grad:
        return OutputRows(value_C, None, metrics, sampler_logprob_C)
    models[0].div_(loss.temperature)
    student_logits_CV[:, shard.real :] = 0
    return OutputRows(value_C, student_logits_CV, metrics, sampler_logprob_C)


def _among_sampled(logprob_C: torch.Tensor, p_CV: torch.Tensor, shard: VocabShard) -> torch.Tensor:
    """Renormalizes log-probabilities [c] over the ids that can be sampled; `p_CV` are probabilities among all ids."""
    return logprob_C - log_sampled_mass(p_CV, shard) if shard.unsampled else logprob_C


def _check_given(
    loss: OutputLoss,
    teacher_logits_CV: torch.Tensor | None,
    teacher_logprob_C: torch.Tensor | None,
    engine_logprob_C: torch.Tensor | None,
    support_rows: torch.Tensor | None,
) -> None:
    if support_rows is not None and loss.needs_support:
        raise ValueError(f"output loss kind={loss.kind} with support_rows: expected None, because it needs all rows")
    if teacher_logits_CV is None and (loss.needs_distribution or teacher_logprob_C is None):
        alternative = "" if loss.needs_distribution else ", or its log-probabilities of the sampled tokens"
        raise ValueError(f"output loss kind={loss.kind}: expected the teacher's logits{alternative}; got neither")
    if loss.correction is not None and engine_logprob_C is None:
        raise ValueError("output loss with a correction: expected the engine's log-probabilities; got none")


def full_vocab(loss: OutputLoss, chunk: Chunk) -> torch.Tensor:
    """KL(p|q) = sum p d, gradient p (d - KL)."""
    assert chunk.log_ratio_CV is not None and chunk.mean_ratio_p_C is not None
    chunk.p_CV.mul_(chunk.log_ratio_CV.sub_(chunk.mean_ratio_p_C[:, None]))
    return chunk.mean_ratio_p_C


def forward_kl(loss: OutputLoss, chunk: Chunk) -> torch.Tensor:
    """KL(q|p) = -sum q d, gradient p - q."""
    assert chunk.q_CV is not None and chunk.mean_ratio_q_C is not None
    chunk.p_CV.sub_(chunk.q_CV)
    return -chunk.mean_ratio_q_C


def jsd(loss: OutputLoss, chunk: Chunk) -> torch.Tensor:
    """b KL(q|m) + (1-b) KL(p|m) with m = b q + (1-b) p, gradient (1-b) p (u - sum p u) with u = log p - log m."""
    p_CV, q_CV, log_ratio_CV = chunk.p_CV, chunk.q_CV, chunk.log_ratio_CV
    assert q_CV is not None and log_ratio_CV is not None
    # u = -log(1 - b + b exp(-d)) and log q - log m = -log(b + (1 - b) exp(d)) are computed by logaddexp: the
    # exponentials overflow, and u - d would cancel where p is tiny
    beta = loss.jsd_beta
    # filled on the device: the host would wait for a copy of its own numbers
    log_beta, log_rest = (log_ratio_CV.new_full((), number) for number in (math.log(beta), math.log1p(-beta)))
    teacher_kl_C = log_ratio_CV.new_zeros(len(log_ratio_CV))
    for columns in slabs(p_CV.shape[1]):
        log_m_over_q = torch.logaddexp(log_ratio_CV[:, columns] + log_rest, log_beta)
        teacher_kl_C -= (q_CV[:, columns] * log_m_over_q).sum(1)
    u_CV = torch.logaddexp(log_ratio_CV.neg_().add_(log_beta), log_rest, out=log_ratio_CV).neg_()
    teacher_kl_C, student_kl_C = chunk.shard.sum_(torch.stack([teacher_kl_C, dot(p_CV, u_CV)]))
    p_CV.mul_(u_CV.sub_(student_kl_C[:, None])).mul_(1 - beta)
    return beta * teacher_kl_C + (1 - beta) * student_kl_C


def sampled_token(loss: OutputLoss, chunk: Chunk) -> torch.Tensor:
    """log p_y - log q_y with the score-function gradient; with the sampling policy's log-probabilities PPO's surrogate.

    A = log q_y - log p_y is held constant and r = p_y / p_old_y: value -min(r A, clip(r, 1 - low, 1 + high) A),
    gradient -r A grad log p_y, or 0 where the clipped product is the smaller one. At r = 1 this is the score-function
    estimator. A correction multiplies value and gradient by the token's weight, which is held constant.
    """
    advantage_C = chunk.teacher_logprob_C - chunk.student_logprob_C
    slope_C, value_C = -advantage_C, -advantage_C  # slope: d value / d log p_y
    if chunk.old_logprob_C is not None:
        ratio_C = (chunk.student_logprob_C - chunk.old_logprob_C.to(advantage_C)).exp()
        bounded_C = ratio_C if loss.clip is None else ratio_C.clamp(*loss.ratio_range)
        clipped_C = bounded_C * advantage_C < ratio_C * advantage_C
        value_C = -torch.minimum(ratio_C * advantage_C, bounded_C * advantage_C)
        slope_C = (-ratio_C * advantage_C).masked_fill(clipped_C, 0)
        chunk.metrics |= {"ratio": ratio_C, "clipped": clipped_C.to(ratio_C)}
    if loss.correction is not None:
        assert chunk.engine_logprob_C is not None and chunk.sampler_logprob_C is not None
        # the student that sampled: later updates keep the weight of the first, and r accounts for what they changed
        weight_C, outside_C = loss.correction.weights(chunk.sampler_logprob_C.to(advantage_C), chunk.engine_logprob_C)
        # The row weights stay 1 / (global counts). Divided by the sum of these weights instead, the estimate would be
        # biased, and no gradient could be computed before the weights of the whole batch are known.
        value_C, slope_C = weight_C * value_C, weight_C * slope_C
        chunk.metrics |= {"correction": weight_C, "correction_squared": weight_C.square()}
        chunk.metrics |= {"correction_outside": outside_C}
    chunk.set_gradient_at_ids_(-slope_C, chunk.tokens_C[:, None], slope_C[:, None])
    return value_C


def top_k(loss: OutputLoss, chunk: Chunk) -> torch.Tensor:
    """KL on a support S that is held constant; sums run over S, p(S) is the mass of S, [v in S] an indicator.

    normalizer "renormalized", with p' = p / p(S), q' = q / q(S), d' = log p' - log q':
        student weights   KL(p'|q') = sum p' d'     gradient  [v in S] p' (d' - KL)
        teacher weights   KL(q'|p') = -sum q' d'    gradient  [v in S] (p' - q')
    normalizer "full": terms of the whole vocabulary's KL, so not bounded below by 0
        student weights   F = sum p d               gradient  [v in S] p (d + 1) - p (F + p(S))
        teacher weights   F = -sum q d              gradient  p q(S) - [v in S] q

    A row whose support is empty has value and gradient 0.
    """
    support = chunk.support
    assert support is not None
    renormalized = loss.normalizer == "renormalized"
    on_support_MCK = support.logprobs
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
    chunk.set_gradient_at_ids_(background_C, support.ids, on_ids_CK)
    return value_C


def _find_support(
    loss: OutputLoss, logits: list[torch.Tensor], shard: VocabShard, rows: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns the support's ids and which of them are valid [c, K], and the overlap |S_p and S_q| / k of the top sets
    [c], from both models' logits. With `rows`, only these are searched; the others' numbers mean nothing."""
    assert loss.k is not None
    student_CK, teacher_CK = (_top_sets(logits_CV, loss.k, shard, rows) for logits_CV in logits)
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
    return ids_CK, valid_CK, shared_CK.to(logits[0].dtype).mean(1)


def _top_sets(logits_CV: torch.Tensor, k: int, shard: VocabShard, rows: torch.Tensor | None) -> torch.Tensor:
    """Returns `top_k_ids` of all rows, or of `rows`; the other rows have id 0 in every column."""
    if rows is None or len(rows) == len(logits_CV):
        return top_k_ids(logits_CV, k, shard)
    found_CK = torch.zeros(len(logits_CV), min(k, shard.count), dtype=torch.int64, device=logits_CV.device)
    if len(rows):
        found_CK[rows] = top_k_ids(logits_CV[rows], k, shard)
    return found_CK


def _support_metrics(support: Support, rows: torch.Tensor | None) -> dict[str, torch.Tensor]:
    student_mass_C, teacher_mass_C = support.logprobs.exp().sum(2)
    empty_C = ~support.valid.any(1)
    found = {
        "overlap": support.overlap,
        "student_mass": student_mass_C,
        "teacher_mass": teacher_mass_C,
        "empty_support": empty_C.to(student_mass_C),
    }
    return found if rows is None else {name: value_C[rows] for name, value_C in found.items()}
