"""Which weights sampled which tokens of a response: spans, int32 [spans, 3] of (version, start, end).

The version is the number of optimizer steps behind the weights. The tokens of a span are those from `start` on and
below `end`. The spans of a response follow each other without a gap, and no later one is of earlier weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

_NAMES = ("version", "start", "end")


def span(version: int, tokens: int) -> np.ndarray:
    """The spans of a response of which all tokens come from the same weights."""
    return np.array([[version, 0, tokens]], np.int32)


def joined(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """The spans of a response that goes on: those of its beginning, and those of its end alone."""
    return np.concatenate([first, second + np.array([0, first[-1, 2], first[-1, 2]], np.int32)])


def token_versions(spans: np.ndarray) -> np.ndarray:
    """int32 [tokens]: the version of every token."""
    return np.repeat(spans[:, 0], spans[:, 2] - spans[:, 1])


def problem(spans: np.ndarray, tokens: int) -> str | None:
    """What is wrong with the spans of a response of so many tokens, as "found; expected ..."; None: nothing."""
    if spans.ndim != 2 or spans.shape[1] != len(_NAMES) or (spans < 0).any():
        return "no spans of (version, start, end) from 0 on; expected such"
    versions, starts, ends = spans.T.tolist()
    if [0, *ends] != [*starts, tokens] or any(start >= end for start, end in zip(starts, ends, strict=True) if tokens):
        return f"the tokens {list(zip(starts, ends, strict=True))} of {tokens}; expected each once and in order"
    if versions != sorted(versions):
        return f"the versions {versions} one after another; expected none that is older than the one before it"
    return None


def as_json(spans: np.ndarray) -> dict[str, Any]:
    """The fields of a JSON file of rollouts: `weight_versions`, and `weight_version` if there is only one version."""
    rows = spans.tolist()
    named: dict[str, Any] = {"weight_versions": [dict(zip(_NAMES, row, strict=True)) for row in rows]}
    return named if len(rows) != 1 else {"weight_version": rows[0][0], **named}


def from_json(given: Any) -> np.ndarray | None:
    """The spans of a field `weight_versions`; None if `given` is no such list."""
    rows: Sequence[Any] = given if isinstance(given, list) else [None]
    for row in rows:
        if not isinstance(row, dict) or {*row} != {*_NAMES}:
            return None
        if any(type(value) is not int or not 0 <= value < 2**31 for value in row.values()):
            return None
    return np.array([[row[name] for name in _NAMES] for row in rows], np.int32).reshape(-1, len(_NAMES))
