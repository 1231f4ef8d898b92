"""What each microbatch of a wave is compared with on this rank: rows, weights and targets of the loss's terms."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from nemo_oprd.batch import HeldRows, StepPlan
from nemo_oprd.layout import Coordinates
from nemo_oprd.megatron.capture import LayerTerm, profile_bins
from nemo_oprd.megatron.head import OutputTerm, rows_of, vocab_shard
from nemo_oprd.megatron.model import DistillingModel
from nemo_oprd.megatron.parallel import Role, device
from nemo_oprd.objective import Objective, OutputObjective
from nemo_oprd.types import Rollout, TeacherTargets


@dataclass(frozen=True)
class Wave:
    """Some microbatches of a batch, with what their teachers sent to the rank at `at`.

    `targets` is per teacher, its rows in the order of its microbatches; a teacher without rows here has none.
    """

    rollouts: list[Rollout]
    plan: StepPlan
    targets: dict[int, TeacherTargets]
    at: Coordinates

    @cached_property
    def hidden_rows(self) -> list[HeldRows]:
        """Per microbatch, the rows whose hidden states are matched on this rank."""
        return self.plan.hidden.held(self.at)

    @cached_property
    def output_rows(self) -> list[HeldRows]:
        """Per microbatch, the rows whose distributions are; none without such a term."""
        return [] if self.plan.output is None else self.plan.output.held(self.at)

    def parts(self, held: list[HeldRows]) -> list[slice]:
        """Per microbatch, where its rows are among all that its teacher sent."""
        ends: dict[int, int] = {}
        parts = []
        for teacher, rows in zip(self.plan.taught_by, held, strict=True):
            start = ends.get(teacher, 0)
            ends[teacher] = start + len(rows.row)
            parts.append(slice(start, ends[teacher]))
        return parts


def hidden_terms(wave: Wave, objective: Objective, row_weights: np.ndarray) -> list[dict[int, LayerTerm]]:
    """Per microbatch: layer -> its term of the hidden states.

    Args:
        objective: as it is in this step.
        row_weights: [n] of the wave's rows, 1 / (global counts).
    """
    table, here = wave.plan.hidden.table, device()
    weight, response = torch.from_numpy(row_weights).float(), torch.from_numpy(table.response)
    bins = torch.from_numpy(np.stack([profile_bins(table.from_start), profile_bins(table.from_end)]))
    weights = objective.layer_weights
    scale = {layer: objective.weight * weights[layer] / sum(weights.values()) for layer in weights}
    deepest = max(objective.layers, default=0)
    result = []
    for held, part, teacher in zip(wave.hidden_rows, wave.parts(wave.hidden_rows), wave.plan.taught_by, strict=True):
        row, rows = torch.from_numpy(held.row), torch.from_numpy(held.local).to(here)
        row_weight, of_response = weight[row].to(here), response[row].to(here)
        sent = wave.targets[teacher].hidden if teacher in wave.targets else {}
        terms = {
            layer: LayerTerm(rows, row_weight, of_response, target[part], scale[layer])
            for layer, target in sent.items()
        }
        if deepest in terms:
            terms[deepest].bins = bins[:, row].to(here)
        result.append(terms)
    return result


def output_terms(
    wave: Wave,
    model: DistillingModel,
    role: Role,
    now: OutputObjective,
    vocab_sizes: list[int],
    head: Callable[[int], torch.Tensor | None],
    sampled_with: list[torch.Tensor | None] | None,
) -> list[OutputTerm | None]:
    """Per microbatch, its term of the distributions; None where its teacher sent nothing for it.

    Args:
        model: the student's last chunk, on the last stage.
        now: the term as it is in this step.
        vocab_sizes: per teacher, the ids that it and the student know.
        head: a teacher's number -> this tensor rank's shard of its head, None where log-probabilities were sent.
        sampled_with: per microbatch, the tokens' log-probabilities under the student that sampled; None: this one did.
    """
    assert wave.plan.output is not None
    table, here = wave.plan.output.table, device()
    tokens, weight = torch.from_numpy(table.tokens(wave.rollouts)), torch.from_numpy(table.weight).float()
    response = torch.from_numpy(table.response)
    terms: list[OutputTerm | None] = []
    parts = wave.parts(wave.output_rows)
    for m, (held, part, teacher) in enumerate(zip(wave.output_rows, parts, wave.plan.taught_by, strict=True)):
        sent = wave.targets[teacher].output if teacher in wave.targets else None
        if sent is None:
            terms.append(None)
            continue
        row = torch.from_numpy(held.row)
        term = OutputTerm(
            loss=now.loss,
            rows=rows_of(held, role),
            model=model,
            shard=vocab_shard(model, role, vocab_sizes[teacher]),
            tokens=tokens[row].to(here),
            weight=weight[row].to(here),
            response=response[row].to(here),
            teacher=sent[part],
            teacher_head=head(teacher),
            scale=now.weight,
            chunk_tokens=now.chunk_tokens,
            old_logprob=None if sampled_with is None else sampled_with[m],
        )
        terms.append(term)
    return terms
