"""Comparison of an engine's states and head with transformers': the verdict, or the first wrong row and a hint.

A row's deviation is |a - b| / |b|, a the engine's state and b transformers' in float32. The bound follows from the
deviation of transformers itself in the engine's precision:

- float32: every row within 1e-5. If a row exceeds that, transformers' float64 is the reference: every row within 1e-5
  of it or, if that is more, 3 times the worst row of transformers' float32 in the layers so far: single rows scatter.
- bfloat16: the median row of a layer within 1.5 times the median of transformers' bfloat16 against its float32. Each
  prompt, the first rows of all prompts, the rows beyond the sliding window and each chunk but the first have medians of
  their own, too: they may be too few to move the median of all. The median of fewer than 16 rows may be 4 times
  transformers' own worst row of the layer: single rows scatter, and a token may visit another expert.

Shapes: T tokens of a prompt, D hidden size, N rows of all prompts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch

from nemo_oprd.canary.reference import HEAD_ROWS, ReferenceStates

# Hints at the cause from the pattern of wrong rows. Every sentence follows from a comparison.


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
    """Returns a hint at the cause: the pattern that the wrong rows of the first wrong `layer` show.

    Args:
        wrong: per prompt, the layer's wrong rows.
        allowed: the largest deviation of a right row.
        window, chunk: as in `prove`.
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
    """Returns which other state of transformers these states equal; None if they equal no other."""
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
    """Returns whether one factor per channel explains nine tenths of the difference between states and reference."""
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


States = Mapping[int, list[torch.Tensor]]
# bound in float32: rounding of sums in another order, over layers of any depth that was tried (docs/canary.md)
FLOAT32_ROW = 1e-5
OWN_DEVIATIONS = 1.5
# bound as a multiple of float32's worst row; a model with routers, whose worst row deviates by 1.5e-5, reached 1.7
OWN_FLOAT32_ROWS = 3.0
OWN_WORST_ROWS, _MANY_ROWS = 4.0, 16
# returns transformers' states in a precision: "float32", "bfloat16" or "float64"
Measure = Callable[[str], ReferenceStates]


class CanaryRefused(ValueError):  # noqa: N818 (a refusal, as users read it)
    """Raised for states that are not the model's.

    Attributes:
        layer, prompt, row: the first wrong row, layers counted from 1, prompts and rows from 0.
    """

    def __init__(self, message: str, layer: int, prompt: int, row: int) -> None:
        super().__init__(message)
        self.layer, self.prompt, self.row = layer, prompt, row


@dataclass(frozen=True)
class CanaryVerdict:
    """Result of a comparison that passed.

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
        """Returns the fields as JSON types; `from_json` reads them."""
        return asdict(self)

    @staticmethod
    def from_json(content: Mapping[str, Any]) -> CanaryVerdict:
        """Reads the verdict from the output of `as_json`.

        Raises:
            KeyError, TypeError, ValueError: the content is no verdict.
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
        measure: returns transformers' states of the same prompts in another precision; needed for bfloat16. Without it,
            float32 rows may deviate by 1e-5.
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
    """The allowed deviation of one layer, its measured one, and the deviation above which a row counts as wrong."""

    allowed: float
    deviation: float
    row: float
    what: str = "row"

    @property
    def exceeded(self) -> bool:
        return not self.deviation <= self.allowed  # not a number, too


def _deviations(found: list[torch.Tensor], reference: list[torch.Tensor]) -> list[torch.Tensor]:
    """Returns deviations [T] per prompt: |a| where the reference is zero, infinity where a row is not finite."""
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
    """Maps the name of each group of rows with a median of its own to those rows of each prompt."""
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


# Comparison of an engine's log-probabilities and entropies with those by transformers' own head.
#
# A head has a matrix, perhaps tied to the embeddings, and in many families a bias, a scale or a cap of the logits. The
# comparison covers all of them, because transformers computes its side by the model's own forward.


# bound of a log-probability or an entropy in float32, in nats
FLOAT32_LOGPROB = 1e-3
_COLUMNS = ("log-probability", "entropy")


def head_rows(length: int) -> list[int]:
    """Returns the rows of a prompt of `length` tokens whose head is compared, see `ReferenceStates.heads`."""
    return [*range(max(0, length - HEAD_ROWS), length - 1)]


def prove_head(found: list[torch.Tensor], family: str, *, dtype: str, measure: Measure) -> None:
    """Compares log-probabilities and entropies of an engine with those by transformers' own head.

    Args:
        found: per prompt [n, 2]: the log-probability of the next token and the entropy of each of its `head_rows`.
        family: the model's type, for messages.
        dtype: the engine's precision: "float32" or "bfloat16".
        measure: returns transformers' results in a precision, with `heads`.

    Raises:
        ValueError: in float32 a number deviates by more than 1e-3, in bfloat16 the median by more than 1.5 times that
            of transformers' bfloat16 from its float32.
    """
    reference = measure("float32").heads
    off = [(a.to("cpu", torch.float32) - b).abs().nan_to_num(torch.inf) for a, b in zip(found, reference, strict=True)]
    joined, allowed, what = torch.cat(off), [FLOAT32_LOGPROB] * len(_COLUMNS), "largest deviation"
    deviation = joined.amax(0)
    if dtype == "bfloat16":
        own = torch.cat([(a - b).abs() for a, b in zip(measure("bfloat16").heads, reference, strict=True)])
        deviation, what = joined.median(0).values, "median deviation"
        allowed = [OWN_DEVIATIONS * each for each in own.median(0).values.tolist()]
    for column, name in enumerate(_COLUMNS):
        if not float(deviation[column]) <= allowed[column]:
            worst = [float(rows[:, column].max()) if len(rows) else 0.0 for rows in off]
            prompt = worst.index(max(worst))
            before_last = len(off[prompt]) - int(off[prompt][:, column].argmax())
            raise ValueError(
                f"canary of {family}: the {name} by the server's head differs from transformers': {what} "
                f"{float(deviation[column]):.1e}, most in prompt {prompt}, {before_last} rows before its last one; "
                f"expected at most {allowed[column]:.1e} in {dtype}, although hidden states are right: the head is "
                "another one, or its bias, scale or cap of logits is left out"
            )
