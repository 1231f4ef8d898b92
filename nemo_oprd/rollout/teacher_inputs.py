"""Sequences for a teacher that reads another prompt than the student, or the text in tokens of its own tokenizer."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np
import torch.distributed as dist

from nemo_oprd.batch.types import Rollout
from nemo_oprd.data.token_alignment import Alignment, align_batch, check_coverage, coverage_of
from nemo_oprd.data.token_bytes import byte_table
from nemo_oprd.data.tokenizer import Tokenizer, teacher_eos_id, teacher_prompts
from nemo_oprd.rollout.engine import Request
from nemo_oprd.rollout.exchange import Exchange

# an object that adds one teacher's sequences to rollouts; every rank builds one and calls it with the same arguments
TeacherInputs: TypeAlias = "PromptInputs | TextInputs"


def add_teacher_inputs(
    inputs_of: list[TeacherInputs | None], taught_by: list[int], rollouts: list[Rollout], requests: list[Request]
) -> list[Rollout]:
    """Adds to each rollout the sequence that its teacher reads; returns the rollouts.

    Args:
        inputs_of: per teacher; None for a teacher that reads the student's ids.
        taught_by: the number of each rollout's teacher.
    """
    result = list(rollouts)
    for number, inputs in enumerate(inputs_of):
        taught = [i for i, teacher in enumerate(taught_by) if teacher == number]
        if inputs is not None and taught:
            with_inputs = inputs.add_to([rollouts[i] for i in taught], [requests[i] for i in taught])
            for i, rollout in zip(taught, with_inputs, strict=True):
                result[i] = rollout
    return result


@dataclass
class PromptInputs:
    """Inputs of a teacher that reads the student's response tokens after a prompt of its own.

    The prompt comes from `teacher.prompt`, or from the teacher's own system prompt or chat template.

    Response tokens beyond the teacher's `max_positions` have no target.
    """

    teacher: Tokenizer
    max_positions: int

    def add_to(self, rollouts: list[Rollout], requests: list[Request]) -> list[Rollout]:
        """Returns the rollouts with the teacher's prompts."""
        asked = [request.teacher_messages for request in requests], [request.tools for request in requests]
        prompts = (np.array(ids, np.int32) for ids in teacher_prompts(self.teacher, *asked))
        return [self._with_prompt(rollout, prompt) for rollout, prompt in zip(rollouts, prompts, strict=True)]

    def _with_prompt(self, rollout: Rollout, prompt: np.ndarray) -> Rollout:
        room, length = max(0, self.max_positions - len(prompt)), len(rollout.response_ids)
        if length <= room:
            return replace(rollout, teacher_prompt_ids=prompt)
        index = np.where(np.arange(length) < room, np.arange(length), -1)
        response = rollout.response_ids[:room]
        return replace(rollout, teacher_prompt_ids=prompt, teacher_response_ids=response, teacher_index=index)


class TextInputs:
    """Inputs of a teacher that reads the text in tokens of its own tokenizer, aligned with the student's tokens."""

    def __init__(
        self, student: Tokenizer, teacher: Tokenizer, max_positions: int, exact: bool, min_coverage: float
    ) -> None:
        """Response tokens beyond the teacher's `max_positions` get no target. See `AlignmentConfig` for the rest.

        Raises:
            ValueError: the bytes of a tokenizer's tokens are unknown, or the teacher's template changes a response.
        """
        self.student, self.teacher, self.max_positions = student, teacher, max_positions
        self.exact, self.min_coverage = exact, min_coverage
        for tokenizer in (student, teacher):
            byte_table(tokenizer)
        teacher_eos_id(teacher)

    def add_to(self, rollouts: list[Rollout], requests: list[Request]) -> list[Rollout]:
        """Returns the rollouts with the sequences that the teacher reads. Each rank aligns a part of the responses.

        Raises:
            ValueError: too few response tokens of the batch have a target.
        """
        rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        own = dict(
            zip(
                range(rank, len(rollouts), world),
                self._align(rollouts[rank::world], requests[rank::world]),
                strict=True,
            )
        )
        if world > 1:
            shared = Exchange().share({i: _columns(alignment) for i, alignment in own.items()})
            own = {i: _alignment(columns) for i, columns in shared.items()}
        alignments = [own[i] for i in range(len(rollouts))]
        check_coverage(coverage_of(alignments), self.min_coverage, exact=self.exact)
        return [
            replace(
                rollout,
                teacher_prompt_ids=alignment.teacher_prompt_ids,
                teacher_response_ids=alignment.teacher_response_ids,
                teacher_index=alignment.teacher_index,
            )
            for rollout, alignment in zip(rollouts, alignments, strict=True)
        ]

    def _align(self, rollouts: list[Rollout], requests: list[Request]) -> list[Alignment]:
        alignments = align_batch(
            self.student,
            self.teacher,
            [request.teacher_messages for request in requests],
            [rollout.response_ids for rollout in rollouts],
            tools=[request.tools for request in requests],
            masks=[rollout.response_mask for rollout in rollouts],
            exact=self.exact,
            min_coverage=0.0,
        )
        return [self._within_positions(alignment) for alignment in alignments]

    def _within_positions(self, alignment: Alignment) -> Alignment:
        room = max(0, self.max_positions - len(alignment.teacher_prompt_ids))
        if len(alignment.teacher_response_ids) <= room:
            return alignment
        index = np.where(alignment.teacher_index < room, alignment.teacher_index, -1)
        return replace(
            alignment,
            teacher_response_ids=alignment.teacher_response_ids[:room],
            teacher_index=index,
            mask=alignment.mask & (index >= 0),
        )


def _columns(alignment: Alignment) -> dict[str, np.ndarray]:
    """Returns the alignment in columns for `Exchange.share`."""
    names = ("teacher_prompt_ids", "teacher_response_ids", "teacher_index", "mask")
    counts = np.array([alignment.num_supervised, alignment.changed_bytes])
    return {name: getattr(alignment, name) for name in names} | {"counts": counts}


def _alignment(columns: dict[str, np.ndarray]) -> Alignment:
    """Rebuilds the alignment from the result of `_columns`."""
    num_supervised, changed_bytes = columns["counts"].tolist()
    arrays = {name: array for name, array in columns.items() if name != "counts"}
    return Alignment(**arrays, num_supervised=num_supervised, changed_bytes=changed_bytes)


def alignment_metrics(rollouts: list[Rollout]) -> dict[str, float]:
    """Returns the fraction of response tokens with mask 1 that have a target, in the batch and in its worst response.

    The result is empty if a rollout has no `teacher_index`, or if no token has mask 1.
    """
    indices = [rollout.teacher_index for rollout in rollouts if rollout.teacher_index is not None]
    if len(indices) < len(rollouts):
        return {}
    supervised = [int(rollout.mask.sum()) for rollout in rollouts]
    aligned = [int((rollout.mask & (index >= 0)).sum()) for rollout, index in zip(rollouts, indices, strict=True)]
    if not any(supervised):
        return {}
    lowest = min(part / whole for part, whole in zip(aligned, supervised, strict=True) if whole)
    return {"align/coverage": sum(aligned) / sum(supervised), "align/coverage_lowest": lowest}
