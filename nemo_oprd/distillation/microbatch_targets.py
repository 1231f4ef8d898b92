"""What each microbatch of a group is compared with on this rank: rows, weights and targets of the loss's terms."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from nemo_oprd.batch.plan import LocalRows, StepPlan
from nemo_oprd.batch.position_bins import profile_bins
from nemo_oprd.batch.types import Rollout, TeacherTargets
from nemo_oprd.distillation.hidden_state_loss import LayerTarget
from nemo_oprd.distillation.objective import OutputTerm, StepObjective
from nemo_oprd.distillation.output_head import OutputHeadLoss, rows_of, vocab_shard
from nemo_oprd.layout import Coordinates
from nemo_oprd.megatron.model import DistillingModel
from nemo_oprd.megatron.parallel import Role, device


@dataclass(frozen=True)
class MicrobatchGroup:
    """Some microbatches of a batch, with what their teachers sent to the rank at `coords`.

    `targets` is per teacher, its rows in the order of its microbatches; a teacher without rows here has none.
    """

    rollouts: list[Rollout]
    plan: StepPlan
    targets: dict[int, TeacherTargets]
    coords: Coordinates

    @cached_property
    def hidden_rows(self) -> list[LocalRows]:
        """Per microbatch, the rows whose hidden states are matched on this rank."""
        return self.plan.hidden.local_rows(self.coords)

    @cached_property
    def output_rows(self) -> list[LocalRows]:
        """Per microbatch, the rows whose distributions are; none without such a term."""
        return [] if self.plan.output is None else self.plan.output.local_rows(self.coords)

    def parts(self, local_rows: list[LocalRows]) -> list[slice]:
        """Per microbatch, where its rows are among all that its teacher sent."""
        ends: dict[int, int] = {}
        parts = []
        for teacher, rows in zip(self.plan.taught_by, local_rows, strict=True):
            start = ends.get(teacher, 0)
            ends[teacher] = start + len(rows.row)
            parts.append(slice(start, ends[teacher]))
        return parts


def layer_targets(group: MicrobatchGroup, objective: StepObjective) -> list[dict[int, LayerTarget]]:
    """Per microbatch: student layer -> what its hidden states are matched to on this rank."""
    table, here = group.plan.hidden.table, device()
    weight, response = torch.from_numpy(table.weight).float(), torch.from_numpy(table.response)
    bins = torch.from_numpy(np.stack([profile_bins(table.from_start), profile_bins(table.from_end)]))
    scale, deepest = objective.layer_scale, max(objective.run.layers, default=0)
    result = []
    for local, part, teacher in zip(
        group.hidden_rows, group.parts(group.hidden_rows), group.plan.taught_by, strict=True
    ):
        row, rows = torch.from_numpy(local.row), torch.from_numpy(local.local).to(here)
        row_weight, of_response = weight[row].to(here), response[row].to(here)
        sent = group.targets[teacher].hidden if teacher in group.targets else {}
        targets = {
            layer: LayerTarget(rows, row_weight, of_response, target[part], scale[layer])
            for layer, target in sent.items()
        }
        if deepest in targets:
            targets[deepest].bins = bins[:, row].to(here)
        result.append(targets)
    return result


def output_head_losses(
    group: MicrobatchGroup,
    model: DistillingModel,
    role: Role,
    term: OutputTerm,
    vocab_sizes: list[int],
    head: Callable[[int], torch.Tensor | None],
    sampled_logprobs: list[torch.Tensor | None] | None,
) -> list[OutputHeadLoss | None]:
    """Per microbatch, its term of the distributions; None where its teacher sent nothing for it.

    Args:
        model: the student's last chunk, on the last stage.
        term: as it is in this update.
        vocab_sizes: per teacher, the ids that it and the student know.
        head: a teacher's number -> this tensor rank's shard of its head, None where log-probabilities were sent.
        sampled_logprobs: per microbatch, the tokens' log-probabilities under the student that sampled; None: the
            student as it is now sampled them.
    """
    assert group.plan.output is not None
    table, here = group.plan.output.table, device()
    tokens, weight = torch.from_numpy(table.tokens(group.rollouts)), torch.from_numpy(table.weight).float()
    response = torch.from_numpy(table.response)
    losses: list[OutputHeadLoss | None] = []
    parts = group.parts(group.output_rows)
    for m, (local, part, teacher) in enumerate(zip(group.output_rows, parts, group.plan.taught_by, strict=True)):
        sent = group.targets[teacher].output if teacher in group.targets else None
        if sent is None:
            losses.append(None)
            continue
        row = torch.from_numpy(local.row)
        loss = OutputHeadLoss(
            loss=term.loss,
            rows=rows_of(local, role),
            model=model,
            shard=vocab_shard(model, role, vocab_sizes[teacher]),
            tokens=tokens[row].to(here),
            weight=weight[row].to(here),
            response=response[row].to(here),
            teacher=sent[part],
            teacher_head=head(teacher),
            scale=term.weight,
            chunk_tokens=term.chunk_tokens,
            old_logprob=None if sampled_logprobs is None else sampled_logprobs[m],
        )
        losses.append(loss)
    return losses
