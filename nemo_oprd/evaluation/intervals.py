"""Computes an evaluation set's metrics (pass@k, maj@k, ...), their bootstrap intervals and paired differences.

A problem's k samples are not independent of each other, so the bootstrap resamples problems: every metric here is a
mean over problems of one value per problem, and its interval shows how the mean would vary with other problems of the
same kind. docs/evaluation.md has the equations.
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

# The metrics of an evaluation set: their names, their meanings, and the graded samples from which they are computed.
#
# There is no average over sets, because their sizes differ by a factor of ten.

N_GRAM = 4
DIVERSITY = "dist_4g"
# The meaning of each metric of an evaluation set, by its name without a number of samples: `avg` stands for avg@4. n is
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
# reasons why a metric may have no value: it is then absent from files and logs
UNDEFINED = {DIVERSITY: "no response has 4 words"}


def kind_of(metric: str) -> str:
    """Returns the key of `MEANINGS` for a metric. Example: `val/aime24/avg@16` -> `avg`."""
    return metric.rsplit("/", 1)[-1].partition("@")[0]


def order_of(metric: str) -> tuple[int, int]:
    """Returns a sort key of metrics without a prefix: the order of `MEANINGS`, then k."""
    return list(MEANINGS).index(kind_of(metric)), int(metric.partition("@")[2] or 0)


def repeated(metrics: Iterable[str]) -> set[str]:
    """Returns the metrics that repeat others: pass@1 is avg@n, and pass@n of all n responses is best@n."""
    return {"pass@1", *(metric.replace("best", "pass") for metric in metrics if metric.startswith("best@"))}


@dataclass(frozen=True)
class Sample:
    """One graded response.

    Attributes:
        problem: number of the problem; any integer that all k samples of a problem share.
        response: text of the response.
        correct: the grade.
        num_tokens: length in the student's tokens, including the end-of-sequence token.
        vote: a text that equal wrong answers share; None without a gradable answer. Right answers may differ in it.
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
    """Returns the samples of each problem, in the order of the problems' numbers."""
    groups = defaultdict[int, list[Sample]](list)
    for sample in samples:
        groups[sample.problem].append(sample)
    return [groups[problem] for problem in sorted(groups)]


def distinct_ratio(responses: Iterable[str]) -> float | None:
    """Returns distinct / all 4-grams of the responses' whitespace tokens; None if no response has four tokens.

    No 4-gram spans two responses.
    """
    grams: list[tuple[str, ...]] = []
    for response in responses:
        words = response.split()
        grams += [tuple(words[i : i + N_GRAM]) for i in range(len(words) - N_GRAM + 1)]
    return len(set(grams)) / len(grams) if grams else None


RESAMPLES = 10_000
CONFIDENCE = 0.95
SEED = 0
_CHUNK = 1_000_000  # numbers drawn at a time, 8 bytes each
# share of a problem's largest value: smaller results are rounding errors of sums that are exactly 0
_ROUNDING = 1e-12
CI = "/ci"
PROBLEMS = "problems"

Values = dict[str, np.ndarray]
Metrics = dict[str, float | list[float]]


def pass_at_k(correct: np.ndarray, samples: int, k: int) -> np.ndarray:
    """Returns per problem the unbiased estimate of the probability that at least one of k samples is right.

    1 - C(n - c, k) / C(n, k): the share of the k-subsets of the n samples that hold one of the c right ones.

    Args:
        correct: int [P], the number of right ones among each problem's `samples`.

    Raises:
        ValueError: k is not between 1 and `samples`.
    """
    if not 1 <= k <= samples:
        raise ValueError(f"pass@{k} of {samples} samples, expected k from 1 to {samples}; choose another k")
    table = [float(1 - Fraction(math.comb(samples - c, k), math.comb(samples, k))) for c in range(samples + 1)]
    return np.array(table)[correct]


def majority(group: Sequence[Sample]) -> float:
    """Returns the probability that the most frequent answer of a problem's samples is right, ties broken at random.

    Right answers are one answer; wrong ones are the same answer if their votes are equal; samples without an answer do
    not vote.
    """
    votes = Counter((s.correct, "" if s.correct else s.vote) for s in group if s.correct or s.vote is not None)
    if not votes:
        return 0.0
    most = max(votes.values())
    winners = [right for (right, _), count in votes.items() if count == most]
    return sum(winners) / len(winners)


