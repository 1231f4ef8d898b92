"""The checks of the layer map: its order, the layers from which the student's weights come, and the layers most alike.

A map that compares the wrong layers harms the student more than a poor choice of the loss, yet the loss still falls.
Shapes: S student layers that are compared before the final norm ("inner" ones), T candidate layers of the teacher.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from nemo_oprd.tools.doctor.findings import Finding

# a map is collapsed if one layer of the teacher has more than this share of the student's layers, of at least FEW
COLLAPSED, FEW = 0.5, 4
# A layer "has the weights" of another if their cosine is above ORIGIN and no other layer comes within CLEARLY of it.
# Weights of models that were trained apart have a cosine of about 0; rounded to 2 bits, it is about 0.8.
ORIGIN, CLEARLY = 0.5, 0.2
# Layers next to each other are alike, so another map counts only if its similarity is higher by MARGIN on average and
# closes the share CLOSED of what the run's map lacks to 1. SMALL_MARGIN is enough where half of that is closed, which
# needs layers of one origin. Correlations tell neighbours apart better than CKA, which models of other widths need.
MARGIN = {"correlation": 0.05, "CKA": 0.1}
CLOSED = {"correlation": 0.2, "CKA": 0.5}
SMALL_MARGIN, MOSTLY_CLOSED = 0.01, 0.5
# Below this even the best map's layers have little to do with each other. Two models that were trained apart on the
# same task (additions) had a CKA of 0.42 and 0.56 with two layers, neither of which is the right one.
ALIKE = {"correlation": 0.3, "CKA": 0.7}
SHOWN = 3


@dataclass(frozen=True)
class LayerMap:
    """The layer map of a run."""

    pairs: Mapping[int, int]  # supervised student layer -> teacher layer
    depths: tuple[int, int]  # number of layers of student and teacher
    final_norm: bool  # whether the last layers are compared after the final norm, hence only with each other
    freely: bool = True  # whether `loss.representation.layer_map` can be set; a bridge is fitted for its map

    @property
    def inner(self) -> dict[int, int]:
        """Student layer -> teacher layer of the pairs that another map could change."""
        last = self.depths[0] if self.final_norm else 0
        return {student: teacher for student, teacher in sorted(self.pairs.items()) if student != last}

    @property
    def candidates(self) -> range:
        """The teacher's layers with which an inner layer could be compared."""
        return range(1, self.depths[1] + (0 if self.final_norm else 1))

    def fix(self, better: Mapping[int, int]) -> str:
        """Returns the fix of a finding: the setting with the pairs `better` for inner layers."""
        chosen = {**self.pairs, **better}
        setting = ",".join(f"{student}:{teacher}" for student, teacher in sorted(chosen.items()))
        before = "" if self.freely else "fit a bridge with "
        return f"fix: {before}loss.representation.layer_map={{{setting}}}"


def order(layers: LayerMap) -> Finding | None:
    """Checks the order of the teacher's layers, whatever the models; None if nothing is wrong.

    A deeper layer of the student belongs to a deeper layer of the teacher, or to the same one. A map that falls at each
    step is wrong; one that falls somewhere, or compares most of at least four layers with one, is a warning.
    """
    inner = list(layers.inner.values())
    steps = np.diff(inner)
    straight = dict(zip(layers.inner, sorted(inner), strict=True))
    shown = f"loss.representation.layer_map compares layers {list(layers.inner)} with the teacher's {inner}"
    numbers = {"pairs": {str(student): teacher for student, teacher in layers.pairs.items()}}
    if len(inner) > 1 and (steps < 0).all():
        text = f"{shown}: the order is reversed; expected deeper layers for deeper ones; {layers.fix(straight)}"
        return Finding("layer map", "wrong", text, numbers, code="layer-map-reversed")
    if (steps < 0).any():
        text = f"{shown}: the order goes back and forth; expected deeper layers for deeper ones; {layers.fix(straight)}"
        return Finding("layer map", "warning", text, numbers, code="layer-map-crossed")
    teacher, count = Counter(inner).most_common(1)[0] if inner else (0, 0)
    if len(inner) >= FEW and count > COLLAPSED * len(inner) and layers.depths[1] >= FEW:
        text = f"{shown}: {count} of {len(inner)} with layer {teacher}; expected layers of their own; fix: leave out "
        return Finding("layer map", "warning", f"{text}layer_map", numbers, code="layer-map-collapsed")
    return None


def origins(cosines_ST: np.ndarray, layers: LayerMap) -> Finding:
    """Checks the order, and whether layers are compared with the teacher's layers that their weights come from.

    A pruned student has some of the teacher's layers, and a checkpoint all of them. A layer's origin is the teacher's
    layer with clearly the largest cosine between rows of `self_attn.o_proj`; without an origin for every inner layer
    the check finds nothing wrong.

    Args:
        cosines_ST: of all layers of both models, [student's depth, teacher's depth].
    """
    wrong_order = order(layers)
    if wrong_order is not None:
        return wrong_order
    inner = layers.inner
    found = {student: _origin(cosines_ST[student - 1]) for student in inner}
    known = {student: teacher for student, teacher in found.items() if teacher is not None}
    shown = f"{len(inner)} inner layers are compared with deeper and deeper layers of the teacher"
    if not known or len(known) < len(inner):
        return Finding("layer map", "ok", f"{shown}; their weights do not come from this teacher's layers")
    numbers = {"compared": list(inner.values()), "origins": list(known.values())}
    if (np.diff(list(known.values())) <= 0).any():
        text = f"the student's layers {list(known)} have the weights of the teacher's layers {list(known.values())}, "
        text += "in another order; expected the same order; fix: correct the names of the tensors in one of the two "
        return Finding("layer map", "wrong", f"{text}models", numbers, code="layers-permuted")
    if known == inner:
        return Finding("layer map", "ok", "every layer is compared with the one whose weights it has", numbers)
    code = "layer-map-shifted" if _is_shift(layers, known) else "layer-map-poor"
    listed = [
        f"layer {student} is compared with layer {teacher} and has the weights of layer {known[student]} (cosine "
        f"{cosines_ST[student - 1, teacher - 1]:.2f}, {cosines_ST[student - 1, known[student] - 1]:.2f})"
        for student, teacher in inner.items()
        if teacher != known[student]
    ]
    text = f"{'; '.join(listed[:SHOWN])}{'; ...' if len(listed) > SHOWN else ''}; expected its own; {layers.fix(known)}"
    return Finding("layer map", "warning", text, numbers, code=code)


