r"""Canonical spellings of answers: what is written differently and means the same becomes the same text.

Nothing here knows mathematics beyond decimal numbers: `\frac{1}{2}` and `0.5` stay different, and math-verify compares
them (`grade.py`).
"""

from __future__ import annotations

import re
from fractions import Fraction

# of a number in plain text, where `\text{...}` does not mark them
UNITS = (
    "degrees?|deg|radians?|percent|dollars?|cents?|usd|units?|seconds?|secs?|minutes?|mins?|hours?|hrs?|days?|weeks?|"
    "months?|years?|mm|cm|km|m|centimeters?|meters?|kilometers?|millimeters?|inch|inches|in|ft|foot|feet|yards?|yd|"
    "miles?|mi|mph|kg|grams?|kilograms?|pounds?|lbs?|ounces?|oz|liters?|litres?|gallons?|ml"
)
MAGNITUDES = "dozen|hundred|thousand|million|billion|trillion"  # words that are part of a number
_STYLES = "text|mbox|textbf|textrm|mathrm|mathbf|boldsymbol|textit|mathit|underline|bm"
# a trailing text that changes the number before it is no unit
_NO_UNIT = rf"(?!\s*(?:{MAGNITUDES}|(?:or|and)\s+(?:more|less|fewer|greater|higher|lower|above|below|a\s+half))\b)"
_POWER = r"(?:\s*\^\s*\{?[23]\}?|[²³])?"

# Applied in this order: normalises spacing and spelling, and removes units. A percent sign counts as a unit, because
# 50 answers "how many percent".
CLEANING = tuple(
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"\s*\\!\s*,\s*|,\s*\\!\s*", ","),
        (r"\\colon(?![a-zA-Z])\s*", ":"),
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
        (r"(?<=\d)(?:\\!\s*)?(?:\\[,;: ]|~| |\{,\})(?=\d{3}(?!\d))", ""),  # 10\,080 and 10{,}080
        (r"(?<!\\)\\[!,;: ]|~|\\q?quad(?![a-zA-Z])", " "),
        (r"\\(?:left|right|[bB]igg?[lr]?)(?![a-zA-Z])|\$|\\\$", ""),
        (r"\\[dtc]frac(?![a-zA-Z])", r"\\frac"),
        (r"\\frac\s*(\d|[a-zA-Z]|\\[a-zA-Z]+(?=[\s\d\\]))", r"\\frac{\1}"),
        (r"(\\frac\{[^{}]*\})\s*(\d|[a-zA-Z]|\\pi(?![a-zA-Z]))", r"\1{\2}"),
        (r"\^\s*(?:\\circ(?![a-zA-Z])|\{\s*\\circ\s*\})|°|\\degree(?![a-zA-Z])", ""),
        (r"(?<=[\d}])\s*\\?%", ""),
        (rf"(?<=[\d}})i])\s*\\(?:text|mbox|mathrm|textrm|operatorname)\s*\{{{_NO_UNIT}[^{{}}]*\}}{_POWER}\s*$", ""),
        (rf"(?<=[\d}}])\s*(?:(?:square|cubic|sq\.?)\s+)?\b(?:{UNITS}){_POWER}\s*$", ""),
        (r"(?:[.,;\s]|\\\\)+$", ""),
        (rf"^\s*\\(?:{_STYLES})\s*\{{([^{{}}]*)\}}\s*$", r"\1"),
        (r"(?:[.,;\s]|\\\\)+$", ""),
    )
)
NUMBER = re.compile(r"([+-]?)\s?(\d+|\d{1,3}(?:,\d{3})+)?(?:\.(\d*))?")
_REPEATING = re.compile(r"(?<!\d)(\d++)\.(\d*+)\\(?:overline|bar)\s*\{(\d{1,50})\}")
_MAGNITUDE = re.compile(
    r"(?<![\d.,/^_{}])(\d{1,3}(?:,\d{3})++|\d{1,30}+)(?:\.(\d{1,30}+))?(?:\s|~|\\[,;: ])*"
    r"(?:\\(?:text|mbox|mathrm|textrm)\s*\{\s*(hundred|thousand|million|billion|trillion)\b([^{}]*)\}"
    r"|(hundred|thousand|million|billion|trillion)\b)"
)
_ZEROS = {"hundred": 2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12}
_UNIT_NAMES = (
    *("second sec", "minute min", "hour hr", "day", "week", "month", "year", "mm millimeter", "cm centimeter"),
    *("km kilometer", "m meter", "inch inches in", "ft foot feet", "yard yd", "mile mi", "mph", "kg kilogram"),
    *("gram", "pound lb", "ounce oz", "liter litre", "gallon", "ml", "dollar usd", "cent"),
)
_UNIT_OF = {name: names.split()[0] for names in _UNIT_NAMES for each in names.split() for name in (each, f"{each}s")}
_LAST_UNIT = re.compile(
    r"(?<=[\d}])(?:\s|~|\\[,;:! ])*(?:\\(?:text|mbox|mathrm|textrm)\s*\{)?\s*((?:square|cubic|sq\.?)\s+)?"
    rf"\b({UNITS})\b\.?\s*\}}?(\s*\^\s*\{{?[23]\}}?|[²³])?[\s.$]*\Z",
    re.IGNORECASE,
)
_BASED = re.compile(r"(\d[0-9A-Za-z]*|[0-9A-Fa-f]+(?=_\{?1[1-6]\}?$))_\{?(\d{1,2})\}?")
_VALUE = r"([^<>=,]+?)"
_RELATION = r"\s*(<|>|\\le(?![a-zA-Z])|\\ge(?![a-zA-Z]))\s*"
_BETWEEN = re.compile(rf"{_VALUE}{_RELATION}([a-zA-Z]){_RELATION}{_VALUE}")
_ONE_SIDED = re.compile(rf"([a-zA-Z]){_RELATION}{_VALUE}")
_ONE_SIDED_TURNED = re.compile(rf"{_VALUE}{_RELATION}([a-zA-Z])")
_UNEQUAL = re.compile(rf"([a-zA-Z])\s*\\(?:neq|ne)(?![a-zA-Z])\s*{_VALUE}")
_MEMBER = re.compile(r"\s*[a-zA-Z]\s*\\in(?![a-zA-Z])")
_OR = re.compile(r"\\(?:text|mbox|mathrm|textrm)\s*\{\s*or\s*\}|\bor\b|\\(?:lor|vee)(?![a-zA-Z])")
_AND = re.compile(r"\\(?:text|mbox|mathrm|textrm)\s*\{\s*and\s*\}|\band\b|\\(?:land|wedge)(?![a-zA-Z])")
_PERCENT = re.compile(r"\\?%|\bpercent\b|\\text\s*\{\s*percent\s*\}")


