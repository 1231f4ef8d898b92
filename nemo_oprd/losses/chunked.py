"""The output losses on hidden states: the product with the head, the divergence and both gradients, chunk by chunk.

A pipeline's last stage computes the losses in its backward pass, once per microbatch. Logits exist for one chunk of
`chunk_tokens` rows only; `divergences.py` says which tensors of a chunk are alive at a time, and a cap adds one. Matrix
products read their factors in the factors' own dtype (bfloat16 in bf16 runs, where the gradients of logits are rounded
to bfloat16, as in any backward pass of a head) and accumulate in float32.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
import torch

from nemo_oprd.losses.divergences import OutputRows, output_rows
from nemo_oprd.losses.output_loss import OutputLoss
from nemo_oprd.losses.vocab_parallel import (
    OutputHead,
    VocabShard,
    add_matmul_,
    compute_dtype,
    gather_ids,
    head_logits,
    leave_out_gaps_,
    log_softmax_,
    slabs,
)


@dataclass(frozen=True)
class TeacherStates:
    """The teacher before its head: hidden states [N, D_T] for the student's rows, and this rank's shard of the head.

    The shards of both models cover the same ids; widths, dtypes, caps, scales and biases of the two models may differ.
    """

    hidden: torch.Tensor
    head: OutputHead


# the teacher's distribution, or only its log-probabilities [N] of the sampled tokens at the loss's temperature
Teacher: TypeAlias = "TeacherStates | torch.Tensor"


@dataclass(frozen=True)
class OutputSums:
    """Float64 sums over N rows, and values per row [N]; on the rows' device, the same on every tensor-parallel rank.

    `loss` is sum_n weight_n value_n. `metrics` (named as in `OutputRows`) are plain sums over the rows, and `rows` is
    the number of rows: sum both over the data-parallel ranks before dividing. Without rows, all metrics exist and are
    0. Those of `SUPPORT_METRICS` are sums over `support_rows` rows.
    `student_logprob` [N] is the student's log-probability of each row's token, `sampler_logprob` [N] the same
    renormalized over the ids that can be sampled (None without a correction), `per_row` [N] each row's part of `loss`.
    `kept` has the metrics that the caller asked for per row, name -> [N].
    """

    loss: torch.Tensor
    metrics: dict[str, torch.Tensor]
    rows: int
    support_rows: int
    student_logprob: torch.Tensor
    per_row: torch.Tensor
    kept: dict[str, torch.Tensor] = field(default_factory=dict)
    sampler_logprob: torch.Tensor | None = None


@dataclass(frozen=True)
class OutputGradients:
    """The sums, and the gradients with respect to `hidden` [N, D] and `head` [size, D] (None for a frozen head), in
    float32 (float64 for float64 inputs)."""

    sums: OutputSums
    hidden: torch.Tensor
    head: torch.Tensor | None


@torch.no_grad()
def chunked_output_loss(
    loss: OutputLoss,
    hidden_ND: torch.Tensor,
    head_VD: torch.Tensor,
    teacher: Teacher,
    tokens_N: torch.Tensor,
    weight_N: torch.Tensor,
    shard: VocabShard,
    *,
    chunk_tokens: int,
    scale: float = 1.0,
    old_logprob_N: torch.Tensor | None = None,
    old_sampler_logprob_N: torch.Tensor | None = None,
    engine_logprob_N: torch.Tensor | None = None,
    support_rows: np.ndarray | None = None,
    head_grad: torch.Tensor | None = None,
    train_head: bool = True,
    reduce_hidden: bool = True,
    keep: Sequence[str] = (),
) -> OutputGradients:
    """Returns the gradients of scale * sum_n weight_n value_n, and the sums to report.

    Args:
        hidden_ND: the student's rows after the final norm, the same on every tensor-parallel rank.
        head_VD: this rank's shard [size, D] of the student's head; the shard's padding rows are never read.
        weight_N: 1 / global counts, so that the local sums add up to the global mean.
        chunk_tokens: rows of a chunk.
        scale: multiplies the gradients only: the loss's weight times the schedule's factor.
        old_logprob_N, old_sampler_logprob_N, engine_logprob_N: see `output_rows`.
        support_rows: int64 [m] on the host, ascending: the rows in which top sets are searched, see `output_rows`.
        head_grad: a buffer to which the head's gradient is added (Megatron's main_grad, [size, D] float32); None starts
            from zeros.
        train_head: False leaves out the head's gradient.
        reduce_hidden: sum the rows' gradient over the tensor-parallel ranks. False returns this rank's part, which
            sequence parallelism reduce-scatters.
        keep: metrics to return per row, where the loss has them.

    Raises:
        ValueError: as `output_rows`, the dtype of `head_grad` is not that of the accumulation, or chunk_tokens < 1.
    """
    dtype = compute_dtype(hidden_ND)
    if not train_head:
        head_grad = None
    elif head_grad is None:
        head_grad = torch.zeros(head_VD.shape, dtype=dtype, device=head_VD.device)
    elif head_grad.dtype != dtype:
        raise ValueError(f"head_grad is {head_grad.dtype}: chunks accumulate in {dtype}; pass such a buffer, or none")
    grad_hidden_ND = torch.zeros(hidden_ND.shape, dtype=dtype, device=hidden_ND.device)
    arguments = loss, hidden_ND, head_VD, teacher, tokens_N, shard
    recorded = old_logprob_N, old_sampler_logprob_N, engine_logprob_N
    searched = _SupportRows.of(support_rows, len(hidden_ND), hidden_ND.device)
    sums = _Accumulator(weight_N, keep, searched.count)
    for chunk in _chunks(len(hidden_ND), chunk_tokens):
        rows = _rows(*arguments, recorded, chunk, support_rows=searched.within(chunk), with_grad=True)
        sums.add(rows, chunk)
        assert rows.grad_logits is not None
        rows.grad_logits.mul_((weight_N[chunk].to(dtype) * scale)[:, None])
        _through_head_(rows.grad_logits, hidden_ND[chunk], head_VD, shard, grad_hidden_ND[chunk], head_grad)
        del rows  # otherwise the gradient would stay alive beside the next chunk's three tensors
    if reduce_hidden:
        shard.sum_(grad_hidden_ND)
    return OutputGradients(sums.result(), grad_hidden_ND, head_grad)


@torch.no_grad()
def output_metrics(
    loss: OutputLoss,
    hidden_ND: torch.Tensor,
    head_VD: torch.Tensor,
    teacher: Teacher,
    tokens_N: torch.Tensor,
    weight_N: torch.Tensor,
    shard: VocabShard,
    *,
    chunk_tokens: int,
    old_logprob_N: torch.Tensor | None = None,
    old_sampler_logprob_N: torch.Tensor | None = None,
    engine_logprob_N: torch.Tensor | None = None,
    support_rows: np.ndarray | None = None,
    keep: Sequence[str] = (),
) -> OutputSums:
    """Returns the sums of `chunked_output_loss` without gradients, to measure a loss outside the objective."""
    arguments = loss, hidden_ND, head_VD, teacher, tokens_N, shard
    recorded = old_logprob_N, old_sampler_logprob_N, engine_logprob_N
    searched = _SupportRows.of(support_rows, len(hidden_ND), hidden_ND.device)
    sums = _Accumulator(weight_N, keep, searched.count)
    for chunk in _chunks(len(hidden_ND), chunk_tokens):
        sums.add(_rows(*arguments, recorded, chunk, support_rows=searched.within(chunk), with_grad=False), chunk)
    return sums.result()


@torch.no_grad()
def chunked_logprob(
    hidden_ND: torch.Tensor,
    head_VD: torch.Tensor,
    tokens_N: torch.Tensor,
    shard: VocabShard,
    *,
    temperature: float,
    chunk_tokens: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns (log-probability of each row's token, entropy of its distribution), both [N], equal on all tensor ranks.

    A teacher sends these two numbers per token for sampled_token. The sampling check needs the student's
    log-probabilities only.
    """
    logprob_N = torch.zeros(len(hidden_ND), dtype=compute_dtype(hidden_ND), device=hidden_ND.device)
    entropy_N = torch.zeros_like(logprob_N)
    for chunk in _chunks(len(hidden_ND), chunk_tokens):
        logits_CV = leave_out_gaps_(head_logits(hidden_ND[chunk], head_VD, shard), shard)
        entropy_N[chunk] = log_softmax_([logits_CV], shard, temperature)[0]
        logprob_N[chunk] = gather_ids([logits_CV], tokens_N[chunk, None], shard)[0, :, 0]
    return logprob_N, entropy_N


