"""Grading: the last box decides, spellings of one value agree, other values don't, nothing hangs or runs code."""

from __future__ import annotations

import itertools
import re
import threading
import time
from pathlib import Path

import pytest

from nemo_oprd.data.prompts import load_prompts
from nemo_oprd.evaluation.grading import equality as grade
from nemo_oprd.evaluation.grading.equality import judge, pairs, settle
from nemo_oprd.evaluation.grading.extraction import extract_boxed, final_part


def is_correct(response: str, answer: str) -> bool:
    """Whether the response's last box holds the reference answer, as text or as an equivalent expression."""
    found = extract_boxed(final_part(response))
    return found is not None and judge(found, answer).correct


DATA = Path(__file__).resolve().parents[3] / "../shared/data"


@pytest.mark.parametrize(
    ("text", "boxed"),
    [
        (r"first \boxed{1}, then \boxed{2}.", "2"),
        (r"\boxed{\frac{1}{\sqrt{2}}}", r"\frac{1}{\sqrt{2}}"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{\left\{ 1 \right.}", r"\left\{ 1 \right."),
        (r"\boxed {7 }", "7"),
        (r"\boxed{\boxed{5}}", "5"),
        (r"} \boxed{3} {", "3"),
        (r"\boxed{4} and then \boxed{12", "4"),
        (r"\boxed{}", ""),
        (r"\boxed{12", None),
        ("the answer is 12", None),
        ("", None),
    ],
)
def test_last_balanced_box(text, boxed):
    assert extract_boxed(text) == boxed


def test_extraction_is_linear_in_the_length():
    """A degenerate response may open thousands of boxes; rescanning from each took minutes."""
    start = time.process_time()
    assert extract_boxed(r"\boxed{" * 20_000) is None
    assert time.process_time() - start < 2


def boxed(text: str) -> str:
    return rf"Therefore the answer is $\boxed{{{text}}}$."


@pytest.mark.parametrize(
    ("answer", "given"),
    [
        ("025", "25"),
        ("25", "025"),
        ("142.0", "142"),
        ("-4.0", "-4"),
        ("-3", "\N{MINUS SIGN}3"),
        ("0", "-0.0"),
        (".0000672", "0.0000672"),
        ("58,500", "58500"),
        ("58500", "58{,}500"),
        (r"10,\!080", r"10\,080"),
        (r"11,\! 111,\! 111,\! 100", "11111111100"),
        (r"\$32,\!348", r"\$32,348.00"),
        (r"336^\circ", "336"),
        ("336", r"336^{\circ}"),
        (r"50\%", "50"),
        (r"5.4 \text{ cents}", "5.40"),
        (r"864 \mbox{ inches}^2", r"864\text{ in}^2"),
        (r"\text{Evelyn}", r"\textbf{evelyn}"),
        (r"\text{(C)}", "C"),
        (r"\dfrac{17}{50}", r"\frac{17}{50}"),
        (r"\frac43", r"\tfrac{4}{3}"),
        (r"\left( 3, \frac{\pi}{2} \right)", r"(3,\frac\pi2)"),
        (r"\begin{pmatrix} -2 \\ -14 \end{pmatrix}", r"\begin{pmatrix}-2\\-14\end{pmatrix}"),
        ("12", " 12. "),
    ],
)
def test_same_spelling(answer, given, monkeypatch):
    monkeypatch.setattr(grade, "_VERIFIER", None)  # text alone must settle these, also where math-verify is missing
    assert is_correct(boxed(given), answer)


@pytest.mark.parametrize(
    ("answer", "given"),
    [
        ("204", "205"),
        ("-3", "3"),
        ("0.5", "0.05"),
        ("1.25", "125"),
        (r"\text{east}", "seat"),
        (r"\text{(C)}", r"\text{(D)}"),
        ("5", ""),
        ("", ""),
        ("5", "5 and more prose " * 100),
    ],
)
def test_different_without_math_verify(answer, given, monkeypatch):
    monkeypatch.setattr(grade, "_VERIFIER", None)
    assert not is_correct(boxed(given), answer)


def test_a_response_without_box_is_wrong():
    assert not is_correct("The answer is 5.", "5")
    assert not is_correct(r"\boxed{5} no, \boxed{6}", "5")
    assert is_correct(r"\boxed{6} no, \boxed{5}", "5")


EQUIVALENT = [
    (r"\frac{14}{3}", "14/3"),
    (r"\frac{1}{2}", "0.5"),
    (r"6 - 5i", "-5i+6"),
    (r"2\sqrt{113}", r"\sqrt{452}"),
    (r"1,-2", r"-2, 1"),
    (r"x \in [-2,7]", "[-2,7]"),
    (r"x=5", "5"),
    (r"1 \pm \sqrt{19}", r"1+\sqrt{19}, 1-\sqrt{19}"),
    (r"11\sqrt2", r"11\sqrt{2}"),
    (r"1024", "2^{10}"),
    (r"204_5", "204_{5}"),
]
DIFFERENT = [
    (r"(3,4]", "(3,4)"),
    (r"p - q", "q - p"),
    (r"1,-2", "1"),
    (r"\frac{1}{3}", "0.333"),
    (r"2k+2", "2k+1"),
    ("5", r"\pm 5"),
    ("5", "(((("),
    ("12", "1 2"),
    ("7", r"\unknown 7"),  # would be right by math-verify's other parser, which evaluates text
]


@pytest.mark.parametrize(
    ("answer", "given", "correct"), [(*pair, True) for pair in EQUIVALENT] + [(*pair, False) for pair in DIFFERENT]
)
def test_equivalence(answer, given, correct):
    pytest.importorskip("math_verify")
    assert is_correct(boxed(given), answer) is correct


def test_equivalence_in_threads():
    pytest.importorskip("math_verify")
    grades: dict[int, bool] = {}

    def run(index: int) -> None:
        grades[index] = is_correct(boxed(f"{index}/2"), r"\frac{4}{2}")

    threads = [threading.Thread(target=run, args=(index,)) for index in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert grades == {index: index == 4 for index in range(8)}


def test_hopeless_expressions_end_and_the_next_is_graded(monkeypatch, caplog):
    pytest.importorskip("math_verify")
    monkeypatch.setattr(grade, "TIME_LIMIT_S", 1)
    monkeypatch.setattr(grade, "_VERIFIER", grade._Verifier())
    start = time.perf_counter()
    assert not is_correct(boxed("9^{9^{9^9}}"), "5")
    assert time.perf_counter() - start < 30
    assert "compared as text" in caplog.text
    monkeypatch.setattr(grade, "TIME_LIMIT_S", 10)  # a busy machine may take seconds for what takes none
    assert is_correct(boxed("10/2"), "5")
    grade._VERIFIER.close()


def test_text_is_never_evaluated(tmp_path):
    pytest.importorskip("math_verify")
    mark = tmp_path / "mark"
    assert not is_correct(boxed(f'__import__("pathlib").Path("{mark}").touch()'), "5")
    assert not is_correct(boxed(f'\\operatorname{{eval}}(open("{mark}","w"))'), "5")
    assert not mark.exists()


def test_a_missing_library_is_an_error(monkeypatch, tmp_path):
    (tmp_path / "math_verify.py").write_text("raise ImportError('not here')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(grade, "_VERIFIER", grade._Verifier())
    with pytest.raises(RuntimeError, match=r"pip install 'math-verify\[antlr4_9_3\]'"):
        is_correct(boxed("x+1"), "1+x")


@pytest.mark.parametrize("name", ["aime24", "aime25", "aimo", "amc23", "math_500"])
def test_real_answers_equal_themselves(name):
    """Every reference answer, boxed, is right, and wrong for the problem before it unless the two answers agree."""
    path = DATA / f"{name}.parquet"
    if not path.exists():
        pytest.skip(f"needs ../shared/data/{name}.parquet beside the repository")
    answers = [prompt.answer or "" for prompt in load_prompts(path)]
    assert [answer for answer in answers if not is_correct(boxed(answer), answer)] == []
    if name != "math_500":  # integers: no two spellings of one value but those that float() sees through
        for given, answer in itertools.pairwise(answers):
            values = {float(text.removesuffix(r"^\circ")) for text in (given, answer)}
            assert is_correct(boxed(given), answer) == (len(values) == 1)


def other_spellings(answer: str) -> list[str]:
    """The same value, written as a model may write it."""
    powers = re.sub(r"(?<=\d)( ?)\\sqrt", r" \\cdot\\sqrt", answer)
    powers = re.sub(r"\\sqrt\{?(\d+)\}?", r"{\1}^{0.5}", powers)
    found = [f"{answer}.", answer.replace(r"\frac", r"\tfrac"), powers]
    if "=" not in answer and r"\in" not in answer and "text" not in answer:
        found.append(f"x = {answer}")
    if re.fullmatch(r"\d{4,6}", answer):
        found.append(rf"{answer[:-3]}\!,{answer[-3:]}")
    if degrees := re.fullmatch(r"(\d+)\^\\circ", answer):
        found += [rf"\frac{{{degrees[1]}\pi}}{{180}}", rf"{degrees[1]}\text{{ degrees}}"]
    if union := re.fullmatch(r"\((.*?),(.*?)\) \\cup \((.*?),(.*?)\)", answer):
        sides = [f"{low} < x < {high}" for low, high in (union.groups()[:2], union.groups()[2:])]
        found.append(r" \text{ or } ".join(sides).replace(r"-\infty < ", "").replace(r"3 < x <  \infty", "x > 3"))
    if signs := re.fullmatch(r"(\d) \\pm (.*)", answer):
        whole, rest = signs.groups()
        found += [f"{whole}-{rest}, {whole}+{rest}", rf"\frac{{{2 * int(whole)} \pm 2({rest})}}{{2}}"]
    return found


def close_wrong_answers(answer: str) -> list[str]:
    found = [re.sub(r"\d", lambda digit: str((int(digit[0]) + 1) % 10), answer, count=1)]
    if "=" not in answer:
        found.append(rf"{answer}\text{{ million}}")
    if re.fullmatch(r"\([^()]*,[^()]*\)", answer):
        found.append(rf"\{{{answer[1:-1]}\}}")
    if degrees := re.fullmatch(r"(\d+)\^\\circ", answer):
        found.append(rf"\frac{{{degrees[1]}\pi}}{{90}}")
    return [each.replace("\\pm", "+") for each in found if re.search(r"\d", answer) and answer not in ("0", "0.0")]


def test_real_answers_in_other_spellings_and_close_wrong_ones():
    pytest.importorskip("math_verify")
    path = DATA / "math_500.parquet"
    if not path.exists():
        pytest.skip("needs ../shared/data/math_500.parquet beside the repository")
    answers = list(dict.fromkeys(prompt.answer or "" for prompt in load_prompts(path)))
    right = {(answer, given) for answer in answers for given in other_spellings(answer)}
    wrong = {(answer, given) for answer in answers for given in close_wrong_answers(answer)}
    assert {pair for pair in right if not grade.judge(pair[1], pair[0]).correct} == set()
    assert {pair for pair in wrong if grade.judge(pair[1], pair[0]).correct} == set()
    assert len(right) > 1000 and len(wrong) > 400
    following = [(a, b) for a, b in itertools.pairwise(answers)]
    assert {pair for pair in following if grade.judge(pair[1], pair[0]).correct} <= {("336", r"336^\circ")}


@pytest.mark.parametrize(
    "unit",
    [r"\pm ", r"\mp1", "x<", r"\text{ or }", "1,", "(", r"\{", "^\\circ", r"k\in Z", "1:", r"1\text{ cm}", "a.m."],
)
def test_readings_of_degenerate_answers_are_quick_and_short(unit):
    text, start = unit * (grade.MAX_CHARACTERS // len(unit)), time.process_time()
    for given, answer in ((text, "5"), (text, r"\pi"), (text, "(1,2)"), (f"1 {text}", rf"1\pm{text}")):
        settle(given, answer)
        found = list(pairs(given, answer))
        assert len(found) <= 4 and max(len(each) for pair in found for each in pair) < 20_000
    assert time.process_time() - start < 2
