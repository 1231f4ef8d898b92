"""The row losses against numpy, the layer choice and the layer map against the paper's formulas."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
import torch

from nemo_oprd.distillation.adaptive_weights import LEAST, GapFactors
from nemo_oprd.losses.layer_mapping import layer_map, supervised_layers
from nemo_oprd.losses.registry import resolve_row_loss

A = np.random.default_rng(0).normal(size=(5, 7))
B = np.random.default_rng(1).normal(size=(5, 7))


def unit(x: np.ndarray) -> np.ndarray:
    return x / np.linalg.norm(x, axis=1, keepdims=True)


@pytest.mark.parametrize(
    ("kind", "reduction", "expected"),
    [
        ("mse", "mean", ((A - B) ** 2).mean(1)),
        ("mse", "sum", ((A - B) ** 2).sum(1)),
        ("normalized_mse", "mean", ((unit(A) - unit(B)) ** 2).mean(1)),
        ("normalized_mse", "sum", 2 - 2 * (unit(A) * unit(B)).sum(1)),
        ("cosine", "mean", 1 - (unit(A) * unit(B)).sum(1)),
        ("cosine", "sum", 1 - (unit(A) * unit(B)).sum(1)),
    ],
)
def test_row_losses(kind: str, reduction: str, expected: np.ndarray) -> None:
    value = resolve_row_loss(kind, {})(torch.from_numpy(A), torch.from_numpy(B), reduction)
    assert value.numpy() == pytest.approx(expected, rel=1e-12)


def test_supervised_layers() -> None:
    assert supervised_layers("all", 5) == [1, 2, 3, 4, 5]
    assert supervised_layers("last", 5) == [5]
    assert supervised_layers("even", 5) == [2, 4]
    assert supervised_layers("odd", 5) == [1, 3, 5]
    assert supervised_layers([5, 1], 5) == [1, 5]


@pytest.mark.parametrize("layers", [[0], [6], [1, 1], []])
def test_bad_layers(layers: list[int]) -> None:
    with pytest.raises(ValueError, match="1..5"):
        supervised_layers(layers, 5)


def test_even_of_a_single_layer_model_is_nothing() -> None:
    with pytest.raises(ValueError, match="even"):
        supervised_layers("even", 1)


@pytest.mark.parametrize(
    ("student", "teacher"), [(3, 5), (28, 36), (28, 28), (36, 28), (2, 7), (5, 3), (7, 4), (24, 80)]
)
def test_layer_map_is_the_papers_formula(student: int, teacher: int) -> None:
    """round((l - 1) / (L_S - 1) * (L_T - 1)) + 1; Python rounds exact fractions to even, as the equation's round."""
    layers = list(range(1, student + 1))
    expected = {i: round(Fraction(i - 1, student - 1) * (teacher - 1)) + 1 for i in layers}
    assert layer_map(layers, student, teacher) == expected


def test_layer_map_of_one_layer() -> None:
    assert layer_map([1], 1, 9) == {1: 9}


def test_factors_follow_the_gaps() -> None:
    factors = GapFactors(0.75)
    assert factors.factor(1) == 1.0
    factors.update({1: 0.0, 2: 4.0})
    factors.update({2: 8.0, 3: 2.0, 1: math.nan})
    assert factors.gaps == {1: 0.0, 2: 5.0, 3: 2.0}
    assert [factors.factor(key) for key in (1, 2, 3, 4)] == [LEAST, 5 * 3 / 7, 2 * 3 / 7, 1.0]
    agreed = GapFactors(0.75, {1: 0.0, 2: 0.0})
    assert [agreed.factor(key) for key in (1, 2)] == [1.0, 1.0]
