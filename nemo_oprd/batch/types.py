"""The objects that pass between the stages of a step: prompts -> Rollout -> TeacherTargets -> training.

Nothing here computes; each class says what one stage promises to the next. Token ids are plain Python lists on
purpose: a rollout is what was sampled, exactly, and is written to and read from JSONL as is.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch


@dataclass(frozen=True)
class Rollout:
    """One sampled response.

    `response_mask[t]` is 1 where response token t may be supervised (None: everywhere). The end-of-sequence token that
    stopped the response is part of it; `finish_reason` is "stop" then, and "length" where the token budget ended it.

    A teacher that doesn't read these very ids (another tokenizer, another prompt) has `teacher_prompt_ids` and
    `teacher_response_ids`; `teacher_index[t]` is then the one of its response tokens whose state stands for that of
    response token t, -1 for none (None: its response tokens are the same).

    >>> Rollout(prompt_ids=[5, 9], response_ids=[7, 1], finish_reason="stop").length
    4
    """

    prompt_ids: list[int]
    response_ids: list[int]
    response_mask: list[int] | None = None
    prompt: str | None = None
    response: str | None = None
    data_source: str | None = None
    answer: str | None = None
    finish_reason: str | None = None
    teacher_prompt_ids: list[int] | None = None
    teacher_response_ids: list[int] | None = None
    teacher_index: list[int] | None = None

    @property
    def length(self) -> int:
        """Tokens of prompt and response together."""
        return len(self.prompt_ids) + len(self.response_ids)

    @property
    def mask(self) -> list[int]:
        """[response length] of 0 and 1."""
        return [1] * len(self.response_ids) if self.response_mask is None else self.response_mask

    def as_read_by_teacher(self) -> Rollout:
        """What the teacher reads: prompt and response ids only."""
        prompt = self.prompt_ids if self.teacher_prompt_ids is None else self.teacher_prompt_ids
        return Rollout(prompt, self.response_ids if self.teacher_response_ids is None else self.teacher_response_ids)


@dataclass
class TeacherTargets:
    """What the frozen teacher says about the supervised rows that this rank needs.

    `hidden[l]` is the target of student layer l (1-based): [n, D] in the run's precision, its rows in the order of the
    rank's microbatches; with a bridge [n, r] in float32. A rank that owns no supervised layer holds nothing. `output`
    is what the last stage's output-space term needs: the teacher's final hidden states of its rows, or for
    sampled_token log-probability and entropy, float32 [n, 2]. `bytes_received` counts what came from other ranks.
    """

    hidden: dict[int, torch.Tensor] = field(default_factory=dict)
    bytes_received: int = 0
    output: torch.Tensor | None = None

    @property
    def bytes_held(self) -> int:
        """Memory of the targets on this rank."""
        held = [*self.hidden.values(), *([] if self.output is None else [self.output])]
        return sum(values.numel() * values.element_size() for values in held)