def ks_of(samples: int) -> list[int]:
    """Returns the k of pass@k: the powers of two up to the number of samples, and that number."""
    return sorted({*(2**i for i in range(samples.bit_length())), samples})


def per_problem(samples: Sequence[Sample], k: int) -> Values:
    """Returns metric -> float [P], one value per problem in the order of their numbers; NaN if a problem has none.

    `samples` are k of each problem, in any order. A metric for which no problem has a value is left out.
    """
    groups = by_problem(samples)
    correct = np.array([sum(s.correct for s in group) for group in groups])
    values = {f"avg@{k}": correct / k, f"best@{k}": (correct > 0).astype(float)}
    values |= {f"pass@{each}": pass_at_k(correct, k, each) for each in ks_of(k)}
    values[f"maj@{k}"] = np.array([majority(group) for group in groups])
    ratios = [distinct_ratio(s.response for s in group) for group in groups]
    if any(ratio is not None for ratio in ratios):
        values[DIVERSITY] = np.array([math.nan if ratio is None else ratio for ratio in ratios])
    values["avg_len"] = np.array([sum(s.num_tokens for s in group) / k for group in groups])
    if all(s.truncated is not None for s in samples):
        values["truncated"] = np.array([sum(bool(s.truncated) for s in group) / k for group in groups])
    values["no_answer"] = np.array([sum(s.vote is None for s in group) / k for group in groups])
    return values


def measure(samples: Sequence[Sample], k: int, values: Values | None = None) -> Metrics:
    """Returns a set's metrics with k samples per problem, means over problems, each with its interval as METRIC/ci.

    If a set has several subjects (or levels), each also has avg@k, its interval and its number of problems, such as
    `subject/NAME/avg@k`. In NAME, "_" replaces what is neither a letter, a digit, "_", "." nor "-"; subjects with the
    same NAME are one row.

    Args:
        values: `per_problem` of the same samples, if already computed.

    Example: two problems, k = 2, grades (1, 0) and (0, 0): avg@2 is 0.25, best@2 is 0.5.
    """
    values = per_problem(samples, k) if values is None else values
    means = {name: float(np.mean(value)) for name, value in values.items()}
    # sums of whole numbers, which have no rounding errors
    means |= {f"avg@{k}": sum(s.correct for s in samples) / len(samples)}
    means |= {"avg_len": sum(s.num_tokens for s in samples) / len(samples)}
    if DIVERSITY in values:
        ratios = values[DIVERSITY][np.isfinite(values[DIVERSITY])].tolist()
        means[DIVERSITY] = sum(ratios) / len(ratios)
    first = [name for name in (f"avg@{k}", f"best@{k}", DIVERSITY, "avg_len") if name in means]
    found: Metrics = {name: means[name] for name in dict.fromkeys([*first, *means])}
    found |= {name + CI: list(interval) for name, interval in bootstrap(values).items()}
    found[PROBLEMS] = len(values[f"avg@{k}"])
    for kind in ("subject", "level"):
        names = [getattr(group[0], kind) or "none" for group in by_problem(samples)]
        labels = {name: re.sub(r"[^\w.-]+", "_", name) for name in sorted(set(names))}
        rows: dict[str, list[int]] = {label: [] for label in labels.values()}
        for row, name in enumerate(names):
            rows[labels[name]].append(row)
        for label in rows if len(rows) > 1 else ():
            prefix, average = f"{kind}/{label}", f"avg@{k}"
            own = {average: values[average][rows[label]]}
            found[f"{prefix}/{average}"] = float(np.mean(own[average]))
            found[f"{prefix}/{average}{CI}"] = list(bootstrap(own)[average])
            found[f"{prefix}/{PROBLEMS}"] = len(own[average])
    return found


def scalars(metrics: Mapping[str, float | list[float]]) -> dict[str, float]:
    """Returns the metrics for a run's log: all but intervals, subjects, levels and the number of problems."""
    return {
        name: value
        for name, value in metrics.items()
        if isinstance(value, int | float) and "/" not in name and name != PROBLEMS
    }


