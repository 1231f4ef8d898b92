r"""Computes canonical spellings of answers: different notations of the same answer become the same text.

This module handles no mathematics beyond decimal numbers: `\frac{1}{2}` and `0.5` stay different, and math-verify
compares them (`equality.py`).
"""

from __future__ import annotations

import re
from fractions import Fraction
from typing import NamedTuple

# units in plain text, without a `\text{...}` around them: one pattern per unit
_DOLLAR, _NOT_COMPARED = "dollars?|usd", "degrees?|deg|radians?|percent(?:age)?|pct|units?"
_UNITS = (
    *(_DOLLAR, "cents?", "seconds?|secs?", "minutes?|mins?", "hours?|hrs?", "days?", "weeks?", "months?", "years?"),
    *("mm|millimeters?", "cm|centimeters?", "m|meters?", "km|kilometers?", "inch|inches|in", "ft|foot|feet", "mph"),
    *("yards?|yd", "miles?|mi", "grams?", "kg|kilograms?", "pounds?|lbs?", "ounces?|oz", "liters?|litres?"),
    *("gallons?", "ml"),
)
UNITS = "|".join((_NOT_COMPARED, *_UNITS))
POWERS_OF_TEN = {"hundred": 2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12}
_POWER_NAMES = "|".join(POWERS_OF_TEN)
MAGNITUDES = f"dozen|{_POWER_NAMES}"  # words that are part of a number
TEXT = r"\\(?:text|mbox|mathrm|textrm)\s*\{"  # begins plain text in a formula
DEGREE = r"\^\s*(?:\\circ(?![a-zA-Z])|\{\s*\\circ\s*\})|\N{DEGREE SIGN}|\\degree(?![a-zA-Z])"
_STYLES = "text|mbox|textbf|textrm|mathrm|mathbf|boldsymbol|textit|mathit|underline|bm"
# a trailing text that changes the number before it is no unit
_NO_UNIT = rf"(?!\s*(?:{MAGNITUDES}|(?:or|and)\s+(?:more|less|fewer|greater|higher|lower|above|below|a\s+half))\b)"
_POWER = r"(?:\s*\^\s*\{?[23]\}?|[²³])?"

# Applied in this order: normalises spacing and spelling, and removes units. A percent sign counts as a unit, because
# 50 answers "how many percent". Each is needed by a pair in tests/unit/evaluation/test_grading_rules.py.
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
        (DEGREE, ""),
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
    rf"(?:{TEXT}\s*({_POWER_NAMES})\b([^{{}}]*)\}}|({_POWER_NAMES})\b)"
)
_LAST_UNIT = re.compile(
    rf"(?<=[\d}}])(?:\s|~|\\[,;:! ])*(?:{TEXT})?\s*((?:square|cubic|sq\.?)\s+)?"
    rf"\b({UNITS})\b\.?\s*\}}?(\s*\^\s*\{{?[23]\}}?|[²³])?[\s.$]*\Z",
    re.IGNORECASE,
)
_BEFORE_UNIT = rf"(?<=[\d}}])(?:\s|~|\\[,;:! ])*(?:{TEXT})?\s*"
# compared, but kept in plain text, where they may be letters of a formula; J is not j, and N is not n
_SI_UNIT = re.compile(rf"{_BEFORE_UNIT}(k?[JNW]|(?i:(?:kilo)?(?:joule|newton|watt)s?))\b[\s.$}}]*\Z")
_TERM = re.compile(r"[\d}]\s*[A-Za-z]\b")
_RATE = re.compile(
    rf"{_BEFORE_UNIT}({UNITS})[\s}}]*(?:/|\bper\b)\s*(?:{TEXT})?\s*({UNITS}|h|s)\b"
    r"[\s}]*(\^\s*\{?[23]\}?|[²³])?[\s.$}]*\Z",
    re.IGNORECASE,
)
_SPEED = re.compile(rf"({_BEFORE_UNIT})(mph|kmph|kph)\b", re.IGNORECASE)
_MODULUS = re.compile(r"(?:\b|(?<=\\[pb]))mod(?![a-zA-Z])[\s{}(~\\,;]*(\d+|[a-zA-Z])[\s.$})]*\Z")
_MONEY = (_DOLLAR, "cents?")
_SHORT = {"h": "hour", "s": "second", "mph": "miles per hour", "kmph": "km per hour", "kph": "km per hour"}
_BASED = re.compile(r"(\d[0-9A-Za-z]*|[0-9A-Fa-f]+(?=_\{?1[1-6]\}?$))_\{?(\d{1,2})\}?")
_VALUE = r"([^<>=,]+?)"
_RELATION = r"\s*(<|>|\\le(?![a-zA-Z])|\\ge(?![a-zA-Z]))\s*"
_TURNED = {"<": ">", ">": "<", r"\le": r"\ge", r"\ge": r"\le"}
_BETWEEN = re.compile(rf"{_VALUE}{_RELATION}([a-zA-Z]){_RELATION}{_VALUE}")
_ABOVE_OR_BELOW = re.compile(rf"([a-zA-Z]){_RELATION}{_VALUE}|{_VALUE}{_RELATION}([a-zA-Z])")
_UNEQUAL = re.compile(rf"([a-zA-Z])\s*\\(?:neq|ne)(?![a-zA-Z])\s*{_VALUE}")
_MEMBER = re.compile(r"\s*[a-zA-Z]\s*\\in(?![a-zA-Z])")
_OR = re.compile(rf"{TEXT}\s*or\s*\}}|\bor\b|\\(?:lor|vee)(?![a-zA-Z])")
_AND = re.compile(rf"{TEXT}\s*and\s*\}}|\band\b|\\(?:land|wedge)(?![a-zA-Z])")
_PERCENT = re.compile(r"\\?%|\b(?:percent(?:age)?|pct)\b|\\text\s*\{\s*percent\s*\}")


