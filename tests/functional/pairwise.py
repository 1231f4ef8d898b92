"""Parts of a list of layout cases that still show every pair of settings, and every setting once.

A case is seen as one value per dimension (the student's tensor parallelism, recompute, objective, ...). Faults of
parallel code come from one setting or from two together, so there is a subset of the list in which every pair of
(dimension, value) that occurs together in some case of the list occurs together in some chosen case. The cases that
remain are marked `slow` and run under `bash scripts/test.sh --all`. Of the chosen ones, the default command runs those
that show each (dimension, value) once, whatever the size, and `bash scripts/test.sh --full` all.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from itertools import combinations
from typing import Any, TypeVar

import pytest
from layout_cases import Case, sizes_in_words

T = TypeVar("T")
Values = Mapping[str, Hashable]
Feature = frozenset[tuple[str, Hashable]]
EXACTLY = "recompute exactly"
AXES = ("tp", "pp", "vpp", "cp", "dp")


def pairs(values: Values) -> set[Feature]:
    """All pairs of (dimension, value) of one case, and each (dimension, value) alone."""
    items = values.items()
    return {frozenset(chosen) for length in (1, 2) for chosen in combinations(items, length)}


def choose(features: Sequence[set[Feature]]) -> list[int]:
    """Positions, in rising order, of cases that have every feature of all cases.

    Greedy: the case with the most features that no chosen case has, the first of equals; afterwards every chosen case
    whose features all occur in other chosen cases is dropped. The result depends on the list alone.
    """
    missing = set[Feature]().union(*features)
    chosen: list[int] = []
    while missing:
        best = max(range(len(features)), key=lambda i: len(features[i] & missing))
        chosen.append(best)
        missing -= features[best]
    for position in list(chosen):
        others = (features[i] for i in chosen if i != position)
        if features[position] <= set[Feature]().union(*others):
            chosen.remove(position)
    return sorted(chosen)


def mark_slow(cases: Iterable[T], features: Callable[[T], set[Feature]]) -> list[Any]:
    """All cases as pytest parameters, in their order; those that `choose` leaves out are marked `slow`.

    Of the others, those that are not needed to show each single setting once are marked `full`. A case that is a tuple
    is the values of several parameters.
    """
    listed = list(cases)
    found = [features(case) for case in listed]
    chosen = choose(found)
    alone = choose([{feature for feature in found[i] if _is_kind(feature)} for i in chosen])
    default = {chosen[i] for i in alone}
    marks = {i: [] if i in default else [pytest.mark.full] for i in chosen}
    return [
        pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=marks.get(i, [pytest.mark.slow]))
        for i, case in enumerate(listed)
    ]


def _is_kind(feature: Feature) -> bool:
    """Whether a feature is a setting alone, and no exact size."""
    return len(feature) == 1 and all(type(value) is not int and name != EXACTLY for name, value in feature)


def of_case(case: Case) -> set[Feature]:
    """Features of a layout case: pairs of what is switched on in either role, and each exact size alone."""
    return pairs(dimensions(case)) | exact_sizes(case)


def dimensions(case: Case) -> Values:
    """What is combined: per role which axes are parallel, sequence parallelism, uneven stages; the other settings."""
    found: dict[str, Hashable] = {}
    for role, words in (("student", case.student), ("teacher", case.teacher)):
        sizes = sizes_in_words(words)
        found |= {f"{role} {axis}": sizes.get(axis, 1) > 1 for axis in AXES}
        found[f"{role} sp"] = "sp" in words.split()
        found[f"{role} uneven"] = bool({"first", "last"} & set(sizes))
    found["placement"] = "dedicated" if case.dedicated else "colocated"
    found["recompute"] = case.recompute.split()[0]
    found["microbatches"] = "small" if case.tokens < 4096 else "large"
    found["objective"] = case.objective
    found["extra"] = case.extra
    return found


def exact_sizes(case: Case) -> set[Feature]:
    """Each size of each role, and the exact recompute setting: ("student pp", 4), ("recompute", "uniform 2")."""
    found: set[Feature] = {frozenset([(EXACTLY, case.recompute)])}
    for role, words in (("student", case.student), ("teacher", case.teacher)):
        found |= {frozenset([(f"{role} {axis}", size)]) for axis, size in sizes_in_words(words).items()}
    return found


def of_settings(ranks: int, overrides: Iterable[str], **others: Hashable) -> set[Feature]:
    """Features of a case that is a list of "key=value": every key with its value, with each other and with `others`."""
    return pairs({"ranks": ranks, **dict(setting.split("=", 1) for setting in overrides), **others})
