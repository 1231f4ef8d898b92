"""Arithmetic on [c, V] tensors whose columns are spread over the tensor-parallel ranks: each rank holds one shard of
the vocabulary, and the ranks exchange only tensors of shape [c] or [c, K].

Legend: c rows of a chunk (dimension C in names), V vocabulary columns on this rank, K chosen ids per row, D hidden
size, N rows of a microbatch, M models. All tensors called `logits` here cover real ids only. Padding ids are cut off
before the product with the head instead of being masked afterwards: an id without a logit has no probability and no
gradient, and 0 * -inf cannot make it NaN. Ids that are left out between others (`VocabShard.gaps`) get one finite logit
in both models, so low that their probability is exactly 0: the log ratio and every product with it are then 0, too.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TypeAlias

import torch
import torch.distributed as dist

from nemo_oprd.losses.registry import SLAB

# (first id, end) of runs of ids, ascending
Ranges: TypeAlias = "tuple[tuple[int, int], ...]"
# the logit of an id that is left out: far below all others at any temperature, and far above the lowest float32 number
LEFT_OUT = -1e30


@dataclass(frozen=True)
class VocabShard:
    """This rank's columns: ids `start` to `start + size - 1` of the padded vocabulary. Ids below `vocab_size` are real.

    `group` is the tensor-parallel group, or None if there is no other rank. The shards cover the vocabulary without
    overlap; a shard may consist of padding only. `cap` bounds the logits of the model that owns the head, see `cap_`.
    The loss leaves out the ids in `gaps`, which are below `vocab_size`. The ids in `unsampled` are part of the loss,
    but the engine never samples them; only a correction reads `unsampled`.

    >>> VocabShard(start=48, size=16, vocab_size=61, group=None).real
    13
    """

    start: int
    size: int
    vocab_size: int
    group: dist.ProcessGroup | None = None
    cap: float | None = None
    gaps: Ranges = ()
    unsampled: Ranges = ()

    @property
    def count(self) -> int:
        """The number of ids that take part, over all ranks."""
        return self.vocab_size - sum(end - start for start, end in self.gaps)

    @property
    def real(self) -> int:
        """The number of this rank's columns that are real ids; these columns come first."""
        return min(max(self.vocab_size - self.start, 0), self.size)

    def trimmed(self) -> VocabShard:
        """Returns the same shard without its padding ids."""
        return replace(self, size=self.real)

    def sum_(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sums a tensor over the tensor-parallel ranks, in place."""
        if self.group is not None:
            dist.all_reduce(tensor, group=self.group)
        return tensor

    def max_(self, tensor: torch.Tensor) -> torch.Tensor:
        """Takes the maximum over the tensor-parallel ranks, in place."""
        if self.group is not None:
            dist.all_reduce(tensor, dist.ReduceOp.MAX, group=self.group)
        return tensor

    def concatenated(self, tensor: torch.Tensor) -> torch.Tensor:
        """Concatenates the tensors [c, K] of all ranks to [c, ranks * K], in the order of the ranks."""
        if self.group is None:
            return tensor
        parts = [torch.empty_like(tensor) for _ in range(self.group.size())]
        dist.all_gather(parts, tensor.contiguous(), group=self.group)
        return torch.cat(parts, dim=1)


@lru_cache(maxsize=16)
def _columns(ranges: Ranges, start: int, real: int, device: torch.device) -> torch.Tensor:
    """Returns which of a rank's columns are in `ranges`, bool [real]; copied to the device once."""
    mask = torch.zeros(real, dtype=torch.bool)
    for first, end in ranges:
        mask[max(first - start, 0) : max(end - start, 0)] = True
    return mask.to(device)


def leave_out_gaps_(logits_CV: torch.Tensor, shard: VocabShard) -> torch.Tensor:
    """Sets the logits [c, real] of the ids in the shard's gaps to `LEFT_OUT`, in place."""
    if not shard.gaps:
        return logits_CV
    return logits_CV.masked_fill_(_columns(shard.gaps, shard.start, shard.real, logits_CV.device), LEFT_OUT)


def log_sampled_mass(p_CV: torch.Tensor, shard: VocabShard) -> torch.Tensor:
    """Returns the log of the probability [c] of all ids that can be sampled, from this rank's `p_CV` [c, real]."""
    unsampled = _columns(shard.unsampled, shard.start, shard.real, p_CV.device)
    mass_C = p_CV.new_zeros(len(p_CV))
    for columns in slabs(p_CV.shape[1]):
        mass_C += p_CV[:, columns].masked_fill(unsampled[columns], 0).sum(1)
    return shard.sum_(mass_C).log()


def slabs(width: int) -> Iterator[slice]:
    """Returns slices of at most `SLAB` that cover 0..width."""
    return (slice(start, min(start + SLAB, width)) for start in range(0, width, SLAB))


def compute_dtype(tensor: torch.Tensor) -> torch.dtype:
    """Returns the dtype of all arithmetic after the product with the head: float32, or float64 for float64 inputs."""
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def matmul(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Returns a @ b of low-precision factors, accumulated and returned in float32.

    The product is never rounded to bfloat16, because the spacing of bfloat16 numbers near a logit of 20 is 0.125, more
    than a typical KL. On CUDA tensor cores do this (`out_dtype`, torch 2.8 or later); on the CPU the factors are
    converted first.
    """
    dtype = compute_dtype(a)
    if a.dtype == dtype:
        return a @ b
    return torch.mm(a, b, out_dtype=dtype) if a.is_cuda else a.to(dtype) @ b.to(dtype)


def matmul_(product: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    """Writes `matmul(a, b)` into `product`, which may be a slab of a wider tensor."""
    if a.dtype == product.dtype:
        torch.mm(a, b, out=product)
    else:
        product.copy_(matmul(a, b))


def add_matmul_(total: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    """Adds `matmul(a, b)` in place to `total`, which may be a slab of a wider tensor."""
    if a.dtype == total.dtype:
        total.addmm_(a, b)
    else:
        total += matmul(a, b)


def cap_(logits: torch.Tensor, cap: float | None) -> torch.Tensor:
    """Replaces logits by cap * tanh(logits / cap), in place, as in Gemma 2; without a cap they stay as they are."""
    return logits if cap is None else logits.div_(cap).tanh_().mul_(cap)


def head_logits(hidden_CD: torch.Tensor, head_VD: torch.Tensor, shard: VocabShard) -> torch.Tensor:
    """Returns hidden head^T for this rank's real ids, bounded by the cap: [c, D], [size, D] -> float32 [c, real]."""
    logits_CV = hidden_CD.new_empty(len(hidden_CD), shard.real, dtype=compute_dtype(hidden_CD))
    for columns in slabs(shard.real):
        matmul_(logits_CV[:, columns], hidden_CD, head_VD[columns].T)
    return cap_(logits_CV, shard.cap)


@dataclass(frozen=True)
class OutputHead:
    """The output layer from final states to logits: scale * bound(states weight^T + bias), in vLLM's order.

    Attributes:
        weight: [size, D], this rank's ids.
        bias: [size]; None for a head without.
        cap: the bound's parameter, see `cap_`; None: the logits are not bounded.
        scale: the factor of the logits (Cohere, Granite).
    """

    weight: torch.Tensor
    bias: torch.Tensor | None = None
    cap: float | None = None
    scale: float = 1.0

    @property
    def terms(self) -> str:
        """The parts beside the matrix, for messages.

        >>> OutputHead(torch.zeros(2, 3), cap=30.0).terms
        'cap 30.0, scale 1.0 and no bias'
        """
        return f"cap {self.cap}, scale {self.scale} and {'no' if self.bias is None else 'a'} bias"

    def to(self, dtype: torch.dtype) -> OutputHead:
        """Returns the same head in this precision."""
        return replace(self, weight=self.weight.to(dtype), bias=None if self.bias is None else self.bias.to(dtype))

    def logits(self, hidden_CD: torch.Tensor, shard: VocabShard) -> torch.Tensor:
        """Returns logits [c, real], float32, of states [c, D] for this rank's real ids, without the shard's own cap."""
        logits_CV = head_logits(hidden_CD, self.weight, replace(shard, cap=None))
        if self.bias is not None:
            logits_CV.add_(self.bias[: shard.real])
        cap_(logits_CV, self.cap)
        return logits_CV if self.scale == 1.0 else logits_CV.mul_(self.scale)


def log_softmax_(all_logits: list[torch.Tensor], shard: VocabShard, temperature: float) -> torch.Tensor:
    """Replaces each of M models' logits z [c, V] by log softmax(z / temperature) over the whole vocabulary, in place.

    Returns:
        [M, c] entropies: with s = sum exp(z - max), H = log s - sum exp(z - max) (z - max) / s.
    """
    for logits_CV in all_logits:
        logits_CV.div_(temperature)
    # a rank whose shard is only padding takes part with -inf
    peak_MC = torch.stack([z.amax(1) if z.shape[1] else z.new_full((len(z),), -torch.inf) for z in all_logits])
    shard.max_(peak_MC)
    sums_2MC = peak_MC.new_zeros(2, *peak_MC.shape)
    for model, logits_CV in enumerate(all_logits):
        logits_CV.sub_(peak_MC[model, :, None])
        for columns in slabs(logits_CV.shape[1]):
            mass = logits_CV[:, columns].exp()
            sums_2MC[0, model] += mass.sum(1)
            sums_2MC[1, model] += mass.mul_(logits_CV[:, columns]).sum(1)
    total_MC, weighted_MC = shard.sum_(sums_2MC)
    log_total_MC = total_MC.log()
    for model, logits_CV in enumerate(all_logits):
        logits_CV.sub_(log_total_MC[model, :, None])
    return log_total_MC - weighted_MC / total_MC


def dot(a_CV: torch.Tensor, b_CV: torch.Tensor) -> torch.Tensor:
    """Returns the row-wise sum of a * b over this rank's columns, [c]."""
    total_C = a_CV.new_zeros(len(a_CV))
    for columns in slabs(a_CV.shape[1]):
        total_C += (a_CV[:, columns] * b_CV[:, columns]).sum(1)
    return total_C


def _local(ids_CK: torch.Tensor, shard: VocabShard) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the column of each id on this rank (0 for an id of another rank), and whether this rank has the id."""
    column_CK = ids_CK - shard.start
    here_CK = (column_CK >= 0) & (column_CK < shard.real)
    return column_CK.masked_fill(~here_CK, 0), here_CK


def gather_ids(tensors: list[torch.Tensor], ids_CK: torch.Tensor, shard: VocabShard) -> torch.Tensor:
    """Returns the columns `ids_CK` of each of M tensors [c, V], on every rank: [M, c, K]."""
    values_MCK = tensors[0].new_zeros(len(tensors), *ids_CK.shape)
    if shard.real:
        column_CK, here_CK = _local(ids_CK, shard)
        for model, tensor_CV in enumerate(tensors):
            values_MCK[model] = tensor_CV.gather(1, column_CK).masked_fill_(~here_CK, 0)
    return shard.sum_(values_MCK)


def add_at_ids_(tensor_CV: torch.Tensor, ids_CK: torch.Tensor, values_CK: torch.Tensor, shard: VocabShard) -> None:
    """Adds `values_CK` to `tensor_CV` at the ids of this rank, in place. An id may repeat within a row."""
    if shard.real:
        column_CK, here_CK = _local(ids_CK, shard)
        tensor_CV.scatter_add_(1, column_CK, values_CK.masked_fill(~here_CK, 0))


def top_k_ids(logits_CV: torch.Tensor, k: int, shard: VocabShard) -> torch.Tensor:
    """Returns the ids of the k largest logits over all ranks, [c, min(k, count)], largest first; of equal logits the
    lower id comes first.

    Each rank contributes its own k largest, and the ranks exchange only these candidates. The order is total, so the
    ids are the same on every rank and for every number of ranks.
    """
    k = min(k, shard.count)
    values_CK, columns_CK = _local_top_k(logits_CV, min(k, shard.real))
    missing = k - values_CK.shape[1]  # a rank with fewer than k columns fills up with -inf at an id above all real ids
    values_CK = torch.nn.functional.pad(values_CK, (0, missing), value=-torch.inf)
    ids_CK = torch.nn.functional.pad(columns_CK + shard.start, (0, missing), value=shard.vocab_size)
    return _ordered(shard.concatenated(values_CK), shard.concatenated(ids_CK))[1][:, :k]


def _local_top_k(logits_CV: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the k largest values of each row, in descending order, and their columns; of equal values, the first
    columns."""
    if k == 0:
        return logits_CV[:, :0], logits_CV.new_zeros(len(logits_CV), 0, dtype=torch.int64)
    values_CK, columns_CK = logits_CV.topk(min(k + 1, logits_CV.shape[1]), dim=1)
    values_CK, after_CK = values_CK[:, :k], values_CK[:, k:]  # the next value, where there is one
    columns_CK = columns_CK[:, :k]
    # where the host need not wait for a device, it looks first whether a k-th value occurs once more
    if logits_CV.is_cuda or bool((after_CK == values_CK[:, -1:]).any()):
        columns_CK = first_of_equal(logits_CV, values_CK, columns_CK)
    return values_CK, columns_CK


def first_of_equal(logits_CV: torch.Tensor, values_CK: torch.Tensor, columns_CK: torch.Tensor) -> torch.Tensor:
    """Returns the columns [c, k] of `logits_CV.topk(k)`'s values, where of equal values the first columns are taken.

    `topk` returns the right values, but if more columns than it returns hold the smallest value, it picks any of them.
    These columns are searched again, in ascending order. Nothing is read back: only the device knows their number.
    """
    k, none = values_CK.shape[1], logits_CV.shape[1]
    smallest_C1 = values_CK[:, -1:]
    tied_CK = torch.full_like(columns_CK, none)
    for slab in slabs(none):
        column_V = torch.arange(slab.start, slab.stop, device=logits_CV.device)
        found_CV = torch.where(logits_CV[:, slab] == smallest_C1, column_V, none)
        first_CK = found_CV.topk(min(k, found_CV.shape[1]), dim=1, largest=False).values
        tied_CK = torch.cat([tied_CK, first_CK], dim=1).topk(k, dim=1, largest=False).values
    # the columns of larger values come first, then the tied ones in their order; a NaN equals nothing
    place_CK = torch.arange(k, device=logits_CV.device) - (values_CK > smallest_C1).sum(1, keepdim=True)
    tied_CK = tied_CK.gather(1, place_CK.clamp(min=0))
    return torch.where((place_CK < 0) | (tied_CK == none), columns_CK, tied_CK)


def _ordered(values_CK: torch.Tensor, ids_CK: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns values and ids, sorted by descending value; equal values are sorted by ascending id."""
    by_id = ids_CK.argsort(dim=1)
    values_CK, ids_CK = values_CK.gather(1, by_id), ids_CK.gather(1, by_id)
    by_value = values_CK.argsort(dim=1, descending=True, stable=True)
    return values_CK.gather(1, by_value), ids_CK.gather(1, by_value)


def contains(set_CK: torch.Tensor, ids_CK: torch.Tensor) -> torch.Tensor:
    """Returns whether each id occurs in the same row of `set_CK`, bool [c, K]."""
    sorted_CK = set_CK.sort(dim=1).values
    place_CK = torch.searchsorted(sorted_CK, ids_CK.contiguous()).clamp_(max=set_CK.shape[1] - 1)
    return sorted_CK.gather(1, place_CK) == ids_CK
