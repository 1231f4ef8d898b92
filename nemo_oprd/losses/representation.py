"""Distances between student and teacher hidden states, one value per row (paper, eq. 5 and its variants).

docs/losses.md has the equations and says how a distance is added, here or in the user's own module.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

# (student rows [N, D], teacher rows [N, D], "mean" or "sum" over D) -> [N], in the rows' dtype, differentiable by
# autograd with respect to the student's; a row's value depends on that row alone
RowLoss = Callable[[torch.Tensor, torch.Tensor, str], torch.Tensor]


def mse(student_ND: torch.Tensor, teacher_ND: torch.Tensor, dim_reduction: str) -> torch.Tensor:
    """Squared difference, [N, D] x 2 -> [N]; "mean" over the width is the paper's 1/D, "sum" leaves the factor out."""
    squares_ND = (student_ND - teacher_ND).square()
    return squares_ND.sum(-1) if dim_reduction == "sum" else squares_ND.mean(-1)


def normalized_mse(student_ND: torch.Tensor, teacher_ND: torch.Tensor, dim_reduction: str) -> torch.Tensor:
    """`mse` after both sides are scaled to unit length, [N, D] x 2 -> [N]. With "sum" this is 2 (1 - cosine)."""
    student_ND, teacher_ND = (torch.nn.functional.normalize(rows_ND, dim=-1) for rows_ND in (student_ND, teacher_ND))
    return mse(student_ND, teacher_ND, dim_reduction)


def cosine(student_ND: torch.Tensor, teacher_ND: torch.Tensor, dim_reduction: str) -> torch.Tensor:
    """1 - cosine similarity, [N, D] x 2 -> [N]; `dim_reduction` has no effect: the cosine sums over the width."""
    return 1.0 - torch.nn.functional.cosine_similarity(student_ND, teacher_ND, dim=-1)
