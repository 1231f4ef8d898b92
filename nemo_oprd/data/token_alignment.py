"""Aligns two tokenizations of one response: finds each student token's teacher token, and the equal parts of texts.

The student's response is converted to text, byte for byte, and tokenized again with the teacher's tokenizer; the
teacher reads it after the prompt in the teacher's chat template. Token ends are byte offsets in that text. The partner
of a student token is the last teacher token that ends at or before the end of the student token, so that the teacher
has read no text that the student has not read. `align_batch` masks student tokens without a partner, and computes the
coverage (the share of tokens that remain).

The response never passes through the template: a template may drop or move the reasoning of earlier turns, which is
right for history but wrong for the response. A template that rewrites plain text is rejected, because a teacher trained
with such a template has never seen text in the form in which the student writes it.

    student  the   cat         ends 3 7        teacher  t  he ca t      ends 1 3 6 7     (with a space before ca)
    teacher_index               1 3
"""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import numpy as np

from nemo_oprd.data.conversation import Tool
from nemo_oprd.data.token_bytes import ByteTable, byte_table, check_ids
from nemo_oprd.data.tokenizer import Messages, Tokenizer, fingerprint, teacher_eos_id, teacher_prompts

# Equal parts of two byte strings: for text that a tokenizer changes (composed accents, merged spaces).
#
# The search follows runs of equal bytes to their end; after a difference, it resumes at the nearest place where both
# strings agree again. The cost is linear for equal texts, plus a bounded search per difference. The result is not a
# shortest edit script: equal parts that the search misses are omitted, and the caller masks them.


# Normal forms that tokenizers apply: Qwen composes accents (NFC), sentencepiece also folds compatibility characters.
FORMS: tuple[Literal["NFC", "NFKC"], ...] = ("NFC", "NFKC")
# Attempts after a difference: (how many bytes must agree again, how far away they may begin). Nearby, few bytes are
# enough; further away, few bytes may agree by chance. The last two are for text in which every word differs and for a
# missing page.
ANCHORS = ((6, 24), (8, 256), (4, 32), (16, 4096))


def equal_spans(text: bytes, other: bytes) -> np.ndarray:
    """Returns int64 [m, 3]: runs (i, j, n), text[i : i + n] == other[j : j + n], ascending, of whole UTF-8 characters.

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
    """Maps byte offsets in the other string to the text: int64 [n]; -1 for 0 and outside the equal runs.

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
    """Returns int64 [length + 1]: the number of bytes of the text before each offset that are in no run of `spans`."""
    outside = np.ones(length, dtype=np.int64)
    for i, _, n in spans.tolist():
        outside[i : i + n] = 0
    return np.concatenate(([0], np.cumsum(outside)))


def _normalised_spans(text: bytes, other: bytes) -> np.ndarray | None:
    """Returns the equal runs, compared letter by letter, if `other` is a normal form of the text; otherwise None."""
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
    """Splits the text before every character that is not a combining mark."""
    starts = [at for at, character in enumerate(text) if not unicodedata.combining(character)]
    edges = [0, *(at for at in starts if at), len(text)]
    return [text[a:b] for a, b in pairwise(edges)]


def _common_prefix(a: bytes, b: bytes, i: int, j: int) -> int:
    """Counts the bytes that agree from a[i] and b[j] on, in pieces of growing size: runs may be short or very long."""
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
    """Returns the fewest bytes to skip in `a` from i and in `b` from j until both agree again; None if not found."""
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
    """Removes incomplete characters at the edges of a run: part of an accented letter's bytes is not that letter."""

    def inside(offset: int) -> bool:
        return any(k + offset < len(s) and s[k + offset] & 0xC0 == 0x80 for s, k in ((a, i), (b, j)))

    start = 0
    while start < n and inside(start):
        start += 1
    while n > start and inside(n):
        n -= 1
    return i + start, j + start, n - start


# Without `exact` nearly every token has a partner. Coverage below one half means that the two texts differ.
MIN_COVERAGE = 0.5
_REPLACEMENT = np.frombuffer("\ufffd".encode(), np.uint8)


@dataclass(frozen=True)
class Alignment:
    """One response of n student tokens as the teacher reads it.

    Attributes:
        teacher_prompt_ids: int32, the prompt in the teacher's chat template.
        teacher_response_ids: int32, the response in the teacher's tokens, with an end of sequence if the student stops.
        teacher_index: int64 [n], the partner of each student token in `teacher_response_ids`; -1 where masked.
        mask: bool [n], the student's mask, set to false where a token has no partner.
        num_supervised: number of student tokens with mask 1 before alignment.
        changed_bytes: number of bytes that change when the text is encoded and decoded with the teacher's tokenizer;
            the tokens that contain them are masked.
    """

    teacher_prompt_ids: np.ndarray
    teacher_response_ids: np.ndarray
    teacher_index: np.ndarray
    mask: np.ndarray
    num_supervised: int
    changed_bytes: int = 0

    @property
    def coverage(self) -> float:
        """Returns the share of the student's mask-1 tokens that have a partner; 1 if there are none."""
        return float(self.mask.sum()) / self.num_supervised if self.num_supervised else 1.0


