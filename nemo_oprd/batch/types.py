"""The objects that pass between the stages of a step, prompts -> Rollout -> TeacherTargets -> training; and spans.

The classes hold data and compute nothing. A rollout's values per token are in arrays, which may be views into one large
buffer: a step has millions of tokens, and no stage makes a Python object for each of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import torch

# Spans: the weights that sampled the tokens of a response, int32 [spans, 3] of (version, start, end).
#
# The version is the number of optimizer steps behind the weights. The tokens of a span are those from `start` on and
# below `end`. The spans of a response follow each other without a gap, and their versions never decrease.


_NAMES = ("version", "start", "end")


def span(version: int, tokens: int) -> np.ndarray:
    """Returns the spans of a response whose tokens all come from the same weights."""
    return np.array([[version, 0, tokens]], np.int32)


def joined(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Joins the spans of a response's first part with those of the rest, which count tokens from 0 again."""
    return np.concatenate([first, second + np.array([0, first[-1, 2], first[-1, 2]], np.int32)])


def token_versions(spans: np.ndarray) -> np.ndarray:
    """Returns the version of every token, int32 [tokens]."""
    return np.repeat(spans[:, 0], spans[:, 2] - spans[:, 1])


def problem(spans: np.ndarray, tokens: int) -> str | None:
    """Returns the fault of the spans of a response of `tokens` tokens, as "found; expected ..."; None: no fault."""
    if spans.ndim != 2 or spans.shape[1] != len(_NAMES) or (spans < 0).any():
        return "no spans of (version, start, end) from 0 on; expected such"
    versions, starts, ends = spans.T.tolist()
    if [0, *ends] != [*starts, tokens] or any(start >= end for start, end in zip(starts, ends, strict=True) if tokens):
        return f"the tokens {list(zip(starts, ends, strict=True))} of {tokens}; expected each once and in order"
    if versions != sorted(versions):
        return f"the versions {versions} one after another; expected none that is older than the one before it"
    return None


def as_json(spans: np.ndarray) -> dict[str, Any]:
    """Returns the fields for a JSON file of rollouts: `weight_versions`, and `weight_version` if there is one span."""
    rows = spans.tolist()
    named: dict[str, Any] = {"weight_versions": [dict(zip(_NAMES, row, strict=True)) for row in rows]}
    return named if len(rows) != 1 else {"weight_version": rows[0][0], **named}


def from_json(given: Any) -> np.ndarray | None:
    """Returns the spans of a field `weight_versions`; None if `given` is no such list."""
    rows: Sequence[Any] = given if isinstance(given, list) else [None]
    for row in rows:
        if not isinstance(row, dict) or {*row} != {*_NAMES}:
            return None
        if any(type(value) is not int or not 0 <= value < 2**31 for value in row.values()):
            return None
    return np.array([[row[name] for name in _NAMES] for row in rows], np.int32).reshape(-1, len(_NAMES))


# the fields of a `Rollout` with a value per token, and what their arrays hold
TOKEN_FIELDS = {
    "prompt_ids": np.int32,
    "response_ids": np.int32,
    "response_mask": np.bool_,
    "teacher_prompt_ids": np.int32,
    "teacher_response_ids": np.int32,
    "teacher_index": np.int32,
    "logprobs": np.float32,
}


