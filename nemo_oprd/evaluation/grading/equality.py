"""Judges whether two answers are equal: as text, by the readings of their notation, and by math-verify.

`judge` first compares answers as text, after removing everything that does not change an answer's meaning
(`spelling.py`); that settles nearly all of AIME and AMC. It compares two plain numbers by value, words by their
letters. The others go to math-verify, restricted to its LaTeX grammar: its other parser passes whole expressions to
Python's `eval` and finds numbers in prose. With LaTeX, sympy evaluates only number tokens (`Integer(10)`).

A model can box `9^{9^{9^9}}`. Python signals neither interrupt such a power (one C call) nor work outside the main
thread. Therefore math-verify runs in a child process, which the operating system ends after the time limit, and
math-verify's own timeouts are off. The child runs `math_verify_child.py` and reads one JSON pair per line. It starts
with the first answer that needs math-verify; a missing math-verify is reported then.

There is no partial credit, and no tolerance beyond math-verify's six decimals.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import json
import logging
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

from nemo_oprd.evaluation.grading.spelling import (
    DEGREE,
    MAGNITUDES,
    TEXT,
    as_interval,
    canonical,
    clean,
    is_interval,
    is_number,
    is_percentage,
    is_words,
    same_in_base,
    same_unit,
)
from nemo_oprd.runtime.signals import JOB_SIGNALS

# Readings of notation beyond spelling: plus-minus, degrees, inequalities, free integers, times of day, units.
#
# `pairs` gives math-verify the readings of two answers, one of which must be equal; `settle` decides about those that
# it would misread. A reading never drops a difference between two answers: `\frac{1 \pm \sqrt{5}}{2}` is both of its
# values.


_MAX_SIGNS, _MAX_VALUES, _MAX_LENGTH = 4, 16, 2_000  # of an answer with plus-minus, and of its list of values
_DEGREE = "\N{RING ABOVE}"  # stands for every spelling of the degree sign while an answer is cleaned
_DEGREES = re.compile(rf"\s*(?:{DEGREE})|(?<=[\d}}])\s*(?:{TEXT}\s*degrees?\s*\}}|degrees?\b)")
_IN_DEGREES = re.compile(
    rf"((?:\d++\s*)?\\frac\{{[^{{}}]*\}}\{{[^{{}}]*\}}|\d++\s*/\s*\d++|\d++(?:\.\d++)?|\.\d++)\s*{_DEGREE}"
)
_TRIGONOMETRY = re.compile(r"\\(?:sin|cos|tan|cot|sec|csc)(?![a-zA-Z])")
_PI = re.compile(r"\\pi(?![a-zA-Z])|\N{GREEK SMALL LETTER PI}")
_SIGN = re.compile(r"\\(pm|mp)(?![a-zA-Z])\s*")
_BOUND = re.compile(r"[<>]|\\(?:le|ge|ne|neq|in)(?![a-zA-Z])")
_CONJUNCTION = re.compile(rf"\s*,?\s*(?:{TEXT}\s*(?:or|and)\s*\}}|\b(?:or|and)\b)\s*")
_LABEL = re.compile(r"\s*[a-zA-Z](?:_\{?\w\}?)?\s*=\s*")
_DECIMAL_POWER = re.compile(r"\^\s*(?:\{\s*(-?\d*\.\d+)\s*\}|(-?\d*\.\d+))")
_MIXED = re.compile(r"([+-]?\d+)\s+(\d+)\s*/\s*(\d+)")
_INTEGERS = re.compile(
    r"[\s,;(]*(?:\\text\s*\{[^{}]*\}\s*)?([a-zA-Z])\s*"
    r"(?:\\in\s*(?:\\math(?:bb|bf|cal)\s*\{?\s*Z\s*\}?|\\Z|Z)|\\text\s*\{[^{}]*\binteger\b[^{}]*\})[\s)]*"
)
_FREE = set("klmn")  # letters that stand for any integer
_TIME = re.compile(rf"(\d{{1,2}})(?:[:.](\d\d))?\s*(?:{TEXT}\s*)?([ap])\.?\s*m\b\.?\s*\}}?", re.IGNORECASE)
_CLOCK = re.compile(r"(\d{1,2}):(\d\d)")
# words after a cleaned answer that change it, and that math-verify ignores
_QUALIFIED = re.compile(
    rf"(?<=[\w}})\]])\s*(?:{TEXT})?\s*"
    rf"(?:{MAGNITUDES}|or\s+(?:more|less|fewer|greater|higher|lower|above|below)|and\s+a\s+(?:half|third|quarter))\b"
)
_RATIO = re.compile(r"-?[\d.]+(?:/[\d.]+)?(?::-?[\d.]+(?:/[\d.]+)?)+")


def unlabelled(given: str, answer: str) -> tuple[str, str]:
    """Returns both answers; if only one has an equals sign, without the name before it: `x = 5` -> `5`."""
    if "=" not in answer and given.count("=") == 1:
        return _without_label(given), answer
    return given, _without_label(answer) if "=" not in given and answer.count("=") == 1 else answer


def _without_label(text: str) -> str:
    label = _LABEL.match(text)
    return text if label is None else text[label.end() :]


def settle(given: str, answer: str) -> bool | None:
    """Returns whether two answers that math-verify would misread are equal; None: not decided here."""
    if given.strip() == answer.strip():
        return None
    time = _same_time(given, answer)
    if time is not None:
        return time
    if not same_unit(given, answer):
        return False
    if _is_set(given) != _is_set(answer) and (_is_tuple(given) or _is_tuple(answer)):
        return False
    if _is_point_against_signs(given, answer) or _is_point_against_signs(answer, given):
        return False
    if (_QUALIFIED.search(clean(given)) is None) != (_QUALIFIED.search(clean(answer)) is None):
        return False
    for one, other in ((given, answer), (answer, given)):
        if _TRIGONOMETRY.search(one) and _DEGREES.search(one) and not _DEGREES.search(other):
            return False if canonical(one) == canonical(other) else None
    return _same_ratio(given, answer)


def pairs(given: str, answer: str) -> Iterator[tuple[str, str]]:
    """Yields (reference, given) pairs for math-verify, one of which must be equal: as written, and by each reading."""
    wanted, found = clean(answer), clean(given)
    wanted, found = _in_order(wanted, found), _in_order(found, wanted)
    yield wanted, found
    if is_percentage(given) != is_percentage(answer):
        value = r"\frac{%s}{100}"
        yield (value % wanted, found) if is_percentage(answer) else (wanted, value % found)
    intervals = as_interval(wanted) or wanted, as_interval(found) or found
    if _are_of_one_variable(wanted, found, intervals):
        yield intervals
    meant = _meaning(answer, given), _meaning(given, answer)
    meant = _in_order(*meant), _in_order(meant[1], meant[0])
    meant = meant[0], _with_the_letter_of(*meant)
    meant = _without_integers(meant[0]), _without_integers(meant[1])
    signs = _each_sign(meant[0]), _each_sign(meant[1])
    if signs != (None, None) or meant != (wanted, found):
        yield signs[0] or meant[0], signs[1] or meant[1]


def _are_of_one_variable(wanted: str, found: str, intervals: tuple[str, str]) -> bool:
    """Returns whether two answers, at least one an inequality, can be compared as intervals."""
    if intervals == (wanted, found) or not all(map(is_interval, intervals)):
        return False
    if intervals[0] == wanted or intervals[1] == found:
        return True  # an interval does not name its variable
    return _letters(_CONJUNCTION.sub(" ", wanted)) == _letters(_CONJUNCTION.sub(" ", found))


def _in_order(one: str, other: str) -> str:
    """Puts a cleaned list in round brackets, if the other answer has them: math-verify compares lists as sets."""
    if not (_is_tuple(other) and other.strip().startswith("(") and other.strip().endswith(")")):
        return one
    if _is_tuple(one) or _is_set(one) or _SIGN.search(one) or _BOUND.search(one):
        return one
    values = _elements(one)
    return f"({','.join(values)})" if len(values) > 1 else one


def _meaning(text: str, other: str) -> str:
    """Rewrites an answer for math-verify: degrees as radians if needed, mixed numbers, ratios, decimal exponents."""
    marked = _DEGREES.sub(_DEGREE, text)
    if _DEGREE in marked and (_PI.search(other) or _TRIGONOMETRY.search(text)):
        radians = _IN_DEGREES.sub(r"(\\frac{\1}{180}\\pi)", clean(marked))
        cleaned = clean(text) if _DEGREE in radians else radians
    else:
        cleaned = clean(text)
    mixed = _MIXED.fullmatch(cleaned)
    if mixed and int(mixed[2]) < int(mixed[3]):
        cleaned = rf"{mixed[1]}\frac{{{mixed[2]}}}{{{mixed[3]}}}"
    if ":" in other:
        cleaned = re.sub(r"(?<=\d)\s*(?:\\text\s*\{\s*to\s*\}|\bto\b)\s*(?=\d)", ":", cleaned)
    return _DECIMAL_POWER.sub(_exact_exponent, cleaned)


def _exact_exponent(found: re.Match[str]) -> str:
    r"""Converts a decimal exponent. Example: `^{0.5}` -> `^{\frac{1}{2}}`."""
    value = Fraction(found[1] or found[2])
    sign = "-" if value < 0 else ""
    return rf"^{{{sign}\frac{{{abs(value.numerator)}}}{{{value.denominator}}}}}"


# --- free integers ---------------------------------------------------------------------------------------------------


def _without_integers(text: str) -> str:
    r"""Removes the remark `k \in \mathbb{Z}` (k is any integer) from the end of a cleaned answer."""
    found = _last_match(text)
    return text if found is None else text[: found.start()]


def _last_match(text: str) -> re.Match[str] | None:
    for start in re.finditer(r"[,;(]|\\text|\\quad|[a-zA-Z]\s*\\in(?![a-zA-Z])", text):
        found = _INTEGERS.fullmatch(text, start.start())
        if found is not None and start.start():
            return found
    return None


def _with_the_letter_of(wanted: str, found: str) -> str:
    r"""Renames the free integer of `found` to that of `wanted`: `2n\pi` for `2k\pi`.

    A letter is a free integer if it is the only one of k, l, m and n in an answer with pi, or by the answer's remark.
    """
    ours, theirs = _free_integer(found), _free_integer(wanted)
    if ours is None or theirs is None or ours == theirs or theirs in _letters(found):
        return found
    return re.sub(rf"(\\[a-zA-Z]+)|{ours}", lambda match: match[1] or theirs, found)


def _free_integer(text: str) -> str | None:
    said = _last_match(text)
    if said is not None:
        return said[1]
    free = _letters(text) & _FREE
    return free.pop() if len(free) == 1 and _PI.search(text) else None


def _letters(text: str) -> set[str]:
    return set(re.findall(r"[a-zA-Z]", re.sub(r"\\[a-zA-Z]+", "", text)))


# --- plus-minus ------------------------------------------------------------------------------------------------------


def _each_sign(text: str) -> str | None:
    r"""Returns a cleaned answer as the list of its values with each sign; None without plus-minus, or with too many.

    The signs of one value are chosen freely, `(\pm 1, \pm 2)` is four points, unless it has `\mp`: then all upper or
    all lower signs belong together.

    Example: `\frac{-1 \pm \sqrt{17}}{2}` -> `\frac{-1+\sqrt{17}}{2}, \frac{-1-\sqrt{17}}{2}`.
    """
    signs = [found[1] for found in _SIGN.finditer(text)]
    if not 1 <= len(signs) <= _MAX_SIGNS:
        return None
    values = list[str]()
    for element in _elements(text):
        own = [found[1] for found in _SIGN.finditer(element)]
        if "mp" in own:
            choices = [tuple(sign == upper for sign in own) for upper in ("pm", "mp")]
        else:
            choices = list(itertools.product((True, False), repeat=len(own)))
        values += [_with_signs(element, choice) for choice in choices]
    listed = ", ".join(values)
    return listed if len(values) <= _MAX_VALUES and len(listed) <= _MAX_LENGTH else None


def _with_signs(element: str, choice: tuple[bool, ...]) -> str:
    chosen = iter(choice)

    def sign(found: re.Match[str]) -> str:
        leads = element[: found.start()].rstrip()[-1:] in ("", "(", "{", "[", ",")
        return ("" if leads else "+") if next(chosen) else "-"

    return _SIGN.sub(sign, element)


def _elements(text: str) -> list[str]:
    """Returns the values of a cleaned list or set, each without the name before its equals sign."""
    text = text.strip()
    if _is_set(text):
        text = text[2:-2]
    parts, start = list[str](), 0
    for token, depth in _depths(text):
        if token.group() == "," and depth == 0:
            parts.append(text[start : token.start()])
            start = token.end()
    parts.append(text[start:])
    split = [each for part in parts for each in _CONJUNCTION.split(part)]
    return [_without_label(each) if _LABEL.match(each) else each.strip() for each in split if each.strip()]


def _depths(text: str) -> Iterator[tuple[re.Match[str], int]]:
    """Yields each bracket and comma of a text with the number of brackets that are open after it."""
    depth = 0
    for token in re.finditer(r"\\[{}]|\\[a-zA-Z]+|[][(){},]", text):
        depth += {"(": 1, "[": 1, "{": 1, ")": -1, "]": -1, "}": -1}.get(token.group()[-1], 0)
        yield token, depth


# --- decisions without math-verify -----------------------------------------------------------------------------------


def _is_set(text: str) -> bool:
    r"""Returns whether the whole answer is one `\{...\}`."""
    return _spans(clean(text).strip(), r"\{", r"\}")


def _is_tuple(text: str) -> bool:
    """Returns whether the whole answer is one pair of brackets with at least two entries: a point or an interval."""
    cleaned = clean(text).strip()
    is_one = any(_spans(cleaned, first, last) for first, last in itertools.product("([", ")]"))
    return is_one and len(_elements(cleaned[1:-1])) > 1


def _spans(text: str, first: str, last: str) -> bool:
    """Returns whether the bracket at the start of a text closes at its end."""
    if not (text.startswith(first) and text.endswith(last)):
        return False
    closing = next((token for token, depth in _depths(text) if depth == 0), None)
    return closing is not None and closing.end() == len(text)


def _is_point_against_signs(one: str, other: str) -> bool:
    r"""Returns whether one answer is a point or an interval, and the other one two values: `(-5, 5)` and `\pm 5`."""
    if not _is_tuple(one) or _SIGN.search(one) or _is_tuple(other):
        return False
    values = _elements(clean(other))
    return len(values) == 1 and _SIGN.search(values[0]) is not None and "(" not in _SIGN.split(values[0])[0]


def _same_time(given: str, answer: str) -> bool | None:
    """Returns whether two times of day are equal, if a.m. or p.m. is named; else None."""
    found, wanted = _time(given), _time(answer)
    if wanted is not None and found is None and wanted[2]:
        return False
    if wanted is None or found is None or not (wanted[2] or found[2]):
        return None
    if wanted[2] and found[2]:
        return _minutes(found) == _minutes(wanted)
    return _minutes(found) == _minutes(wanted) or found[:2] == wanted[:2]


def _time(text: str) -> tuple[int, int, str] | None:
    """Returns (hour, minute, "a", "p" or "")."""
    plain = re.sub(r"\$|\\[,;: !]|~", " ", text).strip().rstrip(".").strip()
    found = _TIME.fullmatch(plain)
    if found:
        return int(found[1]), int(found[2] or 0), found[3].lower()
    clock = _CLOCK.fullmatch(clean(text))
    return (int(clock[1]), int(clock[2]), "") if clock else None


def _minutes(time: tuple[int, int, str]) -> int:
    hour, minute, half = time
    return 60 * (hour % 12 + 12 * (half == "p") if half else hour) + minute


def _same_ratio(given: str, answer: str) -> bool | None:
    """Returns whether two ratios of numbers are equal, if one has three parts or more: `1:2:3` is no quotient."""
    found, wanted = (
        each.split(":") if _RATIO.fullmatch(each) else [] for each in (canonical(given), canonical(answer))
    )
    if max(len(found), len(wanted)) < 3:
        return None
    try:
        a, b = [Fraction(each) for each in found], [Fraction(each) for each in wanted]
    except (ValueError, ZeroDivisionError):
        return None
    return len(a) == len(b) and all(x * b[0] == y * a[0] for x, y in zip(a, b, strict=True))


TIME_LIMIT_S = 10  # the slowest pair of MATH-500 takes well under one second
MEMORY_LIMIT_BYTES = 4 * 2**30  # a huge integer must exhaust the child's limit, not the machine's memory
MAX_CHARACTERS = 1_000  # the longest reference answer of MATH-500 has 53; longer boxes hold prose
_CHILD = Path(__file__).with_name("math_verify_child.py")

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Judgement:
    """The result of comparing an answer with the reference.

    Attributes:
        correct: the verdict: `text`, or else `math_verify`.
        text: the verdict before math-verify, by notation, canonical text, word or value.
        math_verify: its verdict; None if it was not used or did not decide within its limits.
        undecided: math-verify was used and did not decide; the comparison as text is then the verdict.
    """

    correct: bool
    text: bool
    math_verify: bool | None = None
    undecided: bool = False


def judge(given: str, answer: str, *, both: bool = False, by_text: bool = False) -> Judgement:
    r"""Judges whether `given` equals the reference `answer`.

    A percentage such as 50\% equals its number, 50, and its value, 0.5. May be called from any thread. An answer
    of more than 1,000 characters is wrong. An expression that math-verify cannot decide within 10 seconds and 4 GiB is
    compared as text, and `judge` logs a warning, because the grade then depends on the machine.

    Args:
        both: also use math-verify if the texts are equal, to find disagreements of the two.
        by_text: never use math-verify.

    Raises:
        RuntimeError: math-verify is needed, but does not start, for example because it is missing.
    """
    if not given or len(given) > MAX_CHARACTERS:
        return Judgement(False, False)
    given, answer = unlabelled(given, answer)
    settled = settle(given, answer)
    if settled is not None:
        return Judgement(settled, settled)
    plain_given, plain_answer = canonical(given), canonical(answer)
    numbers = is_number(plain_given) and is_number(plain_answer)
    text = plain_given == plain_answer
    if numbers and not text and is_percentage(given) != is_percentage(answer):
        a, b = Fraction(plain_given), Fraction(plain_answer)
        text = a * 100 == b if is_percentage(answer) else a == b * 100
    based = same_in_base(plain_given, plain_answer)
    if based is not None:
        return Judgement(based or text, based or text)  # a numeral with a digit that its base lacks equals itself
    if numbers or is_words(answer) or by_text or (text and not both):
        return Judgement(text, text)
    verdict = _first_verdict(pairs(given, answer))
    return Judgement(text or bool(verdict), text, verdict, undecided=verdict is None)


def _first_verdict(readings: Iterator[tuple[str, str]]) -> bool | None:
    """Returns whether math-verify finds a pair equal; None if it finds none equal and left a pair undecided."""
    undecided = False
    for pair in readings:
        verdict = _VERIFIER.equivalent(*pair)
        if verdict:
            return True
        undecided |= verdict is None
    return None if undecided else False


class _Verifier:
    """The child process that runs math-verify: one for each process that grades; a lock serialises threads' calls."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None
        self._owner = 0

    def equivalent(self, answer: str, given: str) -> bool | None:
        """Returns math-verify's verdict; None if it reached its limit of time or memory."""
        with self._lock:
            process = self._running()
            assert process.stdin is not None
            assert process.stdout is not None
            with contextlib.suppress(BrokenPipeError):  # the reply is then empty, and the exit code shows the reason
                process.stdin.write(json.dumps([answer, given]) + "\n")
                process.stdin.flush()
            reply = process.stdout.readline()
            if reply:
                return bool(json.loads(reply))
            process.communicate()  # closes the pipes and waits
            self._process, code = None, process.returncode
        if code >= 0:
            raise RuntimeError(
                f"math-verify's process ended with code {code} at answer {answer!r}, given {given!r}, expected a "
                "verdict; the error is printed above. To install math-verify: pip install 'math-verify[antlr4_9_3]'"
            )
        logger.warning("compared as text, stopped by signal %d (time or memory): %r against %r", -code, given, answer)
        return None

    def _running(self) -> subprocess.Popen[str]:
        """Returns the child, or starts one. `_owner` is its parent: a fork must not write into its parent's pipe."""
        if self._process is not None and self._process.poll() is not None:
            self.close()
        if self._process is None or self._owner != os.getpid():
            # -P keeps this folder off the import path, where its files would shadow other modules of their names.
            command = [sys.executable, "-P", str(_CHILD), str(TIME_LIMIT_S), str(MEMORY_LIMIT_BYTES)]
            # A signal to the whole job must not end the child before the child ignores such signals: the child starts
            # with them blocked and unblocks them once they are ignored.
            before = signal.pthread_sigmask(signal.SIG_BLOCK, JOB_SIGNALS)
            try:
                self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, before)
            self._owner = os.getpid()
        return self._process

    def close(self) -> None:
        """Ends the child; the next call starts another one."""
        if self._process is not None and self._owner == os.getpid():
            self._process.kill()
            self._process.communicate()
        self._process = None


_VERIFIER = _Verifier()
atexit.register(_VERIFIER.close)
