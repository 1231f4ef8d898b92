"""Chooses a bridge's rank, and computes the baselines of its fit.

The paper's total error at rank r (theorem bias_variance) is

    E(r) = sum_{i > r} lambda_i rho_i^2 + sum_{i <= r} lambda_i (1 - rho_i^2)

Here lambda_i = mean z_i^2 and rho_i^2 are both measured on the test part, so that the second sum is the prediction
error there. The step from r-1 to r is lambda_r (1 - 2 rho_r^2): where rho falls with i, the minimum is where rho^2
crosses 1/2. Where rho_i^2 is not monotone, the first crossing may differ from the minimum, which `optimal_rank` takes.

E(r) is not a reconstruction error. The error that remains when the teacher is reconstructed through the bridge,
sum_{i<=r} lambda_i (1 - rho_i^2) + sum_{i>r} lambda_i, never rises with r, and the error in the bridge space alone
never falls. E(r) trades one for the other: it counts unexplained variance in the bridge space as just as harmful as
lost signal.

The mean cosine over ranks is no estimate of r* either. In one dimension a cosine is a sign: two Gaussians with
correlation rho agree in 2/pi asin(rho) on average, 0.80 for rho^2 = 0.9, while in many dimensions the cosine tends to
rho = 0.95. The curve therefore rises at first although nothing is gained.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.nn.functional import normalize

from nemo_oprd.bridge.covariance import PairStatistics
from nemo_oprd.bridge.fit import PairFit, Projection, principal_directions, projection_error
from nemo_oprd.bridge.row_sample import TEST, TRAIN


def error_curve(fit: PairFit) -> torch.Tensor:
    """E(r) for r = 0..largest_rank, [largest_rank + 1]; a negative rho_i^2 counts as no signal.

    `fit` must have all R = Dt coordinates, as `fit_ridge` gives; an AdamW fit has no sum over the discarded ones.
    """
    assert len(fit.signal_R) == len(fit.eigenvalues_Dt), "E(r) needs all teacher coordinates"
    aligned_R = fit.signal_R * fit.rho2_R.clamp(0, 1)
    zero = aligned_R.new_zeros(1)
    discarded = aligned_R.sum() - torch.cat([zero, aligned_R.cumsum(0)])
    transmitted = torch.cat([zero, fit.error_R.cumsum(0)])
    return (discarded + transmitted)[: fit.largest_rank + 1]


def optimal_rank(fit: PairFit) -> int:
    """r*, the smallest r >= 1 that minimises E(r)."""
    return 1 + int(error_curve(fit)[1:].argmin())


def crossing_rank(fit: PairFit) -> int:
    """The number of leading coordinates with rho_i^2 >= 1/2, which is the paper's criterion; it may be 0."""
    below = torch.nonzero(fit.rho2_R[: fit.largest_rank] < 0.5)
    return int(below[0]) if len(below) else fit.largest_rank


def normalized_curve(fit: PairFit) -> torch.Tensor:
    """E(r) / E_test||h_T - mu_T||^2 for r = 0..largest_rank."""
    return error_curve(fit) / fit.signal_R.sum()


def choose_rank(curves: Sequence[torch.Tensor]) -> int:
    """The rank of `bridge.rank=auto`: the r >= 1 that minimises the mean over layers of E(r) / E_test||h_T - mu_T||^2.

    An artifact has one rank. Each layer's curve is in units of the layer's variance, so that the large norms of late
    layers do not decide alone; for one layer, or for layers that agree, the result is r*. A median of the layers' r*
    would be worse: layers with massive activations have r* = 1 or 2 on an almost flat curve and would outvote others.
    `curves` has the `normalized_curve` of every layer pair.
    """
    shortest = min(len(curve) for curve in curves)
    return 1 + int(torch.stack([curve[:shortest] for curve in curves]).mean(0)[1:].argmin())


def powers_of_two(largest: int) -> list[int]:
    """1, 2, 4, .. up to `largest`."""
    return [2**k for k in range(largest.bit_length())]


def mean_cosines(predicted_NR: torch.Tensor, target_NR: torch.Tensor, ranks: Sequence[int]) -> dict[int, float]:
    """Rank r -> mean over rows of the cosine between the first r coordinates of both arguments."""
    index_G = torch.tensor(ranks, device=predicted_NR.device) - 1
    dot_NG, predicted_NG, target_NG = (
        product_NR.cumsum(1)[:, index_G]
        for product_NR in (predicted_NR * target_NR, predicted_NR.square(), target_NR.square())
    )
    cosine_NG = dot_NG / (predicted_NG.sqrt() * target_NG.sqrt()).clamp_min(1e-300)
    return dict(zip(ranks, cosine_NG.mean(0).tolist(), strict=True))


def sampled_cosine(projection: Projection, statistics: PairStatistics, ranks: Sequence[int]) -> dict[int, float]:
    """Rank -> mean cosine between P_S h_S + b and P_T (h_T - mu_T) on the sampled rows of the test part."""
    teacher_NDt, student_NDs = statistics.sampled(TEST)
    return mean_cosines(projection.student(student_NDs), projection.teacher(teacher_NDt), ranks)


def layer_report(
    fit: PairFit, ridge: PairFit, statistics: PairStatistics, rank: int, *, baselines: bool, seed: int
) -> dict[str, Any]:
    """The report of a layer pair in the artifact's manifest; keys are text, as in JSON.

    Args:
        fit: the fit that goes into the artifact, with `rank` coordinates or more.
        ridge: the fit with all coordinates, from which E(r) and the curves are computed; it may be the same.
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
    """The fit and, with `baselines`, five baselines, at every power of two up to largest_rank, on the test part.

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
    """[D, D] with orthonormal rows, float64, D = `width`; the same on every machine up to rounding."""
    normal = torch.randn(width, width, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return torch.linalg.qr(normal)[0].T.contiguous()


def _constant_cosine(fit: PairFit, statistics: PairStatistics, ranks: Sequence[int]) -> dict[int, float]:
    train_NR, test_NR = (fit.projection.teacher(statistics.sampled(part)[0]) for part in (TRAIN, TEST))
    result = {}
    for rank in ranks:
        direction_R = normalize(normalize(train_NR[:, :rank], dim=1).mean(0), dim=0)
        result[rank] = float((normalize(test_NR[:, :rank], dim=1) @ direction_R).mean())
    return result
