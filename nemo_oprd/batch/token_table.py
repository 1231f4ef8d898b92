"""The supervised tokens of a batch and their weights: masks -> one flat table of rows.

A row is one supervised token of the global batch. Every rank builds the same table from the same rollouts, so the
counts that normalise the loss are global by construction, and no rank computes a mean of means.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import NamedTuple

import numpy as np

from nemo_oprd.batch.types import Rollout


@dataclass(frozen=True)
class TokenTable:
    """N supervised rows, ordered by response, then by position."""

    response: np.ndarray  # int64 [N], index of the row's response in the step's rollouts
    position: np.ndarray  # int64 [N], position in prompt + response at which the student's hidden state is taken
    teacher_position: np.ndarray  # int64 [N], the same in the sequence that the teacher reads
    token: np.ndarray  # int64 [N], the response token that the row belongs to
    from_start: np.ndarray  # int64 [N], 0-based number of that token among the response's tokens that can be supervised
    from_end: np.ndarray  # int64 [N], the same number counted from the end
    weight: np.ndarray  # float64 [N], sums to 1 over the batch unless teachers have weights
    num_responses: int  # number of responses that have rows
    searched: np.ndarray | None = None  # bool [N], rows in which top sets are searched for metrics; None: all

    def __len__(self) -> int:
        return len(self.response)

    def rows_of(self, responses: Sequence[int] | np.ndarray) -> np.ndarray:
        """Returns the indices of the rows of some responses, ascending; a response's rows stand next to each other."""
        chosen = np.unique(np.asarray(responses, dtype=np.int64))
        first, end = (np.searchsorted(self.response, chosen, side=side) for side in ("left", "right"))
        counts = end - first
        return np.repeat(first - (np.cumsum(counts) - counts), counts) + np.arange(counts.sum())

    def for_responses(self, responses: Sequence[int] | np.ndarray) -> TokenTable:
        """Returns the rows of some responses, with the weights that they have in the whole batch."""
        return self._taken(self.rows_of(responses))

    def scale_responses(self, factors: Sequence[float]) -> TokenTable:
        """Returns the same rows, whose weights are multiplied by the factor of their response."""
        return self.scaled(np.asarray(factors, dtype=np.float64)[self.response])

    def scaled(self, factor: np.ndarray) -> TokenTable:
        """Returns the same rows with their weights multiplied by `factor` [N]."""
        return replace(self, weight=self.weight * factor)

    def as_read_by_teacher(self) -> TokenTable:
        """Returns the same rows, with their positions in the teacher's sequences."""
        return replace(self, position=self.teacher_position)

    def draw(self, count: int, key: tuple[int, ...]) -> TokenTable:
        """Draws at most `count` rows, without replacement and with equal weights. Equal keys give equal rows."""
        return self.select(self._drawn(count, key))

    def search_in(self, count: int, key: tuple[int, ...]) -> TokenTable:
        """Returns the same rows, with top sets searched in at most `count` random ones. Equal keys give equal rows."""
        searched = np.zeros(len(self), dtype=bool)
        searched[self._drawn(count, key)] = True
        return replace(self, searched=searched)

    def _drawn(self, count: int, key: tuple[int, ...]) -> np.ndarray:
        return np.sort(np.random.default_rng(key).choice(len(self), min(count, len(self)), replace=False))

    def select(self, chosen: np.ndarray) -> TokenTable:
        """Returns some of the rows, by their ascending indices, with equal weights."""
        return replace(self._taken(chosen), weight=np.full(len(chosen), 1.0 / len(chosen)))

    def _taken(self, chosen: np.ndarray) -> TokenTable:
        names = [f.name for f in fields(self) if f.name not in ("num_responses", "searched")]
        arrays = {name: getattr(self, name)[chosen] for name in names}
        distinct = int(np.count_nonzero(np.diff(arrays["response"], prepend=-1)))  # responses ascend
        searched = None if self.searched is None else self.searched[chosen]
        return TokenTable(**arrays, num_responses=distinct, searched=searched)

    def tokens(self, rollouts: list[Rollout]) -> np.ndarray:
        """Returns the ids of the response tokens that the rows belong to, int64 [N]."""
        return self._of_tokens([rollout.response_ids for rollout in rollouts], np.int64)

    def engine_logprobs(self, rollouts: list[Rollout]) -> np.ndarray:
        """Returns the recorded log-probability of each row's token, float32 [N]; NaN for a rollout without any."""
        return self._of_tokens([rollout.logprobs for rollout in rollouts], np.float32)

    def _of_tokens(self, values: Sequence[np.ndarray | None], dtype: type[np.generic]) -> np.ndarray:
        """Returns the rows' entries [N] of `values`, an array [response tokens] per rollout; NaN if it has none."""
        found = np.empty(len(self), dtype)
        starts = np.flatnonzero(np.diff(self.response, prepend=-1))
        for start, end in itertools.pairwise([*starts.tolist(), len(self)]):
            given = values[self.response[start]]
            found[start:end] = np.nan if given is None else given[self.token[start:end]]
        return found

    def needed_tokens(self, num_responses: int) -> list[int]:
        """Returns, for each response of the batch, the number of tokens of prompt + response that its rows depend on.

        0 for a response without rows. Tokens after the last row are not needed, because attention is causal.
        """
        needed = np.zeros(num_responses, dtype=np.int64)
        first = np.flatnonzero(np.diff(self.response, prepend=-1))
        if len(first):
            needed[self.response[first]] = np.maximum.reduceat(self.position, first) + 1
        return needed.tolist()


