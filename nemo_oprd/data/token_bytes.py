"""Derives the bytes of each token of a vocabulary, from which the ends of a response's tokens in its text follow.

The table holds bytes because decoding prefixes of a response fails: a prefix may end inside a character, and decoding
all prefixes takes quadratic time. A token's bytes follow from the tokenizer's decoder, so the table is derived from the
decoder once per vocabulary, and compared with `decode` on a probe text. Decoders that do not simply join the texts of
their tokens (WordPiece, CTC) have no such table and are rejected. Special tokens have no bytes in the table. The
tokenizers library gives offsets only for a text that it encodes itself, and not for ids that a model sampled.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from nemo_oprd.data.tokenizer import Tokenizer

SPACE_MARK = "\u2581"  # how sentencepiece writes a space
BYTE_PIECES = {f"<0x{value:02X}>": bytes([value]) for value in range(256)}
# Letters, an accent, CJK, a four-byte emoji, LaTeX, digits, single and double spaces, a line break.
PROBE = "Let a  na\u00efve\n\u5b57 \U0001f600 be \\frac{12}{3}, <x>."


@dataclass(frozen=True)
class ByteTable:
    """The bytes of every token of one vocabulary of V ids.

    Attributes:
        pieces: [V] bytes of each token; empty for special tokens and for ids without a token.
        lengths: [V] int64, number of bytes of each token; -1 for ids without a token.
        is_text: [V] bool, false for special tokens (end of sequence, padding, unknown), which have no text.
        strips_prefix: whether decoding removes the space that encoding puts before a text.
    """

    pieces: list[bytes]
    lengths: np.ndarray
    is_text: np.ndarray
    strips_prefix: bool

    def join(self, ids: Sequence[int]) -> bytes:
        """Returns the concatenated bytes of the tokens, including a prefix space."""
        return b"".join(map(self.pieces.__getitem__, ids))

    def prefix(self, raw: bytes) -> int:
        """Returns how many bytes decoding removes from the start of `raw`, the result of `join`: 0 or 1."""
        return int(self.strips_prefix and raw[:1] == b" ")


_TABLES: WeakKeyDictionary[Tokenizer, ByteTable] = WeakKeyDictionary()


def byte_table(tokenizer: Tokenizer) -> ByteTable:
    """Returns the byte table of a tokenizer, built at the first call and cached for the lifetime of the tokenizer.

    Raises:
        ValueError: the bytes of the tokens can't be derived from the tokenizer's decoder.
    """
    if tokenizer not in _TABLES:
        _TABLES[tokenizer] = _build(tokenizer)
    return _TABLES[tokenizer]


def check_ids(tokenizer: Tokenizer, ids: Sequence[int] | np.ndarray) -> np.ndarray:
    """Checks that every id has a token in the vocabulary; returns the ids as int64 [n].

    Raises:
        ValueError: an id has no token, for example because the ids come from another tokenizer.
    """
    table, array = byte_table(tokenizer), np.asarray(ids, dtype=np.int64)
    size = len(table.lengths)
    outside = (array < 0) | (array >= size)
    outside |= table.lengths[np.where(outside, 0, array)] < 0
    if outside.any():
        at = int(outside.argmax())
        raise ValueError(
            f"{tokenizer.path}: token id {int(array[at])} at position {at} of the response is not in this vocabulary, "
            f"expected ids below {size} that have a token; use the tokenizer of the model that sampled the response"
        )
    return array


def _build(tokenizer: Tokenizer) -> ByteTable:
    hf = tokenizer.hf
    backend = json.loads(hf.backend_tokenizer.to_str()) if hf.is_fast else None
    if backend is not None:
        to_bytes, strips = _fast_decoder(tokenizer, backend)
        added = {token["id"]: token for token in backend["added_tokens"]}
        special = {i for i, token in added.items() if token["special"]}
    else:
        to_bytes, strips = _sentencepiece_decoder(tokenizer)
        special = set()
    special |= {int(i) for i in hf.all_special_ids} | set(tokenizer.eos_ids)

    size = max(tokenizer.vocab_size, 1 + max(special, default=-1))
    pieces, lengths = [b""] * size, np.full(size, -1, dtype=np.int64)
    for token, i in hf.get_vocab().items():
        pieces[i] = b"" if i in special else to_bytes(token)
        lengths[i] = len(pieces[i])
    is_text = np.ones(size, dtype=bool)
    is_text[sorted(special)] = False
    lengths[sorted(special)] = 0
    table = ByteTable(pieces, lengths, is_text, strips)
    _compare_with_decode(tokenizer, table)
    return table


def _fast_decoder(tokenizer: Tokenizer, backend: dict[str, Any]) -> tuple[Callable[[str], bytes], bool]:
    """Returns (token -> bytes, whether decoding strips a prefix space) for a tokenizer.json that joins its tokens."""
    decoders = _flatten(backend["decoder"])
    kinds = [decoder["type"] for decoder in decoders]
    if not kinds or not set(kinds) <= {"ByteLevel", "Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"}:
        raise _no_offsets(tokenizer, f"its decoder is {'+'.join(kinds) or 'none, which joins tokens with spaces'}")
    if "ByteLevel" in kinds:
        verbatim = frozenset(token["content"] for token in backend["added_tokens"])
        return (lambda token: _byte_level(token, verbatim)), False

    marks, strips = [], False
    for decoder in decoders:
        if decoder["type"] == "Replace":
            if decoder["content"] != " " or "String" not in decoder["pattern"]:
                raise _no_offsets(tokenizer, f"its decoder replaces {decoder['pattern']} by {decoder['content']!r}")
            marks.append(decoder["pattern"]["String"])
        elif decoder["type"] == "Metaspace":
            marks.append(decoder["replacement"])
            strips |= decoder.get("prepend_scheme", "always") != "never"
        elif decoder["type"] == "Strip":
            if (decoder["content"], decoder["start"], decoder["stop"]) != (" ", 1, 0) or "Fuse" not in kinds:
                raise _no_offsets(tokenizer, f"its decoder strips {decoder}")
            strips = True
    byte_pieces = BYTE_PIECES if "ByteFallback" in kinds else {}
    return (lambda token: _piece(token, marks, byte_pieces)), strips


def _sentencepiece_decoder(tokenizer: Tokenizer) -> tuple[Callable[[str], bytes], bool]:
    """Returns the same as `_fast_decoder`, for a slow tokenizer that holds a sentencepiece model."""
    model = getattr(tokenizer.hf, "sp_model", None)
    if model is None:
        raise _no_offsets(tokenizer, f"{type(tokenizer.hf).__name__} has neither a tokenizer.json nor a sentencepiece")
    byte_pieces = {piece: value for piece, value in BYTE_PIECES.items() if model.is_byte(model.piece_to_id(piece))}
    return (lambda token: _piece(token, [SPACE_MARK], byte_pieces)), True


def _flatten(decoder: dict[str, Any] | None) -> list[dict[str, Any]]:
    if decoder is None:
        return []
    if decoder["type"] == "Sequence":
        return [part for inner in decoder["decoders"] for part in _flatten(inner)]
    return [decoder]


def _piece(token: str, marks: list[str], byte_pieces: dict[str, bytes]) -> bytes:
    if token in byte_pieces:
        return byte_pieces[token]
    for mark in marks:
        token = token.replace(mark, " ")
    return token.encode("utf-8")


def _byte_level(token: str, verbatim: frozenset[str]) -> bytes:
    """Decodes a token of GPT-2's alphabet, one byte per character; `verbatim` and all other tokens become UTF-8."""
    if token in verbatim:
        return token.encode("utf-8")
    alphabet = _byte_alphabet()
    try:
        return bytes([alphabet[character] for character in token])
    except KeyError:  # outside the alphabet: the library's decoder also takes such a token literally
        return token.encode("utf-8")