def bootstrap(values: Values, resamples: int = RESAMPLES, seed: int = SEED) -> dict[str, tuple[float, float]]:
    """Returns percentile intervals of means over problems.

    Every resample draws P problems with replacement, the same for all metrics. The result is a pure function of the
    arguments in all versions of numpy, which guarantees the raw draws of its generators. A NaN does not count in its
    metric's mean; a metric of NaNs alone has no mean and is left out.

    Args:
        values: metric -> float [P], the same P for all.
    """
    names = list(values)
    matrix = np.stack([np.asarray(values[name], dtype=float) for name in names], axis=1)
    present = np.isfinite(matrix)
    filled = np.where(present, matrix, 0.0)
    problems = len(matrix)
    generator, rows, means = np.random.PCG64(seed), max(1, _CHUNK // problems), []
    for first in range(0, resamples, rows):
        count = min(rows, resamples - first)
        drawn = (generator.random_raw(count * problems) % np.uint64(problems)).astype(np.int64).reshape(count, problems)
        cells = (drawn + np.arange(count)[:, None] * problems).ravel()
        weights = np.bincount(cells, minlength=count * problems).reshape(count, problems).astype(float)
        with np.errstate(invalid="ignore"):
            means.append((weights @ filled) / (weights @ present.astype(float)))
    tail = 100 * (1 - CONFIDENCE) / 2
    means_RM = np.concatenate(means)
    found = {}
    for number, name in enumerate(names):
        column = means_RM[:, number]
        column = column[np.isfinite(column)]
        if len(column):
            low, high = np.percentile(column, [tail, 100 - tail])
            found[name] = (float(low), float(high))
    return found


@dataclass(frozen=True)
class Difference:
    """The mean over problems of (value of one evaluation - value of the other), with its interval."""

    value: float
    low: float
    high: float

    @property
    def real(self) -> bool:
        """Returns whether the interval excludes zero; an interval that begins or ends at 0 contains it."""
        return self.low > 0 or self.high < 0

    def decimals(self, scale: float, least: int) -> int:
        """Returns the decimals, at least `least`, for which no bound of a real difference times `scale` prints as 0."""
        nearest = scale * min(abs(self.low), abs(self.high))
        return max(least, math.ceil(-math.log10(2 * nearest)) if self.real else 0)


def paired_differences(after: Values, before: Values) -> dict[str, Difference]:
    """Returns the difference per metric of two evaluations of the same problems in the same order.

    Pairing removes what the two share: some problems are hard for both. Metrics that only one of them has, such as
    pass@8 of 8 samples against 4, are left out, and so is `dist_4g` if the numbers of samples differ: more samples
    repeat more 4-grams. Problems that lack a value in either are left out, too, and metrics without a common problem.

    Raises:
        ValueError: the number of problems differs.
    """
    counts = {len(value) for value in (*after.values(), *before.values())}
    if len(counts) > 1:
        raise ValueError(
            f"evaluations of {' and '.join(map(str, sorted(counts)))} problems, expected the same problems in both; "
            "compare evaluations of one set"
        )
    gaps = {_unified(name): value for name, value in after.items()}
    others = {_unified(name): value for name, value in before.items()}
    scales = {name: max(_largest(gaps[name]), _largest(others[name])) for name in gaps if name in others}
    gaps = {name: gaps[name] - others[name] for name in scales}
    if len({name for name in (*after, *before) if name.startswith("avg@")}) > 1:
        gaps.pop(DIVERSITY, None)
    found = {name: (float(np.nanmean(gaps[name])), *bounds) for name, bounds in bootstrap(gaps).items()}
    return {
        name: Difference(*(each if abs(each) > _ROUNDING * scales[name] else 0.0 for each in numbers))
        for name, numbers in found.items()
    }


def _largest(values: np.ndarray) -> float:
    """Returns the largest absolute value; 0 if there are NaNs only."""
    return float(np.max(np.abs(values), initial=0.0, where=np.isfinite(values)))


def _unified(name: str) -> str:
    """Removes k from avg@k, because avg@4 and avg@16 estimate the same value; pass@k, best@k and maj@k depend on k."""
    return "avg" if name.startswith("avg@") else name