def clean(text: str) -> str:
    """Removes units, dollar signs and spacing commands, and unifies fractions; the result is not yet canonical."""
    text = _MAGNITUDE.sub(_written_out, text)
    for pattern, replacement in CLEANING:
        text = pattern.sub(replacement, text)
    return _REPEATING.sub(_as_fraction, text).strip()


def _written_out(found: re.Match[str]) -> str:
    """Writes out a number with a word. Example: `2.5 million` -> `2500000`."""
    zeros, digits = POWERS_OF_TEN[found[3] or found[5]], found[2] or ""
    number = found[1].replace(",", "") + digits[:zeros].ljust(zeros, "0")
    unit = f"\\text{{{found[4]}}}" if (found[4] or "").strip() else ""
    return number + (f".{digits[zeros:]}" if digits[zeros:] else "") + unit


def _unit_of(text: str) -> tuple[str, int | None] | None:
    """Returns (pattern of the unit or dollar sign of an answer, the unit's power); None without a unit.

    The power is None where none is written: `864 inches` may well be square inches. Angles and percent are left out.
    A rate has the patterns of both units and the power of the second one; a modulus counts as a unit.
    """
    if re.match(r"\s*\$?\s*\\\$", text):
        return _DOLLAR, None
    end = _SPEED.sub(lambda found: found[1] + _SHORT[found[2].lower()], text[-60:])
    if modulus := _MODULUS.search(end):
        return f"mod {modulus[1]}", None
    named = _SI_UNIT.search(end)
    if named and not _TERM.search(end[: named.start()]):  # `2N+3J` is a sum of letters
        word = named[1].lower()
        letters = ("k" if word.startswith("kilo") else "") + word.removeprefix("kilo")[0].upper()
        return named[1] if len(word) < 3 else letters, None
    if rate := _RATE.search(end):
        return f"{_pattern_of(rate[1])} per {_pattern_of(rate[2])}", _power(rate[3]) if rate[3] else 1
    found = _LAST_UNIT.search(end)
    if found is None or _pattern_of(found[2]) == _NOT_COMPARED:
        return None
    written = (found[1] or "") + (found[3] or "")
    return _pattern_of(found[2]), _power(written) if written else None


def _pattern_of(word: str) -> str:
    """Returns the pattern of a unit, which all its spellings share."""
    word = _SHORT.get(word.lower(), word)
    return next((unit for unit in (_NOT_COMPARED, *_UNITS) if re.fullmatch(unit, word, re.IGNORECASE)), word)


def _power(written: str) -> int:
    return 3 if re.search(r"cubic|3|\N{SUPERSCRIPT THREE}", written, re.IGNORECASE) else 2


def same_unit(one: str, other: str) -> bool:
    """Returns whether two answers may have the same unit: they may, unless both name one and the units differ.

    An amount of money may stand for a rate, whose problem says what it is paid for.
    """
    first, second = _unit_of(one), _unit_of(other)
    if first is None or second is None:
        return True
    if first[0] == second[0]:
        return None in (first[1], second[1]) or first[1] == second[1]
    short, long = sorted((first[0], second[0]), key=len)
    return short in _MONEY and long.startswith(f"{short} per ")


def _as_fraction(found: re.Match[str]) -> str:
    r"""Converts a repeating decimal. Example: `0.1\overline{6}` -> `\frac{15}{90}`."""
    whole, fixed, repeated = found[1], found[2], found[3]
    numerator = int(whole + fixed + repeated) - int(whole + fixed)
    return rf"\frac{{{numerator}}}{{{10 ** len(fixed) * (10 ** len(repeated) - 1)}}}"


def canonical(text: str) -> str:
    """Returns the canonical spelling: cleaned, spaces only between digits, one form per number, words in lower case."""
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
    """Returns whether a canonical spelling is a decimal number."""
    return re.fullmatch(r"-?\d+(\.\d+)?", text) is not None


