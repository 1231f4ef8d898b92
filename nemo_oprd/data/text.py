r"""Decides whether two prompts are the same problem, by a normal form of their text; adds a suffix once.

Prompt collections repeat each other with small differences: `$n$` or `n`, `\left(` or `(`, another number of spaces.
The normal form removes these and keeps what changes a problem: digits, operators, and the space between two words or
two numbers.
"""

from __future__ import annotations

import hashlib
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass, replace

from nemo_oprd.data.conversation import non_text_fields
from nemo_oprd.data.prompts import Prompt

# of LaTeX: marks of formulas, sizes of brackets, thin spaces
_TYPESETTING = re.compile(r"\$|\\(?:left|right)(?![a-zA-Z])|\\[,!;: ]|~")
_SPACE_BESIDE_A_MARK = re.compile(r" ?([^\w ]) ?")
# runs of letters and digits; a Chinese or Japanese character is a word
_WORD = re.compile(r"[\u3040-\u30ff\u3400-\u9fff]|[^\W_\u3040-\u30ff\u3400-\u9fff]+")
# a request for the answer in a box that is still empty
_EMPTY_BOX = re.compile(r"\\boxed\{\s*\}")
_SENTENCE_END = re.compile(r"""[.!?:]["')\]]*$""")
# A file's shared instruction has at least this many words, and at least this share of the prompts has it. Fewer words
# can be the beginning of the problems themselves ("What is ...").
INSTRUCTION_WORDS, INSTRUCTION_SHARE = 5, 0.5


def normalize(text: str) -> str:
    r"""Returns a text's normal form: Unicode's NFKC, no capitals, no typesetting, single spaces, none beside a mark.

    Example: `normalize("Find  $x + 1$ .") == "find x+1."`.
    """
    plain = _TYPESETTING.sub("", unicodedata.normalize("NFKC", text).casefold())
    return _SPACE_BESIDE_A_MARK.sub(r"\1", " ".join(plain.split()))


def words_of(normal: str) -> list[str]:
    """Returns the words of a normal form: runs of letters and digits, without marks."""
    return _WORD.findall(normal)


def identity(prompt: Prompt, suffix: str | None = None) -> str:
    """Returns the text that identifies a problem: normal forms of all its messages, without `suffix` at its end.

    It includes all else that a chat template reads, such as calls and tools. Prompts with one identity are the same
    problem: they count as duplicates, and a held-out split keeps them together.
    """
    parts = [normalize(message.get("content") or "") for message in prompt.messages]
    if suffix is not None:
        parts[prompt.asked] = parts[prompt.asked].removesuffix(normalize(suffix)).rstrip()
    return "\n".join([*parts, *filter(None, [non_text_fields(prompt.messages, prompt.tools)])])


def share_of(identity_text: str) -> float:
    """Returns a number in [0, 1) that depends only on this text: the beginning of its sha256."""
    digest = hashlib.sha256(identity_text.encode("utf-8", "surrogatepass")).digest()
    return int.from_bytes(digest[:6], "big") / (1 << 48)


@dataclass(frozen=True)
class SuffixCounts:
    """Counts of prompts that got a suffix, had it, or got none because they ask for a box in other words."""

    added: int = 0
    present: int = 0
    other_words: int = 0

    def __add__(self, other: SuffixCounts) -> SuffixCounts:
        return SuffixCounts(*(mine + its for mine, its in zip(astuple(self), astuple(other), strict=True)))


def with_suffix(prompts: Sequence[Prompt], suffix: str | None) -> tuple[list[Prompt], SuffixCounts]:
    r"""Adds `suffix` at the end of each problem (`Prompt.text`); returns the prompts and the counts.

    A prompt that has the suffix already, anywhere in its problem and with any spacing, is unchanged. A suffix of
    one or two words counts at the end only, because problems may hold such words themselves. If the suffix asks for
    `\boxed{}`, a prompt that asks for it in other words is unchanged, too. A line break or a space at the beginning of
    `suffix` is kept; without one, a space is put in between.
    """
    if suffix is None:
        return list(prompts), SuffixCounts()
    normal, asks_for_box = normalize(suffix), _EMPTY_BOX.search(suffix) is not None
    joint = suffix if suffix[:1].isspace() else f" {suffix}"
    result, added, present, other_words = [], 0, 0, 0
    for prompt in prompts:
        content = prompt.text
        if _has(content, suffix, normal):
            present += 1
        elif asks_for_box and _EMPTY_BOX.search(content):
            other_words += 1
        else:
            added += 1
            prompt = replace(prompt, messages=prompt.with_text(content.rstrip() + joint))
        result.append(prompt)
    return result, SuffixCounts(added, present, other_words)


def _has(content: str, suffix: str, normal: str) -> bool:
    """Returns whether a message has the suffix, whose normal form is `normal`."""
    if len(words_of(normal)) > 2:
        return normal in normalize(content)
    return normalize(content).endswith(normal) if normal else content.rstrip().endswith(suffix.strip())


def without_instructions(texts: Sequence[str]) -> list[str]:
    """Removes from the texts of one file the instructions with which half of them or more begin or end.

    Two collections of the same problems usually ask for the answer in different words. A text that would be empty then
    is unchanged.
    """
    split = [text.split() for text in texts]
    head = _whole_sentences_at_the_beginning(_shared_beginning(split))
    tail = _whole_sentences_at_the_end(_shared_beginning([words[::-1] for words in split])[::-1])
    result = []
    for text, words in zip(texts, split, strict=True):
        start = len(head) if head and words[: len(head)] == head else 0
        end = len(words) - (len(tail) if tail and words[-len(tail) :] == tail else 0)
        result.append(" ".join(words[start:end]) if start < end else text)
    return result


def _whole_sentences_at_the_beginning(words: list[str]) -> list[str]:
    """Returns `words` up to the last sentence's end, if any; the rest begins the problems ("... step. What is")."""
    ends = [number for number, word in enumerate(words, 1) if _SENTENCE_END.search(word)]
    return words[: ends[-1]] if ends else words


def _whole_sentences_at_the_end(words: list[str]) -> list[str]:
    """Returns `words` without the end of a sentence at their start, which ends the problems ("of n? Please ...")."""
    if not words or not words[0][0].islower():
        return words
    ends = [number for number, word in enumerate(words, 1) if _SENTENCE_END.search(word)]
    return words[ends[0] :] if len(ends) > 1 else words


def _shared_beginning(split: Iterable[list[str]]) -> list[str]:
    """Returns the words with which half of the texts begin, as many as possible; [] if these are too few."""
    alive = list(split)
    needed, shared = max(2, INSTRUCTION_SHARE * len(alive)), list[str]()
    while True:
        at = len(shared)
        counts = Counter(words[at] for words in alive if len(words) > at)
        word, count = max(counts.items(), key=lambda item: (item[1], item[0]), default=("", 0))
        if count < needed:
            return shared if len(shared) >= INSTRUCTION_WORDS else []
        alive = [words for words in alive if len(words) > at and words[at] == word]
        shared.append(word)
