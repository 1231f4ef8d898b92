r"""Canonical spellings of answers: what is written differently and means the same becomes the same text.

Nothing here knows mathematics beyond decimal numbers: `\frac{1}{2}` and `0.5` stay different, and math-verify compares
them (`grade.py`).
"""

from __future__ import annotations

import re

# of a number in plain text, where `\text{...}` does not mark them
UNITS = (
    "degrees?|deg|radians?|percent|dollars?|cents?|usd|units?|seconds?|secs?|minutes?|mins?|hours?|hrs?|days?|weeks?|"
    "months?|years?|mm|cm|km|m|centimeters?|meters?|kilometers?|millimeters?|inch|inches|in|ft|foot|feet|yards?|yd|"
    "miles?|mi|mph|kg|grams?|kilograms?|pounds?|lbs?|ounces?|oz|liters?|litres?|gallons?|ml"
)
_STYLES = "text|mbox|textbf|textrm|mathrm|mathbf|boldsymbol|textit|mathit|underline|bm"
_POWER = r"(?:\s*\^\s*\{?[23]\}?|[²³])?"

# Applied in this order: normalises spacing and spelling, and removes units. A percent sign counts as a unit, because
# 50 answers "how many percent".
CLEANING = tuple(
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r",\s*\\!\s*", ","),
        ("[\N{MINUS SIGN}\N{EN DASH}]", "-"),
        ("[\N{NO-BREAK SPACE}\N{THIN SPACE}\N{NARROW NO-BREAK SPACE}]", " "),
        ("\N{INFINITY}", r"\\infty "),
        ("\N{LESS-THAN OR EQUAL TO}|\\\\leqslant(?![a-zA-Z])|\\\\leq(?![a-zA-Z])", r"\\le "),
        ("\N{GREATER-THAN OR EQUAL TO}|\\\\geqslant(?![a-zA-Z])|\\\\geq(?![a-zA-Z])", r"\\ge "),
        (r"\\varnothing(?![a-zA-Z])", r"\\emptyset"),
        (r"\\(?:text|mathrm|operatorname)\s*\{\s*([ei])\s*\}", r"\1"),  # before units go: the imaginary unit
        (r"^\s*([+-]?\d+(?:\.\d+)?)[eE]([+-]?\d+)\s*$", r"\1 \\times 10^{\2}"),
        ("\N{GREEK SMALL LETTER PI}", r"\\pi "),
        ("\N{SQUARE ROOT}\\s*(\\d+|[a-zA-Z])", r"\\sqrt{\1}"),
        ("\N{MULTIPLICATION SIGN}", r"\\times "),
        ("\N{DOT OPERATOR}|\N{MIDDLE DOT}", r"\\cdot "),
        (r"\\(?:displaystyle|textstyle|limits|rm|bf)(?![a-zA-Z])", ""),
        (r"(?<=\d)(?:\\[,;: ]|~| |\{,\})(?=\d{3}(?!\d))", ""),  # 10\,080 and 10{,}080
        (r"(?<!\\)\\[!,;: ]|~|\\q?quad(?![a-zA-Z])", " "),
        (r"\\(?:left|right|[bB]igg?[lr]?)(?![a-zA-Z])|\$|\\\$", ""),
        (r"\\[dtc]frac(?![a-zA-Z])", r"\\frac"),
        (r"\\frac\s*(\d|[a-zA-Z]|\\[a-zA-Z]+(?=[\s\d\\]))", r"\\frac{\1}"),
        (r"(\\frac\{[^{}]*\})\s*(\d|[a-zA-Z]|\\pi(?![a-zA-Z]))", r"\1{\2}"),
        (r"\^\s*(?:\\circ(?![a-zA-Z])|\{\s*\\circ\s*\})|°|\\degree(?![a-zA-Z])", ""),
        (r"(?<=[\d}])\s*\\?%", ""),
        (rf"(?<=[\d}})i])\s*\\(?:text|mbox|mathrm|textrm|operatorname)\s*\{{[^{{}}]*\}}{_POWER}\s*$", ""),
        (rf"(?<=[\d}}])\s*(?:(?:square|cubic|sq\.?)\s+)?\b(?:{UNITS}){_POWER}\s*$", ""),
        (rf"^\s*\\(?:{_STYLES})\s*\{{([^{{}}]*)\}}\s*$", r"\1"),
        (r"(?:[.,;\s]|\\\\)+$", ""),
    )
)
NUMBER = re.compile(r"([+-]?)\s?(\d+|\d{1,3}(?:,\d{3})+)?(?:\.(\d*))?")
_REPEATING = re.compile(r"(?<!\d)(\d++)\.(\d*+)\\(?:overline|bar)\s*\{(\d{1,50})\}")
_BASED = re.compile(r"(\d[0-9A-Za-z]*|[0-9A-Fa-f]+(?=_\{?1[1-6]\}?$))_\{?(\d{1,2})\}?")
_VALUE = r"([^<>=,]+?)"
_RELATION = r"\s*(<|>|\\le(?![a-zA-Z])|\\ge(?![a-zA-Z]))\s*"
_BETWEEN = re.compile(rf"{_VALUE}{_RELATION}([a-zA-Z]){_RELATION}{_VALUE}")
_ONE_SIDED = re.compile(rf"([a-zA-Z]){_RELATION}{_VALUE}")
_PERCENT = re.compile(r"\\?%|\bpercent\b|\\text\s*\{\s*percent\s*\}")