def _is_shift(layers: LayerMap, better: Mapping[int, int]) -> bool:
    """Returns whether the run's map is `better` with all teacher layers shifted alike, clipped to the candidates."""
    inner, ends = layers.inner, (layers.candidates[0], layers.candidates[-1])
    return any(
        all(teacher == min(max(better[student] + by, ends[0]), ends[1]) for student, teacher in inner.items())
        for by in {teacher - better[student] for student, teacher in inner.items()} - {0}
    )


def _origin(cosines_T: np.ndarray) -> int | None:
    """Returns the teacher's layer (1-based) that a student's layer comes from; None if that is not clear."""
    ordered = np.sort(cosines_T)[::-1]
    if ordered[0] < ORIGIN or (len(ordered) > 1 and ordered[1] > ordered[0] - CLEARLY):
        return None
    return int(cosines_T.argmax()) + 1


def best_monotone(similarity_ST: np.ndarray) -> list[int]:
    """Returns ascending columns (0-based), one per row, with the largest sum; strictly ascending if columns suffice."""
    rows, columns = similarity_ST.shape
    step = 1 if columns >= rows else 0
    best = np.full((rows, columns), -np.inf)
    came = np.zeros((rows, columns), dtype=int)
    best[0] = similarity_ST[0]
    for row in range(1, rows):
        top, at = -np.inf, 0
        for column in range(columns):
            if column >= step and best[row - 1, column - step] > top:
                top, at = best[row - 1, column - step], column - step
            best[row, column], came[row, column] = similarity_ST[row, column] + top, at
    chosen = [int(best[-1].argmax())]
    for row in range(rows - 1, 0, -1):
        chosen.append(int(came[row, chosen[-1]]))
    return chosen[::-1]


def similar_layers(similarity_ST: np.ndarray, layers: LayerMap, measure: str, rows: int) -> Finding:
    """Checks whether another map compares layers that are much more alike, on the states of sampled responses.

    The run's map is compared with the ascending map of the largest sum of similarities.

    Args:
        similarity_ST: `measure` (correlation or CKA, at most 1) of the states of inner layers and candidates.
        rows: the number of states that were compared.
    """
    check, inner = "similar layers", layers.inner
    first = layers.candidates[0]
    own = np.array([similarity_ST[i, teacher - first] for i, teacher in enumerate(inner.values())])
    chosen = best_monotone(similarity_ST)
    best = similarity_ST[np.arange(len(chosen)), chosen]
    numbers = {"measure": measure, "rows": rows, "similarity": float(own.mean()), "best": float(best.mean())}
    numbers |= {"similarities": np.round(similarity_ST, 4).tolist()}
    said = f"{measure} of the compared layers' states is {own.mean():.2f} on average"
    gain, lacks = best.mean() - own.mean(), 1 - own.mean()
    better_by_far = gain >= MARGIN[measure] and gain >= CLOSED[measure] * lacks
    clearly_better = measure == "correlation" and gain >= SMALL_MARGIN and gain >= MOSTLY_CLOSED * lacks
    if best.mean() < ALIKE[measure] or not (better_by_far or clearly_better):
        return Finding(check, "ok", f"{said}, that of the best map {best.mean():.2f} ({rows} tokens)", numbers)
    better = {student: column + first for student, column in zip(inner, chosen, strict=True)}
    listed = [
        f"layer {student} with layer {inner[student]} ({own[i]:.2f}), where layer {better[student]} has {best[i]:.2f}"
        for i, student in sorted(enumerate(inner), key=lambda entry: own[entry[0]] - best[entry[0]])
        if better[student] != inner[student]
    ]
    code = "layer-map-shifted" if _is_shift(layers, better) else "layer-map-poor"
    if len(inner) > 1 and (np.diff(list(inner.values())) < 0).all():
        code = "layer-map-reversed"
    text = f"{said}, and {best.mean():.2f} with another map: it compares {'; '.join(listed[:SHOWN])}; expected the "
    return Finding(check, "warning", f"{text}most similar ones; {layers.fix(better)}", numbers, code=code)


def rounds(layers: Sequence[int], candidates: Sequence[int], *, at_once: bool) -> Iterator[dict[int, int]]:
    """Yields layer maps that pair every layer with all candidates or, `at_once`, each candidate with some layer."""
    count = len(candidates)
    for number in range(-(-count // len(layers)) if at_once else count):
        start = number * len(layers) if at_once else number
        yield {layer: candidates[(start + i) % count] for i, layer in enumerate(layers)}