def teacher_positions(rollout: Rollout, shift: int) -> np.ndarray:
    """Returns each response token's position, int64 [tokens], of its state in the teacher's sequence; -1: no state.

    With `shift` 1 this is the state one token earlier; for the first response token, that of the prompt's last token.
    """
    prompt = rollout.prompt_ids if rollout.teacher_prompt_ids is None else rollout.teacher_prompt_ids
    if rollout.teacher_index is None:
        return len(prompt) - shift + np.arange(len(rollout.response_ids))
    index = rollout.teacher_index.astype(np.int64)
    at = np.where(index >= 0, len(prompt) + index, -1)
    return np.concatenate([[len(prompt) - 1], at[:-1]]) if shift and len(at) else at


class _Supervised(NamedTuple):
    """The rows of one response; int64 arrays [rows] as in `TokenTable`, where `number` is called `from_start`."""

    token: np.ndarray
    number: np.ndarray
    teacher_position: np.ndarray
    total: int  # tokens that can be supervised


def _supervised(rollout: Rollout, positions: str, k: int, shift: int) -> _Supervised:
    """Returns the rows of a response for `positions` and `k` of `make_rows`.

    The cost grows with the number of rows only, unless the rollout has a mask or a `teacher_index`.
    """
    prompt = rollout.prompt_ids if rollout.teacher_prompt_ids is None else rollout.teacher_prompt_ids
    if rollout.response_mask is None and rollout.teacher_index is None and len(prompt) >= shift:
        number = _numbers(len(rollout.response_ids), positions, k)
        return _Supervised(number, number, len(prompt) - shift + number, len(rollout.response_ids))
    at = teacher_positions(rollout, shift)
    masked_in = np.flatnonzero(rollout.mask & (at >= 0))
    number = _numbers(len(masked_in), positions, k)
    token = masked_in[number]
    return _Supervised(token, number, at[token], len(masked_in))


def _numbers(total: int, positions: str, k: int) -> np.ndarray:
    """Returns all numbers below `total`, or the last or first k of them, int64."""
    first = max(0, total - k) if positions == "last_k" else 0
    return np.arange(first, min(k, total) if positions == "first_k" else total)


def make_rows(
    rollouts: list[Rollout],
    *,
    positions: str,
    k: int,
    position: str,
    aggregation: str,
    requested_by: str = "loss.representation.position=predicting",
) -> TokenTable:
    """Returns the supervised rows of a batch: response tokens with mask 1 for which the teacher has a hidden state.

    Args:
        positions: which of these tokens: "all", "last_k" or "first_k".
        position: "token" takes the state where token t is the input, "predicting" the state one token earlier.
        aggregation: the weight of a row: 1 / (responses * rows of the response) for "sequence_mean" (the paper's
            equation), 1 / rows for "token_mean". Responses without rows are not counted.
        requested_by: the setting that needs the state before a token, for the error message.

    Raises:
        ValueError: no response has a supervised token, or "predicting" meets an empty prompt.
    """
    shift = 1 if position == "predicting" else 0
    for i, rollout in enumerate(rollouts):
        if shift and not len(rollout.prompt_ids) and rollout.mask.any():
            raise ValueError(
                f"response {i} has an empty prompt: {requested_by} needs a token before the response; expected "
                "at least one prompt token: add one, such as the tokenizer's beginning-of-sequence token"
            )
    chosen = [_supervised(rollout, positions, k, shift) for rollout in rollouts]
    counts = np.array([len(one.token) for one in chosen], dtype=np.int64)
    if counts.sum() == 0:
        raise ValueError(
            f"none of the {len(rollouts)} responses has a supervised token (mask 1); "
            "expected at least one: check response_mask and that responses are not empty"
        )
    active = int((counts > 0).sum())
    response = np.repeat(np.arange(len(rollouts)), counts)
    token = np.concatenate([one.token for one in chosen])
    starts = np.array([len(rollout.prompt_ids) for rollout in rollouts], dtype=np.int64)
    if aggregation == "sequence_mean":
        weight = 1.0 / (active * counts[response].astype(np.float64))
    else:
        weight = np.full(len(token), 1.0 / len(token))
    from_start = np.concatenate([one.number for one in chosen])
    from_end = np.array([one.total for one in chosen], dtype=np.int64)[response] - 1 - from_start
    teacher_position = np.concatenate([one.teacher_position for one in chosen])
    position_in_student = starts[response] + token - shift
    return TokenTable(
        response,
        position_in_student,
        teacher_position=teacher_position,
        token=token,
        from_start=from_start,
        from_end=from_end,
        weight=weight,
        num_responses=active,
    )


# Bins of token numbers, over which cosines are averaged by position in the response (the paper's position figure).
#
# Tokens are numbered from 1, from the start (or the end) of a response. Bin 0 holds token 1, and bin j > 0 holds the
# tokens with 2^(j-1) < number <= 2^j. Bins 0..j together hold the first (or last) 2^j tokens.


# bins 0..23 hold responses of up to 2^23 tokens
PROFILE_BINS = 24


def profile_bins(numbers: np.ndarray) -> np.ndarray:
    """Returns bins [N] of 0-based token numbers [N], which count from the start or from the end of a response."""
    return np.ceil(np.log2(numbers + 1)).astype(np.int64)


def sums_of_first(values: np.ndarray, numbers: np.ndarray) -> dict[int, float]:
    """Returns k = 1, 2, 4, ... -> sum of `values` [N] with 0-based numbers below k, up to a k that covers all."""
    sums = np.cumsum(np.bincount(profile_bins(numbers), values))
    return {1 << j: total for j, total in enumerate(sums.tolist())}


def row_bins(table: TokenTable, positions: str) -> np.ndarray:
    """Returns the rows' bins [N], counted from a response's end if `positions` is "last_k", else from its start."""
    return profile_bins(table.from_end if positions == "last_k" else table.from_start)
