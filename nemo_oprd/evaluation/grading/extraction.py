r"""Finds the final answer in the text of a response; `equality.py` compares answers.

Text that is marked as reasoning is no answer: `final_part` returns the text after the last `</think>`, no text if a
later `<think>` is never closed, and a response without such marks whole. Extraction then reads this part.

Boxes side by side are one answer: `\boxed{1}, \boxed{2} and \boxed{3}` is `1, 2, 3`. Only commas, `and`, `or` and
spaces may stand between them; a box in another sentence, or after other words or operators, is an answer of its own.

Every function takes time linear in the length of the text, because a degenerate response may open thousands of boxes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import NamedTuple

from nemo_oprd.evaluation.grading import numerals
from nemo_oprd.evaluation.grading.spelling import UNITS

_THINK = re.compile(r"<(/?)think>")
_ANSWER = re.compile(r"\banswer\s*(?:[*_]{1,3}\s*)?(?:is\s*)?:", re.IGNORECASE)
_ANSWER_IS = re.compile(r"\banswer\s+is\b(?!\s*:)", re.IGNORECASE)
_NUMBER_BEGINS = r"(?:[dtc]?frac\s*\{?\s*-?)?\.?\d"
_STATED_NUMBER = re.compile(r"[\s*_$(\\]*[-+\N{MINUS SIGN}]?\s*[\\$]*(?:\(\s*)?" + _NUMBER_BEGINS)
_STATEMENT = 500  # maximum characters after `answer is`, or of a number in prose
_CONDITION_LENGTH = 30  # maximum characters before `answer` in a line
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
_HASHED_END = re.compile(r"(?<!#)####(?!#)[ \t]*([^\n]*\S)\s*\Z")
# a number as people write it: sign, thousands separators, decimals, a unit; not the digits inside a word or a number
_NUMBER = re.compile(
    r"(?<![\w.,])[-+\N{MINUS SIGN}]?\s?\$?(?:\d{1,3}(?:,\d{3})+|\d+)?(?:\.\d+)?"
    rf"(?:(?![\w]|,\d|\.\d)|(?<=\d)(?=(?:{UNITS})\b))"
)
# a part of a formula in prose, without the punctuation of its sentence
_ATOM = (
    r"(?:\\[a-zA-Z]++|\\[^a-zA-Z\s]|[-+*/^=$%{}()|!<>\d\N{MINUS SIGN}\N{MULTIPLICATION SIGN}\N{MIDDLE DOT}]"
    r"|[.,:](?=\.?\d)|(?<=\d)[eE](?=[-+]?\d))"
)
_RUN = re.compile(rf"{_ATOM}(?:[ \t]*+{_ATOM})*+")
_CELL = re.compile(r"^\|\s+|\s+\|.*$")  # the edges of a table's cell
_GLUED = re.compile(rf"(?!(?:{UNITS})\b)[A-Za-z_]")
_BULLET = re.compile(r"^[ \t]*[-+*][ \t]+", re.MULTILINE)
_OPERATOR = re.compile(
    r"[-+*/^\N{MINUS SIGN}\N{MULTIPLICATION SIGN}\N{DIVISION SIGN}\N{MIDDLE DOT}]|\\(?:times|cdot|div)"
)
_CLAUSE = re.compile(r"[;:\n]|,(?!\d)|\(\s*[A-Za-z]{2}")  # what a calculation does not have
_LETTER = re.compile(
    r"([\s(\[*_$]*+)(?:(?i:option|choice|letter)\b[\s:(\[*_$]*+)?"
    r"(?:\\(?:text|textbf|mathrm|mathbf)\s*\{[\s(*]*+)?([A-Za-z])"
    r"(?:(?=\*\*(?:[\s.,:;)!?]|\Z))|(?![A-Za-z0-9'^+*/=-]))"  # `**` ends bold type: "**Answer: C** (Paris)"
)
_EMPHASIZED_LETTER = re.compile(r"(?<![\w*_`])([*_`]{1,3})([A-Za-z])\1(?![\w*_`])")
# text allowed between two boxes of one answer, perhaps before the name of the second one (`y =`)
_GAP_LENGTH = 120
_NAME = r"[A-Za-z](?:_(?:\w|\{\w+\}))?\s*=\s*"
_AND = (
    r"[,;]|(?i:\b(?:and|or)\b)"
    r"|\\(?:text|mbox|textrm|mathrm)\s*\{[\s,;]*(?:(?:[^{}.;:=]{0,40}\b)?(?i:and|or)\b)?[\s,;]*\}"
)
_BETWEEN_FORMULAS = r"\$|\\[()\[\]]|\*\*|\n"
_GAP = re.compile(rf"((?:{_AND}|{_BETWEEN_FORMULAS}|[^\S\n]|~|\\[,;:! ]|\\q?quad(?![a-zA-Z]))*)(?:{_NAME})?")
_JOINS, _SEPARATES = re.compile(r"(?<!\\)[,;]|(?i:\b(?:and|or)\b)"), re.compile(_BETWEEN_FORMULAS)
_NAME_BEFORE = re.compile(rf"(?<![\w\\+*/^=<>)}}\]-])({_NAME})\Z")
_OPENS_BEFORE = re.compile(r"(?<!\\)([(\[]|\\\{)\s*\Z")
_CLOSES_BEHIND = re.compile(r"\s*(?:\\right(?![a-zA-Z])\s*)?([)\]]|\\\})")
_ROUNDS = 20  # maximum rounds of removing marks around an answer; more do not occur
_WRAPPED = tuple(
    re.compile(rf"{re.escape(opening)}((?:(?!{re.escape(closing)}).)+){re.escape(closing)}", re.DOTALL)
    for opening, closing in (("$$", "$$"), ("$", "$"), (r"\(", r"\)"), (r"\[", r"\]"), ("`", "`"), ('"', '"'))
)


def final_part(text: str) -> str:
    """Returns the part after the reasoning: the text after the last `</think>`, "" after a last `<think>`, else all."""
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
    """Returns the content of the last `\\boxed{...}` whose braces balance, stripped; None if there is none.

    Boxes side by side are one list, with the brackets around them and, if all have one, the names before them. A box
    that is repeated counts once. Escaped braces (`\\{`, `\\}`) are content. A box that the length limit cuts off
    is ignored.

    Example: `extract_boxed(r"$x = \\boxed{1}$ and $y = \\boxed{2}$.") == "x = 1, y = 2"`.
    """
    boxes = _last_boxes(text)
    return _content(text, boxes) if boxes else None


class _Box(NamedTuple):
    """A box: the start of its command, and the start and end of its content."""

    command: int
    start: int
    end: int


def _last_boxes(text: str) -> list[_Box]:
    """Returns the last box and those side by side with it, in order; [] without a box."""
    last: _Box | None = None
    closed: _Box | None = None  # the box that ends last so far
    before: dict[int, _Box] = {}  # a box's command -> the box side by side with it
    open_braces: list[tuple[int, int] | None] = []  # (command, start) of each open box; None for another brace
    for token in re.finditer(r"\\f?boxed\s*\{|\\.|[{}]", text, re.DOTALL):
        if token.group() == "}" and open_braces:
            opened = open_braces.pop()
            if opened is not None:
                closed = _Box(*opened, token.start())
                if last is None or closed.start > last.start:
                    last = closed
        elif token.group().endswith("{") and token.group() != r"\{":
            is_box = len(token.group()) > 1
            open_braces.append((token.start(), token.end()) if is_box else None)
            if is_box and closed is not None and _are_one_answer(text, closed.end + 1, token.start()):
                before[token.start()] = closed
    boxes = [] if last is None else [last]
    while boxes and (previous := before.get(boxes[-1].command)) and "boxed" not in text[previous.start : previous.end]:
        boxes.append(previous)
    return boxes[::-1]


def _are_one_answer(text: str, end: int, begin: int) -> bool:
    """Returns whether the text between two boxes joins them: spaces in a line and formula, or a comma, `and`, `or`."""
    found = _GAP.fullmatch(text, end, begin) if begin - end <= _GAP_LENGTH else None
    return found is not None and bool(_JOINS.search(found[1]) or not _SEPARATES.search(found[1]))


def _content(text: str, boxes: list[_Box]) -> str:
    """Joins the contents of boxes side by side to one answer."""
    contents = [text[box.start : box.end].strip() for box in boxes]
    places = [text[max(0, box.command - _GAP_LENGTH) : box.command] for box in boxes]
    names = [found[1] if (found := _NAME_BEFORE.search(place)) else "" for place in places]
    if len({*zip(names, contents, strict=True)}) == 1 or (len({*contents}) == 1 and not all(names)):
        return contents[-1]
    if all(name or "=" in content for name, content in zip(names, contents, strict=True)):
        contents = [f"{name}{content}" for name, content in zip(names, contents, strict=True)]
    joined = ", ".join(contents)
    opening = _OPENS_BEFORE.search(places[0].removesuffix(names[0]))
    closing = _CLOSES_BEHIND.match(text, boxes[-1].end + 1)
    if opening is None or closing is None or (opening[1] == r"\{") != (closing[1] == r"\}"):
        return joined
    return f"{opening[1]}{joined}{closing[1]}"


def extract_answer_line(text: str) -> str | None:
    """Returns the text after the last `Answer:`, to the end of its line; None if there is none.

    Case does not matter and words may precede (`Final answer: 5`). If the line ends after the colon, the next line that
    is not blank holds the answer. If the answer holds a box, only the box's content is returned; else dollar signs,
    bold type and a final period around it are removed.

    Example: `extract_answer_line("So x is 5.\\n\\n**Answer:** $5$.") == "5"`.
    """
    last = _last(_ANSWER, text)
    return None if last is None else _rest_of_line(text, last.end()) or None


def _rest_of_line(text: str, start: int) -> str:
    """Returns the first line from `start` that is not blank, unwrapped; a display formula up to its end.

    A list's bullet does not belong to it: below a mark, `- 18` is 18, and `-18` is a negative number.
    """
    rest = text[start:].lstrip("*_ \t\r\n")
    if "\n" in text[start : len(text) - len(rest)] and (bullet := _BULLET.match(rest)):
        rest = rest[bullet.end() :].lstrip("*_ \t")
    for opening, closing in ((r"\[", r"\]"), ("$$", "$$")):
        if rest.startswith(opening):
            end = rest.find(closing, len(opening))
            if end >= 0:
                return unwrap(rest[: end + len(closing)])
            rest = rest[len(opening) :].lstrip()  # a formula that the length limit cut off
            break
    return unwrap(rest.partition("\n")[0])


def unwrap(line: str) -> str:
    """Returns the content of the last box in a line, else the line without marks around it: `**$5$**.` -> `5`."""
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
    """Returns the answer in the last `Answer:` line, or without one in the last box; None without both."""
    line = extract_answer_line(text)
    return extract_boxed(text) if line is None else line


def extract_number(text: str) -> str | None:
    r"""Returns the number at the last mark (box, `Answer:`, `answer is` or `####`); without a mark, the last number.

    A number is read whole (`numerals.read`): a fraction, a power or `2.5 million` is one number. A marked answer that
    is no number, such as `3\sqrt{2}` or two boxes side by side, gives None. A heading of Markdown that begins with
    `####` is no mark. Of a marked calculation, or `x = 5`, the number after the last equals sign counts.

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
    """Returns the last number of a prose text, read with the formula around it; digits inside words do not count."""
    for run in reversed(list(_RUN.finditer(text))):
        start = run.start()
        rest = text[run.end() : run.end() + _STATEMENT].partition("\n")[0]
        glued = re.match(r"\w", text[start - 1 : start]) is not None and run.group()[0] not in "=:<>$|"
        glued = glued or _GLUED.match(rest) is not None
        if not glued and re.search(r"\d", run.group()):
            return _spelling(_CELL.sub("", run.group().rpartition("=")[2] + rest))
    return None


