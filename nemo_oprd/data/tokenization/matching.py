"""Finds the equal parts of two byte strings: for text that a tokenizer changes (composed accents, merged spaces).

Runs of equal bytes are followed to their end; after a difference, the search resumes at the nearest place where both
strings agree again. The cost is linear for equal texts, plus a bounded search per difference. The result is not a
shortest edit script: equal parts that the search misses are omitted, and the caller masks them.
"""

from __future__ import annotations

import unicodedata
from itertools import pairwise
from typing import Literal

import numpy as np

# Normal forms that tokenizers apply: Qwen composes accents (NFC), sentencepiece also folds compatibility characters.
FORMS: tuple[Literal["NFC", "NFKC"], ...] = ("NFC", "NFKC")
# Attempts after a difference: (how many bytes must agree again, how far away they may begin). Nearby, few bytes are
# enough; further away, few bytes may agree by chance. The last two are for text in which every word differs and for a
# missing page.
ANCHORS = ((6, 24), (8, 256), (4, 32), (16, 4096))


def equal_spans(text: bytes, other: bytes) -> np.ndarray:
    """int64 [m, 3]: runs (i, j, n) with text[i : i + n] == other[j : j + n], ascending, of whole UTF-8 characters.

    Example: b"abcdefgh-x" and b"abcdefgh_x" -> [[0, 0, 8], [9, 9, 1]].
    """
    if text == other:
        return np.array([[0, 0, len(text)]], dtype=np.int64)
    normalised = _normalised_spans(text, other)
    if normalised is not None:
        return normalised
    spans, i, j = [], 0, 0
    while i < len(text) and j < len(other):
        n = _common_prefix(text, other, i, j)
        spans.append((i, j, n))
        i, j = i + n, j + n
        skip = _resume(text, other, i, j)
        if skip is None:
            n = _common_prefix(text[i:][::-1], other[j:][::-1], 0, 0)  # the common suffix
            spans.append((len(text) - n, len(other) - n, n))
            break
        i, j = i + skip[0], j + skip[1]
    whole = [_whole_characters(text, other, *span) for span in spans]
    return np.array([span for span in whole if span[2] > 0], dtype=np.int64).reshape(-1, 3)


def map_ends(spans: np.ndarray, ends_other: np.ndarray) -> np.ndarray:
    """int64 [n]: byte offsets in the other string -> offsets in the text; -1 for 0 and outside the equal runs.

    Args:
        spans: [m, 3] from `equal_spans`.
        ends_other: int64 [n], ascending offsets in the other string.
    """
    if not len(spans):
        return np.full(len(ends_other), -1, dtype=np.int64)
    i, j, n = spans.T
    at = np.minimum(np.searchsorted(j + n, ends_other, side="left"), len(spans) - 1)
    inside = (ends_other > j[at]) & (ends_other <= j[at] + n[at])
    return np.where(inside, ends_other - j[at] + i[at], -1)


def bytes_outside(spans: np.ndarray, length: int) -> np.ndarray:
    """int64 [length + 1]: how many bytes of the text before each offset belong to no run of `spans`."""
    outside = np.ones(length, dtype=np.int64)
    for i, _, n in spans.tolist():
        outside[i : i + n] = 0
    return np.concatenate(([0], np.cumsum(outside)))


def _normalised_spans(text: bytes, other: bytes) -> np.ndarray | None:
    """The equal runs, compared letter by letter, if `other` is a normal form of the text; otherwise None."""
    letters = text.decode()
    for form in FORMS:
        if unicodedata.normalize(form, letters).encode() != other:
            continue
        spans, i, j, run = [], 0, 0, 0
        for unit in _with_marks(letters):
            before, after = unit.encode(), unicodedata.normalize(form, unit).encode()
            if before == after:
                run += len(before)
            else:
                spans.append((i, j, run))
                i, j, run = i + run + len(before), j + run + len(after), 0
        if j + run == len(other):  # otherwise letters were composed across units (Korean jamo)
            return np.array([span for span in [*spans, (i, j, run)] if span[2]], dtype=np.int64).reshape(-1, 3)
    return None


def _with_marks(text: str) -> list[str]:
    """The text cut before every character that is not a combining mark."""
    starts = [at for at, character in enumerate(text) if not unicodedata.combining(character)]
    edges = [0, *(at for at in starts if at), len(text)]
    return [text[a:b] for a, b in pairwise(edges)]


def _common_prefix(a: bytes, b: bytes, i: int, j: int) -> int:
    """How many bytes agree from a[i] and b[j] on. Compares pieces of growing size: runs may be short or very long."""
    n, piece = 0, 32
    while True:
        x, y = a[i + n : i + n + piece], b[j + n : j + n + piece]
        if x != y or not x:
            same = min(len(x), len(y))
            differ = np.frombuffer(x[:same], np.uint8) != np.frombuffer(y[:same], np.uint8)
            return n + (int(differ.argmax()) if differ.any() else same)
        n += len(x)
        piece *= 4


def _resume(a: bytes, b: bytes, i: int, j: int) -> tuple[int, int] | None:
    """The fewest bytes to skip in `a` from i and in `b` from j until both agree again; None if none is found."""
    for length, reach in ANCHORS:
        best: tuple[int, int] | None = None
        for skip_a in range(min(reach, len(a) - i - length) + 1):
            if best is not None and skip_a >= sum(best):
                break
            at = b.find(a[i + skip_a : i + skip_a + length], j, j + reach + length)
            if at >= 0 and (best is None or skip_a + at - j < sum(best)):
                best = (skip_a, at - j)
        if best is not None:
            return best
    return None


def _whole_characters(a: bytes, b: bytes, i: int, j: int, n: int) -> tuple[int, int, int]:
    """The run without incomplete characters at its edges: part of an accented letter's bytes is not that letter."""

    def inside(offset: int) -> bool:
        return any(k + offset < len(s) and s[k + offset] & 0xC0 == 0x80 for s, k in ((a, i), (b, j)))

    start = 0
    while start < n and inside(start):
        start += 1
    while n > start and inside(n):
        n -= 1
    return i + start, j + start, n - start
