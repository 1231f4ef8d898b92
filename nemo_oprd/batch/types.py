"""The objects that pass between the stages of a step: prompts -> Rollout -> TeacherTargets -> training.

The classes hold data and compute nothing. Token ids are plain Python lists, because a rollout holds exactly the ids
that were sampled and is written to JSONL and read back unchanged.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Rollout:
    """One sampled response.

    `response_mask[t]` is 1 where response token t may be supervised (None: all tokens may). A response that was stopped
    by an end-of-sequence token includes that token and has the `finish_reason` "stop"; a response that used up the
    token budget has "length".

    `logprobs[t]` is the natural logarithm of the probability that response token t had in the distribution that the
    engine sampled from, its temperature included; None if the engine recorded none. `weight_version` is the number of
    optimizer steps behind the weights that sampled the response; None if it is not known.

    `expert_routes[t, i]` are the experts that token t of prompt and response visited in the i-th layer with experts of
    the engine, int16 [tokens, layers with experts, K]; None if the engine recorded none. The last response token may be
    missing, because an engine need not compute it.

    `teacher_prompt_ids` and `teacher_response_ids` are set where the teacher reads other ids than the student, because
    it has another tokenizer or another prompt. `teacher_index[t]` is then the index of the teacher's response token
    whose state is the target of response token t, or -1 for no target. A `teacher_index` of None means that the
    response tokens of both models are the same.

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
    logprobs: list[float] | None = None
    weight_version: int | None = None
    expert_routes: np.ndarray | None = field(default=None, compare=False, repr=False)

    @property
    def length(self) -> int:
        """Tokens of prompt and response together."""
        return len(self.prompt_ids) + len(self.response_ids)

    @property
    def mask(self) -> list[int]:
        """[response length] of 0 and 1."""
        return [1] * len(self.response_ids) if self.response_mask is None else self.response_mask

    def as_read_by_teacher(self) -> Rollout:
        """The sequence that the teacher reads, as a rollout of prompt ids and response ids only."""
        prompt = self.prompt_ids if self.teacher_prompt_ids is None else self.teacher_prompt_ids
        return Rollout(prompt, self.response_ids if self.teacher_response_ids is None else self.teacher_response_ids)


@dataclass
class TeacherTargets:
    """One teacher's targets for the supervised rows that this student rank needs.

    Attributes:
        hidden: student layer (1-based) -> target [n, D] in the run's precision, or [n, R] float32 with a bridge whose
            teacher side is projected. The rows are in the order of the rank's microbatches. Empty on a rank that owns
            no supervised layer.
        output: on the last pipeline stage, the targets of the output loss: the teacher's final hidden states [n, D], or
            for sampled_token the log-probability of the token and the entropy, float32 [n, 2].
    """

    hidden: dict[int, torch.Tensor] = field(default_factory=dict)
    bytes_received: int = 0  # bytes that came from other ranks
    output: torch.Tensor | None = None

    @property
    def bytes_held(self) -> int:
        """Bytes of the targets on this rank."""
        tensors = [*self.hidden.values(), *([] if self.output is None else [self.output])]
        return sum(values.numel() * values.element_size() for values in tensors)