@lru_cache(maxsize=1)
def _byte_alphabet() -> dict[str, int]:
    """Returns character -> byte: printable Latin-1 characters are themselves, the 68 other bytes start at U+0100."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [value for value in range(256) if value not in printable]
    return {chr(value): value for value in printable} | {chr(0x100 + i): value for i, value in enumerate(others)}


def _compare_with_decode(tokenizer: Tokenizer, table: ByteTable) -> None:
    """Raises ValueError if the table, derived from the decoder's description, disagrees with what `decode` returns."""
    ids = [i for i in tokenizer.encode_plain([PROBE])[0] if table.is_text[i]]
    raw = table.join(ids)
    joined, decoded = raw[table.prefix(raw) :], tokenizer.decode(ids).encode("utf-8")
    if joined != decoded:
        raise _no_offsets(tokenizer, f"the bytes of its tokens join to {joined!r}, but decode returns {decoded!r}")


def _no_offsets(tokenizer: Tokenizer, reason: str) -> ValueError:
    return ValueError(
        f"{tokenizer.path}: the bytes of its tokens can't be derived, so there are no byte offsets ({reason}); "
        "expected byte-level or sentencepiece tokens, or characters, whose concatenated texts are the decoded text: "
        "save it as a fast tokenizer with such a decoder, or use a model with another tokenizer"
    )