@dataclass(frozen=True)
class Coverage:
    """Counts of the aligned tokens of a batch.

    `tokens` counts the tokens with mask 1, `aligned` those that have a partner; `lowest` is the lowest coverage of one
    response; `changed` counts the responses whose text is changed by encoding and decoding, `changed_bytes` the bytes.
    """

    responses: int
    tokens: int
    aligned: int
    lowest: float
    changed: int
    changed_bytes: int

    @property
    def share(self) -> float:
        """Returns the aligned share of all mask-1 tokens of the batch; 1 if there are none."""
        return self.aligned / self.tokens if self.tokens else 1.0

    def __str__(self) -> str:
        lost = f"; {self.changed} responses with {self.changed_bytes} bytes that do not survive decode-encode"
        return (
            f"alignment coverage {self.share:.4f} ({self.aligned} of {self.tokens} tokens of {self.responses} "
            f"responses, lowest {self.lowest:.4f}){lost if self.changed else ''}"
        )


@dataclass(frozen=True)
class _Response:
    """A student response as text.

    `text` is valid UTF-8; `ends` int64 [n] are byte offsets, never decreasing: a special token repeats the one before
    it; `usable` bool [n] marks the tokens that have text, all of it valid UTF-8 in the original; `stops` says whether
    the last token ends the sequence.
    """

    text: bytes
    ends: np.ndarray
    usable: np.ndarray
    stops: bool
    invalid_bytes: int


def align_batch(
    student: Tokenizer,
    teacher: Tokenizer,
    messages: Sequence[Messages],
    student_ids: Sequence[Sequence[int] | np.ndarray],
    *,
    tools: Sequence[Sequence[Tool]] | None = None,
    masks: Sequence[Sequence[int] | np.ndarray | None] | None = None,
    exact: bool = False,
    min_coverage: float = MIN_COVERAGE,
) -> list[Alignment]:
    """Aligns B responses; returns one alignment for each.

    Where the vocabularies are equal, the teacher gets the student's ids unchanged and the alignment is the identity.
    Otherwise these tokens are masked: special tokens inside a response, which have no text; tokens whose bytes are not
    valid UTF-8 (the teacher reads U+FFFD there); tokens whose text the teacher's tokenizer changes or cannot encode.

    Args:
        messages: [B] conversations, for the teacher's chat template.
        tools: [B] tools of each conversation; None: no conversation has any.
        student_ids: [B] sampled response ids, including the end-of-sequence id where the response stopped.
        masks: [B] lists of 0 or 1 for each response token; None stands for all 1.
        exact: keep only pairs of tokens that end on the same byte.
        min_coverage: the minimum share of the batch's mask-1 tokens that must have a partner.

    Raises:
        ValueError: lengths differ, an id is not in the student's vocabulary, a tokenizer has no byte offsets, the
            teacher's template changes text, or the coverage is below `min_coverage`.
    """
    masks = [None] * len(student_ids) if masks is None else masks
    if not len(messages) == len(student_ids) == len(masks):
        raise ValueError(
            f"{len(messages)} conversations, {len(student_ids)} responses and {len(masks)} masks to align, expected "
            "one of each per response; repeat a prompt's conversation for each of its responses"
        )
    checked = [_mask(mask, len(ids), at) for at, (mask, ids) in enumerate(zip(masks, student_ids, strict=True))]
    eos_id = teacher_eos_id(teacher)
    prompts = teacher_prompts(teacher, messages, tools)
    if fingerprint(student) == fingerprint(teacher):
        return [
            Alignment(_ids(prompt), _ids(ids), np.where(mask, np.arange(len(ids)), -1), mask, int(mask.sum()))
            for prompt, ids, mask in zip(prompts, student_ids, checked, strict=True)
        ]

    table = byte_table(teacher)
    responses = [_to_text(student, ids) for ids in student_ids]
    encoded = teacher.encode_plain([response.text.decode() for response in responses])
    alignments = []
    for prompt, response, ids, mask in zip(prompts, responses, encoded, checked, strict=True):
        index, changed = _partners(response, table, ids, exact)
        if response.stops:
            ids = [*ids, eos_id]
            index[-1] = len(ids) - 1
        index[~mask] = -1
        alignments.append(Alignment(_ids(prompt), _ids(ids), index, index >= 0, int(mask.sum()), changed))
    check_coverage(coverage_of(alignments), min_coverage, exact=exact)
    return alignments


