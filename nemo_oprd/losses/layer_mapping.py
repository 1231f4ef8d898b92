"""Which teacher layer a student layer is matched to (paper, "depth alignment")."""

from __future__ import annotations


def layer_pairs(
    student_layers: list[int], student_depth: int, teacher_depth: int, chosen: dict[str, int] | None
) -> dict[int, int]:
    """Student layer -> teacher layer: `chosen` (`loss.representation.layer_map`), or the paper's rule where it is None.

    Raises:
        ValueError: `chosen` doesn't name exactly the supervised layers, or names a layer that the teacher hasn't.
    """
    if chosen is None:
        return layer_map(student_layers, student_depth, teacher_depth)
    named = {int(layer) if layer.isdecimal() else layer: teacher for layer, teacher in chosen.items()}
    if set(named) != set(student_layers):
        raise ValueError(
            f"loss.representation.layer_map names the student layers {sorted(named, key=str)}, expected the supervised "
            f"ones, {student_layers}: name each of them once, or change loss.representation.layers"
        )
    outside = [teacher for teacher in named.values() if not 1 <= teacher <= teacher_depth]
    if outside:
        raise ValueError(
            f"loss.representation.layer_map names teacher layer {outside[0]}, expected 1 to {teacher_depth}: choose one"
        )
    return {layer: named[layer] for layer in student_layers}


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
