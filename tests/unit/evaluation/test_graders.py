"""Which answer a grader finds in a response, which grader a data source has, and graders of a user's own."""

from __future__ import annotations

import random
import sys
import time
from pathlib import Path

import pytest

from nemo_oprd.config.loading import load_config
from nemo_oprd.data.prompts import load_prompts
from nemo_oprd.evaluation.grading import equality as grade
from nemo_oprd.evaluation.grading.extraction import final_part, form
from nemo_oprd.evaluation.grading.graders import (
    BUILTIN,
    DATA_SOURCES,
    BuiltinGrader,
    GraderChoice,
    check_judge,
    resolve,
)
from nemo_oprd.run.checks import check_graders

DATA = Path(__file__).resolve().parents[3] / "../shared/data"
# (grader, response, reference, what is extracted, verdict)
CASES: list[tuple[str, str, str, str | None, bool]] = [
    ("boxed", r"so \boxed{5}", "5", "5", True),
    ("boxed", r"\boxed{6} no, wait: \boxed{5}", "5", "5", True),
    ("boxed", r"\boxed{5} no, wait: \boxed{6}", "5", "6", False),
    ("boxed", r"\fbox{5} and \boxed {5}", "5", "5", True),
    ("boxed", "The answer is 5.", "5", None, False),
    ("boxed", r"\boxed{}", "5", "", False),
    ("boxed", r"\boxed{\text{five}}", "5", r"\text{five}", False),
    ("boxed", r"<think>maybe \boxed{5}</think> Hm. \boxed{6}", "6", "6", True),
    ("boxed", r"<think>it is \boxed{5}</think> I don't know.", "5", None, False),
    ("boxed", r"it is \boxed{5}</think> I don't know.", "5", None, False),
    ("boxed", r"<think>it is \boxed{5}, let me check that", "5", None, False),
    ("boxed", r"so far \boxed{5}, which has \boxed{1", "5", "5", True),
    ("boxed", r"\boxed{x = 5}", "5", "x = 5", True),
    ("boxed", r"\boxed{4} or \boxed{5}", "4", "4, 5", False),
    ("boxed", r"\boxed{4} or \boxed{5}", "5", "4, 5", False),
    # boxes side by side are one answer
    *(
        ("boxed", response, answer, extracted, True)
        for response, answer, extracted in [
            (r"\boxed{1}, \boxed{2} and \boxed{3}", "{1,2,3}", "1, 2, 3"),
            (r"They are \boxed{3}, \boxed{1}, and \boxed{2}.", r"\{1, 2, 3\}", "3, 1, 2"),
            (r"\[\boxed{k = 45} \quad \text{and} \quad \boxed{n = 2}\]", "k = 45, n = 2", "k = 45, n = 2"),
            (r"$$\boxed{(4, 1)},\; \boxed{(1, 4)}$$", "(1,4),(4,1)", "(4, 1), (1, 4)"),
            (r"$\boxed{(4, 1)} \text{ in case (a) and } \boxed{(1, 4)}$", "(1,4),(4,1)", "(4, 1), (1, 4)"),
            (r"$\boxed{-7}$ and $\boxed{\frac12}$", "0.5, -7", r"-7, \frac12"),
            ("\\(\\boxed{-7}\\), or\n\\(\\boxed{8}\\)", "8, -7", "-7, 8"),
            ("**\\boxed{-7}**\n\nand\n\n**\\boxed{8}**", "8, -7", "-7, 8"),
            (r"\boxed{3}\boxed{4}", "3, 4", "3, 4"),
            (r"$x = \boxed{3}$ and $y = \boxed{4}$", "(3, 4)", "x = 3, y = 4"),
            (r"\(y_1 = \boxed{(x+1)^2}\) and \( y_2 = \boxed{3x} \)", "y_1=x^2+2x+1,y_2=3x", "y_1 = (x+1)^2, y_2 = 3x"),
            (r"$x = \boxed{3} \text{ or } \boxed{4}$", "3, 4", "3, 4"),
            (r"$(\boxed{3}, \boxed{4})$", "(3,4)", "(3, 4)"),
            (r"$\left[\boxed{3}, \boxed{4}\right)$", "[3,4)", "[3, 4)"),
            (r"$\{\boxed{3}, \boxed{4}\}$", r"\{4,3\}", r"\{3, 4\}"),
            (r"$x = \boxed{3}, y = \boxed{3}$", "(3,3)", "x = 3, y = 3"),
            (r"\boxed{3}, \boxed{3}", "3", "3"),  # written again
            (r"\boxed{3}, \boxed{4", "3", "3"),
        ]
    ),
    *(
        ("boxed", response, answer, extracted, False)
        for response, answer, extracted in [
            (r"\boxed{1}, \boxed{2} and \boxed{3}", "3", "1, 2, 3"),
            (r"\boxed{1}, \boxed{2} and \boxed{3}", r"\{1, 2\}", "1, 2, 3"),
            (r"\boxed{1}, \boxed{2} and \boxed{3}", r"\{1, 2, 4\}", "1, 2, 3"),
            (r"\boxed{1}, \boxed{200}", "1,200", "1, 200"),
            (r"\boxed{1} \boxed{2}", "12", "1, 2"),
            (r"\boxed{1} \boxed{2}", "3", "1, 2"),
            (r"$x = \boxed{3}$ and $y = \boxed{4}$", "(4, 3)", "x = 3, y = 4"),
            (r"$x = \boxed{4}$ and $y = \boxed{3}$", "x = 3, y = 4", "x = 4, y = 3"),
            (r"$(\boxed{3}, \boxed{4})$", r"\{3, 4\}", "(3, 4)"),
            (r"$[\boxed{3}, \boxed{4}]$", "(3,4)", "[3, 4]"),
            (r"$[\boxed{3}, \boxed{4})$", "[3,4]", "[3, 4)"),
            # intermediate results: the last box alone is the answer, so that no list is made of them
            (r"So $a = \boxed{3}$. $b = \boxed{4}$.", "3, 4", "4"),
            (r"First $\boxed{3}$. Then $\boxed{4}$", "3, 4", "4"),
            (r"We get \boxed{3}, so \boxed{4}", "3, 4", "4"),
            (r"We get \boxed{3} and hence \boxed{4}", "3, 4", "4"),
            (r"$a = \boxed{3}$, $b = \boxed{4}$ and $a + b = \boxed{7}$", "3, 4, 7", "7"),
            (r"$\boxed{3} \text{. This gives, and } \boxed{4}$", "3, 4", "4"),
            (r"$\boxed{3} + \boxed{4}$", "3, 4", "4"),
            (r"$\boxed{3} = \boxed{4}$", "3, 4", "4"),
            (r"$\frac{\boxed{3}}{\boxed{4}}$", "3, 4", "4"),
            (r"$\boxed{3} \to \boxed{4}$", "3, 4", "4"),
            (r"$\boxed{3}:\boxed{4}$", "3, 4", "4"),
            (r"| \boxed{3} | \boxed{4} |", "3, 4", "4"),
            ("1. $\\boxed{3}$\n2. $\\boxed{4}$", "3, 4", "4"),
            ("$\\boxed{3}$\n\n$\\boxed{4}$", "3, 4", "4"),
            ("\\boxed{3}\n\\boxed{4}", "3, 4", "4"),
            (r"$\boxed{3}$ $\boxed{4}$", "3, 4", "4"),
            (r"\boxed{3} \text{ cm}, \boxed{4}", "3, 4", "4"),
            (r"\boxed{\boxed{3}} and \boxed{4}", "3, 4", "4"),
        ]
    ),
    # of a worked solution as the reference answer, what its last line marks
    ("boxed", r"\boxed{72}", "48 + 24 = 72 clips.\n#### 72", "72", True),
    ("boxed", r"\boxed{24}", "48 + 24 = 72 clips.\n#### 72", "24", False),
    ("boxed", r"\boxed{x+1}", "Thus.\n#### 1 + x", "x+1", True),
    ("answer_line", "Answer: 72", "48 + 24 = 72 clips.\nAnswer: 72.", "72", True),
    ("answer_line_or_boxed", r"\boxed{48}", "48 + 24 = 72 clips.\nAnswer: 72.", "48", False),
    ("answer_line", r"Answer: $\boxed{3}$ and $\boxed{4}$", "4, 3", "3, 4", True),
    ("answer_line", "Answer: 34", "34", "34", True),
    ("answer_line", "Answer: $34$", "34", "34", True),
    ("answer_line", "x = 34.\n\nAnswer: 34.", "34", "34", True),
    ("answer_line", "**Answer:** 34", "34", "34", True),
    ("answer_line", "**Answer: 34**", "34", "34", True),
    ("answer_line", "**Answer**: $34$.", "34", "34", True),
    ("answer_line", "### Final Answer: \\(34\\)", "34", "34", True),
    ("answer_line", "Final answer:\n\n34\n", "34", "34", True),
    ("answer_line", "Answer:\n\\[\n34\n\\]", "34", "34", True),
    ("answer_line", r"Answer: \boxed{34}", "34", "34", True),
    ("answer_line", r"Answer: $\boxed{\frac{1}{2}}$", "0.5", r"\frac{1}{2}", True),
    ("answer_line", "answer: 34", "34", "34", True),
    ("answer_line", "The answer is: 34", "34", "34", True),
    ("answer_line", "ANSWER : 34", "34", "34", True),
    ("answer_line", "Answer: 5 seems wrong.\nAnswer: 34", "34", "34", True),
    ("answer_line", "Answer: 34\nAnswer: 35", "34", "35", False),
    ("answer_line", "Answer: 34 miles", "34", "34 miles", True),
    ("answer_line", "Answer: 1,034", "1034", "1,034", True),
    ("answer_line", "Answer: -3", "-3", "-3", True),
    ("answer_line", "Answer: x = 34", "34", "x = 34", True),
    ("answer_line", "Answer: 34 or 35", "34", "34 or 35", False),
    ("answer_line", r"so \boxed{34}", "34", None, False),
    ("answer_line", "Thus 34.", "34", None, False),
    ("answer_line", "Answer:", "34", None, False),
    ("answer_line", "", "34", None, False),
    ("answer_line", "Answer: $$34", "34", "34", True),
    ("answer_line", "Answer: \\[ 34", "34", "34", True),
    ("answer_line", "Answer:\n\\[\n34", "34", "34", True),
    ("answer_line", "The answers: 34", "34", None, False),
    ("answer_line", "<think>Answer: 34</think> Not sure.", "34", None, False),
    ("answer_line_or_boxed", r"so \boxed{34}", "34", "34", True),
    ("answer_line_or_boxed", "\\boxed{35}\nAnswer: 34", "34", "34", True),
    ("answer_line_or_boxed", "Answer: 34\n\\boxed{35}", "34", "34", True),
    ("answer_line_or_boxed", "It is 34.", "34", None, False),
    ("number", "12 + 5 = 17", "17", "17", True),
    ("number", "She pays $1,017.50 in all.", "1017.5", "1,017.50", True),
    ("number", "17 of them.\n#### 18", "18", "18", True),
    ("number", "#### 1,800 (in dollars, of 2000)", "1800", "1,800", True),
    ("number", "Answer: 18 apples of 20", "18", "18", True),
    ("number", r"\boxed{18} out of 20", "18", "18", True),
    ("number", r"It is \boxed{\$18}, not 20.", "18", "18", True),
    ("number", "The temperature is \N{MINUS SIGN}3.", "-3", "-3", True),
    ("number", "18 apples cost 5 dollars", "18", "5", False),
    ("number", "Room B12 is the one", "12", None, False),
    ("number", "Version 1.2.3", "3", None, False),
    ("number", "no number", "5", None, False),
    ("number", "<think>17</think> I give up", "17", None, False),
    ("number", ".5", "0.5", ".5", True),
    ("number", "#### Step 1: add\n8+10=18.\n#### Conclusion\nThe total is 18 dollars.", "18", "18", True),
    ("number", "#### Step 3: Total\nShe earns 18 dollars.", "18", "18", True),
    ("number", "#### 2. Add the prices\nShe earns 18 dollars.", "18", "18", True),
    ("number", "##### 5 Steps\nShe earns 18 dollars.", "18", "18", True),
    ("number", "She earns 18 dollars. #### 18 of 20", "18", "18", True),
    ("number", "####\n18", "18", "18", True),
    ("number", "#### **\\$18** dollars\nThat is 20 less.", "18", "18", True),
    ("number", r"\boxed{20kg}", "20", "20", True),
    ("number", r"\boxed{20k}", "20", None, False),
    ("number", "In total:\n- 18 dollars", "18", "18", True),
    ("number", "It is\n-18 degrees", "-18", "-18", True),
    ("number", "Answer: 48 + 24 = 72", "72", "72", True),
    ("number", r"\boxed{48 + 24 = 72}", "72", "72", True),
    ("number", "Answer: x = 34", "34", "34", True),
    ("number", "Answer: 18 dollars, as 1 dollar = 100 cents", "18", "18", True),
    ("number", "#### 72", "Natalia sold 48/2 = <<48/2=24>>24 clips in May.\n#### 72", "72", True),
    ("number", "#### 24", "Natalia sold 48/2 = <<48/2=24>>24 clips in May.\n#### 72", "24", False),
    ("number", "#### 72", "72 clips", "72", True),
    ("number", "It is 0.5", r"\frac{1}{2}", "0.5", True),
    ("number", "It is 0.5", r"50\%", "0.5", True),
    # what is marked is read whole, exactly
    *(
        ("number", rf"\boxed{{{given}}}", answer, given, True)
        for given, answer in [
            (r"\frac{3}{4}", "0.75"),
            (r"\frac{3}{4}", "3/4"),
            ("3/4", r"\frac{3}{4}"),
            (r"-\frac12", "-0.5"),
            (r"2\frac12", "2.5"),
            ("2 1/2", "2.5"),
            ("1.5e3", "1500"),
            ("2^{10}", "1024"),
            ("10^6", "1,000,000"),
            (r"1.5 \times 10^3", "1500"),
            ("2.5 million", "2500000"),
            ("2e-3", "0.002"),
            ("2^{-3}", "0.125"),
            ("4 dozen", "48"),
            ("10^{-6}", "1e-6"),
            ("12345678901234567890", "12345678901234567890"),
        ]
    ),
    *(
        ("number", rf"\boxed{{{given}}}", answer, given, False)
        for given, answer in [
            (r"\frac{3}{4}", "3"),
            ("3/4", "4"),
            (r"-\frac12", "1"),
            ("1.5e3", "1.5"),
            ("2^{10}", "2"),
            ("2^{10}", "10"),
            (r"1.5 \times 10^3", "1.5"),
            ("2.5 million", "2.5"),
            (r"\frac{1}{3}", "0.3333333333"),
            ("12345678901234567890", "12345678901234567891"),
            ("0.1", "0.10000000000000001"),
        ]
    ),
    *(
        ("number", rf"\boxed{{{given}}}", answer, None, False)
        for given, answer in [
            (r"3\sqrt{2}", "3"),
            (r"72 \text{ or } 73", "72"),
            ("72 or 73", "73"),
            ("72, 73", "72"),
            (r"\pm 5", "5"),
            (r"5\pi", "5"),
            ("5x", "5"),
            ("5 x", "5"),
            ("48 + 24", "48"),
            ("5!", "5"),
            ("5(3)", "5"),
            ("3:4", "3"),
            ("5 hours and 30 minutes", "5"),
            ("2 and a half", "2"),
            ("1/0", "1"),
            ("10^{999999}", "10"),
            ("|-5|", "5"),
            (r"\log 8", "8"),
            ("5 squared", "5"),
            ("(3, 4)", "3"),
            ("2 thirds", "2"),
            (r"x \le 5", "5"),
            ("not 5", "5"),
            (r"2\frac{3}{2}", "2"),
            ("5 or more", "5"),
            ("2^{x}", "2"),
            (r"\sqrt{2}", "2"),
            (r"(1+2)\cdot 3", "1"),
        ]
    ),
    ("number", "#### 3/4", "3/4", "3/4", True),
    ("number", r"#### \frac{3}{4}", "0.75", r"\frac{3}{4}", True),
    ("number", "#### $2.5 million", "2500000", "2.5 million", True),
    ("number", r"#### 1.5 \times 10^3 dollars", "1500", r"1.5 \times 10^3", True),
    ("number", "#### 1.5e3", "1500", "1.5e3", True),
    ("number", r"#### 3\sqrt{2}", "2", None, False),
    ("number", "#### 72 or 73", "73", None, False),
    ("number", r"#### 72 \text{ or } 73", "73", None, False),
    ("number", "#### negative\nShe owes 5.", "5", "5", True),
    ("number", "Answer: $\\dfrac{3}{4}$ of it", "0.75", r"\frac{3}{4}", True),
    ("number", "Answer: about 5 hours", "5", "5", True),
    ("number", "Answer: about .5 hours", "0.5", ".5", True),
    ("number", "Answer: Rs. 18 (= 9 x 2)", "18", "18", True),
    ("number", "Answer: \N{EURO SIGN}18", "18", "18", True),
    ("number", "Answer: 6 p.m.", "6", None, False),
    ("number", "Answer: negative 5", "-5", "-5", True),
    ("number", "The answer is 18. I took 3 steps.", "18", "18", True),
    ("number", "The answer is 3/4. I took 3 steps.", "3/4", "3/4", True),
    ("number", r"The answer is $\frac{3}{4}$.", "0.75", r"\frac{3}{4}", True),
    ("number", "If the answer is 5, then 6 + 12 = 18 are left.\nSo it's 18", "18", "18", True),
    ("number", "The answer is 5 times 3, which is 15", "15", "15", True),
    ("number", "The answer is as follows:\n18", "18", "18", True),
    # prose: the last number, with the formula in which it stands
    ("number", "He has 3/4.", "3/4", "3/4", True),
    ("number", "He has 3/4.", "4", "3/4", False),
    ("number", r"It is $3\sqrt{2}$.", "2", None, False),
    ("number", "In 2010, 18 people", "18", "18", True),
    ("number", "It costs $5 per m^2", "5", "5", True),
    ("number", "x=18, as said", "18", "18", True),
    ("number", "That makes 2.5 million.", "2500000", "2.5 million", True),
    ("number", "#### 0.75", "3/4 of a cake", "0.75", True),
    ("number", "#### 0.75", "He eats it.\n#### 3/4", "0.75", True),
    ("number", r"\boxed{50\%}", r"50\%", "50", True),
    ("number", r"\boxed{0.5}", r"50\%", "0.5", True),
    ("number", r"\boxed{500}", r"50\%", "500", False),
    ("number", r"\boxed{1.4142135}", r"\sqrt{2}", "1.4142135", True),
    ("number", r"\boxed{1.4}", r"\sqrt{2}", "1.4", False),
    # no number and no letter: two of them are
    ("number", r"\boxed{3} and \boxed{4}", "4", None, False),
    ("number", r"$x = \boxed{3}$, $y = \boxed{4}$", "3", None, False),
    ("number", r"\boxed{4}, \boxed{4}", "4", "4", True),
    ("choice", r"\boxed{A} or \boxed{C}", "A", None, False),
    ("choice", r"\boxed{A} or \boxed{C}", "C", None, False),
    ("choice", r"\boxed{C}, \boxed{C}", "C", "C", True),
    ("choice", "The answer is (C).", "C", "C", True),
    ("choice", "The answer is (C).", "(C)", "C", True),
    ("choice", "Answer: C", "C", "C", True),
    ("choice", "**Answer:** **C**", "C", "C", True),
    ("choice", "Answer: C) 15 miles", "C", "C", True),
    ("choice", r"\boxed{\text{(C)}}", "C", "C", True),
    ("choice", r"\boxed{\textbf{(C)}\ 15}", r"\text{(C)}", "C", True),
    ("choice", r"\boxed{C}", "D", "C", False),
    ("choice", "c", "C", "C", True),
    ("choice", "(C)", "C", "C", True),
    ("choice", "A bird flies. B is false. The answer is b", "B", "B", True),
    ("choice", "A bird flies.", "A", None, False),
    ("choice", "The answer is Berlin", "B", None, False),
    ("choice", "The answer is (B).\n#### Analysis\nB it is", "B", "B", True),
    ("choice", "#### B\nbecause of that", "B", "B", True),
    ("choice", "The answer is option B.", "B", "B", True),
    ("choice", "Answer: Option (C)", "C", "C", True),
    ("choice", "The answer is a bit tricky. I pick C.", "C", None, False),
    ("choice", "The answer is a.", "A", "A", True),
    ("choice", "Answer: b because of that", "B", "B", True),
    ("choice", "Answer: A or B?\nAnswer: B", "B", "B", True),
    ("choice", "<think>Answer: C</think>", "C", None, False),
    # a letter in bold type or the like, before words; an asterisk alone is no such mark
    *(
        ("choice", response, "C", "C", True)
        for response in [
            "The answer is **C**, because",
            "Answer: **C** (Paris)",
            "Answer: **C**: Paris",
            "Answer: *C*, as",
            "Answer: *C* because",
            "Answer: `C` because",
            "Answer: ***C*** because",
            "The answer is (**C**)",
            "**Answer: C** (Paris)",
            "**The answer is C** because",
            "The answer is **c**, because",
            "`C`",
            "**Answer:**\n- C",
            "**Answer:**\n- **C** (Paris)",
        ]
    ),
    *(
        ("choice", response, "A", None, False)
        for response in [
            "Answer: A*B",
            "Answer: *A*B",
            "Answer: A**2",
            "answer is a bit",
            "the answer is A* search",
            "The answer is *a* lot",
            "The answer is **a** lot",
            "**The answer is a** lot",
        ]
    ),
    # a bullet below a mark is no minus sign
    *(
        (grader, response, "18", extracted, True)
        for grader in ("number", "answer_line")
        for response, extracted in [
            ("**Answer:**\n- 18", "18"),
            ("Answer:\r\n\r\n+ 18\n", "18"),
            ("Answer:\n* 18", "18"),
            ("Answer:\n- \\[\n18\n\\]", "18"),
        ]
    ),
    ("number", "Answer: -5", "-5", "-5", True),
    ("number", "Answer:\n-5", "-5", "-5", True),
    ("number", "Answer: - 5", "-5", "-5", True),
    ("answer_line", "Answer:\n-5", "-5", "-5", True),
    ("exact", "hello  world\n", "hello world", "hello  world", True),
    ("exact", "Hello world", "hello world", "Hello world", False),
    ("exact", "I say so.\nAnswer: 0.50", "0.5", "0.50", False),
    ("exact", r"\boxed{\frac12}", r"\frac12", r"\frac12", True),
    ("exact", "", "x", None, False),
]