def clean(text: str) -> str:
    """An answer without units, dollar signs and spacing commands, in one spelling of fractions; not yet canonical."""
    text = _MAGNITUDE.sub(_written_out, text)
    for pattern, replacement in CLEANING:
        text = pattern.sub(replacement, text)
    return _REPEATING.sub(_as_fraction, text).strip()


def _written_out(found: re.Match[str]) -> str:
    """Example: `2.5 million` -> `2500000`."""
    zeros, digits = _ZEROS[found[3] or found[5]], found[2] or ""
    number = found[1].replace(",", "") + digits[:zeros].ljust(zeros, "0")
    unit = f"\\text{{{found[4]}}}" if (found[4] or "").strip() else ""
    return number + (f".{digits[zeros:]}" if digits[zeros:] else "") + unit


def unit_of(text: str) -> tuple[str, int | None] | None:
    """The unit behind the number of an answer, or its dollar sign, by one name, and its power; None without one.

    The power is None where none is written: `864 inches` may well be square inches. Angles and percent are left out.
    """
    if re.match(r"\s*\$?\s*\\\$", text):
        return "dollar", None
    found = _LAST_UNIT.search(text[-60:])
    name = _UNIT_OF.get(found[2].lower()) if found is not None else None
    if found is None or name is None:
        return None
    power = 3 if re.search(r"cubic|3|\N{SUPERSCRIPT THREE}", (found[1] or "") + (found[3] or ""), re.I) else 2
    return name, power if found[1] or found[3] else None