def marked_number(text: str) -> str | None:
    """Returns the text marked as answer: by a box, `Answer:`, or `####` or `answer is` before a number; else None."""
    return _last_marked(text, (_ends_of(_ANSWER), _ends_of_hashes, _ends_of_statements), several="")


def _ends_of_statements(text: str) -> Iterator[int]:
    """Yields the end of each `answer is` that precedes a number and is no condition ("if the answer is 5")."""
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
    """Yields the end of each `####` that marks a number as the answer."""
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
    """Returns the letter, in upper case, that begins the text at the last mark: box, `Answer:`, `answer is` or `####`.

    Without a mark, a response that is nothing but a letter is that letter. Other letters in prose are no answers: "A"
    starts sentences, and "the answer is a bit tricky" names none. `####` marks only a letter alone in its line.

    Example: `extract_choice("A bird flies, so the answer is (b).") == "B"`.
    """
    text = _EMPHASIZED_LETTER.sub(r"\2", text)
    marks = (_ends_of(_ANSWER), _ends_of(_HASHED_LETTER))
    marked = _last_marked(text, (*marks, _ends_of(_ANSWER_IS)), several="")
    if marked is None:
        marked = text if len(text.strip()) <= 12 else ""
        alone = re.fullmatch(r"[\s(\[*_$]*([A-Za-z])[\s)\].*_$]*", marked)
        return alone[1].upper() if alone else None
    letter = _LETTER.match(marked)
    if letter is None or (_is_article(marked, letter) and marked != _last_marked(text, marks)):
        return None
    return letter[2].upper()


