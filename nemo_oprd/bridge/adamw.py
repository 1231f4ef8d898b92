"""The paper's training of the student projector: 20 epochs of AdamW on sampled rows, best epoch kept.

Kept to compare the closed form with, and for objectives that have none (cosine). One rank at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Literal

import torch
from torch.nn.functional import cosine_similarity

from nemo_oprd.bridge.covariance import PairStatistics
from nemo_oprd.bridge.fit import PairFit, evaluated
from nemo_oprd.bridge.sampling import PARTS, SELECTION, TRAIN


def fit_adamw(
    statistics: PairStatistics,
    ridge: PairFit,
    rank: int,
    *,
    objective: Literal["mse", "cosine"] = "mse",
    epochs: int = 20,
    lr: float = 1e-4,
    batch_rows: int = 256,
    seed: int = 0,
    progress: Callable[[int, float], None] | None = None,
) -> PairFit:
    """Trains P_S [rank, d_S] on the sampled training rows; basis, means and centring are those of `ridge`.

    "mse" is the paper's eq. bridge_train as a mean over rows, "cosine" 1 - cos. The epoch with the best mean cosine on
    the sampled selection rows is kept, as the paper's code does. There is no bias during training; with
    `ridge.center_student` the student's training mean is subtracted first, which is stored as the bias. Runs in
    float32 on the moments' device. The batch size is ours (the paper doesn't give one).

    Args:
        progress: called after every epoch with its number, from 1, and the selection cosine.

    Raises:
        ValueError: a rank that the pair can't have, or no sampled rows of a part.
    """
    ridge.check_rank(rank)
    head = ridge.projection.head(rank)
    mean_S = statistics.moments[TRAIN].mean_S
    data = []
    for part in (TRAIN, SELECTION):
        teacher_ND, student_ND = statistics.reservoir.rows(part)
        if not len(teacher_ND):
            raise ValueError(
                f"layer pair {ridge.pair.key}: none of the {len(statistics.reservoir)} sampled rows is of the "
                f"{PARTS[part]} part; raise the reservoir's size ({statistics.reservoir.capacity}) or use more rollouts"
            )
        student_ND = student_ND.to(mean_S)
        centred_ND = student_ND - mean_S if ridge.center_student else student_ND
        data.append((centred_ND.float(), head.teacher(teacher_ND).float()))
    (train_ND, train_NR), (selection_ND, selection_NR) = data
    generator = torch.Generator().manual_seed(seed)
    projector_RS = _initial(rank, len(mean_S), generator).to(train_ND.device).requires_grad_()
    optimizer = torch.optim.AdamW([projector_RS], lr=lr)
    best, kept_RS = -2.0, projector_RS.detach().clone()
    for epoch in range(1, epochs + 1):
        for index in torch.randperm(len(train_ND), generator=generator).to(train_ND.device).split(batch_rows):
            optimizer.zero_grad()
            _loss(train_ND[index] @ projector_RS.T, train_NR[index], objective).backward()
            optimizer.step()
        with torch.no_grad():
            cosine = float(cosine_similarity(selection_ND @ projector_RS.T, selection_NR).mean())
        if cosine > best:
            best, kept_RS = cosine, projector_RS.detach().clone()
        if progress is not None:
            progress(epoch, cosine)
    final_RS = kept_RS.to(head.basis_KT)
    bias_R = -final_RS @ mean_S if ridge.center_student else None
    return evaluated(
        statistics,
        replace(head, projector_KS=final_RS, bias_K=bias_R),
        ridge.eigenvalues_T,
        penalty_K=None,
        center_student=ridge.center_student,
    )


def _initial(rank: int, width: int, generator: torch.Generator) -> torch.Tensor:
    """torch.nn.Linear's own: uniform in +-1/sqrt(width)."""
    return (2 * torch.rand(rank, width, generator=generator) - 1) / width**0.5


def _loss(predicted_NR: torch.Tensor, target_NR: torch.Tensor, objective: str) -> torch.Tensor:
    if objective == "cosine":
        return 1 - cosine_similarity(predicted_NR, target_NR).mean()
    return (predicted_NR - target_NR).square().sum(1).mean()
