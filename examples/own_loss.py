"""A loss of one's own: the Huber distance between hidden states. docs/losses.md says how a run uses it."""

import torch


def huber(
    student_ND: torch.Tensor, teacher_ND: torch.Tensor, dim_reduction: str, *, delta: float = 1.0
) -> torch.Tensor:
    """Quadratic where the two differ by at most `delta`, linear beyond: [N, D] x 2 -> [N].

    A few dimensions of a language model's hidden states are larger than the others by orders of magnitude. These
    dimensions have most of the gradient of a squared difference; here no dimension's derivative exceeds `delta`.
    """
    gap_ND = (student_ND - teacher_ND).abs()
    value_ND = torch.where(gap_ND <= delta, gap_ND.square() / 2, delta * (gap_ND - delta / 2))
    return value_ND.sum(-1) if dim_reduction == "sum" else value_ND.mean(-1)
