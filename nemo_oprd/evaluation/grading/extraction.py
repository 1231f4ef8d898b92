r"""Finds the final answer in the text of a response; nothing here compares answers.

Text that is marked as reasoning is no answer: after `</think>` only what follows it is read, and after a `<think>` that
is never closed nothing is. A response without such marks is read whole.

Every function takes time linear in the length of the text, because a degenerate response may open thousands of boxes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

from nemo_oprd.evaluation.grading import numerals
from nemo_oprd.evaluation.grading.spelling import UNITS

_THINK = re.compile(r"<(/?)think>")
_ANSWER = re.compile(r"\banswer\s*(?:[*_]{1,3}\s*)?(?:is\s*)?:", re.IGNORECASE)
_ANSWER_IS = re.compile(r"\banswer\s+is\b(?!\s*:)", re.IGNORECASE)
_NUMBER_BEGINS = r"(?:[dtc]?frac\s*\{?\s*-?)?\.?\d"
_STATED_NUMBER = re.compile(r"[\s*_$(\\]*[-+\N{MINUS SIGN}]?\s*[\\$]*(?:\(\s*)?" + _NUMBER_BEGINS)
_STATEMENT = 500  # characters of what follows `answer is`, or a number in prose
_CONDITION_LENGTH = 30  # characters before `answer` in which one may stand
_CONDITION = re.compile(r"\b(?:if|whether|assume|suppose|say)\s+(?:that\s+)?(?:the|your|my|our)?\s*\Z", re.IGNORECASE)
# `####` before an answer, as GSM8K writes it; at the start of a line it also begins a heading of Markdown
_HASHES = re.compile(r"(?<!#)####(?!#)\s*")
_HASHED_NUMBER = re.compile(r"[-+$\\*_\N{MINUS SIGN}]*" + _NUMBER_BEGINS)
# a line with nothing but arithmetic, a unit, other numbers and a remark in brackets: no "2. Add the prices"
_NUMBER_LINE = re.compile(
    rf"(?!\d++[.)][ \t]+\S)(?=[-+$\\* \N{{MINUS SIGN}}]*{_NUMBER_BEGINS})"
    r"(?:[\d\s.,+*/^=$\\%{}\N{MINUS SIGN}\N{MULTIPLICATION SIGN}-]|(?<=\\)[a-z]++|(?<=\d)e(?=[-+]?\d)"
    r"|(?:or|and|to|of)[ \t]++(?=[-$\\{ ]*\.?\d))*+"
    r"(?:(?:[a-z][\w/]*+|[A-Z]{3}\b)[ \t]*+){0,4}+(?:\([^()]*+\))?[.*!\s]*+"
)
# a line that begins with a number and holds LaTeX is no heading
_FORMULA_LINE = re.compile(r"[-+$\\* \N{MINUS SIGN}]*" + _NUMBER_BEGINS + r"[^\n]*\\[A-Za-z]")
_HASHED_LETTER = re.compile(r"(?<!#)####[ \t]*(?=[(\[*_$]*[A-Za-z][)\]*_$.]*\s*$)", re.MULTILINE)
# a number as people write it: sign, thousands separators, decimals, a unit; not the digits inside a word or a number
_NUMBER = re.compile(
    r"(?<![\w.,])[-+\N{MINUS SIGN}]?\s?\$?(?:\d{1,3}(?:,\d{3})+|\d+)?(?:\.\d+)?"
    rf"(?:(?![\w]|,\d|\.\d)|(?<=\d)(?=(?:{UNITS})\b))"
)
# of a formula in prose, without the punctuation of its sentence
_ATOM = (
    r"(?:\\[a-zA-Z]++|\\[^a-zA-Z\s]|[-+*/^=$%{}()|!<>\d\N{MINUS SIGN}\N{MULTIPLICATION SIGN}\N{MIDDLE DOT}]"
    r"|[.,:](?=\.?\d)|(?<=\d)[eE](?=[-+]?\d))"
)
_RUN = re.compile(rf"{_ATOM}(?:[ \t]*+{_ATOM})*+")
_CELL = re.compile(r"^\|\s+|\s+\|.*$")  # of a table
_GLUED = re.compile(rf"(?!(?:{UNITS})\b)[A-Za-z_]")
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
    r"""The final number: in the last box, `Answer:`, `answer is` or `####` line, whichever is last; else the last one.

    It is read whole (`numerals.read`): a fraction, a power or `2.5 million` is one number, and what is marked as the
    answer and is no number, such as `3\sqrt{2}`, is none. A heading of Markdown that begins with `####` is no mark. Of
    an equation that is marked as the answer, the number behind its last equals sign counts.

    Example: `extract_number("12 + 5 = 17, so $1,017 in all.") == "1,017"`.
    """
    marked = marked_number(text)
    if marked is None:
        return _last_number(_BULLET.sub("", text))
    left, _, right = marked.rpartition("=")
    is_calculation = not _CLAUSE.search(left) and (_OPERATOR.search(left) or not numbers_in(left))
    return _spelling(right if is_calculation else marked)


def _spelling(text: str) -> str | None:
    found = numerals.read(text)
    return None if found is None else found.spelling


def _last_number(text: str) -> str | None:
    """The last number of a prose text, with the whole formula in which it stands; digits inside words do not count."""
    for run in reversed(list(_RUN.finditer(text))):
        start = run.start()
        rest = text[run.end() : run.end() + _STATEMENT].partition("\n")[0]
        glued = re.match(r"\w", text[start - 1 : start]) is not None and run.group()[0] not in "=:<>$|"
        glued = glued or _GLUED.match(rest) is not None
        if not glued and re.search(r"\d", run.group()):
            return _spelling(_CELL.sub("", run.group().rpartition("=")[2] + rest))
    return None


def marked_number(text: str) -> str | None:
    """What is marked as the answer by a box, `Answer:`, or by `####` or `answer is` before a number; None without."""
    return _last_marked(text, (_ends_of(_ANSWER), _ends_of_hashes, _ends_of_statements))


def _ends_of_statements(text: str) -> Iterator[int]:
    """The ends of each `answer is` that a number follows, and that is no condition ("if the answer is 5")."""
    for found in _ANSWER_IS.finditer(text):
        line_end = text.find("\n", found.end())
        line = text[found.end() : min(found.end() + _STATEMENT, len(text) if line_end < 0 else line_end)]
        if (
            _STATED_NUMBER.match(line)
            and _spelling(line)
            and not _CONDITION.search(text, max(0, found.start() - _CONDITION_LENGTH), found.start())
        ):
            yield found.end()


def _ends_of_hashes(text: str) -> Iterator[int]:
    """The ends of each `####` that marks a number as the answer."""
    for found in _HASHES.finditer(text):
        end = found.end()
        if found.start() and text[found.start() - 1] != "\n":
            marks = _HASHED_NUMBER.match(text, end)
        else:
            line_end = text.find("\n", end)
            line_end = len(text) if line_end < 0 else line_end
            marks = _NUMBER_LINE.fullmatch(text, end, line_end) or _FORMULA_LINE.match(text, end, line_end)
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