def _chunks(n: int, chunk_tokens: int) -> Iterator[slice]:
    """Returns slices that cover 0..n; one empty slice for n = 0, so that all ranks of a run report the same metrics."""
    if chunk_tokens < 1:
        raise ValueError(f"chunk_tokens={chunk_tokens}: expected a whole number of at least 1")
    return (slice(start, min(start + chunk_tokens, n)) for start in range(0, max(n, 1), chunk_tokens))


def _rows(
    loss: OutputLoss,
    hidden_ND: torch.Tensor,
    head_VD: torch.Tensor,
    teacher: Teacher,
    tokens_N: torch.Tensor,
    shard: VocabShard,
    recorded: tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None],
    chunk: slice,
    *,
    support_rows: torch.Tensor | None,
    with_grad: bool,
) -> OutputRows:
    """Returns `output_rows` of one chunk; `grad_logits` is with respect to the product with the head, before the cap.
    `recorded`: old_logprob_N, old_sampler_logprob_N, engine_logprob_N.

    Logits are computed for real ids only, so they have no padding columns.
    """
    student_CV = head_logits(hidden_ND[chunk], head_VD, shard)
    slope_CV = None
    if with_grad and shard.cap is not None:  # the derivative of `cap_`
        slope_CV = (student_CV / shard.cap).square_().neg_().add_(1)
    teacher_CV = None
    if isinstance(teacher, TeacherStates):
        # from here on, both models have the student's precision
        teacher_CV = teacher.head.logits(teacher.hidden[chunk], shard).to(student_CV.dtype)
    old_C, old_sampler_C, engine_C = (None if values is None else values[chunk] for values in recorded)
    rows = output_rows(
        loss,
        student_CV,
        tokens_N[chunk],
        shard.trimmed(),
        teacher_logits_CV=teacher_CV,
        teacher_logprob_C=None if isinstance(teacher, TeacherStates) else teacher[chunk],
        old_logprob_C=old_C,
        old_sampler_logprob_C=old_sampler_C,
        engine_logprob_C=engine_C,
        support_rows=support_rows,
        with_grad=with_grad,
    )
    if slope_CV is not None:
        assert rows.grad_logits is not None
        rows.grad_logits.mul_(slope_CV)
    return rows


