"""Validation problems in training data: what is found, what is not, and how fast."""

from __future__ import annotations

import random
import time

from nemo_oprd.data.preparation import CONTAINED_SHARE, SEQUENCE_WORDS, TrainingTexts
from nemo_oprd.data.prompts import Prompt
from nemo_oprd.data.text import normalize, words_of

BOX = r"Please reason step by step, and put your final answer within \boxed{}."
DAPO = "Solve the following math problem step by step. The last line should be Answer: $Answer."


def prompts(*texts: str) -> list[Prompt]:
    return [Prompt(({"role": "user", "content": text},), "1", "toy", i) for i, text in enumerate(texts)]


def problem(seed: int, words: int = 40) -> str:
    draw = random.Random(seed)
    return " ".join("".join(draw.choices("abcdefghij", k=4)) for _ in range(words))


def found(training: list[Prompt], validation: list[Prompt]) -> list[tuple[int, int, float, bool]]:
    overlaps = TrainingTexts([training]).overlaps({"set": validation})["set"]
    return [(each.problem, each.training, each.share, each.same_text) for each in overlaps]


def test_the_same_problem_under_other_instructions_and_in_other_typesetting() -> None:
    training = prompts(*(f"{DAPO}\n\n{problem(n)} $n$ = $\\left({n}\\right)$" for n in range(6)))
    validation = prompts(*(f"{problem(n).upper()} n=({n}) {BOX}" for n in (3, 90, 5)))
    assert found(training, validation) == [(0, 3, 1.0, True), (2, 5, 1.0, True)]


def test_short_problems_are_found_by_their_whole_text() -> None:
    training = prompts("What is 2+3?", "What is 2-3?")
    assert found(training, prompts("what is $2 + 3$?", "What is 2+4?")) == [(0, 0, 1.0, True)]


def test_shares_equal_those_of_a_plain_count() -> None:
    texts = [problem(n) for n in range(4)]
    halves = zip(texts, (39, 27, 20, 5), strict=True)
    parts = [" ".join([*text.split()[:half], problem(50 + n)]) for n, (text, half) in enumerate(halves)]
    overlaps = TrainingTexts([prompts(*parts)]).overlaps({"set": prompts(*texts)})["set"]

    def sequences(text: str) -> set[str]:
        words = words_of(normalize(text))
        return {" ".join(words[i : i + SEQUENCE_WORDS]) for i in range(len(words) - SEQUENCE_WORDS + 1)}

    pairs = [(sequences(text), sequences(part)) for text, part in zip(texts, parts, strict=True)]
    plain = [len(ours & theirs) / len(ours) for ours, theirs in pairs]
    assert [(each.problem, each.training, each.share) for each in overlaps] == [(n, n, plain[n]) for n in range(3)]
    assert plain[0] > CONTAINED_SHARE and plain[1] > CONTAINED_SHARE > plain[2] > plain[3] == 0
    assert [each.is_contained for each in overlaps] == [True, True, False]


def test_common_phrases_say_nothing() -> None:
    phrase = "the answer can be written in the form m over n where both are relatively prime positive integers find m"
    others = [problem(n) for n in range(20, 40)]  # most prompts, so that the phrase is no instruction of the file
    training = [f"{problem(n, 6)} {phrase}" for n in range(11)]
    validation = prompts(f"{problem(99, 6)} {phrase}", "other")
    assert found(prompts(*others, *training), validation) == []
    assert found(prompts(*others, *training[:10]), validation) != []


def test_all_copies_are_named_also_those_in_other_files() -> None:
    text = problem(1)
    overlaps = TrainingTexts([prompts(problem(7), text), prompts(text + " more")]).overlaps(
        {"one": prompts(text), "other": prompts(problem(8))}
    )
    assert [(each.training, each.same_text) for each in overlaps["one"]] == [(1, True), (2, False)]
    assert overlaps["other"] == []


def test_a_collection_is_compared_in_seconds() -> None:
    """4,000 prompts of 80 words against 500 problems; CPU time, because other processes may be at work."""
    draw = random.Random(0)
    vocabulary = ["".join(draw.choices("abcdefgh", k=5)) for _ in range(3000)]
    texts = [" ".join(draw.choices(vocabulary, k=80)) for _ in range(4000)]
    start = time.process_time()
    overlaps = TrainingTexts([prompts(*texts)]).overlaps({"set": prompts(*texts[:250], *texts[-250:])})["set"]
    assert len(overlaps) == 500 and all(each.same_text for each in overlaps)
    assert time.process_time() - start < 10