def same_unit(one: str, other: str) -> bool:
    """Whether two answers may have the same unit: they do unless both say which, and it differs."""
    units = unit_of(one), unit_of(other)
    if units[0] is None or units[1] is None:
        return True
    return units[0][0] == units[1][0] and (None in (units[0][1], units[1][1]) or units[0][1] == units[1][1])


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
    r"""Cleaned inequalities in one letter as intervals: `-2 \le x < 7` -> `[-2,7)`; None for other texts.

    `or` joins intervals, `and` a lower and an upper bound, `x \ne 3` is all numbers but one, and of `x \in S` the set
    is what counts.
    """
    member = _MEMBER.match(text)
    if member is not None:
        return text[member.end() :].strip()
    parts = _OR.split(_conjoined(text))
    bounds = [bound for part in parts for bound in _bounds(part)]
    if not bounds or len({letter for letter, *_ in bounds}) > 1 or any(not _bounds(part) for part in parts):
        return None
    return r"\cup".join(interval for _, interval in bounds)


def _conjoined(text: str) -> str:
    """Two bounds that a comma separates, with the word that is meant: `x < 7, x > 2` is between them."""
    sides = text.split(",")
    if len(sides) != 2:
        return text
    found = [_one_sided(side) for side in sides]
    ends = {each[1]: canonical(each[2].strip("[]()")) for each in found if each is not None}
    if len(ends) < 2 or not all(map(is_number, ends.values())):
        return text
    word = "and" if Fraction(ends["lower"]) < Fraction(ends["upper"]) else "or"
    return f"{sides[0]} {word} {sides[1]}"


def _bounds(text: str) -> list[tuple[str, str]]:
    """The (letter, interval) of an inequality; [] for other texts."""
    sides = [_one_sided(part) for part in _AND.split(text)]
    if len(sides) == 2 and sides[0] is not None and sides[1] is not None:
        lower, upper = sorted(sides, key=lambda side: side is not None and side[1] == "upper")
        if lower is None or upper is None or (lower[0], lower[1], upper[1]) != (upper[0], "lower", "upper"):
            return []
        return [(lower[0], f"{lower[2]},{upper[2]}")]
    if len(sides) > 1:
        return []
    between, unequal = _BETWEEN.fullmatch(text.strip()), _UNEQUAL.fullmatch(text.strip())
    if between:
        low, first, letter, second, high = between.groups()
        if first in (">", r"\ge"):
            low, first, second, high = high, _turned(second), _turned(first), low
        if first in (">", r"\ge") or second in (">", r"\ge"):
            return []
        return [(letter, f"{'(' if first == '<' else '['}{low},{high}{')' if second == '<' else ']'}")]
    if unequal:
        letter, value = unequal.groups()
        return [(letter, rf"(-\infty,{value})"), (letter, rf"({value},\infty)")]
    if sides[0] is None:
        return []
    letter, side, bound = sides[0]
    return [(letter, rf"{bound},\infty)" if side == "lower" else rf"(-\infty,{bound}")]


def _one_sided(text: str) -> tuple[str, str, str] | None:
    r"""(Letter, "lower" or "upper", the end of the interval): `x > 2` -> (x, lower, `(2`)."""
    found, turned = _ONE_SIDED.fullmatch(text.strip()), _ONE_SIDED_TURNED.fullmatch(text.strip())
    if found:
        letter, relation, bound = found.groups()
    elif turned:
        bound, relation, letter = turned.groups()
        relation = _turned(relation)
    else:
        return None
    if relation in (">", r"\ge"):
        return letter, "lower", ("(" if relation == ">" else "[") + bound
    return letter, "upper", bound + (")" if relation == "<" else "]")


def _turned(relation: str) -> str:
    return {"<": ">", ">": "<", r"\le": r"\ge", r"\ge": r"\le"}[relation]


def is_interval(text: str) -> bool:
    """Whether a cleaned answer is an interval or a union of intervals, perhaps after `x \\in`."""
    return re.fullmatch(r"(?:[a-zA-Z]\s*\\in\s*)?[(\[].*,.*[)\]]", text, re.DOTALL) is not None


def is_percentage(text: str) -> bool:
    """Whether an answer has a percent sign or ends with the word."""
    return _PERCENT.search(text) is not None
