"""Builds a bridge from the statistics of all layer pairs: the fits (also the paper's), the rank, and the report."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import torch
from torch.nn.functional import cosine_similarity

from nemo_oprd.bridge.covariance import LayerPair, PairStatistics
from nemo_oprd.bridge.fit import PairFit, evaluated, fit_ridge
from nemo_oprd.bridge.maps import Bridge, CapturePoint, LayerBridge, ModelIdentity
from nemo_oprd.bridge.rank import choose_rank, layer_report, normalized_curve
from nemo_oprd.bridge.row_sample import SELECTION, TRAIN
from nemo_oprd.runtime.messages import ANY_RANK, ON_STDOUT

# The paper's training of the student projector (`bridge.fit=adamw`): 20 epochs of AdamW on sampled rows.
#
# It exists to compare the closed form (`fit.fit_ridge`) with.


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


logger = logging.getLogger(__name__)

# a pair is fitted by one rank, whichever that is
_OF_EVERY_PAIR = {**ON_STDOUT, **ANY_RANK}


def build_bridge(
    statistics: Sequence[PairStatistics],
    student: ModelIdentity,
    teacher: ModelIdentity,
    capture: CapturePoint,
    *,
    rank: int | Literal["auto"],
    fit: Literal["ridge", "adamw"],
    center_student: bool,
    baselines: bool,
    seed: int,
    gather: Callable[[Any], list[Any]],
) -> Bridge:
    """Fits every layer pair; the result is the same on every process.

    Args:
        statistics: the layer pairs that this process fits, one `PairStatistics` each, reduced over all ranks. Every
            pair belongs to one process; a process may have none.
        rank: "auto" takes `rank.choose_rank` of the ridge fits, whatever `fit` is.
        baselines: whether the report has the baselines of `rank.compare`.
        gather: the values of all processes for the value of this one, such as `all_gather_object`; with one process,
            `lambda value: [value]`. Every process calls it equally often.

    Raises:
        ValueError: a pair cannot have the rank (this is checked before any AdamW runs), a part has no rows, or states
            do not vary.
    """
    ridge_fits = [fit_ridge(stats, center_student=center_student) for stats in statistics]
    curves = _union(gather({each.pair: normalized_curve(each).cpu() for each in ridge_fits}))
    chosen = choose_rank([curves[pair] for pair in sorted(curves)]) if rank == "auto" else rank
    for each in ridge_fits:
        each.check_rank(chosen)
    pairs: dict[LayerPair, LayerBridge] = {}
    reports: dict[LayerPair, dict[str, Any]] = {}
    for stats, ridge in zip(statistics, ridge_fits, strict=True):
        final = ridge
        if fit == "adamw":
            final = fit_adamw(stats, ridge, chosen, seed=seed, progress=partial(_log_epoch, stats.pair.key))
        report = layer_report(final, ridge, stats, chosen, baselines=baselines, seed=seed)
        pairs[stats.pair], reports[stats.pair] = final.bridge(chosen), report
        cosine = report["held_out_cosine"]
        logger.info(f"{stats.pair.key}: rank {chosen}, held-out cosine {cosine:.4f}", extra=_OF_EVERY_PAIR)
    pairs, reports = _union(gather(pairs)), _union(gather(reports))
    layers = {pair.key: reports[pair] for pair in sorted(reports)}
    report = {"fit": fit, "center_student": center_student, "rank_asked_for": rank, "layers": layers}
    return Bridge(chosen, dict(sorted(pairs.items())), student, teacher, capture, report)


def _log_epoch(pair: str, epoch: int, cosine: float) -> None:
    logger.info(f"{pair}: epoch {epoch}, selection cosine {cosine:.4f}", extra=_OF_EVERY_PAIR)


def _union(parts: Sequence[dict[LayerPair, Any]]) -> dict[LayerPair, Any]:
    return {pair: value for part in parts for pair, value in part.items()}