@dataclass(frozen=True, eq=False)
class Rollout:
    """One sampled response.

    The fields of `TOKEN_FIELDS` are read-only arrays [tokens]. Any sequence of numbers is accepted for them and becomes
    such an array; a contiguous array of the right dtype is not copied. Rollouts are equal if their contents are,
    `expert_routes` aside.

    `response_mask[t]` is true where response token t may be supervised (None: all tokens may). A response that was
    stopped by an end-of-sequence token includes that token and has the `finish_reason` "stop"; a response that used up
    the token budget has "length", and one that `rollout.stop_after` ended has "prefix".

    `logprobs[t]` is the natural logarithm of the probability that response token t had in the distribution that the
    engine sampled from, its temperature included; None if the engine recorded none. Engines compute float32; values
    from a rollout file are rounded to float32. `weight_versions` are spans, int32 [spans, 3] of (version, start, end);
    None if they are not known.

    `expert_routes[t, i]` are the experts that token t of prompt and response visited in the i-th of the layers that
    have experts, int16 [tokens, layers with experts, K]; None if the engine recorded none. The last response token may
    be missing, because an engine need not compute it.

    `teacher_prompt_ids` and `teacher_response_ids` are set where the teacher reads other ids than the student, because
    it has another tokenizer or another prompt. `teacher_index[t]` is then the index of the teacher's response token
    whose state is the target of response token t, or -1 for no target. A `teacher_index` of None means that the
    response tokens of both models are the same.

    Raises:
        ValueError: a field of `TOKEN_FIELDS` is no sequence of such numbers, or an id is beyond int32.

    >>> Rollout(prompt_ids=[5, 9], response_ids=[7, 1], finish_reason="stop").length
    4
    """

    prompt_ids: np.ndarray
    response_ids: np.ndarray
    response_mask: np.ndarray | None = None
    prompt: str | None = None
    response: str | None = None
    data_source: str | None = None
    answer: str | None = None
    finish_reason: str | None = None
    teacher_prompt_ids: np.ndarray | None = None
    teacher_response_ids: np.ndarray | None = None
    teacher_index: np.ndarray | None = None
    logprobs: np.ndarray | None = None
    weight_versions: np.ndarray | None = None
    expert_routes: np.ndarray | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        for name, dtype in TOKEN_FIELDS.items():
            values = getattr(self, name)
            if values is not None:
                object.__setattr__(self, name, _frozen(values, dtype, name))
        if self.weight_versions is not None:
            spans = np.ascontiguousarray(self.weight_versions, np.int32).view()
            spans.flags.writeable = False
            object.__setattr__(self, "weight_versions", spans)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Rollout):
            return NotImplemented
        return all(_equal(getattr(self, f.name), getattr(other, f.name)) for f in fields(self) if f.compare)

    @property
    def length(self) -> int:
        """Tokens of prompt and response together."""
        return len(self.prompt_ids) + len(self.response_ids)

    @property
    def ids(self) -> np.ndarray:
        """int32 [length]: prompt and response as one sequence, a copy."""
        return np.concatenate([self.prompt_ids, self.response_ids])

    @property
    def mask(self) -> np.ndarray:
        """bool [response length]: which response tokens may be supervised."""
        return np.ones(len(self.response_ids), np.bool_) if self.response_mask is None else self.response_mask

    def as_read_by_teacher(self) -> Rollout:
        """Returns the sequence that the teacher reads, as a rollout of prompt ids and response ids only."""
        prompt = self.prompt_ids if self.teacher_prompt_ids is None else self.teacher_prompt_ids
        return Rollout(prompt, self.response_ids if self.teacher_response_ids is None else self.teacher_response_ids)


def _frozen(values: np.ndarray | Sequence[float], dtype: type[np.generic], name: str) -> np.ndarray:
    """Returns `values` as a read-only, contiguous array [tokens]; a view if they are such an array of this dtype."""
    given = np.asarray(values)
    kinds = "biuf" if dtype is np.float32 else "biu"
    if given.ndim != 1 or (given.dtype.kind not in kinds and given.size):
        raise ValueError(f"{name}={str(values)[:60]}; expected a sequence of {np.dtype(dtype)} numbers, one per token")
    if given.dtype != dtype and dtype is np.int32 and given.size:
        low, high = int(given.min()), int(given.max())
        if not -(2**31) <= low <= high < 2**31:
            raise ValueError(f"{name} holds {low if low < -(2**31) else high}; expected ids that fit int32")
    array = np.ascontiguousarray(given, dtype).view()
    array.flags.writeable = False
    return array


def _equal(one: object, other: object) -> bool:
    if isinstance(one, np.ndarray) and isinstance(other, np.ndarray):
        return np.array_equal(one, other)
    return one is other or (not isinstance(one, np.ndarray) and not isinstance(other, np.ndarray) and one == other)


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
        return sum(values.nbytes for values in tensors)