def _is_article(marked: str, letter: re.Match[str]) -> bool:
    """Returns whether the letter may be a word of a sentence, as in "a bit": small, bare, and before another word."""
    return letter[2].islower() and not letter[1].strip() and re.match(r"\**\s+\w", marked[letter.end() :]) is not None


def extract_exact(text: str) -> str | None:
    """Returns the content of the last box or `Answer:` line; without any, the response without marks around it."""
    marked = _last_marked(text, (_ends_of(_ANSWER),))
    return (unwrap(text) if marked is None else marked) or None


def reference(answer: str) -> str:
    """Returns the final answer of a reference answer: the part after `####` or `Answer:` in its last line, else all.

    Example: `reference("She has 4 + 3 = 7 eggs.\\n#### 7") == "7"`.
    """
    return _marked_end(answer)[1] or answer


def form(answer: str) -> str | None:
    """Returns the grader for the form of a reference answer; None for a final answer alone, which fits most graders.

    A worked solution that ends with `#### 7`, as those of GSM8K, names `number`, one with `#### C` names `choice`, and
    one that ends with `Answer: 7` names `answer_line_or_boxed`.
    """
    mark, final = _marked_end(answer)
    if mark != "####":
        return "answer_line_or_boxed" if mark else None
    if _HASHED_LETTER.search(answer):
        return "choice"
    return "number" if numerals.read(final) is not None else None