def is_words(answer: str) -> bool:
    """Returns whether the whole answer is words: as an expression, `east` would be a product and equal to `seat`."""
    if re.fullmatch(r"\s*\\(?:text|mbox)(?:bf|rm|it)?\s*\{[^{}]*\}\s*", answer):
        return True
    # three letters may be the product of three variables
    return re.fullmatch(r"\s*(?=.*[A-Za-z]{4}|(?:yes|no|odd)\b)[A-Za-z' -]+\s*", answer, re.IGNORECASE) is not None


def same_in_base(given: str, answer: str) -> bool | None:
    """Returns whether numerals such as `52_8` are equal; None if neither canonical spelling has a base.

    A numeral without a base is read in the base of the reference, because the problem names it.
    """
    found, wanted = _BASED.fullmatch(given), _BASED.fullmatch(answer)
    if found is None:
        return None if wanted is None else given.lower() == wanted[1].lower()
    value = _value(found)
    return value is not None and str(value) == (answer if wanted is None else str(_value(wanted)))


def _value(numeral: re.Match[str]) -> int | None:
    try:
        return int(numeral[1], int(numeral[2]))
    except ValueError:  # a digit that the base does not have, or a base above 36
        return None


def as_interval(text: str) -> str | None:
    r"""Converts cleaned inequalities in one letter to intervals: `-2 \le x < 7` -> `[-2,7)`; None for other texts.

    `or` joins intervals, `and` joins a lower and an upper bound, `x \ne 3` is all numbers but one, and `x \in S`
    becomes `S`.
    """
    member = _MEMBER.match(text)
    if member is not None:
        return text[member.end() :].strip()
    parts = [_intervals(part) for part in _OR.split(_conjoined(text))]
    found = [each for part in parts for each in part]
    if not all(parts) or len({letter for letter, _ in found}) > 1:
        return None
    return r"\cup".join(interval for _, interval in found)


def _conjoined(text: str) -> str:
    """Replaces the comma between two bounds by `and` if the lower one is less than the upper one, else by `or`."""
    sides = text.split(",")
    if len(sides) != 2:
        return text
    found = [_bound_in(side) for side in sides]
    ends = {each.side: canonical(each.end.strip("[]()")) for each in found if each is not None}
    if len(ends) < 2 or not all(map(is_number, ends.values())):
        return text
    word = "and" if Fraction(ends["lower"]) < Fraction(ends["upper"]) else "or"
    return f"{sides[0]} {word} {sides[1]}"


def _intervals(text: str) -> list[tuple[str, str]]:
    """Returns (letter, interval) of an inequality without `or`, two of them for `x \\ne 3`; [] for other texts."""
    parts, unequal = _AND.split(text), _UNEQUAL.fullmatch(text.strip())
    between = _BETWEEN.fullmatch(text.strip()) if len(parts) == 1 else None
    if between is not None:
        low, first, letter, second, high = between.groups()
        sides: list[_Bound | None] = [_bound(letter, _TURNED[first], low), _bound(letter, second, high)]
    elif len(parts) == 1 and unequal is not None:
        letter, value = unequal.groups()
        return [(letter, rf"(-\infty,{value})"), (letter, rf"({value},\infty)")]
    else:
        sides = [_bound_in(part) for part in parts]
    found = {each.side: each for each in sides if each is not None}
    if len(found) < len(sides) or len({each.letter for each in found.values()}) > 1:
        return []
    low = found["lower"].end if "lower" in found else r"(-\infty"
    high = found["upper"].end if "upper" in found else r"\infty)"
    return [(next(iter(found.values())).letter, f"{low},{high}")]


class _Bound(NamedTuple):
    letter: str
    side: str  # "lower" or "upper"
    end: str  # of the interval


def _bound_in(text: str) -> _Bound | None:
    """Parses a bound. Example: `x > 2` -> (x, lower, `(2`)."""
    found = _ABOVE_OR_BELOW.fullmatch(text.strip())
    if found is None:
        return None
    return _bound(*found.group(1, 2, 3)) if found[1] else _bound(found[6], _TURNED[found[5]], found[4])


def _bound(letter: str, relation: str, value: str) -> _Bound:
    if relation in (">", r"\ge"):
        return _Bound(letter, "lower", ("(" if relation == ">" else "[") + value)
    return _Bound(letter, "upper", value + (")" if relation == "<" else "]"))


def is_interval(text: str) -> bool:
    """Returns whether a cleaned answer is an interval or a union of intervals, perhaps after `x \\in`."""
    return re.fullmatch(r"(?:[a-zA-Z]\s*\\in\s*)?[(\[].*,.*[)\]]", text, re.DOTALL) is not None


def is_percentage(text: str) -> bool:
    """Returns whether an answer has a percent sign, or the word percent, percentage or pct."""
    return _PERCENT.search(text) is not None
