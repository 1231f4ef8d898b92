"""Distances between student and teacher hidden states, one value per row (paper, eq. 5 and its variants).

Adding a loss: one function here with the signature of `mse`, and its name in `ROW_LOSSES`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

RowLoss = Callable[[torch.Tensor, torch.Tensor, str], torch.Tensor]


def _reduce(squares: torch.Tensor, dim_reduction: str) -> torch.Tensor:
    return squares.sum(-1) if dim_reduction == "sum" else squares.mean(-1)


def mse(student_ND: torch.Tensor, teacher_ND: torch.Tensor, dim_reduction: str) -> torch.Tensor:
    """Squared difference, [N, D] x 2 -> [N]; mean over the width is the paper's 1/d, "sum" leaves it out."""
    return _reduce((student_ND - teacher_ND).square(), dim_reduction)


def normalized_mse(student_ND: torch.Tensor, teacher_ND: torch.Tensor, dim_reduction: str) -> torch.Tensor:
    """`mse` after both sides are brought to unit length. With "sum" this is 2 (1 - cosine)."""
    return mse(
        torch.nn.functional.normalize(student_ND, dim=-1),
        torch.nn.functional.normalize(teacher_ND, dim=-1),
        dim_reduction,
    )


def cosine(student_ND: torch.Tensor, teacher_ND: torch.Tensor, dim_reduction: str) -> torch.Tensor:
    """1 - cosine similarity, [N, D] x 2 -> [N]; the width is summed out whatever `dim_reduction` says."""
    return 1.0 - torch.nn.functional.cosine_similarity(student_ND, teacher_ND, dim=-1)


def weights_of_layers(given: list[float] | dict[str, float] | None, layers: str | list[int], num_layers: int) -> dict:
    """Supervised layer -> its weight w_l in the term sum_l w_l L_l / sum_l w_l.

    Args:
        given: one weight per supervised layer (in the order of `layers` where that is a list, else ascending), or some
            layers' weights by number where the others have 1; None is 1 for all.

    Raises:
        ValueError: another number of weights than of supervised layers, or a layer that is not supervised.
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


ROW_LOSSES: dict[str, RowLoss] = {"mse": mse, "normalized_mse": normalized_mse, "cosine": cosine}


def supervised_layers(layers: str | list[int], num_layers: int) -> list[int]:
    """The distilled layers (1-based, ascending) of a model with `num_layers` blocks.

    Raises:
        ValueError: a layer outside 1..num_layers, a repeated one, or a selection that leaves none by mistake.
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
