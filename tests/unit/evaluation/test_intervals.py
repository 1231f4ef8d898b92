"""pass@k and maj@k against enumeration, bootstrap intervals against a plain loop, paired differences by hand."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable

import numpy as np
import pytest

from nemo_oprd.evaluation import intervals
from nemo_oprd.evaluation import intervals as metrics
from nemo_oprd.evaluation.grading.grade_sets import GradedSet
from nemo_oprd.evaluation.intervals import (
    Difference,
    bootstrap,
    distinct_ratio,
    ks_of,
    majority,
    measure,
    paired_differences,
    pass_at_k,
    per_problem,
    scalars,
)
from nemo_oprd.evaluation.intervals import Sample as GradedSample
from nemo_oprd.evaluation.tables import differences


def sample(problem: int, vote: str | None, correct: bool = False, **more: object) -> GradedSample:
    return GradedSample(problem, "a b c d", correct, 3, vote=vote, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize("n", [1, 2, 5, 8])
def test_pass_at_k_is_the_share_of_subsets_with_a_right_sample(n: int) -> None:
    for correct, k in itertools.product(range(n + 1), range(1, n + 1)):
        subsets = list(itertools.combinations([1] * correct + [0] * (n - correct), k))
        expected = sum(any(subset) for subset in subsets) / len(subsets)
        assert pass_at_k(np.array([correct]), n, k)[0] == pytest.approx(expected, abs=1e-12)


def test_pass_at_k_has_no_k_beyond_the_samples() -> None:
    for k in (0, 5):
        with pytest.raises(ValueError, match=f"pass@{k} of 4 samples, expected k from 1 to 4"):
            pass_at_k(np.array([1]), 4, k)
    assert ks_of(1) == [1] and ks_of(4) == [1, 2, 4] and ks_of(6) == [1, 2, 4, 6]


def first_most_frequent(votes: list[str]) -> str | None:
    """The winner that comes first in the list: over all orders, ties are broken evenly."""
    return max(votes, key=lambda vote: (votes.count(vote), -votes.index(vote))) if votes else None


def test_majority_is_the_mean_over_all_orders_of_the_votes() -> None:
    draw = random.Random(0)
    for _ in range(40):
        given = [draw.choice(["right", "x", "y", None]) for _ in range(5)]
        group = [sample(0, vote, vote == "right") for vote in given]
        orders = list(itertools.permutations([vote for vote in given if vote is not None]))
        expected = sum(first_most_frequent(list(order)) == "right" for order in orders) / len(orders)
        assert majority(group) == pytest.approx(expected, abs=1e-12), given


def test_right_answers_of_other_spellings_vote_together() -> None:
    group = [sample(0, "1/2", True), sample(0, "0.5", True), sample(0, "2"), sample(0, None), sample(0, None)]
    assert majority(group) == 1
    assert majority([sample(0, None), sample(0, None)]) == 0


def plain_interval(values: list[float], resamples: int, seed: int) -> tuple[float, float]:
    """A loop without any array operation but the percentile: NaN does not count."""
    generator, means = np.random.PCG64(seed), []
    for _ in range(resamples):
        drawn = [values[int(generator.random_raw()) % len(values)] for _ in values]
        present = [value for value in drawn if value == value]
        if present:
            means.append(sum(present) / len(present))
    low, high = np.percentile(means, [2.5, 97.5])
    return float(low), float(high)


def test_intervals_equal_a_plain_loop() -> None:
    draw = np.random.default_rng(1)
    grades, lengths = draw.integers(0, 5, 37) / 4, draw.normal(100, 30, 37)
    holes = np.where(draw.random(37) < 0.3, np.nan, lengths)
    found = bootstrap({"avg": grades, "len": lengths, "holes": holes}, resamples=300, seed=5)
    for name, values in (("avg", grades), ("len", lengths), ("holes", holes)):
        assert found[name] == pytest.approx(plain_interval(values.tolist(), 300, 5), abs=1e-9)
    assert found == bootstrap({"avg": grades, "len": lengths, "holes": holes}, resamples=300, seed=5)
    assert found != bootstrap({"avg": grades, "len": lengths, "holes": holes}, resamples=300, seed=6)


def test_chunks_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    values = {"avg": np.arange(13.0)}
    whole = bootstrap(values, resamples=101)
    monkeypatch.setattr("nemo_oprd.evaluation.intervals._CHUNK", 13 * 7)
    assert bootstrap(values, resamples=101) == whole


def test_intervals_hold_what_they_promise() -> None:
    """Of 200 sets of 60 problems, about 95 % have the true mean in their interval."""
    draw = np.random.default_rng(0)
    sets = draw.binomial(4, draw.beta(1, 1, (200, 60))) / 4
    held = 0
    for grades in sets:
        low, high = bootstrap({"avg": grades}, resamples=500)["avg"]
        held += low <= 0.5 <= high
    assert 180 <= held <= 199, held


def test_a_metric_without_any_value_is_left_out() -> None:
    """Of short responses there is no diversity: not 0, no interval, no difference, not even from a value."""
    nothing = np.array([np.nan, np.nan])
    assert list(bootstrap({"dist_4g": nothing, "avg": np.ones(2)}, resamples=10)) == ["avg"]
    short = [GradedSample(problem, "a b", True, 2, vote="1") for problem in range(3)]
    long = [GradedSample(problem, "a b c d", True, 2, vote="1") for problem in range(3)]
    found = measure(short, 1)
    assert not any("dist_4g" in name for name in found) and found["avg@1"] == 1.0 and found["avg_len/ci"] == [2.0, 2.0]
    assert "dist_4g" not in scalars(found) and scalars(measure(long, 1))["dist_4g"] == 1.0
    for after, before in ((short, long), (long, short), (short, short)):
        gaps = paired_differences(per_problem(after, 1), per_problem(before, 1))
        assert "dist_4g" not in gaps and gaps["avg"].value == 0
    one = [GradedSample(0, "a b c d", True, 2), GradedSample(1, "a", True, 2)]
    other = [GradedSample(0, "a", True, 2), GradedSample(1, "a b c d", True, 2)]
    assert "dist_4g" not in paired_differences(per_problem(one, 1), per_problem(other, 1)), "no problem in common"


def test_pairing_finds_a_small_difference_that_the_intervals_hide() -> None:
    draw = np.random.default_rng(2)
    before = draw.random(100)
    after = before + 0.02 + draw.normal(0, 0.01, 100)
    gap = paired_differences({"avg@4": after, "best@4": after}, {"avg@16": before, "best@16": before})
    assert set(gap) == {"avg"}, "best of other numbers of samples is another quantity"
    assert gap["avg"].real and gap["avg"].value == pytest.approx((after - before).mean())
    assert gap["avg"].low == pytest.approx(plain_interval((after - before).tolist(), 10_000, 0)[0], abs=1e-9)
    alone = bootstrap({"a": after, "b": before})
    assert alone["a"][0] < alone["b"][1], "the intervals overlap"
    none = paired_differences({"avg@4": before}, {"avg@4": before})["avg"]
    assert (none.value, none.low, none.high, none.real) == (0, 0, 0, False)
    with pytest.raises(ValueError, match="evaluations of 3 and 4 problems"):
        paired_differences({"avg@1": np.zeros(4)}, {"avg@1": np.zeros(3)})


def test_a_difference_that_cancels_is_0_and_a_small_one_shows_its_digits() -> None:
    """A verdict and the numbers beside it agree: no "+0.0 [+0.0, +0.0] real"."""
    third = np.array([2 / 3, 1.0, 1.0, 1 / 3, 2 / 3] * 4)
    rounded = np.nextafter(third, 2)  # as sums in another order
    gap = paired_differences({"avg@3": rounded}, {"avg@3": third})["avg"]
    assert (rounded > third).all() and not gap.real
    one, other = np.array([2 / 3, 2 / 3]), np.array([1 / 3, 1.0])
    assert (one - other).mean() != 0 and paired_differences({"avg@3": one}, {"avg@3": other})["avg"].value == 0
    few = np.zeros(14_000)
    few[:6] = 0.5
    small = paired_differences({"avg@2": few, "avg_len": few}, {"avg@2": 0 * few, "avg_len": 0 * few})
    assert small["avg"].real
    shares, lengths = differences({"sums": small}, "before", "after").splitlines()
    assert "sums  before -> after  avg " in shares and "+0.02 [+0.01, +0.04] points " in shares
    assert "+0.0002 [+0.0001, +0.0004] tokens  real: the interval excludes 0" in lengths and "real:" in shares
    for gap, verdict in ((Difference(0.5, 0.0, 1.0), "contains"), (Difference(-0.5, -1.0, 0.0), "contains")):
        assert not gap.real and verdict in differences({"s": {"avg": gap}}, "before", "after")
    assert "-50.00 [-100.00, -0.04] points  real" in differences({"s": {"avg": Difference(-0.5, -1, -4e-4)}}, "a", "b")


def test_the_metrics_of_a_set_by_hand() -> None:
    rows = [
        sample(0, "5", True, truncated=False, subject="algebra", level="1"),
        sample(0, None, truncated=True, subject="algebra", level="1"),
        sample(1, "7", truncated=False, subject="number theory", level="1"),
        sample(1, "7", truncated=True, subject="number theory", level="1"),
    ]
    found = measure(rows, 2)
    numbers = scalars(found)
    assert numbers == {
        "avg@2": 0.25, "best@2": 0.5, "dist_4g": 0.5, "avg_len": 3.0, "pass@1": 0.25, "pass@2": 0.5, "maj@2": 0.5,
        "truncated": 0.5, "no_answer": 0.25,
    }  # fmt: skip
    assert all(found[f"{name}/ci"][0] <= value <= found[f"{name}/ci"][1] for name, value in numbers.items())  # type: ignore[index]
    assert found["avg@2/ci"] == [0.0, 0.5]
    assert found["subject/algebra/avg@2"] == 0.5 and found["subject/number_theory/avg@2"] == 0
    assert found["subject/algebra/problems"] == 1 and found["problems"] == 2
    assert not any(name.startswith("level/") for name in found), "one level is no table"


def test_subjects_with_one_label_are_one_row() -> None:
    subjects, right = ["A B", "C-D", "A&B", "C D"], [True, False, False, True]
    found = measure([sample(p, "5", right[p], subject=subjects[p]) for p in range(4)], 1)
    assert found["subject/A_B/problems"] == 2 and found["subject/A_B/avg@1"] == 0.5
    assert found["subject/A_B/avg@1/ci"] == [0.0, 1.0]
    rows = [name for name in found if name.startswith("subject/") and name.endswith("/problems")]
    # as before, in the order of the subjects' own names
    assert rows == [f"subject/{label}/problems" for label in ("A_B", "C_D", "C-D")]
    one = measure([sample(p, "5", subject=("A B", "A&B")[p]) for p in range(2)], 1)
    assert not any(name.startswith("subject/") for name in one), "one row is no table"


def test_diversity_of_other_numbers_of_samples_is_not_compared() -> None:
    few, many = per_problem([sample(0, "5")], 1), per_problem([sample(0, "5"), sample(0, "5")], 2)
    assert "dist_4g" in paired_differences(few, few) and "dist_4g" not in paired_differences(few, many)
    assert {"avg", "avg_len", "no_answer"} <= set(paired_differences(few, many))


def test_the_4_grams_of_a_problem_are_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    counted = []

    def count(responses: Iterable[str]) -> float | None:
        counted.append(1)
        return distinct_ratio(responses)

    for module in (intervals, metrics):
        monkeypatch.setattr(module, "distinct_ratio", count)
    samples = [sample(p, "5", subject="ab"[p % 2], level="12"[p // 2]) for p in range(4)]
    graded = GradedSet("sums", "here", 1, samples, {}, {}, 0, 0)
    assert graded.metrics.keys() > graded.values.keys()
    assert len(counted) == 4
    assert graded.metrics["subject/a/problems"] == 2


def test_unknown_lengths_are_left_out() -> None:
    assert "truncated" not in per_problem([sample(0, "5", True)], 1)
