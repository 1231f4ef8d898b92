"""Summarises graded samples of one evaluation set: avg@k, best@k, 4-gram diversity and length.

`sample` and `grade` produce the samples. Nothing is averaged over sets, because their sizes differ by a factor of ten.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
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


def check_samples(samples: Sequence[Sample], k: int) -> None:
    """Raises ValueError if there are no samples, k is not positive, or a problem does not have exactly k samples."""
    if k < 1 or not samples:
        raise ValueError(
            f"k is {k} with {len(samples)} samples, expected k >= 1 and at least one sample; check the evaluation set"
        )
    for problem, count in Counter(sample.problem for sample in samples).items():
        if count != k:
            raise ValueError(f"problem {problem} has {count} samples, expected k = {k}; sample every problem k times")


def summarize(samples: Sequence[Sample], k: int, diversity: Sequence[float] | None = None) -> dict[str, float]:
    """The metrics of one set of problems with k samples each, in any order.

    Args:
        diversity: `distinct_ratio` of the problems that have one, if it is known.

    Returns:
        `avg@{k}`: mean over problems of the mean grade of their k samples, in [0, 1].
        `best@{k}`: fraction of problems with at least one correct sample, in [0, 1].
        `dist_4g`: distinct / all whitespace-token 4-grams, pooled over a problem's samples (no 4-gram spans two
            samples), averaged over the problems that have any; absent if none has.
        `avg_len`: mean response length in tokens.

    Example: two problems, k = 2, grades (1, 0) and (0, 0): avg@2 is 0.25, best@2 is 0.5.

    Raises:
        ValueError: as `check_samples`.
    """
    check_samples(samples, k)
    groups = by_problem(samples)
    if diversity is None:
        diversity = [ratio for group in groups if (ratio := distinct_ratio(s.response for s in group)) is not None]
    metrics = {
        # k samples per problem: also the mean over problems
        f"avg@{k}": sum(s.correct for s in samples) / len(samples),
        f"best@{k}": sum(any(s.correct for s in group) for group in groups) / len(groups),
    }
    if diversity:
        metrics[DIVERSITY] = sum(diversity) / len(diversity)
    return {**metrics, "avg_len": sum(s.num_tokens for s in samples) / len(samples)}


def distinct_ratio(responses: Iterable[str]) -> float | None:
    """Distinct / all 4-grams of the responses' whitespace tokens; None if no response has four tokens."""
    grams: list[tuple[str, ...]] = []
    for response in responses:
        words = response.split()
        grams += [tuple(words[i : i + N_GRAM]) for i in range(len(words) - N_GRAM + 1)]
    return len(set(grams)) / len(grams) if grams else None
