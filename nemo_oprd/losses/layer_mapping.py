"""Resolves the supervised student layers, their weights, and the teacher layer that each is matched to."""

from __future__ import annotations

from fractions import Fraction


def supervised_layers(layers: str | list[int], num_layers: int) -> list[int]:
    """Returns the supervised layers (1-based, ascending) of a model with `num_layers` blocks.

    Raises:
        ValueError: a layer outside 1..num_layers, a repeated layer, or a selection that is empty and not "none".
    """
    if layers == "none":
        return []
    every = range(1, num_layers + 1)
    named = {"all": list(every), "last": [num_layers], "even": list(every)[1::2], "odd": list(every)[::2]}
    chosen = named[layers] if isinstance(layers, str) else sorted(layers)
    outside = [layer for layer in chosen if layer not in every]
    if outside or len(set(chosen)) != len(chosen) or not chosen:
        raise ValueError(
            f"loss.representation.layers={layers}: expected distinct layers in 1..{num_layers}"
            + (f"; {outside} are not" if outside else "")
        )
    return chosen


def weights_of_layers(given: list[float] | dict[str, float] | None, layers: str | list[int], num_layers: int) -> dict:
    """Returns supervised layer -> its weight w_l in the term sum_l w_l L_l / sum_l w_l.

    Args:
        given: one weight per supervised layer (in the order of `layers` where that is a list, else ascending), or the
            weights of some layers by number, where the other layers have 1; None gives every layer 1.

    Raises:
        ValueError: a list `given` is not as long as the supervised layers, or a layer in `given` is not supervised.
    """
    supervised = supervised_layers(layers, num_layers)
    if given is None:
        return dict.fromkeys(supervised, 1.0)
    if isinstance(given, list):
        if len(given) != len(supervised):
            raise ValueError(
                f"loss.representation.layer_weights={given}: expected {len(supervised)} weights, one for each of the "
                f"supervised layers {supervised}; got {len(given)}: give as many, or {{layer: weight}}"
            )
        order = layers if isinstance(layers, list) else supervised
        return dict(sorted(zip(order, given, strict=True)))
    unknown = sorted(set(given) - {str(layer) for layer in supervised})
    if unknown:
        raise ValueError(
            f"loss.representation.layer_weights has a weight for layer {unknown[0]}; expected some of the supervised "
            f"layers {supervised}: choose one of these, or supervise it"
        )
    return {layer: given.get(str(layer), 1.0) for layer in supervised}


def layer_pairs(
    student_layers: list[int], student_depth: int, teacher_depth: int, chosen: dict[str, int] | None
) -> dict[int, int]:
    """Returns student layer -> teacher layer: `chosen` (`loss.representation.layer_map`), or `layer_map` if it is None.

    Raises:
        ValueError: `chosen` does not name exactly the supervised layers, or names a layer that the teacher lacks.
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


def check_norms_match(pairs: dict[int, int], student_depth: int, teacher_depth: int) -> None:
    """Raises ValueError if `pairs` (student layer -> teacher layer) compare the last state of one model, which is taken
    after the final norm, with an earlier state of the other model."""
    for student, teacher in pairs.items():
        if (student == student_depth) != (teacher == teacher_depth):
            last, other = ("student", "teacher") if student == student_depth else ("teacher", "student")
            raise ValueError(
                f"loss.representation.layer_map compares student layer {student} with teacher layer {teacher}: the "
                f"{last}'s is its last one and is taken after the final norm, the {other}'s is not; expected last "
                "layers together: change layer_map, leave that layer out, or set loss.representation.final_norm=false"
            )


def layer_map(student_layers: list[int], student_depth: int, teacher_depth: int) -> dict[int, int]:
    """Returns student layer -> teacher layer, 1-based: l_T = 1 + round((l_S - 1) (L_T - 1) / (L_S - 1)), ties to even.

    This is the paper's rule ("depth alignment"). The arithmetic is exact on integers, so that no rounding error moves a
    layer. The only layer of a student with one layer maps to L_T.

    >>> layer_map([1, 2, 3], 3, 5)
    {1: 1, 2: 3, 3: 5}
    """
    if student_depth == 1:
        return dict.fromkeys(student_layers, teacher_depth)
    return {
        layer: 1 + round(Fraction((layer - 1) * (teacher_depth - 1), student_depth - 1)) for layer in student_layers
    }
