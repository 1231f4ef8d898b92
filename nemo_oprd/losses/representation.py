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


ROW_LOSSES: dict[str, RowLoss] = {"mse": mse, "normalized_mse": normalized_mse, "cosine": cosine}
