"""Builds a bridge from the statistics of all layer pairs: the fits (also the paper's), the rank, and the report."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import torch
from torch.nn.functional import cosine_similarity, normalize

from nemo_oprd.bridge.covariance import LayerPair, PairStatistics
from nemo_oprd.bridge.fit import PairFit, Projection, evaluated, fit_ridge, principal_directions, projection_error
from nemo_oprd.bridge.maps import Bridge, CapturePoint, LayerBridge, ModelIdentity
from nemo_oprd.bridge.row_sample import SELECTION, TEST, TRAIN
from nemo_oprd.runtime.messages import ANY_RANK, ON_STDOUT

# Chooses a bridge's rank, and computes the baselines of its fit.
#
# The paper's total error at rank r (theorem bias_variance) is
#
#     E(r) = sum_{i > r} lambda_i rho_i^2 + sum_{i <= r} lambda_i (1 - rho_i^2)
#
# Here lambda_i = mean z_i^2 and rho_i^2 are both measured on the test part, so that the second sum is the prediction
# error there. The step from r-1 to r is lambda_r (1 - 2 rho_r^2): where rho falls with i, the minimum is where rho^2
# crosses 1/2. Where rho_i^2 is not monotone, the first crossing may differ from the minimum, which `optimal_rank`
# takes.
#
# E(r) is not a reconstruction error. The error that remains when the teacher is reconstructed through the bridge,
# sum_{i<=r} lambda_i (1 - rho_i^2) + sum_{i>r} lambda_i, never rises with r, and the error in the bridge space alone
# never falls. E(r) trades one for the other: it counts unexplained variance in the bridge space as just as harmful as
# lost signal.
#
# The mean cosine over ranks is no estimate of r* either. In one dimension a cosine is a sign: two Gaussians with
# correlation rho agree in 2/pi asin(rho) on average, 0.80 for rho^2 = 0.9, while in many dimensions the cosine tends to
# rho = 0.95. The curve therefore rises at first although nothing is gained.


def error_curve(fit: PairFit) -> torch.Tensor:
    """Returns E(r) for r = 0..largest_rank, [largest_rank + 1]; a negative rho_i^2 counts as no signal.

    `fit` must have all R = Dt coordinates, as `fit_ridge` gives; an AdamW fit has no sum over the discarded ones.
    """
    assert len(fit.signal_R) == len(fit.eigenvalues_Dt), "E(r) needs all teacher coordinates"
    aligned_R = fit.signal_R * fit.rho2_R.clamp(0, 1)
    zero = aligned_R.new_zeros(1)
    discarded = aligned_R.sum() - torch.cat([zero, aligned_R.cumsum(0)])
    transmitted = torch.cat([zero, fit.error_R.cumsum(0)])
    return (discarded + transmitted)[: fit.largest_rank + 1]


def optimal_rank(fit: PairFit) -> int:
    """Returns r*, the smallest r >= 1 that minimises E(r)."""
    return 1 + int(error_curve(fit)[1:].argmin())


def crossing_rank(fit: PairFit) -> int:
    """Returns the number of leading coordinates with rho_i^2 >= 1/2, which is the paper's criterion; it may be 0."""
    below = torch.nonzero(fit.rho2_R[: fit.largest_rank] < 0.5)
    return int(below[0]) if len(below) else fit.largest_rank


def normalized_curve(fit: PairFit) -> torch.Tensor:
    """Returns E(r) / E_test||h_T - mu_T||^2 for r = 0..largest_rank."""
    return error_curve(fit) / fit.signal_R.sum()


def choose_rank(curves: Sequence[torch.Tensor]) -> int:
    """Returns the rank for `bridge.rank=auto`: the r >= 1 that minimises the mean of `normalized_curve` over layers.

    An artifact has one rank. Each layer's curve is in units of the layer's variance, so that the large norms of late
    layers do not decide alone; for one layer, or for layers that agree, the result is r*. A median of the layers' r*
    would be worse: layers with massive activations have r* = 1 or 2 on an almost flat curve and would outvote others.
    `curves` has the `normalized_curve` of every layer pair.
    """
    shortest = min(len(curve) for curve in curves)
    return 1 + int(torch.stack([curve[:shortest] for curve in curves]).mean(0)[1:].argmin())