def clean(text: str) -> str:
    """An answer without units, dollar signs and spacing commands, in one spelling of fractions; not yet canonical."""
    for pattern, replacement in CLEANING:
        text = pattern.sub(replacement, text)
    return _REPEATING.sub(_as_fraction, text).strip()


def _as_fraction(found: re.Match[str]) -> str:
    r"""Example: `0.1\overline{6}` -> `\frac{15}{90}`."""
    whole, fixed, repeated = found[1], found[2], found[3]
    numerator = int(whole + fixed + repeated) - int(whole + fixed)
    return rf"\frac{{{numerator}}}{{{10 ** len(fixed) * (10 ** len(repeated) - 1)}}}"


def canonical(text: str) -> str:
    """A canonical spelling: cleaned, spaces only between digits, one form per decimal number, words in lower case."""
    text = re.sub(r"\s+", " ", clean(text))
    number = NUMBER.fullmatch(text)  # before spaces go: "1, 200" is a list, "1,200" is a number
    if number and (number[2] or number[3]):
        whole, fraction = (number[2] or "").replace(",", "").lstrip("0"), (number[3] or "").rstrip("0")
        value = (whole or "0") + ("." + fraction if fraction else "")
        return "-" + value if number[1] == "-" and value != "0" else value
    # a list of digits keeps its space, so that it stays another text than the number with thousands separators
    text = re.sub(r"(?<!\d)(?<!\d,) | (?!\d)", "", text)
    choice = re.fullmatch(r"\(([A-Za-z])\)", text)
    text = choice[1] if choice else text
    return text.lower() if text.isalpha() and len(text) > 1 else text


def is_number(text: str) -> bool:
    """Whether a canonical spelling is a decimal number."""
    return re.fullmatch(r"-?\d+(\.\d+)?", text) is not None


def is_words(answer: str) -> bool:
    """Whether the whole answer is words: as an expression, `east` would be a product and equal to `seat`."""
    if re.fullmatch(r"\s*\\(?:text|mbox)(?:bf|rm|it)?\s*\{[^{}]*\}\s*", answer):
        return True
    # three letters may be the product of three variables
    return re.fullmatch(r"\s*(?=.*[A-Za-z]{4}|(?:yes|no|odd)\b)[A-Za-z' -]+\s*", answer, re.IGNORECASE) is not None


def same_in_base(given: str, answer: str) -> bool | None:
    """Whether numerals such as `52_8` are equal; None if neither canonical spelling has a base.

    A numeral without a base is read in the base of the reference, because the problem names it.
    """
    found, wanted = _BASED.fullmatch(given), _BASED.fullmatch(answer)
    if found is None and wanted is None:
        return None
    if found is None and wanted is not None:
        return given.lower() == wanted[1].lower()
    value = _value(found) if found is not None else None
    return value is not None and str(value) == (str(_value(wanted)) if wanted is not None else answer)


def _value(numeral: re.Match[str]) -> int | None:
    try:
        return int(numeral[1], int(numeral[2]))
    except ValueError:  # a digit that the base does not have, or a base above 36
        return None


def as_interval(text: str) -> str | None:
    r"""A cleaned inequality in one letter as an interval: `-2 \le x < 7` -> `[-2,7)`; None for other texts."""
    between = _BETWEEN.fullmatch(text.strip())
    if between:
        low, first, _, second, high = between.groups()
        if first in (">", r"\ge"):
            low, first, second, high = high, _turned(second), _turned(first), low
        if first in (">", r"\ge") or second in (">", r"\ge"):
            return None
        return f"{'(' if first == '<' else '['}{low},{high}{')' if second == '<' else ']'}"
    one_sided = _ONE_SIDED.fullmatch(text.strip())
    if one_sided is None:
        return None
    _, relation, bound = one_sided.groups()
    if relation in (">", r"\ge"):
        return rf"{'(' if relation == '>' else '['}{bound},\infty)"
    return rf"(-\infty,{bound}{')' if relation == '<' else ']'}"


def _turned(relation: str) -> str:
    return {"<": ">", ">": "<", r"\le": r"\ge", r"\ge": r"\le"}[relation]


def is_interval(text: str) -> bool:
    """Whether a cleaned answer is an interval or a union of intervals, perhaps after `x \\in`."""
    return re.fullmatch(r"(?:[a-zA-Z]\s*\\in\s*)?[(\[].*,.*[)\]]", text, re.DOTALL) is not None


def is_percentage(text: str) -> bool:
    """Whether an answer has a percent sign or ends with the word."""
    return _PERCENT.search(text) is not None
