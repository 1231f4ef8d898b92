"""The losses of each microbatch of a group on this rank: their rows, weights and targets."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from nemo_oprd.batch.layout import Coordinates
from nemo_oprd.batch.plan import LocalRows, StepPlan
from nemo_oprd.batch.token_table import profile_bins
from nemo_oprd.batch.types import Rollout, TeacherTargets
from nemo_oprd.distillation.hidden_state_loss import LayerTarget
from nemo_oprd.distillation.metrics.token_metrics import LayerTokens, TokenSlots
from nemo_oprd.distillation.objective import StepObjective
from nemo_oprd.distillation.output_head import OutputHeadLoss, final_state_rows, vocab_shard
from nemo_oprd.distillation.student import Student
from nemo_oprd.megatron.parallel import on_device


@dataclass(frozen=True)
class MicrobatchGroup:
    """Some microbatches of a batch, with the targets that the rank at `coords` received for them.

    `targets` holds the targets by the teacher's number; their rows are in the order of the teacher's microbatches. A
    teacher without rows in the group has no entry. `slots` are those of the batch; None: no values are kept per token.
    """

    rollouts: list[Rollout]
    plan: StepPlan
    targets: dict[int, TeacherTargets]
    coords: Coordinates
    slots: TokenSlots | None = None

    @cached_property
    def hidden_rows(self) -> list[LocalRows]:
        """Per microbatch, the rows of the representation loss on this rank."""
        return self.plan.hidden.local_rows(self.coords)

    @cached_property
    def output_rows(self) -> list[LocalRows]:
        """Per microbatch, the rows of the output loss on this rank; empty without an output loss."""
        return [] if self.plan.output is None else self.plan.output.local_rows(self.coords)

    def target_slices(self, local_rows: list[LocalRows]) -> list[slice]:
        """Per microbatch, the slice of its rows in the targets that its teacher sent."""
        ends: dict[int, int] = {}
        slices = []
        for teacher, rows in zip(self.plan.taught_by, local_rows, strict=True):
            start = ends.get(teacher, 0)
            ends[teacher] = start + len(rows.table_index)
            slices.append(slice(start, ends[teacher]))
        return slices


def layer_targets(group: MicrobatchGroup, objective: StepObjective) -> list[dict[int, LayerTarget]]:
    """Per microbatch: student layer -> the layer's target on this rank."""
    table = group.plan.hidden.table
    weight, response = torch.from_numpy(table.weight).float(), torch.from_numpy(table.response)
    bins = torch.from_numpy(np.stack([profile_bins(table.from_start), profile_bins(table.from_end)]))
    scale, deepest = objective.layer_scale, max(objective.run.layers, default=0)
    slots = None if group.slots is None else torch.from_numpy(group.slots.of_rows(table))
    weights = objective.layer_weights
    total, each = sum(weights.values()), 1 / max(1, len(weights))
    shares = dict(
        zip(weights, on_device(np.array([(w / total, each) for w in weights.values()]).reshape(-1, 2)), strict=True)
    )
    result = []
    slices = group.target_slices(group.hidden_rows)
    for local, part, teacher in zip(group.hidden_rows, slices, group.plan.taught_by, strict=True):
        row, hidden_index = torch.from_numpy(local.table_index), on_device(local.hidden_index)
        row_weight, row_response = on_device(weight[row]), on_device(response[row])
        sent = group.targets[teacher].hidden if teacher in group.targets else {}
        targets = {
            layer: LayerTarget(hidden_index, row_weight, row_response, target[part], scale[layer])
            for layer, target in sent.items()
        }
        if deepest in targets:
            targets[deepest].bins = on_device(bins[:, row])
        if group.slots is not None and slots is not None:
            for layer, target in targets.items():
                target.tokens = LayerTokens(on_device(slots[row]), group.slots.count, shares[layer])
        result.append(targets)
    return result


def output_head_losses(
    group: MicrobatchGroup,
    student: Student,
    objective: StepObjective,
    sampled_logprobs: list[tuple[torch.Tensor, torch.Tensor | None] | None] | None,
) -> list[OutputHeadLoss | None]:
    """Per microbatch, its output loss; None without one, before the last stage, and where no output targets came.

    `sampled_logprobs` are those of the microbatches, see `step.KeptResults`.
    """
    term, model = objective.output, student.chunks[-1]
    if group.plan.output is None or term is None or not model.post_process:
        return [None] * len(group.plan.taught_by)
    table = group.plan.output.table
    tokens, weight = torch.from_numpy(table.tokens(group.rollouts)), torch.from_numpy(table.weight).float()
    response = torch.from_numpy(table.response)
    corrected = term.loss.correction is not None
    engine_logprob = torch.from_numpy(table.engine_logprobs(group.rollouts)) if corrected else None
    slots = None if group.slots is None else torch.from_numpy(group.slots.of_rows(table))
    packs = group.plan.output.packs[group.coords.data]
    losses: list[OutputHeadLoss | None] = []
    slices = group.target_slices(group.output_rows)
    for m, (local, part, teacher) in enumerate(zip(group.output_rows, slices, group.plan.taught_by, strict=True)):
        sent = group.targets[teacher].output if teacher in group.targets else None
        if sent is None:
            losses.append(None)
            continue
        row = torch.from_numpy(local.table_index)
        old = None if sampled_logprobs is None else sampled_logprobs[m]
        shared = objective.run.teachers[teacher].shared
        loss = OutputHeadLoss(
            loss=term.loss,
            rows=final_state_rows(local, packs[m], student.role),
            model=model,
            shard=vocab_shard(model, student.role, shared, objective.run.sampled),
            tokens=on_device(tokens[row]),
            weight=on_device(weight[row]),
            response=on_device(response[row]),
            teacher=sent[part],
            teacher_head=student.teacher_head(teacher) if term.sends_states else None,
            scale=term.weight,
            chunk_tokens=term.chunk_tokens,
            old_logprob=None if old is None else old[0],
            old_sampler_logprob=None if old is None else old[1],
            engine_logprob=None if engine_logprob is None else on_device(engine_logprob[row]),
            token_slots=None if slots is None else on_device(slots[row]),
            support_rows=None if table.searched is None else np.flatnonzero(table.searched[local.table_index]),
        )
        losses.append(loss)
    return losses
