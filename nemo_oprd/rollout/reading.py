"""What a teacher with another tokenizer reads: the sampled responses as text, in its own tokens and chat template."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch.distributed as dist

from nemo_oprd.rollout.base import Request
from nemo_oprd.tokens.align import Alignment, Coverage, align_batch, check_coverage, coverage_of
from nemo_oprd.tokens.identity import teacher_stop
from nemo_oprd.tokens.token_bytes import byte_table
from nemo_oprd.tokens.tokenizer import Tokenizer
from nemo_oprd.types import Rollout


class TextReader:
    """Aligns rollouts with what the teacher reads (`tokens/align.py`). Every rank makes one and calls it alike."""

    def __init__(
        self, student: Tokenizer, teacher: Tokenizer, max_positions: int, exact: bool, min_coverage: float
    ) -> None:
        """`max_positions` are the teacher's: tokens that would stand behind them have no partner.

        Raises:
            ValueError: a tokenizer says nothing about bytes, or the teacher's chat template changes a response.
        """
        self.student, self.teacher, self.max_positions = student, teacher, max_positions
        self.exact, self.min_coverage = exact, min_coverage
        for tokenizer in (student, teacher):
            byte_table(tokenizer)
        teacher_stop(teacher)

    def read(self, rollouts: list[Rollout], requests: list[Request]) -> tuple[list[Rollout], Coverage]:
        """The rollouts with the teacher's sequences, and how many tokens have a partner in them.

        Each rank aligns its share of the responses.

        Raises:
            ValueError: too few tokens of the batch have a partner.
        """
        rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        mine = self._align(rollouts[rank::world], requests[rank::world])
        parts: list[list[Alignment]] = [mine] * world
        if world > 1:
            dist.all_gather_object(parts, mine)
        alignments = [parts[i % world][i // world] for i in range(len(rollouts))]
        coverage = coverage_of(alignments)
        check_coverage(coverage, self.min_coverage, exact=self.exact)
        return [_with(rollout, found) for rollout, found in zip(rollouts, alignments, strict=True)], coverage

    def _align(self, rollouts: list[Rollout], requests: list[Request]) -> list[Alignment]:
        found = align_batch(
            self.student,
            self.teacher,
            [list(request.messages) for request in requests],
            [rollout.response_ids for rollout in rollouts],
            masks=[rollout.response_mask for rollout in rollouts],
            exact=self.exact,
            min_coverage=0.0,
        )
        return [self._within_positions(alignment) for alignment in found]

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


def _with(rollout: Rollout, alignment: Alignment) -> Rollout:
    return replace(
        rollout,
        teacher_prompt_ids=alignment.teacher_prompt_ids,
        teacher_response_ids=alignment.teacher_response_ids,
        teacher_index=alignment.teacher_index.tolist(),
    )


def alignment_metrics(rollouts: list[Rollout]) -> dict[str, float]:
    """The share of supervised response tokens that have a partner, of the batch and of its worst response."""
    asked = [sum(rollout.mask) for rollout in rollouts]
    found = [
        sum(m for m, at in zip(rollout.mask, rollout.teacher_index or (), strict=True) if at >= 0)
        for rollout in rollouts
        if rollout.teacher_index is not None
    ]
    if len(found) < len(rollouts) or not any(asked):
        return {}
    lowest = min(part / whole for part, whole in zip(found, asked, strict=True) if whole)
    return {"align/coverage": sum(found) / sum(asked), "align/coverage_lowest": lowest}