@pytest.mark.parametrize(("grader", "response", "answer", "extracted", "correct"), CASES)
def test_extraction_and_verdict(grader: str, response: str, answer: str, extracted: str | None, correct: bool) -> None:
    pytest.importorskip("math_verify")
    found = BuiltinGrader(grader)(response, answer)
    assert (found.extracted, found.correct) == (extracted, correct)


def test_every_grader_is_tested() -> None:
    assert {case[0] for case in CASES} == set(BUILTIN) >= set(DATA_SOURCES.values())


@pytest.mark.parametrize("grader", BUILTIN)
@pytest.mark.parametrize(
    "unit",
    [
        r"\boxed{",
        r"\boxed{1}, ",
        r"\boxed{1}, \boxed{",
        "Answer: ",
        "answer",
        "1,",
        "<think>",
        "#### ",
        "((",
        "$",
        "**",
        "1",
        "\\",
        "{",
        "- ",
        ".",
        ".*",
    ]
    + ["the answer is 5 ", "a1 ", "x=", "\\text{", "\\frac{", "2^", "1/2", "5 or ", "1e", "| 1 ", "1 million "],
)
def test_long_degenerate_responses_are_graded_in_linear_time(grader: str, unit: str) -> None:
    """Four times the text takes less than eight times as long, in one process; quadratic time would be sixteen."""

    def seconds(characters: int) -> float:
        start = time.process_time()
        for before in ("", "Answer: "):
            BuiltinGrader(grader, "text")(before + unit * (characters // len(unit)), "5")
        return time.process_time() - start

    seconds(1_000)  # what the first call alone costs
    quarter = seconds(15_000)
    assert seconds(60_000) < max(0.5, 8 * quarter)


def test_only_what_follows_the_reasoning_is_read() -> None:
    assert final_part("a</think>b</think> c") == " c"
    assert final_part("a <think>b") == "" and final_part("a") == "a"


def test_the_data_source_chooses_and_a_named_set_overrules_it() -> None:
    choice = GraderChoice({"quiz": "choice"})
    assert choice.of("held", "math_dapo").name == "answer_line_or_boxed"
    assert choice.of("held", "AIME24").name == choice.of("held", None).name == "boxed"
    assert choice.of("quiz", "math_dapo").name == "choice"
    assert GraderChoice({"": "number"}).of("any", "math_dapo").name == "number"


GSM8K = "She has 48 + 24 = <<48+24=72>>72 of them.\n#### 72"


def test_the_form_of_the_answers_chooses_where_nothing_else_does() -> None:
    choice = GraderChoice({"quiz": "boxed"})
    mine = [("mine", GSM8K), ("mine", "#### 3"), ("other", "72"), ("math_dapo", "#### 5")]
    (line,) = choice.read("held", mine)
    assert (
        "held: all answers of the data source 'mine'" in line and "'number'" in line and "in place of 'boxed'" in line
    )
    assert "evaluation.graders.held=NAME" in line
    assert [choice.of("held", source).name for source, _ in mine[1:]] == ["number", "boxed", "answer_line_or_boxed"]
    assert choice.of("held", "mine")("72 of them", GSM8K).correct
    # of other sets, and of those with a grader of their own, nothing is said
    assert choice.read("quiz", mine) == [] and choice.of("quiz", "mine").name == "boxed"
    assert choice.of("more", "mine").name == "boxed"
    # not all agree: `boxed` reads what is marked
    assert choice.read("held", [("mine", GSM8K), ("mine", "72")]) == [] and choice.of("held", "mine").name == "boxed"


@pytest.mark.parametrize(
    ("answer", "grader"),
    [
        (GSM8K, "number"),
        ("#### 3", "number"),
        ("It is so.\n#### 1,800 dollars\n", "number"),
        ("It is so.\n#### C", "choice"),
        ("It is so.\nAnswer: x + 1", "answer_line_or_boxed"),
        ("#### A heading\nIt is 5.", None),
        ("#### x + 1", None),
        ("Answer: 5 is wrong.\nIt is 6.", None),
        ("72", None),
        ("C", None),
        (r"So it is $\boxed{72}$.", None),
        ("", None),
    ],
)
def test_forms_of_answers(answer: str, grader: str | None) -> None:
    assert form(answer) == grader


def test_grading_by_text_says_so_and_asks_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grade, "_VERIFIER", None)
    grader = BuiltinGrader("boxed", "text")
    assert grader.name == "boxed (text)"
    assert not grader(r"\boxed{\frac{2}{4}}", r"\frac{1}{2}").correct
    assert grader(r"\boxed{\dfrac12}", r"\frac{1}{2}").correct


def test_a_missing_judge_is_refused_with_the_alternative(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"not installed.*pip install 'math-verify.*--judge=text"):
        check_judge("--judge", "math_verify")
    check_judge("--judge", "text")
    with pytest.raises(ValueError, match="--judge='maths': expected one of math_verify, text"):
        check_judge("--judge", "maths")


@pytest.mark.parametrize(
    ("grader", "answer", "words"),
    [
        ("number", "east", "expected a number"),
        ("number", "between 5 and 7 apples", "expected a number"),
        ("choice", "12", "expected a letter such as C"),
    ],
)
def test_reference_answers_that_a_grader_cannot_compare_with_are_refused(grader: str, answer: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        BuiltinGrader(grader).check(answer)


OWN = """
import functools
def half(response, answer):
    return response.startswith(answer), response or None
def bare(response, answer):
    return answer in response
def strange(response, answer):
    return "yes"
def breaks(response, answer):
    raise KeyError("gone")
def three(response, answer, more):
    return True
number = 5
partial = functools.partial(bare)
class Careful:
    def __call__(self, response, answer):
        return answer in response
instance = Careful()
exec("def made(response, answer): return answer in response")
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "own_graders_for_a_test.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "own_graders_for_a_test", raising=False)  # another test's file
    return "own_graders_for_a_test"


def test_a_grader_of_ones_own(own: str) -> None:
    half, bare = resolve("--grader", f"{own}:half"), resolve("--grader", f"{own}:bare")
    assert (half.name, half("5 apples", "5").correct, half("5 apples", "5").extracted) == (
        f"{own}:half",
        True,
        "5 apples",
    )
    assert not half("", "5").correct and half("", "5").extracted is None
    assert bare("so 5", "5").correct and bare("so 6", "5").extracted == ""
    assert half.key != bare.key and half.key.startswith(half.name)
    with pytest.raises(KeyError) as broken:
        resolve("--grader", f"{own}:breaks")("text", "5")
    assert any("own_graders_for_a_test:breaks, answer '5'" in note for note in broken.value.__notes__)


def test_every_callable_has_a_key_that_follows_its_file(own: str, tmp_path: Path) -> None:
    """One that passes the checks of a start must not fail when its key is first needed, after sampling."""
    names = [f"{own}:{name}" for name in ("bare", "partial", "instance", "made")] + ["operator:eq", "math:isclose"]
    graders = {name: resolve("--grader", name) for name in names}
    before = {name: grader.key for name, grader in graders.items()}
    assert all(key.startswith(f"{name} ") for name, key in before.items())
    file = tmp_path / f"{own}.py"
    file.write_text(file.read_text() + "more = 6\n")
    changed = [name for name, grader in graders.items() if grader.key != before[name]]
    assert changed == names[:4]


def test_the_key_of_a_partial_follows_its_arguments_and_its_function(own: str, tmp_path: Path) -> None:
    text = f"import functools, {own}\nhalf = functools.partial(functools.partial({own}.half))\n"
    named = tmp_path / "named_graders_for_a_test.py"
    named.write_text(text)
    grader = resolve("--grader", "named_graders_for_a_test:half")
    keys = [grader.key]
    for file in (named, tmp_path / f"{own}.py"):
        file.write_text(file.read_text() + "more = 6\n")
        keys.append(grader.key)
    assert len(set(keys)) == 3


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("boxd", "--grader='boxd': expected one of boxed, .* did you mean 'boxed'?"),
        ("no_such_module_here:f", "no module 'no_such_module_here'; expected one on Python's path"),
        ("OWN:hlaf", "has no 'hlaf'; expected a function in it: did you mean 'half'?"),
        ("OWN:number", "is int, expected a function"),
        ("OWN:three", "can't be called with a response and an answer"),
        ("OWN:strange", "returned 'yes' for answer '5', expected a bool, or"),
    ],
)
def test_wrong_graders_are_refused_in_one_line(own: str, name: str, words: str) -> None:
    with pytest.raises(ValueError, match=words.replace("?", r"\?")) as refused:
        resolve("--grader", name.replace("OWN", own)).check("5")
    assert "\n" not in str(refused.value)


def test_a_configuration_chooses_graders_and_mistakes_are_found_before_models_are_read() -> None:
    base = ["student.hf_path=a", "teacher.hf_path=b", "data.validation.sums=x.jsonl"]
    config = load_config("verify", [*base, "evaluation.graders.sums=number", "evaluation.judge=text"])
    assert (config.evaluation.graders, config.evaluation.judge) == ({"sums": "number"}, "text")
    check_graders(config)
    with pytest.raises(ValueError, match=r"evaluation.graders.other=number: there is no such set, .* \(sums\)"):
        load_config("verify", [*base, "evaluation.graders.other=number"])
    for name, words in (("boxd", "did you mean 'boxed'"), ("no_such_module_here:f", "no module 'no_such_module_here'")):
        with pytest.raises(ValueError, match=rf"evaluation.graders.sums=.*{words}"):
            check_graders(load_config("verify", [*base, f"evaluation.graders.sums={name}"]))


PIECES = [
    *(
        "\\frac",
        "\\sqrt",
        "\\left",
        "\\right",
        "\\le",
        "\\text{a}",
        "\\begin{pmatrix}",
        "\\end{pmatrix}",
        "\\\\",
        "\\pm",
    ),
    *(
        "\\infty",
        "\\cup",
        "\\{",
        "\\}",
        "\\%",
        "\\",
        "\\sin",
        "\\log",
        "\\int",
        "\\sum",
        "\\lim",
        "\\to",
        "\\overline{3}",
    ),
    *("\\boxed{", "Answer:", "0.", "1", "2", "x", "i", *"{}^_()[]+-*/,=<&%!|$.: "),
]


def test_random_latex_never_crashes_or_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("math_verify")
    monkeypatch.setattr(grade, "TIME_LIMIT_S", 2)
    draw, asked = random.Random(0), 0
    for _ in range(300):
        text = "".join(draw.choice(PIECES) for _ in range(draw.randint(1, 14)))
        for answer in (r"\frac{1}{2}", "[1,2]", text):
            judgement = grade.judge(text, answer, both=True)
            asked += judgement.math_verify is not None
            assert answer != text or judgement.correct
        for name in BUILTIN:
            BuiltinGrader(name, "text")(text, "5")
    assert asked > 300


@pytest.mark.parametrize("name", ["aime24", "aime25", "aimo", "amc23", "math_500", "dapo_math_17k"])
def test_real_answers_are_correct_against_themselves(name: str) -> None:
    """Every reference answer, in the form that its data source asks for and in a box."""
    pytest.importorskip("math_verify")
    path = DATA / f"{name}.parquet"
    if not path.exists():
        pytest.skip(f"needs ../shared/data/{name}.parquet beside the repository")
    choice = GraderChoice({}, "math_verify")
    wrong = []
    seen = set[str]()
    for prompt in load_prompts(path):
        answer, grader = prompt.answer or "", choice.of(name, prompt.data_source)
        if answer in seen:
            continue
        seen.add(answer)
        forms = [rf"Thus $\boxed{{{answer}}}$."]
        forms += [f"Thus.\n\nAnswer: {answer}", f"Answer: ${answer}$"] if "answer_line" in grader.name else []
        # spelled as the reference, so that the text settles it; math-verify's own verdict is not needed here
        wrong += [form for form in forms if not BuiltinGrader(grader.name, "text")(form, answer).correct]
    assert wrong == [] and seen
    if name == "dapo_math_17k":
        assert choice.of(name, "math_dapo").name == "answer_line_or_boxed"
