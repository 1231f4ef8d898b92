"""The judgements of the doctor about layer maps, on similarities that are given."""

from __future__ import annotations

import numpy as np
import pytest

from nemo_oprd.tools.doctor.layer_map import LayerMap, best_monotone, order, origins, rounds, similar_layers


def of(pairs: dict[int, int], teacher_depth: int, *, final_norm: bool = True) -> LayerMap:
    return LayerMap(pairs, (max(pairs), teacher_depth), final_norm)


@pytest.mark.parametrize(
    ("pairs", "final_norm", "code"),
    [
        ({1: 1, 2: 2, 3: 3, 4: 4}, True, None),
        ({1: 3, 2: 2, 3: 1, 4: 4}, True, "layer-map-reversed"),  # the last layers belong together in any map
        ({1: 4, 2: 3, 3: 2, 4: 1}, False, "layer-map-reversed"),
        ({1: 1, 2: 3, 3: 2, 4: 4}, True, "layer-map-crossed"),
        ({1: 2, 2: 2, 3: 2, 4: 2, 5: 4}, True, "layer-map-collapsed"),
        ({1: 1, 2: 1, 3: 2, 4: 2, 5: 4}, True, None),
        ({2: 4}, True, None),
    ],
)
def test_order(pairs: dict[int, int], final_norm: bool, code: str | None) -> None:
    found = order(of(pairs, 4, final_norm=final_norm))
    assert (found and found.code) == code


def test_a_reversed_map_is_put_straight() -> None:
    found = order(of({1: 3, 2: 2, 3: 1, 4: 4}, 4))
    assert found is not None and found.verdict == "wrong"
    assert "fix: loss.representation.layer_map={1:1,2:2,3:3,4:4}" in found.text


def cosines(layers: list[int], depth: int) -> np.ndarray:
    """The student has the teacher's layers `layers`, nearly."""
    result = np.full((len(layers), depth), 0.02)
    for i, layer in enumerate(layers):
        result[i, layer - 1] = 0.9
    return result


@pytest.mark.parametrize(
    ("pairs", "code"),
    [
        ({1: 1, 2: 2, 3: 3, 4: 10}, None),
        ({1: 1, 2: 4, 3: 7, 4: 10}, "layer-map-poor"),
        ({1: 2, 2: 3, 3: 4, 4: 10}, "layer-map-shifted"),
    ],
)
def test_origins(pairs: dict[int, int], code: str | None) -> None:
    """A pruned student that has layers 1, 2, 3 and 10: also where the paper's even map is used."""
    found = origins(cosines([1, 2, 3, 10], 10), of(pairs, 10))
    assert found.code == code
    if code is not None:
        assert "layer_map={1:1,2:2,3:3,4:10}" in found.text and "(cosine 0.02, 0.90)" in found.text


def test_layers_of_another_origin_say_nothing() -> None:
    unclear = cosines([1, 2, 3, 10], 10)
    unclear[1, 2] = 0.85
    even = of({1: 1, 2: 4, 3: 7, 4: 10}, 10)
    assert origins(unclear, even).verdict == "ok" and origins(np.zeros((4, 10)), even).verdict == "ok"
    assert origins(cosines([1, 3, 2, 10], 10), even).code == "layers-permuted"


def test_a_shift_that_the_ends_stop() -> None:
    pairs = {1: 2, 2: 3, 3: 4, 4: 4}
    assert origins(cosines([1, 2, 3, 4], 4), of(pairs, 4, final_norm=False)).code == "layer-map-shifted"


def test_the_best_map_rises() -> None:
    """By trying all maps."""
    from itertools import combinations

    similarity = np.random.default_rng(0).random((3, 6))
    best = max(combinations(range(6), 3), key=lambda chosen: sum(similarity[i, c] for i, c in enumerate(chosen)))
    assert best_monotone(similarity) == list(best)
    # fewer layers than the student has: some are used twice
    assert best_monotone(np.array([[1.0, 0.0], [0.9, 0.2], [0.0, 1.0]])) == [0, 0, 1]


def neighbours(truth: list[int], depth: int, slope: float) -> np.ndarray:
    """Similarities that fall by `slope` with each layer between a candidate and the true one."""
    return np.array([[0.95 - slope * abs(layer - other) for other in range(1, depth)] for layer in truth])


@pytest.mark.parametrize(
    ("pairs", "slope", "code"),
    [
        ({1: 1, 2: 2, 3: 3, 4: 10}, 0.1, None),
        ({1: 1, 2: 4, 3: 7, 4: 10}, 0.1, "layer-map-poor"),
        ({1: 2, 2: 3, 3: 4, 4: 10}, 0.1, "layer-map-shifted"),
        ({1: 3, 2: 2, 3: 1, 4: 10}, 0.1, "layer-map-reversed"),
        ({1: 2, 2: 3, 3: 4, 4: 10}, 0.02, None),  # about as good as the best one
        ({1: 1, 2: 2, 3: 4, 4: 10}, 0.1, None),
    ],
)
def test_similar_layers(pairs: dict[int, int], slope: float, code: str | None) -> None:
    found = similar_layers(neighbours([1, 2, 3], 10, slope), of(pairs, 10), "correlation", 500)
    assert found.code == code
    if code is not None:
        assert "layer_map={1:1,2:2,3:3,4:10}" in found.text
    if code == "layer-map-poor":
        assert "layer 3 with layer 7 (0.55), where layer 3 has 0.95" in found.text
    unrelated = 0.2 * neighbours([1, 2, 3], 10, slope)
    assert similar_layers(unrelated, of(pairs, 10), "correlation", 500).verdict == "ok"


def test_other_widths() -> None:
    """CKA says less: models that were trained apart are a little alike in any layers."""
    apart = np.array([[0.42, 0.56]])
    assert similar_layers(apart, of({1: 1, 2: 3}, 3), "CKA", 200).verdict == "ok"
    clear = neighbours([1, 2, 3], 10, 0.1)
    assert similar_layers(clear, of({1: 7, 2: 8, 3: 9, 4: 10}, 10), "CKA", 500).code == "layer-map-shifted"


def test_rounds_cover_all() -> None:
    at_once = list(rounds([1, 2, 5], [1, 2, 3, 4], at_once=True))
    assert len(at_once) == 2 and {teacher for pairs in at_once for teacher in pairs.values()} == {1, 2, 3, 4}
    each = list(rounds([1, 2, 5], [1, 2, 3, 4], at_once=False))
    for layer in (1, 2, 5):
        assert {pairs[layer] for pairs in each} == {1, 2, 3, 4}
