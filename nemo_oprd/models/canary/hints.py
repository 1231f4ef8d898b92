"""What the pattern of wrong rows says about their cause. Every sentence follows from a comparison."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from nemo_oprd.models.canary.reference import ReferenceStates

# padding ids may have a row of zeros, which most layers return unchanged
_NEARLY_ALL = 0.9


def hint(
    layer: int,
    found: Mapping[int, list[torch.Tensor]],
    reference: ReferenceStates,
    wrong: list[set[int]],
    allowed: float,
    window: int | None,
    chunk: int,
) -> str:
    """What the first wrong `layer` looks like.

    Args:
        wrong: per prompt, the layer's wrong rows.
        allowed: the largest deviation of a right row.
        window, chunk: as `verdict.prove`.
    """
    states = found[layer]
    if any(not bool(torch.isfinite(rows).all()) for rows in states):
        return "states are not finite"
    other = _other_state(layer, states, reference, allowed)
    if other is not None:
        return other
    if layer == reference.depth and _scaled_channels(states, reference.layers[layer]):
        return (
            "every row differs by the same factor per channel, so the final norm has another weight (w instead of "
            "1 + w, or of another model)"
        )
    return _by_rows(states, wrong, window, chunk)


def _other_state(layer: int, states: list[torch.Tensor], reference: ReferenceStates, allowed: float) -> str | None:
    """Which other state of transformers these are."""
    depth = reference.depth
    if layer == depth and _same(states, reference.before_norm, allowed):
        return "it is the state before the final norm"
    others = {layer - 1: reference.embeddings if layer == 1 else reference.layers[layer - 1]}
    if layer < depth:
        others[layer + 1] = reference.before_norm if layer + 1 == depth else reference.layers[layer + 1]
    for number, other in others.items():
        if _same(states, other, allowed):
            name = "the embeddings" if number == 0 else f"layer {number}"
            return f"it is transformers' state of {name}, so layers are counted off by one"
    return None


def _same(states: list[torch.Tensor], other: list[torch.Tensor], allowed: float) -> bool:
    return all(
        bool(((a - b).norm(dim=-1) <= allowed * b.norm(dim=-1)).all()) for a, b in zip(states, other, strict=True)
    )


def _scaled_channels(states: list[torch.Tensor], reference: list[torch.Tensor]) -> bool:
    """Whether the states are the reference times one factor per channel: nine tenths of the difference is that."""
    a, b = torch.cat(states).double(), torch.cat(reference).double()
    factors = (a * b).sum(dim=0) / b.square().sum(dim=0).clamp_min(torch.finfo(torch.float64).tiny)
    return bool((a - b * factors).norm() < 0.1 * (a - b).norm()) and len(a) > 1


def _by_rows(states: list[torch.Tensor], wrong: list[set[int]], window: int | None, chunk: int) -> str:
    first = min(min(rows) for rows in wrong if rows)
    long = [i for i, rows in enumerate(states) if len(rows) > first]
    if window is not None and first in (window - 1, window) and all(wrong[i] for i in long):
        longer = "longer" if first == window else "shorter"
        return (
            f"all rows before {first} are right, and the sliding window is {window}: the engine's is {longer}, or it "
            "has none"
        )
    if chunk and first > 0 and first % chunk == 0:
        return f"rows are right up to the engine's chunk of {chunk} tokens: what it keeps between chunks is wrong"
    if first > 0:
        if first == 1 and all(wrong[i] for i in long):
            return (
                "row 0 of every prompt, which sees no other token, is right and later rows are not: how tokens see "
                "earlier ones, i.e. rotation (base, share, scaling), norms or head order of queries and keys, or the "
                "decay of a recurrent state; values and MLP are right"
            )
        return f"rows before {first} are right in every prompt: what depends on the position or on earlier tokens"
    share = sum(map(len, wrong)) / sum(map(len, states))
    if share >= _NEARLY_ALL:
        return (
            f"{share:.0%} of its rows are wrong, from row 0 on: a weight of this layer is another one (stale, swapped, "
            "permuted or scaled)"
        )
    return f"{share:.0%} of its rows are wrong, from row 0 on: what depends on the token, such as the choice of experts"
