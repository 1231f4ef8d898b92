"""A bridge in memory: the maps of every layer pair, and the models and hidden states that they are for."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from nemo_oprd.bridge.covariance import LayerPair


@dataclass(frozen=True)
class ModelIdentity:
    """What of a model must agree for a bridge to fit it. None is not compared.

    `name` says where the model came from and is for people. `tokenizer` is `Tokenizer.fingerprint()`; `weights` any
    hash of the weights, useful for the frozen teacher (a student's change as it learns).
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
    """Where hidden states were taken: `loss.representation.position` and `.final_norm`."""

    position: str = "token"
    final_norm: bool = True


@dataclass(frozen=True)
class LayerBridge:
    """The maps of one layer pair: float32 [d_T], [r, d_T], [r, d_S], [r] or None.

    At full width the teacher's side is the identity, and mean and basis are None; so is a projector that has yet to be
    drawn.
    """

    teacher_mean: torch.Tensor | None = None
    teacher_basis: torch.Tensor | None = None
    student_projector: torch.Tensor | None = None
    student_bias: torch.Tensor | None = None

    def tensors(self) -> dict[str, torch.Tensor]:
        """The ones that are there, by their name in the file."""
        return {name: value for name, value in vars(self).items() if value is not None}


@dataclass(frozen=True)
class Bridge:
    """A pair of linear maps per supervised layer into one space of `rank` dimensions.

    Layers are named by the student's (a student layer has one teacher layer; a teacher layer may serve several).
    `report` is what the fit has to say: anything that JSON can hold.
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
        """Whether the teacher's states are compared as they are."""
        return all(maps.teacher_basis is None for maps in self.pairs.values())

    def for_layer(self, layer: int) -> LayerBridge:
        """The maps of a student layer."""
        return self.pairs[LayerPair(layer, self.layers[layer])]

    def project_teacher(self, layer: int, teacher_ND: torch.Tensor) -> torch.Tensor:
        """P_T (h_T - mu_T) for student layer `layer`: [n, d_T] -> [n, r], in float32 or, if given that, float64."""
        at = self.for_layer(layer)
        teacher_ND = _at_least_float32(teacher_ND)
        if at.teacher_mean is None or at.teacher_basis is None:
            return teacher_ND
        return (teacher_ND - at.teacher_mean.to(teacher_ND)) @ at.teacher_basis.to(teacher_ND).T

    def project_student(self, layer: int, student_ND: torch.Tensor) -> torch.Tensor:
        """P_S h_S + b: [n, d_S] -> [n, r], differentiable in h_S; precision as above."""
        at = self.for_layer(layer)
        assert at.student_projector is not None, "the projector was not drawn yet"
        return apply_projector(at.student_projector, at.student_bias, student_ND)

    def to(self, device: torch.device | str, *, student: bool = True) -> Bridge:
        """The same bridge with its tensors on `device`; without `student`, only the teacher's side of it."""
        moved = {
            pair: LayerBridge(
                **{
                    name: value.to(device) if student or name.startswith("teacher") else value
                    for name, value in maps.tensors().items()
                }
            )
            for pair, maps in self.pairs.items()
        }
        return Bridge(self.rank, moved, self.student, self.teacher, self.capture, self.report)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Every tensor by its full name, e.g. to keep them as buffers of a run."""
        return {
            f"{pair.key}.{name}": value
            for pair, maps in sorted(self.pairs.items())
            for name, value in maps.tensors().items()
        }


def apply_projector(projector: torch.Tensor, bias: torch.Tensor | None, student_ND: torch.Tensor) -> torch.Tensor:
    """P_S h_S + b: [r, d_S], [r] or None, [n, d_S] -> [n, r]; differentiable in all of them."""
    student_ND = _at_least_float32(student_ND)
    projected_NR = student_ND @ projector.to(student_ND).T
    return projected_NR if bias is None else projected_NR + bias.to(student_ND)


def _at_least_float32(states_ND: torch.Tensor) -> torch.Tensor:
    return states_ND.to(torch.promote_types(states_ND.dtype, torch.float32))
