"""The metrics of an evaluation set: their names, what they mean, and the graded samples that they are made of.

`intervals.py` computes them. Nothing is averaged over sets, because their sizes differ by a factor of ten.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

N_GRAM = 4
DIVERSITY = "dist_4g"
# What every metric of an evaluation set means, by its name without a number of samples: `avg` stands for avg@4. n is
# the number of responses to a problem, k that of a subset of them. The report shows it, and docs/evaluation.md has it.
MEANINGS = {
    "avg": "mean share of right responses among a problem's n",
    "best": "share of problems with at least one right response among the n",
    "pass": "probability that k responses to a problem hold a right one, estimated from all n without bias",
    "maj": "share of problems whose most frequent answer is right; where answers tie, the share of right ones",
    "avg_len": "mean length of a response in the student's tokens, the end-of-sequence token included",
    "truncated": "share of responses that were cut off at the limit of tokens",
    "no_answer": "share of responses in which the grader finds no answer",
    DIVERSITY: "different / all sequences of 4 words in a problem's responses, mean over problems: 1 is no repetition",
}
# why a metric may have no value: it is then absent from files and logs
UNDEFINED = {DIVERSITY: "no response has 4 words"}


def kind_of(metric: str) -> str:
    """The key of `MEANINGS` for a metric. Example: `val/aime24/avg@16` -> `avg`."""
    return metric.rsplit("/", 1)[-1].partition("@")[0]


def order_of(metric: str) -> tuple[int, int]:
    """Sorts metrics without a prefix as `MEANINGS` has them, then by their k."""
    return list(MEANINGS).index(kind_of(metric)), int(metric.partition("@")[2] or 0)


def repeated(metrics: Iterable[str]) -> set[str]:
    """The metrics that are others by another name: pass@1 is avg@n, and pass@n of all n responses is best@n."""
    return {"pass@1", *(metric.replace("best", "pass") for metric in metrics if metric.startswith("best@"))}


@dataclass(frozen=True)
class Sample:
    """One graded response.

    Attributes:
        problem: number of the problem; any integer that all k samples of a problem share.
        response: text of the response.
        correct: the grade.
        num_tokens: length in the student's tokens, including the end-of-sequence token.
        vote: what equal wrong answers share; None without a gradable answer. Right answers need no common spelling.
        truncated: whether the response was cut off; None if it is not known.
        subject, level: of the problem; None if the data has none.
    """

    problem: int
    response: str
    correct: bool
    num_tokens: int
    vote: str | None = None
    truncated: bool | None = None
    subject: str | None = None
    level: str | None = None


def by_problem(samples: Iterable[Sample]) -> list[list[Sample]]:
    """The samples of each problem, in the order of the problems' numbers."""
    groups = defaultdict[int, list[Sample]](list)
    for sample in samples:
        groups[sample.problem].append(sample)
    return [groups[problem] for problem in sorted(groups)]


def distinct_ratio(responses: Iterable[str]) -> float | None:
    """Distinct / all 4-grams of the responses' whitespace tokens; None if no response has four tokens.

    No 4-gram spans two responses.
    """
    grams: list[tuple[str, ...]] = []
    for response in responses:
        words = response.split()
        grams += [tuple(words[i : i + N_GRAM]) for i in range(len(words) - N_GRAM + 1)]
    return len(set(grams)) / len(grams) if grams else None