def _through_head_(
    grad_CV: torch.Tensor,
    hidden_CD: torch.Tensor,
    head_VD: torch.Tensor,
    shard: VocabShard,
    grad_hidden_CD: torch.Tensor,
    head_grad: torch.Tensor | None,
) -> None:
    """Takes the gradient of a chunk's logits through the head: adds its product with the head to the rows' gradient,
    and its product with the rows to the head's gradient."""
    for columns in slabs(shard.real):
        part_CV = grad_CV[:, columns].to(head_VD.dtype)
        add_matmul_(grad_hidden_CD, part_CV, head_VD[columns])
        if head_grad is not None:
            add_matmul_(head_grad[columns], part_CV.T, hidden_CD)


@dataclass(frozen=True)
class _SupportRows:
    """The rows in which top sets are searched, on the host and on the device; None: all `count` rows."""

    host: np.ndarray | None
    device: torch.Tensor | None
    count: int

    @staticmethod
    def of(rows: np.ndarray | None, n: int, device: torch.device) -> _SupportRows:
        if rows is None:
            return _SupportRows(None, None, n)
        on_host = torch.from_numpy(rows)
        pinned = on_host.pin_memory() if device.type == "cuda" else on_host  # so that the host does not wait
        return _SupportRows(rows, pinned.to(device, non_blocking=True), len(rows))

    def within(self, chunk: slice) -> torch.Tensor | None:
        """Returns the rows of a chunk, counted from its first row; None: all. The host finds them without waiting."""
        if self.host is None or self.device is None:
            return None
        first, last = np.searchsorted(self.host, [chunk.start, chunk.stop]).tolist()
        return self.device[first:last] - chunk.start