def coverage_of(alignments: Sequence[Alignment]) -> Coverage:
    """Returns the batch's coverage, weighted by token counts, and the lowest coverage of a response."""
    return Coverage(
        responses=len(alignments),
        tokens=sum(alignment.num_supervised for alignment in alignments),
        aligned=sum(int(alignment.mask.sum()) for alignment in alignments),
        lowest=min((alignment.coverage for alignment in alignments), default=1.0),
        changed=sum(alignment.changed_bytes > 0 for alignment in alignments),
        changed_bytes=sum(alignment.changed_bytes for alignment in alignments),
    )


def check_coverage(coverage: Coverage, minimum: float, *, exact: bool) -> None:
    """Raises ValueError if the batch's coverage is below `minimum`."""
    if coverage.share >= minimum:
        return
    fix = "align without `exact`, or lower the minimum" if exact else "check that these are the student's ids"
    raise ValueError(
        f"{coverage}: expected at least {minimum}; {fix}, or choose a teacher whose tokenizer covers this text"
    )


def _ids(ids: Sequence[int] | np.ndarray) -> np.ndarray:
    return np.asarray(ids, dtype=np.int32)


def _mask(mask: Sequence[int] | np.ndarray | None, length: int, at: int) -> np.ndarray:
    """Returns the mask as bool [n]; `at` is the response's number, for the error message."""
    if mask is None:
        return np.ones(length, dtype=bool)
    if len(mask) != length:
        raise ValueError(
            f"response {at}: the mask has {len(mask)} entries, expected one for each of the {length} tokens; omit the "
            "mask, or write one entry per token"
        )
    return np.asarray(mask, dtype=bool)


def _to_text(student: Tokenizer, ids: Sequence[int] | np.ndarray) -> _Response:
    """Returns the response's text and the ends of its tokens in it; each invalid byte becomes one U+FFFD."""
    table, array = byte_table(student), check_ids(student, ids)
    raw = table.join(array.tolist())
    prefix = table.prefix(raw)
    ends = np.maximum(np.cumsum(table.lengths[array]) - prefix, 0)
    text, invalid = _valid_utf8(raw[prefix:])
    before = np.searchsorted(invalid, ends)  # invalid bytes before each end
    usable = table.is_text[array] & (np.diff(before, prepend=0) == 0)
    stops = bool(len(ids)) and int(ids[-1]) in student.eos_ids
    return _Response(text, ends + before * (len(_REPLACEMENT) - 1), usable, stops, len(invalid))


def _valid_utf8(raw: bytes) -> tuple[bytes, np.ndarray]:
    """Returns (text with U+FFFD for each byte that is not part of a character; the offsets of those bytes in `raw`)."""
    try:
        raw.decode()
    except UnicodeDecodeError:
        pass
    else:
        return raw, np.empty(0, dtype=np.int64)
    # Each invalid byte becomes a lone surrogate, ED A0..BF xx: valid text never has one, and it is as long as U+FFFD.
    text = np.frombuffer(raw.decode(errors="surrogateescape").encode(errors="surrogatepass"), np.uint8).copy()
    at = np.flatnonzero((text[:-1] == 0xED) & (text[1:] >= 0xA0))
    text[at[:, None] + np.arange(len(_REPLACEMENT))] = _REPLACEMENT
    return text.tobytes(), at - np.arange(len(at)) * (len(_REPLACEMENT) - 1)


def _partners(response: _Response, table: ByteTable, teacher_ids: list[int], exact: bool) -> tuple[np.ndarray, int]:
    """Returns (int64 [n] partners among the teacher's text tokens, -1: none; number of bytes that encoding changes)."""
    raw = table.join(teacher_ids)
    # Sentencepiece models put a space before a text (some only if it does not begin with one); that space is not part
    # of the response.
    lead = int(raw[:1] == b" " and (response.text[:1] != b" " or raw[1:] == response.text))
    spans = equal_spans(response.text, raw[lead:]) + np.array([0, lead, 0])
    lengths = table.lengths[np.asarray(teacher_ids, dtype=np.int64)]
    ends = map_ends(spans, np.cumsum(lengths))
    # Tokens without bytes (unknown) stand for text of unknown length, so the byte at which they end is not known.
    partners = np.flatnonzero((ends > 0) & (lengths > 0))
    if not len(partners):
        partners, ends = np.array([-1]), np.array([0])
    at = np.searchsorted(ends[partners], response.ends, side="right") - 1
    index = np.where(at >= 0, partners[at], -1)
    outside = bytes_outside(spans, len(response.text))
    changed = np.diff(outside[response.ends], prepend=0) > 0
    aligned = response.usable & (index >= 0) & ~changed
    if exact:
        aligned &= ends[index] == response.ends
    return np.where(aligned, index, -1), int(outside[-1]) + response.invalid_bytes
