"""Comparison of an engine's hidden states with transformers': the verdict, or the first wrong row.

A row's deviation is |a - b| / |b|, a the engine's state and b transformers' in float32. What is allowed follows from
how far transformers itself deviates, in the engine's precision:

- float32: every row within 1e-5. If a row exceeds that, transformers' float64 is the reference: every row within 1e-5
  of it or, if that is more, 3 times the worst row of transformers' float32 in the layers so far: single rows scatter.
- bfloat16: the median row of a layer within 1.5 times the median of transformers' bfloat16 against its float32. Each
  prompt, the first rows of all prompts, the rows beyond the sliding window and each chunk are judged by themselves,
  too, because they may be too few to move the median of all. Of less than 16 rows, the median may be 4 times
  transformers' own worst row of the layer: single rows scatter, and a token may visit another expert.

Shapes: T tokens of a prompt, D hidden size, N rows of all prompts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch

from nemo_oprd.models.canary.hints import hint
from nemo_oprd.models.canary.reference import ReferenceStates

States = Mapping[int, list[torch.Tensor]]
# rounding of sums in another order, over layers of any depth that was tried (docs/canary.md)
FLOAT32_ROW = 1e-5
OWN_DEVIATIONS = 1.5
# of the worst row of float32; 1.7 was seen in a model with routers whose worst row deviates by 1.5e-5
OWN_FLOAT32_ROWS = 3.0
OWN_WORST_ROWS, _MANY_ROWS = 4.0, 16
# transformers' states in another precision: "float64" or "bfloat16"
Measure = Callable[[str], ReferenceStates]


class CanaryRefused(ValueError):  # noqa: N818 (a refusal, as users read it)
    """States that are not the model's.

    Attributes:
        layer, prompt, row: the first wrong row, layers counted from 1, prompts and rows from 0.
    """

    def __init__(self, message: str, layer: int, prompt: int, row: int) -> None:
        super().__init__(message)
        self.layer, self.prompt, self.row = layer, prompt, row


@dataclass(frozen=True)
class CanaryVerdict:
    """What a comparison found that refused nothing.

    Attributes:
        worst, median: layer -> deviation of its worst row, of its median row.
        allowed: layer -> the allowed deviation, of the worst row for float32, of the median row for bfloat16.
        rows: N.
    """

    family: str
    dtype: str
    worst: dict[int, float]
    median: dict[int, float]
    allowed: dict[int, float]
    rows: int

    @property
    def line(self) -> str:
        """The verdict in one line."""
        layer = max(self.worst, key=lambda each: self.worst[each])
        return (
            f"{len(self.worst)} layers of {self.family} equal transformers' in {self.dtype} on {self.rows} rows: worst "
            f"row {self.worst[layer]:.1e} (layer {layer}), worst median {max(self.median.values()):.1e}"
        )

    def as_json(self) -> dict[str, Any]:
        """The fields, as JSON has them; `from_json` reads them."""
        return asdict(self)

    @staticmethod
    def from_json(content: Mapping[str, Any]) -> CanaryVerdict:
        """The verdict that `as_json` described.

        Raises:
            KeyError, TypeError, ValueError: the content is of something else.
        """
        numbers = {
            name: {int(layer): float(value) for layer, value in content[name].items()}
            for name in ("worst", "median", "allowed")
        }
        return CanaryVerdict(
            family=str(content["family"]), dtype=str(content["dtype"]), rows=int(content["rows"]), **numbers
        )


def prove(
    found: States,
    reference: ReferenceStates,
    family: str,
    *,
    dtype: str = "float32",
    measure: Measure | None = None,
    window: int | None = None,
    chunk: int = 0,
) -> CanaryVerdict:
    """Compares the states of an engine with transformers'.

    Args:
        found: layer (1-based) -> a tensor [T, D] per prompt, as `ReferenceStates.layers`; all layers or some.
        reference: transformers' states in float32.
        family: the model's type, for messages.
        dtype: the engine's precision: "float32" or "bfloat16".
        measure: returns transformers' states of the same prompts in another precision; needed for bfloat16. Without it
            float32 rows are allowed 1e-5.
        window: the model's sliding window, None if it has none.
        chunk: tokens that the engine computes at a time; 0 if it computes sequences whole.

    Raises:
        CanaryRefused: rows deviate by more than is allowed, are missing or are not finite.
    """
    assert reference.dtype == "float32", reference.dtype
    states = {layer: [rows.detach().to("cpu", torch.float32) for rows in found[layer]] for layer in sorted(found)}
    _check_shapes(states, reference, family)
    deviations = {layer: _deviations(rows, reference.layers[layer]) for layer, rows in states.items()}
    if dtype == "bfloat16":
        assert measure is not None, "bfloat16 is judged by transformers' own bfloat16"
        bounds = _bfloat16_bounds(deviations, reference, measure("bfloat16"), window, chunk)
    else:
        worst = max(float(rows.max()) for prompts in deviations.values() for rows in prompts)
        exact = measure("float64") if measure is not None and worst > FLOAT32_ROW else None
        if exact is not None:  # else the errors of two computations in float32 would be added up
            deviations = {layer: _deviations(rows, exact.layers[layer]) for layer, rows in states.items()}
        bounds = _float32_bounds(deviations, reference, exact)
    for layer, bound in bounds.items():
        if bound.exceeded:
            raise _refusal(layer, bound, states, deviations, reference, family, dtype, window, chunk)
    joined = {layer: torch.cat(rows) for layer, rows in deviations.items()}
    return CanaryVerdict(
        family,
        dtype,
        worst={layer: float(rows.max()) for layer, rows in joined.items()},
        median={layer: float(rows.median()) for layer, rows in joined.items()},
        allowed={layer: bound.allowed for layer, bound in bounds.items()},
        rows=len(next(iter(joined.values()))),
    )


@dataclass(frozen=True)
class _Bound:
    """What one layer may deviate by, what it does, and from which deviation on a row counts as wrong."""

    allowed: float
    deviation: float
    row: float
    what: str = "row"

    @property
    def exceeded(self) -> bool:
        return not self.deviation <= self.allowed  # not a number, too


def _deviations(found: list[torch.Tensor], reference: list[torch.Tensor]) -> list[torch.Tensor]:
    """A tensor [T] per prompt. A row of zeros deviates by its length, and one that is not finite by infinity."""
    result = []
    for a, b in zip(found, reference, strict=True):
        norm = b.norm(dim=-1)
        rows = (a - b).norm(dim=-1) / torch.where(norm > 0, norm, 1.0)
        result.append(torch.where(torch.isfinite(rows), rows, torch.inf))
    return result


def _float32_bounds(
    deviations: dict[int, list[torch.Tensor]], reference: ReferenceStates, exact: ReferenceStates | None
) -> dict[int, _Bound]:
    worst = {layer: max(float(rows.max()) for rows in prompts) for layer, prompts in deviations.items()}
    own = dict.fromkeys(worst, 0.0)
    if exact is not None:
        so_far = 0.0
        for layer in range(1, reference.depth + 1):
            rows = torch.cat(_deviations(reference.layers[layer], exact.layers[layer]))
            so_far = max(so_far, float(rows.max()))
            if layer in own:
                own[layer] = so_far
    allowed = {layer: max(FLOAT32_ROW, OWN_FLOAT32_ROWS * own[layer]) for layer in worst}
    return {layer: _Bound(allowed[layer], worst[layer], allowed[layer]) for layer in worst}


def _bfloat16_bounds(
    deviations: dict[int, list[torch.Tensor]],
    reference: ReferenceStates,
    rounded: ReferenceStates,
    window: int | None,
    chunk: int,
) -> dict[int, _Bound]:
    bounds = {}
    for layer, prompts in deviations.items():
        own = _deviations(rounded.layers[layer], reference.layers[layer])
        worst = max(float(rows.max()) for rows in own)
        candidates = []
        for what, chosen in _groups([len(rows) for rows in own], window, chunk).items():
            there, here = (
                torch.cat([rows[part] for rows, part in zip(each, chosen, strict=True)]) for each in (own, prompts)
            )
            # the median of a few rows may lie anywhere between theirs
            allowed = OWN_DEVIATIONS * float(there.median()) if len(there) >= _MANY_ROWS else OWN_WORST_ROWS * worst
            candidates.append(_Bound(allowed, float(here.median()), OWN_DEVIATIONS * worst, what))
        bounds[layer] = next((bound for bound in candidates if bound.exceeded), candidates[0])
    return bounds


def _groups(lengths: list[int], window: int | None, chunk: int) -> dict[str, list[slice]]:
    """What is judged by its median -> the rows of each prompt; few rows do not move the median of all."""
    none = slice(0)
    groups = {"median row": [slice(None) for _ in lengths]}
    for i in range(len(lengths)):
        groups[f"median row of prompt {i}"] = [slice(None) if i == j else none for j in range(len(lengths))]
    groups["median first row of the prompts"] = [slice(1) for _ in lengths]
    if window is not None:
        groups["median row beyond the sliding window"] = [slice(window, None) for _ in lengths]
    for start in range(chunk, max(lengths), chunk) if chunk else ():
        groups[f"median row of the chunk from row {start}"] = [slice(start, start + chunk) for _ in lengths]
    return {
        what: chosen
        for what, chosen in groups.items()
        if any(part.indices(length)[0] < part.indices(length)[1] for part, length in zip(chosen, lengths, strict=True))
    }


def _check_shapes(found: States, reference: ReferenceStates, family: str) -> None:
    """Raises CanaryRefused unless every layer has every row of the reference."""
    if not found or not set(found) <= set(reference.layers):
        layers = f"layers {sorted(found)}" if found else "no layers"
        raise CanaryRefused(
            f"canary of {family}: {layers} came back; expected some of layers 1 to {reference.depth}: the engine has "
            "another model",
            1,
            0,
            0,
        )
    for layer, states in found.items():
        shapes = [tuple(rows.shape) for rows in states]
        expected = [tuple(rows.shape) for rows in reference.layers[layer]]
        if shapes != expected:
            prompt = next((i for i, pair in enumerate(zip(shapes, expected, strict=False)) if pair[0] != pair[1]), 0)
            raise CanaryRefused(
                f"canary of {family}: layer {layer}, prompt {prompt}: states of shapes {shapes}; expected {expected}: "
                "the engine lost rows, or has another model",
                layer,
                prompt,
                0,
            )


def _refusal(
    layer: int,
    bound: _Bound,
    found: States,
    deviations: dict[int, list[torch.Tensor]],
    reference: ReferenceStates,
    family: str,
    dtype: str,
    window: int | None,
    chunk: int,
) -> CanaryRefused:
    rows = deviations[layer]
    wrong = [(deviation > min(bound.row, 1.0)).nonzero().flatten() for deviation in rows]
    if not any(len(each) for each in wrong):  # rows that are moved a little, all of them
        wrong = [(deviation > bound.allowed).nonzero().flatten() for deviation in rows]
    row, prompt = min((int(each[0]), i) for i, each in enumerate(wrong) if len(each))
    text = hint(layer, found, reference, [set(each.tolist()) for each in wrong], bound.row, window, chunk)
    return CanaryRefused(
        f"canary of {family}: layer {layer} of {reference.depth}, prompt {prompt}, row {row} is the first wrong one: "
        f"it deviates from transformers' by {float(rows[prompt][row]):.1e}, the layer's {bound.what} by "
        f"{bound.deviation:.1e}; expected at most {bound.allowed:.1e} in {dtype}: {text}",
        layer,
        prompt,
        row,
    )
