"""The output loss on the last pipeline stage: its rows of the final hidden state, and their gradient.

Like the loss of a layer, the output loss is an identity in the forward pass. Logits exist in the backward pass only,
one chunk at a time; value and gradient of a chunk come from one product with the head (`losses/chunked.py`). The
gradient of the head is added to Megatron's float32 gradient buffer directly. `output_head_metrics` turns the
measured sums of an update into metrics.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.utils import make_viewless_tensor

from nemo_oprd.batch.packing import Pack
from nemo_oprd.batch.plan import LocalRows
from nemo_oprd.data.token_ids import TokenIds
from nemo_oprd.distillation.metrics.token_metrics import OUTPUT, OUTPUT_METRICS, output_values
from nemo_oprd.distillation.objective import OutputTerm, TeacherMatch
from nemo_oprd.losses.chunked import OutputSums, Teacher, TeacherStates, chunked_output_loss, output_metrics
from nemo_oprd.losses.divergences import SUPPORT_METRICS
from nemo_oprd.losses.output_loss import OutputLoss
from nemo_oprd.losses.vocab_parallel import OutputHead, VocabShard
from nemo_oprd.megatron.model import DistillingModel
from nemo_oprd.megatron.optimizer import main_gradient
from nemo_oprd.megatron.parallel import Role, device, on_device
from nemo_oprd.megatron.weights.hf import ServedHead, TensorReader
from nemo_oprd.models import ModelSpec

# metric of `OutputRows` -> name of its mean over rows in metrics.jsonl; "" for one that is only part of other metrics
ROW_METRICS = {
    "student_logprob": "",
    "teacher_logprob": "",
    "student_entropy": "actor/entropy",
    "teacher_entropy": "teacher/entropy",
    "reverse_kl": "output/reverse_kl",
    "overlap": "val-topk/overlap_ratio",
    "student_mass": "val-topk/student_mass",
    "teacher_mass": "val-topk/teacher_mass",
    "empty_support": "val-topk/empty_support",
    "ratio": "actor/ratio",
    "clipped": "actor/clipped",
    "correction": "rollout/correction_mean",
    "correction_squared": "",
    "correction_outside": "rollout/correction_outside",
}


@dataclass(frozen=True)
class FinalStateRows:
    """The rows of one microbatch's output loss in the final hidden state; the same on all tensor ranks.

    Under sequence parallelism each tensor rank holds consecutive tokens of the context rank's sequence. The host knows
    which rows these are, and tells the device: counting them there would make the host wait.

    Attributes:
        owned: int64 [m], which of the n rows this tensor rank holds; None: all.
        index: int64 [m], their indices in this rank's hidden state.
        count: n, the rows of all tensor ranks together.
    """

    owned: torch.Tensor | None
    index: torch.Tensor
    count: int
    group: dist.ProcessGroup

    def gather(self, hidden: torch.Tensor) -> torch.Tensor:
        """This rank's hidden state [S, 1, D] -> all rows [n, D], on every tensor rank."""
        flat = hidden.flatten(0, 1)
        if self.owned is None:
            return flat.index_select(0, self.index)
        gathered = flat.new_zeros(self.count, flat.shape[1])
        gathered[self.owned] = flat.index_select(0, self.index)
        dist.all_reduce(gathered, group=self.group)  # exact: each row is nonzero on one rank only
        return gathered

    def add_(self, gradient: torch.Tensor, rows_ND: torch.Tensor) -> None:
        """Adds float32 `rows_ND` [n, D] to this rank's part of a gradient [S, 1, D], with one rounding."""
        flat = gradient.flatten(0, 1)
        added = rows_ND if self.owned is None else rows_ND[self.owned]
        flat[self.index] = (flat[self.index].to(rows_ND.dtype) + added).to(flat.dtype)