def powers_of_two(largest: int) -> list[int]:
    """Returns 1, 2, 4, .. up to `largest`."""
    return [2**k for k in range(largest.bit_length())]


def mean_cosines(predicted_NR: torch.Tensor, target_NR: torch.Tensor, ranks: Sequence[int]) -> dict[int, float]:
    """Returns rank r -> mean over rows of the cosine between the first r coordinates of both arguments."""
    index_G = torch.tensor(ranks, device=predicted_NR.device) - 1
    dot_NG, predicted_NG, target_NG = (
        product_NR.cumsum(1)[:, index_G]
        for product_NR in (predicted_NR * target_NR, predicted_NR.square(), target_NR.square())
    )
    cosine_NG = dot_NG / (predicted_NG.sqrt() * target_NG.sqrt()).clamp_min(1e-300)
    return dict(zip(ranks, cosine_NG.mean(0).tolist(), strict=True))


def sampled_cosine(projection: Projection, statistics: PairStatistics, ranks: Sequence[int]) -> dict[int, float]:
    """Returns rank -> mean cosine between P_S h_S + b and P_T (h_T - mu_T) on the sampled rows of the test part."""
    teacher_NDt, student_NDs = statistics.sampled(TEST)
    return mean_cosines(projection.student(student_NDs), projection.teacher(teacher_NDt), ranks)


def layer_report(
    fit: PairFit, ridge: PairFit, statistics: PairStatistics, rank: int, *, baselines: bool, seed: int
) -> dict[str, Any]:
    """Returns the report of a layer pair in the artifact's manifest; keys are text, as in JSON.

    Args:
        fit: the fit that goes into the artifact, with `rank` coordinates or more.
        ridge: the fit with all coordinates, from which E(r) and the curves are computed; it may be `fit` itself.
    """
    curve = normalized_curve(ridge).tolist()
    table = compare(ridge, statistics, baselines=baselines, seed=seed)
    return {
        **fit.report(rank),
        "held_out_cosine": sampled_cosine(fit.projection, statistics, [rank])[rank],
        "optimal_rank": optimal_rank(ridge),
        "crossing_rank": crossing_rank(ridge),
        "error_curve": {str(r): curve[r] for r in [0, *powers_of_two(ridge.largest_rank)]},
        "curves": {
            name: {what: {str(r): value for r, value in values.items()} for what, values in curves.items()}
            for name, curves in table.items()
        },
    }


def compare(
    fit: PairFit, statistics: PairStatistics, *, baselines: bool, seed: int = 0
) -> dict[str, dict[str, dict[int, float]]]:
    """Measures the fit and, with `baselines`, five baselines at each power of two up to largest_rank on the test part.

    Returns:
        Name -> {"cosine": {rank: mean cosine on the sampled rows}, "predicted": {rank: share of the teacher's whole
        variance that the projection of this rank predicts}}. The names:
        "bridge": the fit.
        "before": the teacher's basis with a random orthonormal student projector, the paper's curve before training.
        "random_basis": random orthonormal teacher coordinates, each predicted by its ridge solution.
        "reduced_rank": the coordinates that the student predicts best, the optimum of this comparison.
        "student_pca": the i-th principal component of the student, scaled to predict the i-th teacher coordinate.
        "constant": one vector for all tokens, the mean direction; cosine only. Massive activations can make one
        coordinate's sign nearly constant, and then this cosine is already close to 1.
    """
    ranks = powers_of_two(fit.largest_rank)
    # the same test rows and the same variance for all
    total = float(fit.signal_R.sum())
    projections = {"bridge": fit.projection, **(_baselines(fit, statistics, seed) if baselines else {})}
    result: dict[str, dict[str, dict[int, float]]] = {}
    for name, projection in projections.items():
        signal_R, error_R = projection_error(statistics.moments[TEST], projection)
        predicted = ((signal_R - error_R).cumsum(0) / total).tolist()
        result[name] = {
            "cosine": sampled_cosine(projection, statistics, ranks),
            "predicted": {rank: predicted[rank - 1] for rank in ranks},
        }
    if baselines:
        result["constant"] = {"cosine": _constant_cosine(fit, statistics, ranks)}
    return result


