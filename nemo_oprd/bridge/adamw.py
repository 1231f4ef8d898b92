"""The paper's training of the student projector (`bridge.fit=adamw`): 20 epochs of AdamW on sampled rows.

It exists to compare the closed form (`fit.fit_ridge`) with.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch.nn.functional import cosine_similarity

from nemo_oprd.bridge.covariance import PairStatistics
from nemo_oprd.bridge.fit import PairFit, evaluated
from nemo_oprd.bridge.row_sample import SELECTION, TRAIN

# the paper's; it does not give a batch size
EPOCHS, LEARNING_RATE = 20, 1e-4
BATCH_ROWS = 256


def fit_adamw(
    statistics: PairStatistics,
    ridge: PairFit,
    rank: int,
    *,
    lr: float = LEARNING_RATE,
    seed: int = 0,
    progress: Callable[[int, float], None] | None = None,
) -> PairFit:
    """Trains P_S [R, Ds], R = `rank`, on the sampled training rows; basis, means and centring are those of `ridge`.

    The loss is the paper's eq. bridge_train as a mean over rows. As in the paper's code, the result is the projector
    of the epoch with the best mean cosine on the sampled selection rows. No bias is trained; with
    `ridge.center_student` the student's training mean is subtracted first and stored as the bias. The training runs in
    float32 on the moments' device.

    Args:
        progress: called after every epoch with the epoch's number, from 1, and the selection cosine.

    Raises:
        ValueError: the pair cannot have this rank, or no sampled row belongs to the training or selection part.
    """
    ridge.check_rank(rank)
    head = ridge.projection.head(rank)
    mean_Ds = statistics.moments[TRAIN].mean_Ds
    data = []
    for part in (TRAIN, SELECTION):
        teacher_NDt, student_NDs = statistics.sampled(part)
        student_NDs = student_NDs.to(mean_Ds)
        centred_NDs = student_NDs - mean_Ds if ridge.center_student else student_NDs
        data.append((centred_NDs.float(), head.teacher(teacher_NDt).float()))
    (train_NDs, train_NR), (selection_NDs, selection_NR) = data
    generator = torch.Generator().manual_seed(seed)
    width = len(mean_Ds)
    initial_RDs = (2 * torch.rand(rank, width, generator=generator) - 1) / width**0.5  # as torch.nn.Linear starts
    projector_RDs = initial_RDs.to(train_NDs.device).requires_grad_()
    optimizer = torch.optim.AdamW([projector_RDs], lr=lr)
    best_cosine, best_RDs = -2.0, projector_RDs.detach().clone()
    for epoch in range(1, EPOCHS + 1):
        for index in torch.randperm(len(train_NDs), generator=generator).to(train_NDs.device).split(BATCH_ROWS):
            optimizer.zero_grad()
            (train_NDs[index] @ projector_RDs.T - train_NR[index]).square().sum(1).mean().backward()
            optimizer.step()
        with torch.no_grad():
            cosine = float(cosine_similarity(selection_NDs @ projector_RDs.T, selection_NR).mean())
        if cosine > best_cosine:
            best_cosine, best_RDs = cosine, projector_RDs.detach().clone()
        if progress is not None:
            progress(epoch, cosine)
    final_RDs = best_RDs.to(head.basis_RDt)
    bias_R = -final_RDs @ mean_Ds if ridge.center_student else None
    trained = replace(head, projector_RDs=final_RDs, bias_R=bias_R)
    return evaluated(statistics, trained, ridge.eigenvalues_Dt, penalty_R=None, center_student=ridge.center_student)
