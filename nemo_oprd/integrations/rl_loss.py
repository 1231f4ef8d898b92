"""`OPRDOutputLoss`: this project's output-space losses as a loss function of NeMo-RL.

NeMo-RL calls a loss function on the last pipeline stage after the forward pass of a microbatch, once per sequence if
sequences are packed, with this context rank's logits of this tensor rank's vocabulary. The worker already has the
teacher's logits of the same microbatch, because the teacher runs in it (`rl_worker.py`).

The hidden-state loss is no loss function: it enters in the backward pass, on the stages that own the layers. With
`kind=none` the loss function is a zero whose backward pass leads through the model.

Importing this module imports NeMo-RL. B sequences, S their padded tokens, s those of this context rank, n rows,
V vocabulary of this tensor rank.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from nemo_rl.algorithms.loss.interfaces import LossInputType, LossType

from nemo_oprd.config.schema import OutputLossConfig
from nemo_oprd.integrations.rl_batch import OUTPUT_WEIGHT
from nemo_oprd.losses.divergences import output_rows
from nemo_oprd.losses.output_loss import OutputLoss
from nemo_oprd.losses.vocab_parallel import VocabShard
from nemo_oprd.megatron.versions import batch_on_this_cp_rank


class OPRDOutputLoss:
    """A `LossFunction` of NeMo-RL 0.7.0. The driver makes it and sends it to the workers, which use copies.

    Attributes:
        loss_type, input_type: declarations for NeMo-RL: sums over tokens, of logits.
        needs_teacher: whether the loss reads the teacher's logits.
    """

    loss_type = LossType.TOKEN_LEVEL
    input_type = LossInputType.LOGIT

    def __init__(self, output: OutputLossConfig, vocab_size: int) -> None:
        """Takes the keys of `loss.output`; ids below `vocab_size`, config.json's, are real ones.

        Raises:
            ValueError: the weight is a schedule, or an option is wrong.
        """
        if isinstance(output.weight, list):
            raise ValueError("output.weight is a schedule; expected a number: use nemo-oprd train for stages")
        self.needs_teacher = not output.is_off
        self._weight, self._chunk, self._vocab_size = float(output.weight), output.chunk_tokens, vocab_size
        self._loss = None if output.is_off else OutputLoss.of(output)
        self._teacher: torch.Tensor | None = None
        self._groups: Any = None
        self._read = 0

    def begin(self, teacher: torch.Tensor | None, groups: Any) -> None:
        """Sets the teacher's logits; the worker calls this before every forward pass of the student.

        `teacher`: the teacher's logits [B, s, V] of the microbatch; None before the last pipeline stage. `groups`: the
        model's `ProcessGroupCollection`.
        """
        self._teacher, self._groups, self._read = teacher, groups, 0

    def __call__(
        self, data: Any, global_valid_seqs: torch.Tensor, global_valid_toks: torch.Tensor, logits: torch.Tensor
    ) -> tuple[torch.Tensor, dict[str, float]]:
        """Computes the loss of one microbatch, or of one sequence of a pack.

        Args:
            data: `input_ids` [B, any length], and the weights that `with_weights` has added, which already contain
                1 / counts of the update.
            global_valid_seqs, global_valid_toks: NeMo-RL's own counts, ignored here.
            logits: [B, s, V], not divided by a sampling temperature.

        Returns:
            (The loss times the size of the context-parallel group, by which NeMo-RL divides it; {"loss": the loss of
            all context ranks}).
        """
        if self._loss is None:
            return logits.narrow(0, 0, 0).sum(), {"loss": 0.0}
        if self._teacher is None:
            raise ValueError("OPRDOutputLoss has no logits of the teacher; expected a worker that is an OPRDWorker")
        if self._teacher.shape[2] != logits.shape[2]:
            raise ValueError(
                f"the student's logits have {logits.shape[2]} columns on this rank, and the teacher's "
                f"{self._teacher.shape[2]}; expected equal padded vocabularies: choose models of one family, or "
                "output.kind=none"
            )
        teacher = self._teacher[:, self._read : self._read + logits.shape[1]]
        self._read += logits.shape[1]
        ranks = self._groups.cp.size()
        # the weight of a position, and the token that it predicts
        whole = {"weight": data[OUTPUT_WEIGHT], "token": data["input_ids"][:, 1:]}
        whole = {name: _padded(values, ranks * logits.shape[1]) for name, values in whole.items()}
        local = batch_on_this_cp_rank(whole, self._groups.cp) if ranks > 1 else whole
        weight_N, token_N = local["weight"].flatten(), local["token"].flatten()
        rows = weight_N.nonzero()[:, 0]
        value, surrogate = self._rows(
            logits.flatten(0, 1), teacher.flatten(0, 1), rows, token_N[rows], weight_N[rows].float()
        )
        # NeMo-RL's own losses are equal on all context ranks; this rank's part must not be divided by their number
        loss = self._weight * ranks * (surrogate + (value - surrogate).detach())
        total = value.detach().clone()
        if ranks > 1:
            dist.all_reduce(total, group=self._groups.cp)
        return loss, {"loss": self._weight * float(total)}

    def _rows(
        self,
        student: torch.Tensor,
        teacher: torch.Tensor,
        rows: torch.Tensor,
        token_N: torch.Tensor,
        weight_N: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns (the rows' loss, detached; a scalar that has its gradient), from both models' logits [tokens, V]."""
        size, group = student.shape[1], self._groups.tp
        shard = VocabShard(group.rank() * size, size, self._vocab_size, group if group.size() > 1 else None)
        value = torch.zeros((), device=student.device)
        surrogate = student.narrow(0, 0, 0).sum().float()
        assert self._loss is not None
        for chunk in (slice(first, first + self._chunk) for first in range(0, len(rows), self._chunk)):
            raw_CV = student[rows[chunk]].float()
            logits_CV, teacher_CV = raw_CV.detach().clone(), teacher[rows[chunk]].float().clone()
            found = output_rows(self._loss, logits_CV, token_N[chunk], shard, teacher_logits_CV=teacher_CV)
            assert found.grad_logits is not None
            value = value + (found.value * weight_N[chunk]).sum()
            surrogate = surrogate + (raw_CV * found.grad_logits * weight_N[chunk, None]).sum()
        return value, surrogate


def _padded(values_BS: torch.Tensor, length: int) -> torch.Tensor:
    """Pads to [B, length] with 0, or cuts off the padding that the pack left out."""
    return torch.nn.functional.pad(values_BS, (0, length - values_BS.shape[1])).contiguous()
