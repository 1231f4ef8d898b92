r"""Finds the final answer in the text of a response; nothing here compares answers.

Text that is marked as reasoning is no answer: after `</think>` only what follows it is read, and after a `<think>` that
is never closed nothing is. A response without such marks is read whole.

Every function takes time linear in the length of the text, because a degenerate response may open thousands of boxes.
"""

from __future__ import annotations

import re

_THINK = re.compile(r"<(/?)think>")
_ANSWER = re.compile(r"\banswer\s*(?:[*_]{1,3}\s*)?(?:is\s*)?:", re.IGNORECASE)
_ANSWER_IS = re.compile(r"\banswer\s+is\b\s*:?", re.IGNORECASE)
_HASHES = re.compile(r"####")
# a number as people write it: sign, thousands separators, decimals; not the digits inside a word or a longer number
_NUMBER = re.compile(r"(?<![\w.,])[-+\N{MINUS SIGN}]?\s?\$?(?:\d{1,3}(?:,\d{3})+|\d+)?(?:\.\d+)?(?![\w]|,\d|\.\d)")
_LETTER = re.compile(r"[\s(\[*_$]*(?:\\(?:text|textbf|mathrm|mathbf)\s*\{)?[\s(*]*([A-Za-z])(?![A-Za-z0-9'^+*/=-])")
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
            return unwrap(rest[: rest.find(closing, len(opening)) + len(closing)])
    return unwrap(rest.partition("\n")[0])


def unwrap(line: str) -> str:
    """An answer without what people put around it: `**$5$**.` -> `5`; a box in it is opened."""
    boxed = extract_boxed(line)
    if boxed is not None:
        return boxed
    before = None
    while line != before:
        before, line = line, line.strip().strip("*").strip()
        line = re.sub(r"(?<![.\\])\.$", "", line)
        inner = next((found for wrapped in _WRAPPED if (found := wrapped.fullmatch(line))), None)
        line = line if inner is None else inner[1]
    return line


def extract_answer_line_or_boxed(text: str) -> str | None:
    """The last `Answer:` line, and without one the last box."""
    line = extract_answer_line(text)
    return extract_boxed(text) if line is None else line


def extract_number(text: str) -> str | None:
    """The final number: in the last box, `Answer:` line or `####` line, whichever is last; without any, the last one.

    Example: `extract_number("12 + 5 = 17, so $1,017 in all.") == "1,017"`.
    """
    marked = _last_marked(text)
    numbers = _numbers(text if marked is None else marked)
    if not numbers:
        return None
    # "Answer: 5 (of 12)": what was marked as the answer begins with it; prose ends with it
    return numbers[-1] if marked is None else numbers[0]


def extract_choice(text: str) -> str | None:
    """The letter of a multiple-choice answer, in upper case: in the last box, `Answer:`, `answer is` or `####`.

    A response that is nothing but a letter is that letter. Other letters in prose are no answers: "A" starts sentences.

    Example: `extract_choice("A bird flies, so the answer is (b).") == "B"`.
    """
    marked = _last_marked(text, (_ANSWER, _ANSWER_IS, _HASHES))
    if marked is None:
        marked = text if len(text.strip()) <= 12 else ""
        alone = re.fullmatch(r"[\s(\[*_$]*([A-Za-z])[\s)\].*_$]*", marked)
        return alone[1].upper() if alone else None
    letter = _LETTER.match(marked)
    return letter[1].upper() if letter else None


def extract_exact(text: str) -> str | None:
    """The content of the last box or `Answer:` line, whichever is last; without any, the whole response."""
    marked = _last_marked(text, (_ANSWER,))
    return (unwrap(text) if marked is None else marked) or None


def _last_marked(text: str, marks: tuple[re.Pattern[str], ...] = (_ANSWER, _HASHES)) -> str | None:
    """The content of the last box or what follows the last mark in its line, whichever stands later."""
    box = _last_box(text)
    place, content = (-1, None) if box is None else (box[1], text[box[0] : box[1]].strip())
    ends = [found.end() for mark in marks for found in mark.finditer(text)]
    return _rest_of_line(text, max(ends)) if ends and max(ends) > place else content


def _numbers(text: str) -> list[str]:
    text = text.replace(r"\$", "$").replace("{,}", ",").replace(r"\!", "")
    found = (match.group() for match in _NUMBER.finditer(text))
    return [
        re.sub(r"[\s$+]", "", number).replace("\N{MINUS SIGN}", "-") for number in found if re.search(r"\d", number)
    ]
