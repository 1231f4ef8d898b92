"""Which teacher layer a student layer is matched to (paper, "depth alignment")."""

from __future__ import annotations


def layer_map(student_layers: list[int], student_depth: int, teacher_depth: int) -> dict[int, int]:
    """Student layer -> teacher layer, 1-based: l_T = 1 + round((l_S - 1) (L_T - 1) / (L_S - 1)), ties to even.

    Exact integer arithmetic, so that a layer never jumps on a rounding error. A student of one layer maps to L_T.

    >>> layer_map([1, 2, 3], 3, 5)
    {1: 1, 2: 3, 3: 5}
    """
    if student_depth == 1:
        return dict.fromkeys(student_layers, teacher_depth)
    return {
        layer: 1 + _round_half_even((layer - 1) * (teacher_depth - 1), student_depth - 1) for layer in student_layers
    }


def _round_half_even(numerator: int, denominator: int) -> int:
    whole, rest = divmod(numerator, denominator)
    if 2 * rest == denominator:
        return whole + whole % 2
    return whole + (2 * rest > denominator)
