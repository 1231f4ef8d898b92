r"""Finds the final answer in the text of a response; nothing here compares answers.

Text that is marked as reasoning is no answer: after `</think>` only what follows it is read, and after a `<think>` that
is never closed nothing is. A response without such marks is read whole.

Every function takes time linear in the length of the text, because a degenerate response may open thousands of boxes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

from nemo_oprd.evaluation.spelling import UNITS

_THINK = re.compile(r"<(/?)think>")
_ANSWER = re.compile(r"\banswer\s*(?:[*_]{1,3}\s*)?(?:is\s*)?:", re.IGNORECASE)
_ANSWER_IS = re.compile(r"\banswer\s+is\b(?!\s*:)", re.IGNORECASE)
# `####` before an answer, as GSM8K writes it; at the start of a line it also begins a heading of Markdown
_HASHES = re.compile(r"(?<!#)####(?!#)\s*")
_HASHED_NUMBER = re.compile(r"[-+$\\*_\N{MINUS SIGN}]*\.?\d")
# a line with nothing but arithmetic, a unit and a remark in brackets: no "2. Add the prices"
_NUMBER_LINE = re.compile(
    r"(?!\d++[.)][ \t]+\S)(?=[-+$\\* \N{MINUS SIGN}]*\.?\d)[\d\s.,+*/^=$\\%{}\N{MINUS SIGN}-]*+"
    r"(?:(?:[a-z][\w/]*+|[A-Z]{3}\b)[ \t]*+){0,4}+(?:\([^()]*+\))?[.*!\s]*+"
)
_HASHED_LETTER = re.compile(r"(?<!#)####[ \t]*(?=[(\[*_$]*[A-Za-z][)\]*_$.]*\s*$)", re.MULTILINE)
# a number as people write it: sign, thousands separators, decimals, a unit; not the digits inside a word or a number
_NUMBER = re.compile(
    r"(?<![\w.,])[-+\N{MINUS SIGN}]?\s?\$?(?:\d{1,3}(?:,\d{3})+|\d+)?(?:\.\d+)?"
    rf"(?:(?![\w]|,\d|\.\d)|(?<=\d)(?=(?:{UNITS})\b))"
)
_BULLET = re.compile(r"^[ \t]*[-+*][ \t]+", re.MULTILINE)
_OPERATOR = re.compile(
    r"[-+*/^\N{MINUS SIGN}\N{MULTIPLICATION SIGN}\N{DIVISION SIGN}\N{MIDDLE DOT}]|\\(?:times|cdot|div)"
)
_CLAUSE = re.compile(r"[;:\n]|,(?!\d)|\(\s*[A-Za-z]{2}")  # what a calculation does not have
_LETTER = re.compile(
    r"([\s(\[*_$]*+)(?:(?i:option|choice|letter)\b[\s:(\[*_$]*+)?"
    r"(?:\\(?:text|textbf|mathrm|mathbf)\s*\{[\s(*]*+)?([A-Za-z])(?![A-Za-z0-9'^+*/=-])"
)
_ROUNDS = 20  # of removing what surrounds an answer; nobody wraps an answer more often
_WRAPPED = tuple(
    re.compile(rf"{re.escape(opening)}((?:(?!{re.escape(closing)}).)+){re.escape(closing)}", re.DOTALL)
    for opening, closing in (("$$", "$$"), ("$", "$"), (r"\(", r"\)"), (r"\[", r"\]"), ("`", "`"), ('"', '"'))
)


def final_part(text: str) -> str:
    """What follows the reasoning: the text after the last `</think>`, nothing after a last `<think>`, else all."""
    last = _last(_THINK, text)
    if last is None:
        return text
    return text[last.end() :] if last[1] else ""


def _last(pattern: re.Pattern[str], text: str) -> re.Match[str] | None:
    last = None
    for found in pattern.finditer(text):
        last = found
    return last


def extract_boxed(text: str) -> str | None:
    """The content of the last `\\boxed{...}` whose braces balance, stripped; None if there is none.

    Escaped braces (`\\{`, `\\}`) are content. A box that the length limit cuts off is ignored.

    Example: `extract_boxed(r"so \\boxed{\\frac{1}{2}}.") == r"\\frac{1}{2}"`.
    """
    found = _last_box(text)
    return None if found is None else text[found[0] : found[1]].strip()


def _last_box(text: str) -> tuple[int, int] | None:
    """(Start, end) of the content of the last box."""
    last: tuple[int, int] | None = None
    open_braces: list[int | None] = []  # for each open brace, where a box's content starts; None if it is not a box
    for token in re.finditer(r"\\f?boxed\s*\{|\\.|[{}]", text, re.DOTALL):
        if token.group() == "}" and open_braces:
            start = open_braces.pop()
            if start is not None and (last is None or start > last[0]):
                last = (start, token.start())
        elif token.group().endswith("{") and token.group() != r"\{":
            open_braces.append(token.end() if len(token.group()) > 1 else None)
    return last


def extract_answer_line(text: str) -> str | None:
    """What follows the last `Answer:`, to the end of its line; None if there is none or nothing follows.

    Case does not matter and words may precede (`Final answer: 5`). If the line ends after the colon, the next line that
    is not blank holds the answer. A box in the answer is opened, and dollar signs, bold type and a final period around
    it are removed.

    Example: `extract_answer_line("So x is 5.\\n\\n**Answer:** $5$.") == "5"`.
    """
    last = _last(_ANSWER, text)
    return None if last is None else _rest_of_line(text, last.end()) or None


def _rest_of_line(text: str, start: int) -> str:
    """The first line from `start` that is not blank, unwrapped; a display formula is read to its end."""
    rest = text[start:].lstrip("*_ \t\r\n")
    for opening, closing in ((r"\[", r"\]"), ("$$", "$$")):
        if rest.startswith(opening):
            end = rest.find(closing, len(opening))
            if end >= 0:
                return unwrap(rest[: end + len(closing)])
            rest = rest[len(opening) :].lstrip()  # a formula that the length limit cut off
            break
    return unwrap(rest.partition("\n")[0])


def unwrap(line: str) -> str:
    """An answer without what people put around it: `**$5$**.` -> `5`; a box in it is opened."""
    boxed = extract_boxed(line)
    if boxed is not None:
        return boxed
    for _ in range(_ROUNDS):
        before, line = line, line.strip().strip("*").strip()
        if line.endswith(".") and not line.endswith(("..", "\\.")):
            line = line[:-1]
        inner = next((found for wrapped in _WRAPPED if (found := wrapped.fullmatch(line))), None)
        line = line if inner is None else inner[1]
        if line == before:
            break
    return line


def extract_answer_line_or_boxed(text: str) -> str | None:
    """The last `Answer:` line, and without one the last box."""
    line = extract_answer_line(text)
    return extract_boxed(text) if line is None else line


def extract_number(text: str) -> str | None:
    """The final number: in the last box, `Answer:` line or `####` line, whichever is last; without any, the last one.

    A heading of Markdown that begins with `####` is no such line. Of an equation that is marked as the answer, the
    number behind its last equals sign counts.

    Example: `extract_number("12 + 5 = 17, so $1,017 in all.") == "1,017"`.
    """
    marked = marked_number(text)
    if marked is None:
        numbers = numbers_in(_BULLET.sub("", text))
        return numbers[-1] if numbers else None
    left, _, right = marked.rpartition("=")
    is_calculation = not _CLAUSE.search(left) and (_OPERATOR.search(left) or not numbers_in(left))
    # "Answer: 5 (of 12)": what was marked as the answer begins with it; prose ends with it
    numbers = (numbers_in(right) if is_calculation else []) or numbers_in(marked)
    return numbers[0] if numbers else None


def marked_number(text: str) -> str | None:
    """What is marked as the answer by a box, `Answer:` or `####` before a number; None without such a mark."""
    return _last_marked(text, (_ends_of(_ANSWER), _ends_of_hashes))


def _ends_of_hashes(text: str) -> Iterator[int]:
    """The ends of each `####` that marks a number as the answer."""
    for found in _HASHES.finditer(text):
        end = found.end()
        if found.start() and text[found.start() - 1] != "\n":
            marks = _HASHED_NUMBER.match(text, end)
        else:
            line_end = text.find("\n", end)
            marks = _NUMBER_LINE.fullmatch(text, end, len(text) if line_end < 0 else line_end)
        if marks:
            yield end


def extract_choice(text: str) -> str | None:
    """The letter of a multiple-choice answer, in upper case: in the last box, `Answer:`, `answer is` or `####`.

    A response that is nothing but a letter is that letter. Other letters in prose are no answers: "A" starts sentences,
    and "the answer is a bit tricky" names none. `####` counts before a letter that is alone in its line.

    Example: `extract_choice("A bird flies, so the answer is (b).") == "B"`.
    """
    marks = (_ends_of(_ANSWER), _ends_of(_HASHED_LETTER))
    marked = _last_marked(text, (*marks, _ends_of(_ANSWER_IS)))
    if marked is None:
        marked = text if len(text.strip()) <= 12 else ""
        alone = re.fullmatch(r"[\s(\[*_$]*([A-Za-z])[\s)\].*_$]*", marked)
        return alone[1].upper() if alone else None
    letter = _LETTER.match(marked)
    if letter is None or (_is_article(marked, letter) and marked != _last_marked(text, marks)):
        return None
    return letter[2].upper()


def _is_article(marked: str, letter: re.Match[str]) -> bool:
    """Whether the letter may be a word of a sentence, as in "a bit": small, bare, and followed by another word."""
    return letter[2].islower() and not letter[1].strip() and re.match(r"\s+\w", marked[letter.end() :]) is not None


def extract_exact(text: str) -> str | None:
    """The content of the last box or `Answer:` line, whichever is last; without any, the whole response."""
    marked = _last_marked(text, (_ends_of(_ANSWER),))
    return (unwrap(text) if marked is None else marked) or None


def _ends_of(mark: re.Pattern[str]) -> Callable[[str], Iterator[int]]:
    return lambda text: (found.end() for found in mark.finditer(text))


def _last_marked(text: str, marks: tuple[Callable[[str], Iterator[int]], ...]) -> str | None:
    """The content of the last box or what follows the last mark in its line, whichever stands later."""
    box = _last_box(text)
    place, content = (-1, None) if box is None else (box[1], text[box[0] : box[1]].strip())
    ends = [end for mark in marks for end in mark(text)]
    return _rest_of_line(text, max(ends)) if ends and max(ends) > place else content


def numbers_in(text: str) -> list[str]:
    """The numbers in a text as people write them, in its order, without dollar and plus signs."""
    text = text.replace(r"\$", "$").replace("{,}", ",").replace(r"\!", "")
    found = (match.group() for match in _NUMBER.finditer(text))
    return [
        re.sub(r"[\s$+]", "", number).replace("\N{MINUS SIGN}", "-") for number in found if re.search(r"\d", number)
    ]
