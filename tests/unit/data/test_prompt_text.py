r"""When prompts are the same problem, a suffix that is added once, and instructions that a file's prompts share."""

from __future__ import annotations

import pytest

from nemo_oprd.data.prompts import Prompt
from nemo_oprd.data.text import SuffixCounts, identity, normalize, share_of, with_suffix, without_instructions, words_of

BOX = r"Please reason step by step, and put your final answer within \boxed{}."
ANSWER = 'Remember to put your answer on its own line after "Answer:".'


def prompt(content: str, *before: str, answer: str | None = None) -> Prompt:
    messages = [{"role": "system", "content": text} for text in before] + [{"role": "user", "content": content}]
    return Prompt(tuple(messages), answer, "toy", 0)


SAME = [
    ("a $9$-kilometer walk", "A 9-kilometer  walk"),
    (r"$\left( 3, \frac{\pi}{2} \right)$", r"(3,\frac{\pi}{2})"),
    (r"10\,000 and 10{,}000", r"10000 and 10{,}000"),
    ("x + 1 = 2", "x+1=2"),
    ("two\n\nlines ", "two lines"),
    ("\uff11\uff12 ", "12"),  # full-width digits
    ("Find $x$ .", "find x."),
]
DIFFERENT = [
    ("3 + 4", "3 - 4"),
    ("1 12", "11 2"),
    ("x^2", "x_2"),
    ("a b", "ab"),
    ("1.5", "15"),
    (r"\lefteqn{x}", r"{x}"),
    ("2", "3"),
    ("-4", "4"),
]


@pytest.mark.parametrize(("one", "other"), SAME)
def test_same_problem(one: str, other: str) -> None:
    assert normalize(one) == normalize(other)
    assert identity(prompt(one)) == identity(prompt(other))


@pytest.mark.parametrize(("one", "other"), DIFFERENT)
def test_different_problems(one: str, other: str) -> None:
    assert normalize(one) != normalize(other)


def test_all_messages_identify_a_problem() -> None:
    assert identity(prompt("2+3", "Be brief.")) != identity(prompt("2+3"))
    assert identity(prompt(f"2+3? {BOX}"), BOX) == identity(prompt("2+3?"), BOX) != identity(prompt(f"2+3? {BOX}"))


def test_words() -> None:
    assert words_of(normalize(r"Let $f(x_1)=\frac{1}{2}$ 若x")) == ["let", "f", "x", "1", "frac", "1", "2", "若", "x"]


def test_a_share_is_even_and_fixed_by_value() -> None:
    """Fixed by value: another hash would move problems from training to validation."""
    assert share_of("1+1=") == pytest.approx(SHARE, abs=1e-12)
    shares = [share_of(str(number)) for number in range(4000)]
    assert all(0 <= share < 1 for share in shares)
    assert all(abs(sum(share < limit for share in shares) / 4000 - limit) < 0.03 for limit in (0.1, 0.25, 0.5, 0.9))


SHARE = 0.2792570752199808


def test_the_suffix_is_added_once() -> None:
    prompts = [
        prompt("2+3?"),
        prompt(f"2+3? {BOX}"),
        prompt("2+3?\nplease reason step by step,  and put your final answer within $\\boxed{}$."),
        prompt(r"2+3? Give it in \boxed{ }."),
        prompt(r"Simplify \boxed{3}+2.  "),
    ]
    added, counts = with_suffix(prompts, BOX)
    contents = [each.messages[-1]["content"] for each in added]
    assert contents[0] == f"2+3? {BOX}" and contents[4] == rf"Simplify \boxed{{3}}+2. {BOX}"
    assert added[1:4] == prompts[1:4]
    assert counts == SuffixCounts(added=2, present=2, other_words=1)
    again, counts = with_suffix(added, BOX)
    assert again == added and counts == SuffixCounts(present=4, other_words=1)


def test_a_suffix_of_its_own_lines_and_one_without_a_box() -> None:
    (added,), counts = with_suffix([prompt(r"2+3? Use \boxed{}.", "Be brief.")], f"\n\n{ANSWER}")
    assert added.messages[-1]["content"] == f"2+3? Use \\boxed{{}}.\n\n{ANSWER}"
    assert added.messages[0] == {"role": "system", "content": "Be brief."}
    assert counts == SuffixCounts(added=1)
    assert with_suffix([added], None) == ([added], SuffixCounts())


@pytest.mark.parametrize(
    ("suffix", "has", "has_not"),
    [
        ("/no_think", "2+3? /no_think", "Explain /no_think in prompts."),
        ("Answer:", "2+3?\n\nanswer: ", "The last line is Answer: $x. What is 2+3?"),
        ("$$", "2+3? $$", "2+3?"),
        ("Think step by step.", "Think step  by step. 2+3?", "Think by step. 2+3?"),
    ],
)
def test_short_suffixes_count_at_the_end_only(suffix: str, has: str, has_not: str) -> None:
    added, counts = with_suffix([prompt(has), prompt(has_not)], suffix)
    assert counts == SuffixCounts(added=1, present=1)
    assert added == [prompt(has), prompt(f"{has_not} {suffix}")]


def test_instructions_that_half_of_a_file_shares_are_left_out() -> None:
    head = "Solve the following math problem step by step."
    texts = [f"{head} What is {n}+1? {ANSWER}" for n in range(3)] + ["What is 9+1?", f"{head} {ANSWER}"]
    assert without_instructions(texts) == [f"What is {n}+1?" for n in range(3)] + ["What is 9+1?", texts[4]]
    assert without_instructions([f"{n} is the value of n? {BOX}" for n in range(3)]) == [
        f"{n} is the value of n?" for n in range(3)
    ]
    # the beginning of the problems themselves, and an instruction of a minority
    problems = [f"What is the value of {n}?" for n in range(4)]
    assert without_instructions(["What is 1?", "What is 2?"]) == ["What is 1?", "What is 2?"]
    assert without_instructions([*problems[:1], "a", "b", "c", "d"]) == [*problems[:1], "a", "b", "c", "d"]
    assert without_instructions([]) == []