def final_state_rows(local: LocalRows, pack: Pack, role: Role) -> FinalStateRows:
    """Returns the rows of the output loss of one microbatch, packed as `pack`, on this rank."""
    layout, index, owned = role.layout, local.hidden_index, None
    if layout.sequence:
        tokens = pack.total // layout.context // layout.tensor
        held = np.flatnonzero(index // tokens == role.member_coords.tensor)
        owned, index = on_device(held), index[held] % tokens
    return FinalStateRows(owned, on_device(index), len(local.hidden_index), role.member_groups.tp)


def vocab_shard(model: DistillingModel, role: Role, ids: TokenIds, sampled: TokenIds | None = None) -> VocabShard:
    """This tensor rank's shard of the padded vocabulary, of which only `ids` are used.

    `sampled`: the ids that can be sampled, for a correction; None: all of `ids`.
    """
    size = model.output_weight().shape[0]
    group = role.member_groups.tp if role.layout.tensor > 1 else None
    shard = VocabShard(role.member_coords.tensor * size, size, ids.limit, group, model.output_cap, ids.gaps)
    return shard if sampled in (None, ids) else replace(shard, unsampled=sampled.missing_below(ids.limit))


def read_teacher_head(spec: ModelSpec, read: TensorReader) -> OutputHead:
    """Returns a teacher's LM head for all of its ids, in its files' dtype; `read` returns a tensor by its HF name.

    Only teachers on servers may have a bias or a scale: no family that the ranks of this job build has either.
    """
    weight = read("model.embed_tokens.weight" if spec.tied_embeddings else "lm_head.weight")
    bias = read.bias() if isinstance(read, ServedHead) else None
    return OutputHead(weight, bias, spec.output_cap, spec.output_scale)


def load_teacher_head(
    model: DistillingModel, role: Role, dtype: torch.dtype, match: TeacherMatch, read: TensorReader
) -> OutputHead | None:
    """Returns a teacher's LM head for the ids of the student's head on this tensor rank; None before the last stage.

    `model` is the student's last chunk; `read` returns a tensor of the teacher by its HF name.
    """
    if not model.post_process:
        return None
    whole = read_teacher_head(match.spec, read)
    shard = vocab_shard(model, role, match.shared)

    def part(ids_first: torch.Tensor) -> torch.Tensor:
        held = ids_first[shard.start : min(shard.start + shard.size, match.shared.limit)].to(device(), dtype)
        # zero rows for the ids that only one of the models has; the loss ignores these ids
        return torch.cat([held, held.new_zeros(shard.size - len(held), *held.shape[1:])])

    return replace(whole, weight=part(whole.weight), bias=None if whole.bias is None else part(whole.bias))


@dataclass
class OutputHeadLoss:
    """The output loss of one microbatch on this rank, for n rows.

    `teacher` holds the teacher's log-probability and entropy per row [n, 2], or its final hidden states [n, D], which
    `teacher_head` turns into logits (D is the teacher's hidden size here).
    `scale` is the weight of the loss in the total loss; with 0 the loss is only measured. `old_logprob` holds the
    tokens' log-probabilities under the weights that sampled them, and `old_sampler_logprob` these renormalized over the
    ids that can be sampled; None if the current weights sampled the tokens. `engine_logprob` holds the tokens'
    log-probabilities as the engine computed them. Without a correction it and `old_sampler_logprob` are None.
    `token_slots` says where the rows' values are kept per token (`TokenSlots.of_rows`); None: they are not kept.
    `support_rows` are those of the n rows in which top sets are searched; None: all.
    """

    loss: OutputLoss
    rows: FinalStateRows
    model: DistillingModel
    shard: VocabShard
    tokens: torch.Tensor  # [n] int64
    weight: torch.Tensor  # [n] float32, includes 1 / (global counts)
    response: torch.Tensor  # [n] int64, index of the rollout
    teacher: torch.Tensor
    teacher_head: OutputHead | None
    scale: float
    chunk_tokens: int
    old_logprob: torch.Tensor | None = None  # [n]
    old_sampler_logprob: torch.Tensor | None = None  # [n]
    engine_logprob: torch.Tensor | None = None  # [n] float32
    token_slots: torch.Tensor | None = None  # [n] int64
    support_rows: np.ndarray | None = None  # [m] int64, ascending
    sums: OutputSums | None = None
    backward_passes: int = 0

    def attach(self, hidden: torch.Tensor) -> torch.Tensor:
        """Returns `hidden` [S, 1, D] unchanged; the backward pass measures the loss and adds its gradient."""
        if not torch.is_grad_enabled() or self.rows.count == 0:
            return hidden
        attached = _AddOutputGradient.apply(hidden, self.rows, self._gradient)
        return make_viewless_tensor(attached, requires_grad=True, keep_graph=True)

    def _gradient(self, rows_ND: torch.Tensor) -> torch.Tensor:
        head = self.model.output_weight()
        teacher: Teacher = self.teacher[:, 0]
        if self.teacher_head is not None:
            teacher = TeacherStates(self.teacher, self.teacher_head)
        arguments = self.loss, rows_ND, head.detach(), teacher, self.tokens, self.weight, self.shard
        settings: dict[str, Any] = {"chunk_tokens": self.chunk_tokens, "old_logprob_N": self.old_logprob}
        settings |= {"engine_logprob_N": self.engine_logprob, "old_sampler_logprob_N": self.old_sampler_logprob}
        settings["support_rows"] = self.support_rows
        settings["keep"] = () if self.token_slots is None else OUTPUT_METRICS
        if self.scale:
            result = chunked_output_loss(*arguments, **settings, scale=self.scale, head_grad=main_gradient(head))
            self.sums, gradient = result.sums, result.hidden
        else:
            self.sums, gradient = output_metrics(*arguments, **settings), torch.zeros_like(rows_ND)
        if self.teacher_head is None:
            self.sums.metrics["teacher_entropy"] = self.teacher[:, 1].sum(dtype=torch.float64)
        self.backward_passes += 1
        return gradient

    def named_sums(self, num_responses: int, num_slots: int, *, counts_rows: bool) -> dict[str, torch.Tensor | float]:
        """Returns name -> float64 sum over this microbatch after its backward pass; absent if nothing was measured.

        "output_passes" and "output_loss" are scalars, "output_rows" [len(ROW_METRICS), 2] holds sums over rows with
        the numbers of rows, "output_responses" [num_responses] contributions to the total loss, "output_tokens"
        [len(OUTPUT), num_slots + 1] values per token. With `counts_rows` this rank adds its rows; all tensor ranks have
        the same sums, so one of them does.
        """
        named: dict[str, torch.Tensor | float] = {"output_passes": self.backward_passes}
        if self.sums is None or not counts_rows:
            return named
        zeros = self.sums.loss.new_zeros
        named["output_loss"] = self.sums.loss
        named["output_rows"] = rows = zeros(len(ROW_METRICS), 2)
        for i, name in enumerate(ROW_METRICS):
            if name in self.sums.metrics:
                rows[i, 0] += self.sums.metrics[name]
                rows[i, 1] += self.sums.support_rows if name in SUPPORT_METRICS else self.sums.rows
        if self.scale:
            shares = self.scale * self.sums.per_row
            named["output_responses"] = zeros(num_responses).index_add_(0, self.response, shares)
        if self.token_slots is not None:
            named["output_tokens"] = tokens = zeros(len(OUTPUT), num_slots + 1)
            for name, values in output_values(self.sums.kept).items():
                tokens[list(OUTPUT).index(name)].index_add_(0, self.token_slots, values.double())
        return named


def output_head_metrics(sums: Mapping[str, torch.Tensor], term: OutputTerm | None) -> dict[str, float]:
    """Returns the metrics of the output loss, or of a divergence that is only measured, by metric name.

    `sums` are those of `OutputHeadLoss.named_sums` over all ranks, on the CPU.
    """
    pairs = zip(ROW_METRICS, sums["output_rows"].tolist(), strict=True)
    means = {name: total / rows for name, (total, rows) in pairs if rows}
    named = {} if term is None or term.only_watched else {"output/loss": float(sums["output_loss"])}
    named |= {ROW_METRICS[name]: mean for name, mean in means.items() if ROW_METRICS[name]}
    if {"student_logprob", "teacher_logprob"} <= set(means):
        estimate = means["student_logprob"] - means["teacher_logprob"]
        named["output/kl_estimate"] = estimate
        if term is not None and (term.loss.from_samples or term.only_watched):
            named["actor/pg_loss"] = named.get("output/loss", estimate)
    if "correction" in means:
        square = means["correction_squared"]
        named["rollout/effective_sample_size"] = means["correction"] ** 2 / square if square else 0.0
    return named


class _AddOutputGradient(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: torch.Tensor, rows: FinalStateRows, gradient: Callable[[torch.Tensor], torch.Tensor]
    ) -> torch.Tensor:
        ctx.rows, ctx.gradient = rows, gradient
        ctx.save_for_backward(rows.gather(hidden))  # autograd does not keep the final norm's output itself
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, grad_output: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        (rows_ND,) = ctx.saved_tensors
        total = grad_output.clone()
        ctx.rows.add_(total, ctx.gradient(rows_ND))
        return total, None, None