def _baselines(fit: PairFit, statistics: PairStatistics, seed: int) -> dict[str, Projection]:
    fitted, train = fit.projection, statistics.moments[TRAIN]
    teacher_width, student_width = len(train.mean_Dt), len(train.mean_Ds)
    count = min(teacher_width, student_width)
    # predicts all of h_T - mu_T; the ridge solution for the coordinates of another basis is that basis times this
    whole_DtDs = fitted.basis_RDt.T @ fitted.projector_RDs
    whole_bias_Dt = None if fitted.bias_R is None else fitted.basis_RDt.T @ fitted.bias_R

    def in_basis(basis_RDt: torch.Tensor) -> Projection:
        bias_R = None if whole_bias_Dt is None else basis_RDt @ whole_bias_Dt
        return Projection(fitted.mean_Dt, basis_RDt, basis_RDt @ whole_DtDs, bias_R)

    _, reduced_DtDt = principal_directions(whole_DtDs @ train.sigma_DsDs @ whole_DtDs.T)
    student_values_Ds, student_DsDs = principal_directions(train.sigma_DsDs)
    components_RDs = student_DsDs[:count]
    covariance_R = ((components_RDs @ train.sigma_DsDt) * fitted.basis_RDt[:count]).sum(1)
    slope_R = covariance_R / student_values_Ds[:count].clamp_min(1e-300)
    paired_RDs = slope_R[:, None] * components_RDs
    random_RDs = random_orthonormal(student_width, seed + 1).to(train.mean_Dt)[:count]
    centre_R = -random_RDs @ train.mean_Ds if fit.center_student else None
    head = fitted.head(count)
    return {
        "before": replace(head, projector_RDs=random_RDs, bias_R=centre_R),
        "random_basis": in_basis(random_orthonormal(teacher_width, seed).to(train.mean_Dt)),
        "reduced_rank": in_basis(reduced_DtDt),
        "student_pca": replace(head, projector_RDs=paired_RDs, bias_R=-paired_RDs @ train.mean_Ds),
    }


def random_orthonormal(width: int, seed: int) -> torch.Tensor:
    """Returns a matrix [D, D] with orthonormal rows, float64, D = `width`; the same on every machine up to rounding."""
    normal = torch.randn(width, width, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return torch.linalg.qr(normal)[0].T.contiguous()


def _constant_cosine(fit: PairFit, statistics: PairStatistics, ranks: Sequence[int]) -> dict[int, float]:
    train_NR, test_NR = (fit.projection.teacher(statistics.sampled(part)[0]) for part in (TRAIN, TEST))
    result = {}
    for rank in ranks:
        direction_R = normalize(normalize(train_NR[:, :rank], dim=1).mean(0), dim=0)
        result[rank] = float((normalize(test_NR[:, :rank], dim=1) @ direction_R).mean())
    return result


# The paper's training of the student projector (`bridge.fit=adamw`): 20 epochs of AdamW on sampled rows.
#
# It exists for comparison with the closed form (`fit.fit_ridge`).


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
        rank: "auto" takes `choose_rank` of the ridge fits, whatever `fit` is.
        baselines: whether the report has the baselines of `compare`.
        gather: takes this process's value and returns the values of all processes, like `all_gather_object`; with one
            process, `lambda value: [value]`. Every process calls it equally often.

    Raises:
        ValueError: a pair cannot have the rank (this is checked before any AdamW fit), a part has no rows, or states do
            not vary.
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
