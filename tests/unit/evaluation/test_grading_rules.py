r"""One answer for each rule of the grader's spellings and numerals that is judged wrongly without the rule.

The rows are in the order of the rules, so that a new rule needs a new row.
"""

from __future__ import annotations

import pytest

from nemo_oprd.evaluation.grading import numerals, spelling
from nemo_oprd.evaluation.grading.equality import judge
from nemo_oprd.evaluation.grading.graders import BuiltinGrader

# (reference, given, verdict, whether the texts alone are compared: math-verify knows the spelling itself)
PAIRS_OF_CLEANING = [
    ("2304", r"2\!,304", True, False),
    ("3:4", r"3\colon 4", True, False),
    ("-3", "\N{EN DASH}3", True, False),
    ("10080", "10\N{NO-BREAK SPACE}080", True, False),
    (r"(2,\infty)", "(2,\N{INFINITY})", True, False),
    ("[2,7]", r"2 \leqslant x \leqslant 7", True, False),
    (r"[3,\infty)", "x \N{GREATER-THAN OR EQUAL TO} 3", True, False),
    (r"\emptyset", r"\varnothing", True, False),
    ("6 - 5i", r"6-5\mathrm{i}", True, False),
    ("1000000", "1e6", True, False),
    (r"2\pi", "2\N{GREEK SMALL LETTER PI}", True, True),
    (r"2\sqrt{5}", "2\N{SQUARE ROOT}5", True, False),
    (r"2\times 3", "2\N{MULTIPLICATION SIGN}3", True, True),
    (r"3\cdot 10^5", "3\N{MIDDLE DOT}10^5", True, False),
    (r"\frac{1}{2}", r"\displaystyle\frac{1}{2}", True, True),
    ("2304", r"2\,304", True, False),
    ("7", r"7\,", True, False),
    ("(3,4)", r"\bigl(3,4\bigr)", True, False),
    (r"\frac{17}{50}", r"\dfrac{17}{50}", True, True),
    (r"\pm\frac{\pi}{3}+2k\pi", r"2n\pi\pm\frac\pi3", True, False),
    (r"\frac{\pi}{8}", r"22\frac12^\circ", True, False),
    (r"\sin 30", r"\sin 30^\circ", False, False),
    (r"\frac{3}{4}", r"75\%", True, False),
    ("0.25", r"25\text{ percent}", True, False),
    (r"15\mbox{ cm}^2", "15 cm^2", True, False),
    (r"\text{(B)}", r"\text{(B)}.", True, False),
    (r"\text{Evelyn}", "Evelyn", True, False),
    (r"\text{Evelyn}", r"\text{Evelyn.}", True, False),
]
# (response, reference): correct for the grader of numbers
ANSWERS_OF_NUMERALS = [
    (r"\boxed{10{,}080}", "10080"),
    (r"\boxed{10,\!080}", "10080"),
    (r"\boxed{10\,080}", "10080"),
    ("The temperature is \N{MINUS SIGN}3.", "-3"),
    (r"Answer: $\dfrac{3}{4}$ of it", "0.75"),
    ("#### 1.5 \N{MULTIPLICATION SIGN} 10^3", "1500"),
    ("Answer: \N{EURO SIGN}18", "18"),
    (r"It is \boxed{\$18}, not 20.", "18"),
    (r"\boxed{45^\circ}", "45"),
    (r"\boxed{18\text{ km}}", "18"),
    (r"\boxed{18~km}", "18"),
    (r"\boxed{50\%}", r"50\%"),
    ("That makes **2.5** million.", "2500000"),
    (r"\boxed{\approx 18}", "18"),
]


@pytest.mark.parametrize("number", range(len(spelling.CLEANING)))
def test_a_rule_of_spelling_is_needed(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("math_verify")
    answer, given, verdict, by_text = PAIRS_OF_CLEANING[number]
    assert judge(given, answer, by_text=by_text).correct is verdict
    rules = spelling.CLEANING
    monkeypatch.setattr(spelling, "CLEANING", rules[:number] + rules[number + 1 :])
    assert judge(given, answer, by_text=by_text).correct is not verdict


@pytest.mark.parametrize("number", range(len(numerals._SIMPLER)))
def test_a_rule_of_numerals_is_needed(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    response, answer = ANSWERS_OF_NUMERALS[number]
    assert BuiltinGrader("number")(response, answer).correct
    rules = numerals._SIMPLER
    monkeypatch.setattr(numerals, "_SIMPLER", rules[:number] + rules[number + 1 :])
    assert not BuiltinGrader("number")(response, answer).correct


def test_every_rule_has_one_row() -> None:
    assert len(PAIRS_OF_CLEANING) == len(spelling.CLEANING)
    assert len(ANSWERS_OF_NUMERALS) == len(numerals._SIMPLER)