def _marked_end(answer: str) -> tuple[str, str]:
    """Returns (`####` or `Answer:`, the text that it marks in the last line), both empty without such a mark."""
    hashed = _HASHED_END.search(answer)
    if hashed is not None:
        return "####", hashed[1]
    line = answer.rstrip().rpartition("\n")[2]
    said = _last(_ANSWER, line)
    final = "" if said is None else unwrap(line[said.end() :])
    return ("Answer:", final) if final else ("", "")


def _ends_of(mark: re.Pattern[str]) -> Callable[[str], Iterator[int]]:
    return lambda text: (found.end() for found in mark.finditer(text))


def _last_marked(
    text: str, marks: tuple[Callable[[str], Iterator[int]], ...], several: str | None = None
) -> str | None:
    """Returns the content of the last box or the text after the last mark in its line, whichever is later.

    Args:
        several: returned in place of the content of different boxes side by side.
    """
    boxes = _last_boxes(text)
    ends = [end for mark in marks for end in mark(text)]
    if ends and (not boxes or max(ends) > boxes[-1].end):
        return _rest_of_line(text, max(ends))
    if not boxes:
        return None
    content = _content(text, boxes)
    return content if several is None or content == text[boxes[-1].start : boxes[-1].end].strip() else several


def numbers_in(text: str) -> list[str]:
    """Returns the numbers in a text as people write them, in order, without dollar and plus signs."""
    text = text.replace(r"\$", "$").replace("{,}", ",").replace(r"\!", "")
    found = (match.group() for match in _NUMBER.finditer(text))
    return [
        re.sub(r"[\s$+]", "", number).replace("\N{MINUS SIGN}", "-") for number in found if re.search(r"\d", number)
    ]
