"""The output-space term on the last pipeline stage: the rows it needs, and their gradient on the way back.

Like the terms of the layers it is an identity in the forward pass. Its logits exist in the backward pass only, a chunk
at a time, where value and gradient come from one product with the head (`losses/chunked.py`). The gradient of the
head goes straight into Megatron's float32 gradient buffer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.utils import make_viewless_tensor

from nemo_oprd.batch.plan import LocalRows
from nemo_oprd.distillation.objective import TeacherMatch
from nemo_oprd.losses.chunked import OutputSums, Teacher, TeacherStates, chunked_output_loss, output_metrics
from nemo_oprd.losses.divergences import OutputLoss
from nemo_oprd.losses.vocab_parallel import VocabShard
from nemo_oprd.megatron.model import DistillingModel
from nemo_oprd.megatron.optimizer import main_gradient
from nemo_oprd.megatron.parallel import Role, device
from nemo_oprd.weights.hf import TensorReader


@dataclass(frozen=True)
class Rows:
    """Rows of one microbatch in the final hidden state, the same on all tensor ranks of a context rank.

    Under sequence parallelism each tensor rank holds `share` consecutive tokens of the context rank's sequence; `rows`
    count in the whole of it.
    """

    rows: torch.Tensor  # [n] int64
    tensor_rank: int
    sequence_parallel: bool
    group: dist.ProcessGroup

    def _own(self, share: int) -> tuple[torch.Tensor, torch.Tensor]:
        own = (self.rows // share == self.tensor_rank).nonzero().squeeze(1)
        return own, self.rows[own] % share

    def take(self, hidden: torch.Tensor) -> torch.Tensor:
        """[S, 1, D] on this rank -> all rows [n, D]."""
        flat = hidden.flatten(0, 1)
        if not self.sequence_parallel:
            return flat.index_select(0, self.rows)
        own, local = self._own(len(flat))
        taken = flat.new_zeros(len(self.rows), flat.shape[1])
        taken[own] = flat.index_select(0, local)
        dist.all_reduce(taken, group=self.group)  # every row has one rank that isn't zero: the sum is exact
        return taken

    def add_(self, gradient: torch.Tensor, rows_ND: torch.Tensor) -> None:
        """Adds float32 [n, D] to this rank's part of a gradient [S, 1, D]; rounded once."""
        flat = gradient.flatten(0, 1)
        own, local = (slice(None), self.rows) if not self.sequence_parallel else self._own(len(flat))
        flat[local] = (flat[local].to(rows_ND.dtype) + rows_ND[own]).to(flat.dtype)


def rows_of(local: LocalRows, role: Role) -> Rows:
    """The output rows of one microbatch on this rank."""
    rows = torch.from_numpy(local.local).to(device())
    return Rows(rows, role.member_coords.tensor, role.layout.sequence, role.member_groups.tp)


def vocab_shard(model: DistillingModel, role: Role, vocab_size: int) -> VocabShard:
    """This tensor rank's part of the padded vocabulary, of which the first `vocab_size` ids count."""
    size = model.output_weight().shape[0]
    group = role.member_groups.tp if role.layout.tensor > 1 else None
    return VocabShard(role.member_coords.tensor * size, size, vocab_size, group)


def load_teacher_head(
    model: DistillingModel, role: Role, dtype: torch.dtype, match: TeacherMatch, read: TensorReader
) -> torch.Tensor | None:
    """A teacher's LM head [V, D] for the ids that this tensor rank's own head has; None before the last stage.

    Args:
        model: the student's last chunk on this rank.
        read: gives the teacher's HF tensors by name.
    """
    if not model.post_process:
        return None
    whole = read("model.embed_tokens.weight" if match.spec.tied_embeddings else "lm_head.weight")
    shard = vocab_shard(model, role, match.shared_vocab)
    part = whole[shard.start : min(shard.start + shard.size, match.shared_vocab)].to(device(), dtype)
    # ids that only one of the models has count for neither
    return torch.nn.functional.pad(part, (0, 0, 0, shard.size - len(part)))


@dataclass
class OutputHeadLoss:
    """The output-space term of one microbatch: n rows of the rollouts `response`.

    `teacher` is log-probability and entropy per row [n, 2], or the teacher's final hidden states [n, D_T], which
    `teacher_head` [V, D_T] turns into logits. `scale` is its weight in the total; 0 measures only. `old_logprob` is
    what the tokens had under the student that sampled them, None if this is the one.
    """

    loss: OutputLoss
    rows: Rows
    model: DistillingModel
    shard: VocabShard
    tokens: torch.Tensor  # [n] int64
    weight: torch.Tensor  # [n] float32, 1 / (global counts)
    response: torch.Tensor  # [n] int64
    teacher: torch.Tensor
    teacher_head: torch.Tensor | None
    scale: float
    chunk_tokens: int
    old_logprob: torch.Tensor | None = None  # [n]
    sums: OutputSums | None = None
    backward_passes: int = 0

    def attach(self, hidden: torch.Tensor) -> torch.Tensor:
        """`hidden` [S, 1, D] unchanged; its backward pass measures the term and adds its gradient."""
        if not torch.is_grad_enabled() or len(self.rows.rows) == 0:
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
        if self.scale:
            result = chunked_output_loss(*arguments, **settings, scale=self.scale, head_grad=main_gradient(head))
            self.sums, gradient = result.sums, result.hidden
        else:
            self.sums, gradient = output_metrics(*arguments, **settings), torch.zeros_like(rows_ND)
        if self.teacher_head is None:
            self.sums.metrics["teacher_entropy"] = self.teacher[:, 1].sum(dtype=torch.float64)
        self.backward_passes += 1
        return gradient


class _AddOutputGradient(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: torch.Tensor, rows: Rows, gradient: Callable[[torch.Tensor], torch.Tensor]
    ) -> torch.Tensor:
        ctx.rows, ctx.gradient = rows, gradient
        ctx.save_for_backward(rows.take(hidden))  # nothing else keeps the final norm's output
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, grad_output: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        (rows_ND,) = ctx.saved_tensors
        total = grad_output.clone()
        ctx.rows.add_(total, ctx.gradient(rows_ND))
        return total, None, None
