"""Evaluation metrics against values worked out by hand."""

from __future__ import annotations

import random
import re
from pathlib import Path

import pytest

from nemo_oprd.evaluation.intervals import MEANINGS, UNDEFINED, Sample, kind_of, measure, scalars


def samples(grades: list[list[int]], text: str = "", length: int = 1) -> list[Sample]:
    return [Sample(problem, text, bool(c), length) for problem, row in enumerate(grades) for c in row]


FIRST = ("avg@2", "best@2", "dist_4g", "avg_len")


def test_avg_and_best():
    summary = measure(samples([[1, 0, 0, 0], [1, 1, 1, 0], [0, 0, 0, 0]], text="one two three four"), k=4)
    assert list(summary)[:4] == ["avg@4", "best@4", "dist_4g", "avg_len"]
    assert summary["avg@4"] == pytest.approx(4 / 12)
    assert summary["best@4"] == pytest.approx(2 / 3)
    assert all(type(value) is float for value in list(summary.values())[:4])


def test_diversity_pools_a_problems_samples_and_averages_over_problems():
    rows = [
        Sample(7, "a b c d e", True, 10),  # abcd bcde
        Sample(7, "a  b\nc d f", True, 20),  # abcd bcdf: 3 distinct of 4
        Sample(9, "x x x x x x", False, 30),  # xxxx three times
        Sample(9, "too short here", False, 40),  # none: 1 distinct of 3
        Sample(5, "a b c", False, 0),
        Sample(5, "", False, 50),  # the problem has no 4-gram and does not count
    ]
    summary = measure(rows, k=2)
    assert summary["dist_4g"] == pytest.approx((3 / 4 + 1 / 3) / 2)
    assert summary["avg_len"] == pytest.approx(25.0)


@pytest.mark.parametrize("text", ["", "a b c", " a\tb\n"])
def test_diversity_without_any_four_gram_is_absent(text):
    """A 0 would say that the responses repeat themselves."""
    found = measure(samples([[1, 0], [0, 0]], text=text), k=2)
    assert {name: found[name] for name in FIRST if name in found} == {"avg@2": 0.25, "best@2": 0.5, "avg_len": 1.0}


def test_every_metric_has_its_meaning_in_the_docs():
    """The table of docs/evaluation.md has the words of `MEANINGS`, and all of them."""
    text = (Path(__file__).resolve().parents[3] / "docs" / "evaluation.md").read_text()
    table = re.findall(r"^\| `([a-z_0-9]+)(?:@[nk])?`.*? \| (.*?) \|.*\|$", text.partition("## Metrics")[2], re.M)
    assert dict(table[: len(MEANINGS)]) == MEANINGS
    assert all(kind_of(name) == kind for kind in MEANINGS for name in (kind, f"{kind}@8", f"val/a set/teacher/{kind}"))
    assert set(UNDEFINED) <= set(MEANINGS)


def test_order_does_not_matter():
    rows = [Sample(p, f"word {p} {i} and more text", (p + i) % 3 == 0, p * i) for p in range(5) for i in range(3)]
    shuffled = random.Random(0).sample(rows, len(rows))
    found, expected = (scalars(measure(each, 3)) for each in (shuffled, rows))
    assert found == pytest.approx(expected, abs=1e-12)
