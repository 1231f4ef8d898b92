"""The choice of cases for the default run loses no pair of settings, and no case: the others are marked `slow`."""

from __future__ import annotations

from itertools import combinations

from hypothesis import given
from hypothesis import strategies as st
from layout_cases import Case
from layout_grid import CASES
from pairwise import choose, dimensions, mark_slow, of_case, of_settings, pairs

VALUES = st.dictionaries(st.sampled_from("abcd"), st.integers(0, 2), min_size=1)


def test_the_chosen_layouts_show_every_pair_of_the_whole_list() -> None:
    """Counted here without the helper's own notion of a pair."""
    chosen = [CASES[i] for i in choose([of_case(case) for case in CASES])]
    assert 24 <= len(chosen) <= 45 < len(CASES)

    def shown(cases: list[Case]) -> set[tuple]:
        found = set()
        for case in cases:
            values = dimensions(case)
            assert set(values) >= {"student tp", "teacher cp", "student uneven", "recompute", "objective", "placement"}
            found |= {(a, values[a], b, values[b]) for a, b in combinations(sorted(values), 2)}
        return found

    assert shown(chosen) == shown(CASES)
    for words in ("pp4", "vpp4", "cp3", "dp4", "first6", "last4", "sp"):
        assert any(words in case.student.split() for case in chosen), words
    assert {case.recompute for case in chosen} == {case.recompute for case in CASES}


@given(st.lists(VALUES, min_size=1, max_size=12))
def test_any_list_keeps_its_pairs_with_as_few_as_that_takes(cases: list[dict[str, int]]) -> None:
    features = [pairs(case) for case in cases]
    chosen = choose(features)
    assert chosen == sorted(set(chosen)) == choose(features)
    assert set().union(*(features[i] for i in chosen)) == set().union(*features)
    for left_out in chosen:  # none of the chosen is there without need
        others = set().union(*(features[i] for i in chosen if i != left_out))
        assert not features[left_out] <= others


def test_all_cases_become_parameters_in_their_order() -> None:
    parameters = mark_slow(CASES, of_case)
    assert [parameter.values for parameter in parameters] == [(case,) for case in CASES]
    names = [{mark.name for mark in parameter.marks} for parameter in parameters]
    assert [i for i, marks in enumerate(names) if marks != {"slow"}] == choose([of_case(case) for case in CASES])
    assert {name for marks in names for name in marks} == {"slow", "full"}

    def shown(cases: list[Case]) -> set[tuple]:
        return {item for case in cases for item in dimensions(case).items()}

    default = [CASES[i] for i, marks in enumerate(names) if not marks]
    assert shown(default) == shown(CASES) and len(default) <= 24


def test_settings_are_dimensions() -> None:
    """A product of one layout with two objectives needs both; an equal case is needed once."""
    cases = [(2, ["student.parallel.tensor=2"], "x"), (2, ["student.parallel.tensor=2"], "y")] * 2
    features = [of_settings(ranks, settings, objective=objective) for ranks, settings, objective in cases]
    assert choose(features) == [0, 1]
