r"""Reads one number as people write it, exactly: `\frac{3}{4}`, `1.5 \times 10^3`, `2^{10}`, `2.5 million`, `\$1,200`.

A text is read as a whole or not at all. Words may precede the number, and a unit, a remark or a clause follow it;
a text that continues with mathematics (`3\sqrt{2}`, `48 + 24`) or with a further number (`72 or 73`) has no value here.

Every function takes time linear in the length of the text.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

from nemo_oprd.evaluation.grading.spelling import DEGREE, MAGNITUDES, POWERS_OF_TEN, UNITS

_MAX_EXPONENT = 1_000  # largest exponent of a power: larger ones are no answers, and would take long
_MAX_DIGITS = 100
_MAX_TAIL = 2_000  # characters after a number that are examined

# Each is needed by an answer in tests/unit/evaluation/test_grading_rules.py.
_SIMPLER = tuple(
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"\{,\}", ","),
        (r"\\!", ""),
        (r"(?<=\d)(?:\\[,;: ]|~)(?=\d{3}(?!\d))", ""),  # 10\,080
        ("[\N{MINUS SIGN}\N{EN DASH}\N{EM DASH}]", "-"),
        (r"\\[dtc]frac(?![a-zA-Z])", r"\\frac"),
        (r"(?:\\times|\\cdot)(?![a-zA-Z])|[\N{MULTIPLICATION SIGN}\N{MIDDLE DOT}\N{DOT OPERATOR}]", r"\\times "),
        ("[\N{EURO SIGN}\N{POUND SIGN}\N{YEN SIGN}\N{INDIAN RUPEE SIGN}]", ""),
        (r"\\(?:left|right|displaystyle|textstyle)(?![a-zA-Z])|\\?\$|\\[()\[\]]", ""),
        (DEGREE, " degrees "),
        (r"\\(?:text|mbox|textbf|textrm|mathrm|mathbf|boldsymbol|underline|operatorname)\s*\{([^{}]*)\}", r" \1 "),
        (r"\\[,;: ]|~|\\q?quad(?![a-zA-Z])", " "),
        (r"\\%", "%"),
        (r"(?<![\w)}])\*\*|\*\*(?![\w({\\])", ""),  # bold type, not 2**10
        (r"\\approx(?![a-zA-Z])", "\N{ALMOST EQUAL TO}"),
    )
)
_D = r"(?:\d{1,3}(?:,\d{3})++|\d++)(?:\.\d++)?+|\.\d++"
_EXPONENT = r"(?:\{\s*([-+]?\d{1,6})\s*\}|([-+]?\d{1,6}))"
_PART = rf"(?:\{{\s*(-?\s*(?:{_D}))\s*\}}|(\d))"
_FRACTION = rf"\\frac\s*{_PART}\s*{_PART}"
_BEFORE = re.compile(
    r"[\s(){}*_:;,~`\"'>\]\N{ALMOST EQUAL TO}]*+"
    rf"(?:(?!(?:{MAGNITUDES})\b)[A-Za-z][A-Za-z'\N{{RIGHT SINGLE QUOTATION MARK}}-]*+"
    r"(?=[\s:,(\N{ALMOST EQUAL TO}=-]|\.\s)(?:[\s(:;,*_~`\"'=\N{ALMOST EQUAL TO}]|\.(?!\d))*+)*+"
)
_SIGN = re.compile(r"([-+]?)\s*")
_NEGATIVE = re.compile(r"\b(?:negative|minus)\s*\Z", re.IGNORECASE)
# words that change the number after them
_OPERATORS_BEFORE = re.compile(
    r"(?<!['\N{RIGHT SINGLE QUOTATION MARK}-])\b(?:(?i:not|sqrt|root|log|ln|sin|cos|tan|pi)|[b-zB-HJ-Z])\b"
    r"(?!['\N{RIGHT SINGLE QUOTATION MARK}-])"
)
_MAGNITUDE = re.compile(rf"\s*({MAGNITUDES})\b", re.IGNORECASE)
_FACTORS = {"dozen": 12, **{name: 10**power for name, power in POWERS_OF_TEN.items()}}

_CLOSING = re.compile(r"[\s)\]}*_`\"']*+")
_PERCENT = re.compile(r"(?:%|percent\b)[\s)\]}*_`\"']*+")
_FURTHER_NUMBER = re.compile(
    r"(?:^|(?<=[\s\w(])(?<![,;.] ))\s*\b(?:or|and|plus|minus|times)\s+[-+(\\{]*\s*\.?(?:\d|frac|half|a\s)",
    re.IGNORECASE,
)
_OTHER_NUMBER = re.compile(
    r"(?:or|and|to|plus|minus|times|over|through|by|mod|modulo|squared|cubed|factorial|point|half|halves|thirds?|"
    r"fourths?|quarters?|fifths?|sixths?|sevenths?|eighths?|ninths?|tenths?|hundredths?|thousandths?|x|pi|[ap]\.?m)\b",
    re.IGNORECASE,
)
_WORD = re.compile(rf"(?:[-/]\s*)?(?:[A-Za-z]{{2,}}|[mglLshAVWNJK](?![A-Za-z\\])|a\s+[A-Za-z])|(?:{UNITS})\b")
_GLUED_UNIT = re.compile(rf"(?:{UNITS})\b|[-/]\s*[A-Za-z]{{2}}", re.IGNORECASE)
_REMARK = re.compile(r"\(\s*(?:[A-Za-z]{2}|=)")
_CLAUSE = re.compile(r"[,;:.](?:\s+(?![-+\\{(]*\.?\d)|\s*$)|=\s*[A-Za-z]\w*\s*$|\N{ALMOST EQUAL TO}\s*\Z")


@dataclass(frozen=True)
class Numeral:
    """A number in a text.

    Attributes:
        spelling: as it is written, without currency and percent signs.
        outside: the text before and after it.
    """

    spelling: str
    value: Fraction
    outside: str


def read(text: str) -> Numeral | None:
    r"""Returns the number of a text with only words before it and a unit or a remark after it; None for other texts.

    Example: `read(r"\$2.5 million in all").value == 2_500_000`, `read(r"3\sqrt{2}") is None`.
    """
    for pattern, replacement in _SIMPLER:
        text = pattern.sub(replacement, text)
    before = _BEFORE.match(text)
    assert before is not None  # it may be empty
    if _OPERATORS_BEFORE.search(before.group()):
        return None
    sign = _SIGN.match(text, before.end())
    assert sign is not None
    form = next(((found, evaluate) for pattern, evaluate in _FORMS if (found := pattern.match(text, sign.end()))), None)
    if form is None:
        return None
    found, evaluate = form
    # its value must be defined, and the text after it must not change it
    magnitude = _MAGNITUDE.match(text, found.end())
    end = found.end() if magnitude is None else magnitude.end()
    value = evaluate(tuple(group for group in found.groups() if group is not None))
    if value is None or not _ends(text[end : end + _MAX_TAIL]):
        return None
    if magnitude is not None:
        value *= _FACTORS[magnitude[1].lower()]
    negative = (sign[1] == "-") != (_NEGATIVE.search(before.group()) is not None)
    spelling = ("-" if negative else "") + " ".join(text[found.start() : end].split())
    return Numeral(spelling, -value if negative else value, f"{before.group()} {text[end:]}")


def _ends(tail: str) -> bool:
    """Returns whether a number ends before `tail`: a unit, a remark, a clause or nothing follows, no mathematics."""
    closing = _CLOSING.match(tail)
    assert closing is not None
    tail, glued = tail[closing.end() :], not closing.group()
    percent = _PERCENT.match(tail)
    if percent is not None:
        tail, glued = tail[percent.end() :], False
    if not tail.strip(".,;:? \t\r\n\\"):
        return True
    if _FURTHER_NUMBER.search(tail) or _OTHER_NUMBER.match(tail):
        return False
    if glued and (tail[0].isalpha() or tail[0] in "-/"):
        return _GLUED_UNIT.match(tail) is not None
    return any(pattern.match(tail) is not None for pattern in (_WORD, _REMARK, _CLAUSE))


# --- values ----------------------------------------------------------------------------------------------------------


def _decimal(text: str) -> Fraction | None:
    digits = re.sub(r"[,\s]", "", text)
    return Fraction(digits) if len(digits) <= _MAX_DIGITS else None


def _number(groups: tuple[str, ...]) -> Fraction | None:
    return _decimal(groups[0])


def _ratio(groups: tuple[str, ...]) -> Fraction | None:
    above, below = map(_decimal, groups)
    return above / below if above is not None and below else None


def _mixed(groups: tuple[str, ...]) -> Fraction | None:
    r"""Adds a whole number and a proper fraction; None for `2\frac{3}{2}`, which may be meant as a product."""
    whole, part = _decimal(groups[0]), _ratio(groups[1:])
    return whole + part if whole is not None and part is not None and 0 <= part < 1 else None


def _power(groups: tuple[str, ...]) -> Fraction | None:
    base, exponent = _decimal(groups[0]), int(groups[1])
    if base is None or abs(exponent) > _MAX_EXPONENT or (base == 0 and exponent <= 0):
        return None
    return base**exponent


def _scientific(groups: tuple[str, ...]) -> Fraction | None:
    factor, power = _decimal(groups[0]), _power(("10", groups[1]))
    return factor * power if factor is not None and power is not None else None


# the longer forms first; the first match wins
_FORMS: tuple[tuple[re.Pattern[str], Callable[[tuple[str, ...]], Fraction | None]], ...] = tuple(
    (re.compile(pattern), evaluate)
    for pattern, evaluate in (
        (rf"({_D})\s*(?:\\times|[x*])\s*10\s*(?:\^|\*\*)\s*{_EXPONENT}(?!\d)", _scientific),
        (r"((?:\d++)(?:\.\d++)?+|\.\d++)[eE]([-+]?\d{1,6})(?!\d)", _scientific),
        (rf"({_D})\s*(?:\^|\*\*)\s*{_EXPONENT}(?!\d)", _power),
        (rf"(\d++)\s*{_FRACTION}", _mixed),
        (r"(\d++)\s+(\d++)\s*/\s*(\d++)(?![\d.,]*\d)", _mixed),
        (_FRACTION, _ratio),
        (rf"({_D})\s*/\s*({_D})(?!,?\d|\.\d)", _ratio),
        (rf"({_D})(?!,?\d|\.\d)", _number),
    )
)
