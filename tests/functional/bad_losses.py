"""Row losses that a run refuses, each for one reason; `loss.representation.kind=bad_losses:NAME`."""

from __future__ import annotations

import torch

NUMBER = 3


def whole_matrix(student_ND: torch.Tensor, teacher_ND: torch.Tensor, dim_reduction: str) -> torch.Tensor:
    """Forgets to reduce the width."""
    return (student_ND - teacher_ND).square()


def one_number(student_ND: torch.Tensor, teacher_ND: torch.Tensor, dim_reduction: str) -> float:
    """A plain number for all rows."""
    return float((student_ND - teacher_ND).square().mean())


def half_precision(student_ND: torch.Tensor, teacher_ND: torch.Tensor, dim_reduction: str) -> torch.Tensor:
    """The right values in another dtype."""
    return (student_ND - teacher_ND).square().mean(-1).bfloat16()


def detached(student_ND: torch.Tensor, teacher_ND: torch.Tensor, dim_reduction: str) -> torch.Tensor:
    """The right values, cut off from the student."""
    return (student_ND.detach() - teacher_ND).square().mean(-1)


def of_the_teacher_only(student_ND: torch.Tensor, teacher_ND: torch.Tensor, dim_reduction: str) -> torch.Tensor:
    """Has a gradient, but of something else than the student's rows."""
    return teacher_ND.clone().requires_grad_().square().mean(-1)


def over_rows(student_ND: torch.Tensor, teacher_ND: torch.Tensor, dim_reduction: str) -> torch.Tensor:
    """Centres the rows of a microbatch, which depend on the layout."""
    return (student_ND - student_ND.mean(0) - teacher_ND).square().mean(-1)


def in_place(student_ND: torch.Tensor, teacher_ND: torch.Tensor, dim_reduction: str) -> torch.Tensor:
    """Changes the targets that the run keeps."""
    return (student_ND - teacher_ND.mul_(2)).square().mean(-1)


def needs_delta(student_ND: torch.Tensor, teacher_ND: torch.Tensor, dim_reduction: str, delta: float) -> torch.Tensor:
    """Right, but for an argument without a default."""
    return delta * (student_ND - teacher_ND).square().mean(-1)
