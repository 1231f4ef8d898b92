"""A bridge in memory: the maps of every layer pair, their models and hidden states; and the full-width bridge."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from nemo_oprd.bridge.covariance import LayerPair


@dataclass(frozen=True)
class ModelIdentity:
    """The properties of a model that must agree with those of the model that a bridge was made for.

    None stands for unknown and is not compared. `name` is the model's source; it is for people and is not
    compared either. `tokenizer` is `Tokenizer.fingerprint()`. `weights` is any hash of the weights; it is useful for a
    frozen teacher, whereas a student's weights change in training.
    """

    model_type: str
    num_layers: int
    hidden_size: int
    vocab_size: int | None = None
    tokenizer: str | None = None
    weights: str | None = None
    name: str = field(default="", compare=False)


@dataclass(frozen=True)
class CapturePoint:
    """The hidden states that a bridge maps: `loss.representation.position` and `loss.representation.final_norm`."""

    position: str = "token"
    final_norm: bool = True


@dataclass(frozen=True)
class LayerBridge:
    """The maps of one layer pair, float32. The teacher side of a full-width bridge is the identity."""

    teacher_mean: torch.Tensor | None = None  # [Dt]; None in a full-width bridge
    teacher_basis: torch.Tensor | None = None  # [R, Dt]; None in a full-width bridge
    student_projector: torch.Tensor | None = None  # [R, Ds]; None in a full-width bridge before it is drawn
    student_bias: torch.Tensor | None = None  # [R], or None for a bridge without bias

    def tensors(self) -> dict[str, torch.Tensor]:
        """Returns the maps that are not None, by their name in the file."""
        return {name: value for name, value in vars(self).items() if value is not None}


@dataclass(frozen=True)
class Bridge:
    """A pair of linear maps per supervised layer into one space of `rank` dimensions.

    A student layer has one teacher layer, so the student layer identifies the pair; a teacher layer may have several
    student layers. `report` is the report of the fit, made of plain JSON values.
    """

    rank: int
    pairs: dict[LayerPair, LayerBridge]
    student: ModelIdentity
    teacher: ModelIdentity
    capture: CapturePoint = field(default_factory=CapturePoint)
    report: dict[str, Any] = field(default_factory=dict)

    @property
    def layers(self) -> dict[int, int]:
        """Student layer -> teacher layer."""
        return dict(sorted(self.pairs))

    @property
    def full_width(self) -> bool:
        """True if the teacher's hidden states are compared without a projection."""
        return all(maps.teacher_basis is None for maps in self.pairs.values())

    def for_layer(self, layer: int) -> LayerBridge:
        """Returns the maps of a student layer."""
        return self.pairs[LayerPair(layer, self.layers[layer])]

    def project_teacher(self, layer: int, teacher_NDt: torch.Tensor) -> torch.Tensor:
        """Returns P_T (h_T - mu_T) for a student layer: [N, Dt] -> [N, R]; float64 for float64 states, else float32."""
        at = self.for_layer(layer)
        teacher_NDt = _at_least_float32(teacher_NDt)
        if at.teacher_mean is None or at.teacher_basis is None:
            return teacher_NDt
        return (teacher_NDt - at.teacher_mean.to(teacher_NDt)) @ at.teacher_basis.to(teacher_NDt).T

    def project_student(self, layer: int, student_NDs: torch.Tensor) -> torch.Tensor:
        """Returns P_S h_S + b: [N, Ds] -> [N, R], differentiable in h_S, with the dtypes of `project_teacher`."""
        at = self.for_layer(layer)
        assert at.student_projector is not None, "the projector was not drawn yet"
        return apply_projector(at.student_projector, at.student_bias, student_NDs)

    def to(self, device: torch.device | str, *, student: bool = True) -> Bridge:
        """Returns the bridge with its tensors on `device`; without `student`, only the teacher's maps are moved."""
        pairs = {}
        for pair, maps in self.pairs.items():
            moved = {n: t.to(device) for n, t in maps.tensors().items() if student or n.startswith("teacher")}
            pairs[pair] = replace(maps, **moved)
        return replace(self, pairs=pairs)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Returns every tensor by its name in the file, such as "s2.t3.teacher_basis"."""
        return {
            f"{pair.key}.{name}": value
            for pair, maps in sorted(self.pairs.items())
            for name, value in maps.tensors().items()
        }


def apply_projector(projector: torch.Tensor, bias: torch.Tensor | None, student_NDs: torch.Tensor) -> torch.Tensor:
    """Returns P_S h_S + b from P_S [R, Ds], b [R] or None and h_S [N, Ds]: [N, R], differentiable in all three."""
    student_NDs = _at_least_float32(student_NDs)
    projected_NR = student_NDs @ projector.to(student_NDs).T
    return projected_NR if bias is None else projected_NR + bias.to(student_NDs)


def _at_least_float32(states_ND: torch.Tensor) -> torch.Tensor:
    return states_ND.to(torch.promote_types(states_ND.dtype, torch.float32))


# The full-width map of the paper's notation table: W_l h_S is compared with h_T, W_l being [Dt, Ds].
#
# A full-width bridge needs neither a fit nor an artifact: W_l is drawn from the seed and trained with the student.


# the value of bridge.path that stands in place of a directory
FULL_WIDTH = "full_width"
# separates these draws from the run's other draws, which have the same seed
_STREAM = 0x57


def full_width_bridge(
    layers: Mapping[int, int], student: ModelIdentity, teacher: ModelIdentity, capture: CapturePoint
) -> Bridge:
    """Returns the bridge between `layers` (student layer -> teacher layer), without tensors yet; its rank is Dt."""
    pairs = {LayerPair(*pair): LayerBridge() for pair in sorted(layers.items())}
    return Bridge(teacher.hidden_size, pairs, student, teacher, capture)


def draw_projector(seed: int, student_layer: int, teacher_width: int, student_width: int) -> torch.Tensor:
    """Draws the initial W of a layer: float32 [Dt, Ds] from N(0, 1 / Ds), so that W h_S has about the RMS value of h_S.

    The result depends on the arguments only, so it is the same on every rank and at every layout.
    """
    draw = np.random.default_rng((_STREAM, seed, student_layer))
    normal = draw.standard_normal((teacher_width, student_width), dtype=np.float32)
    return torch.from_numpy(normal) / student_width**0.5