class _Accumulator:
    """Sums the results of the chunks in float64; `support_rows`: the number of rows in which top sets are searched."""

    def __init__(self, weight_N: torch.Tensor, keep: Sequence[str], support_rows: int) -> None:
        self._support_rows = support_rows
        self._weight_N = weight_N.double()
        self._loss = self._weight_N.new_zeros(())
        self._metrics: dict[str, torch.Tensor] = {}
        self._student_logprob: list[torch.Tensor] = []
        self._sampler_logprob: list[torch.Tensor] = []
        self._per_row: list[torch.Tensor] = []
        self._kept: dict[str, list[torch.Tensor]] = {name: [] for name in keep}

    def add(self, rows: OutputRows, chunk: slice) -> None:
        self._per_row.append(self._weight_N[chunk] * rows.value.double())
        self._loss = self._loss + self._per_row[-1].sum()
        self._student_logprob.append(rows.metrics["student_logprob"].clone())
        if rows.sampler_logprob is not None:
            self._sampler_logprob.append(rows.sampler_logprob.clone())
        for name, values_C in rows.metrics.items():
            self._metrics[name] = values_C.sum(dtype=torch.float64) + self._metrics.get(name, 0)
            if name in self._kept:
                self._kept[name].append(values_C.clone())

    def result(self) -> OutputSums:
        return OutputSums(
            loss=self._loss,
            metrics=self._metrics,
            rows=len(self._weight_N),
            support_rows=self._support_rows,
            student_logprob=torch.cat(self._student_logprob),
            per_row=torch.cat(self._per_row),
            kept={name: torch.cat(parts) for name, parts in self._kept.items() if parts},
            sampler_logprob=torch.cat(self._sampler_logprob) if self._sampler_logprob else None,
        )


# Log-probabilities in the distribution that responses are sampled from: a temperature, then the nucleus of top-p.


# rows whose whole distribution is on one rank at a time, which the nucleus needs
NUCLEUS_ROWS = 64


@torch.no_grad()
def sampling_logprob(
    hidden_ND: torch.Tensor,
    head_VD: torch.Tensor,
    tokens_N: torch.Tensor,
    shard: VocabShard,
    *,
    temperature: float,
    top_p: float,
    chunk_tokens: int,
) -> torch.Tensor:
    """Returns the log-probability [N] of each row's token, equal on all TP ranks; float32 (float64 for float64).

    At temperature 0, where sampling takes the most probable id, the distribution is that of temperature 1 and top_p 1.

    Args:
        hidden_ND: the student's rows after the final norm, the same on every tensor-parallel rank.
        head_VD: this rank's shard [size, D] of the head.
        shard: its ids below `vocab_size` that are not in `gaps` can be sampled.
        top_p: below 1, the fewest most probable ids whose probabilities reach `top_p` (the nucleus) are renormalized. A
            token outside is counted as one of them, because rounding may have excluded it.
        chunk_tokens: rows of a chunk at temperature 0 or top_p 1; with a nucleus, `NUCLEUS_ROWS` are taken instead.
    """
    if temperature == 0 or top_p == 1:
        arguments = hidden_ND, head_VD, tokens_N, shard
        return chunked_logprob(*arguments, temperature=temperature or 1.0, chunk_tokens=chunk_tokens)[0]
    parts = [torch.zeros(0, dtype=compute_dtype(hidden_ND), device=hidden_ND.device)]
    for start in range(0, len(hidden_ND), NUCLEUS_ROWS):
        chunk = slice(start, start + NUCLEUS_ROWS)
        parts.append(_nucleus_logprob(hidden_ND[chunk], head_VD, tokens_N[chunk], shard, temperature, top_p))
    return torch.cat(parts)


def _nucleus_logprob(
    hidden_CD: torch.Tensor,
    head_VD: torch.Tensor,
    tokens_C: torch.Tensor,
    shard: VocabShard,
    temperature: float,
    top_p: float,
) -> torch.Tensor:
    logits_CV = leave_out_gaps_(head_logits(hidden_CD, head_VD, shard), shard)
    log_softmax_([logits_CV], shard, temperature)
    padded_CV = logits_CV.new_full((len(logits_CV), shard.size), -torch.inf)  # ranks must exchange equal shapes
    padded_CV[:, : shard.real] = logits_CV
    logprob_CV = shard.concatenated(padded_CV).double()
    logprob_C = logprob_CV.gather(1, tokens_C[:, None])[:, 0]
    ordered_CV = logprob_CV.exp().sort(dim=1, descending=True).values
    in_nucleus_CV = ordered_CV.cumsum(1) - ordered_CV < top_p
    mass_C = (ordered_CV * in_nucleus_CV).sum(1)
    least_C = ordered_CV.gather(1, in_nucleus_CV.sum(1, keepdim=True) - 1)[:, 0]
    mass_C += logprob_C.exp().masked_fill(logprob_C.exp() >= least_C, 0)
    return (logprob_C - mass_C.log()).to(logits_CV.dtype)
