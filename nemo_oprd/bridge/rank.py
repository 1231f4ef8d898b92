"""How many dimensions a bridge should have, and what its fit is worth beside simpler ones.

The paper's total error at rank r (theorem bias_variance) is

    E(r) = sum_{i > r} lambda_i rho_i^2 + sum_{i <= r} lambda_i (1 - rho_i^2)

here with lambda_i = mean z_i^2 and rho_i^2 both from the test part, so that the second sum is the error measured there.
The step from r-1 to r is lambda_r (1 - 2 rho_r^2): with rho falling, the minimum is where rho^2 crosses 1/2.

What E(r) is not: the error of a reconstruction. sum_{i<=r} lambda_i (1 - rho_i^2) + sum_{i>r} lambda_i, what remains of
the teacher when it is read through the bridge, never rises with r, and the error in the bridge space alone never falls.
E(r) weighs the two against each other by declaring unexplained variance as harmful as lost signal is useful. And where
rho_i^2 is not monotone the first crossing need not be the minimum; `optimal_rank` takes the minimum.

The mean cosine says something else again. In one dimension a cosine is a sign: two Gaussians correlated rho agree in
2/pi asin(rho) on average, 0.80 for rho^2 = 0.9, while in many dimensions the cosine tends to rho = 0.95. So the curve
over ranks rises at first though nothing is gained, and its peak is no estimate of r*.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.nn.functional import normalize

from nemo_oprd.bridge.covariance import PairStatistics
from nemo_oprd.bridge.fit import PairFit, Projection, principal_directions, projection_error
from nemo_oprd.bridge.sampling import PARTS, TEST, TRAIN


def error_curve(fit: PairFit) -> torch.Tensor:
    """E(r) for r = 0..largest_rank, [largest_rank + 1]; a negative rho_i^2 counts as no signal.

    Raises:
        ValueError: the fit has not all coordinates (AdamW fits one rank): there is no sum over the discarded ones.
    """
    if len(fit.signal_K) != len(fit.eigenvalues_T):
        raise ValueError(
            f"layer pair {fit.pair.key}: E(r) needs all {len(fit.eigenvalues_T)} teacher coordinates, this fit has "
            f"{len(fit.signal_K)}; compute it from the ridge fit"
        )
    aligned_K = fit.signal_K * fit.rho2_K.clamp(0, 1)
    zero = aligned_K.new_zeros(1)
    discarded = aligned_K.sum() - torch.cat([zero, aligned_K.cumsum(0)])
    transmitted = torch.cat([zero, fit.error_K.cumsum(0)])
    return (discarded + transmitted)[: fit.largest_rank + 1]


def optimal_rank(fit: PairFit) -> int:
    """r* = the r >= 1 that minimises E(r); the smallest where several do."""
    return 1 + int(error_curve(fit)[1:].argmin())


def crossing_rank(fit: PairFit) -> int:
    """The number of leading coordinates with rho_i^2 >= 1/2: the paper's criterion taken literally; may be 0."""
    below = torch.nonzero(fit.rho2_K[: fit.largest_rank] < 0.5)
    return int(below[0]) if len(below) else fit.largest_rank


def normalized_curve(fit: PairFit) -> torch.Tensor:
    """E(r) / E_test||h_T - mu_T||^2 for r = 0..largest_rank."""
    return error_curve(fit) / fit.signal_K.sum()


def choose_rank(curves: Sequence[torch.Tensor]) -> int:
    """`bridge.rank: auto`: the r >= 1 that minimises the mean over layers of E(r) / E_test||h_T - mu_T||^2.

    Args:
        curves: `normalized_curve` of every layer pair.

    An artifact has one rank. Each layer's curve is measured in units of the layer's variance, so that the late layers'
    large norms don't decide alone; for one layer, or layers that agree, this is r*. Not a median of the layers' r*:
    layers with massive activations have r* = 1 or 2 on a curve that is almost flat, and should not outvote others.
    """
    shortest = min(len(curve) for curve in curves)
    return 1 + int(torch.stack([curve[:shortest] for curve in curves]).mean(0)[1:].argmin())


def powers_of_two(largest: int) -> list[int]:
    """1, 2, 4, .. up to `largest`."""
    return [2**k for k in range(largest.bit_length())]


def mean_cosines(predicted_NK: torch.Tensor, target_NK: torch.Tensor, ranks: Sequence[int]) -> dict[int, float]:
    """Rank -> mean over rows of the cosine between the first r coordinates of both."""
    index = torch.tensor(ranks, device=predicted_NK.device) - 1
    dot, ours, theirs = (
        product_NK.cumsum(1)[:, index]
        for product_NK in (predicted_NK * target_NK, predicted_NK.square(), target_NK.square())
    )
    cosine_NR = dot / (ours.sqrt() * theirs.sqrt()).clamp_min(1e-300)
    return dict(zip(ranks, cosine_NR.mean(0).tolist(), strict=True))


def sampled_cosine(projection: Projection, statistics: PairStatistics, ranks: Sequence[int]) -> dict[int, float]:
    """Rank -> mean cosine between P_S h_S + b and P_T (h_T - mu_T) on the sampled rows of the test part."""
    teacher_ND, student_ND = _sampled(statistics, TEST)
    return mean_cosines(projection.student(student_ND), projection.teacher(teacher_ND), ranks)


def layer_report(fit: PairFit, ridge: PairFit, statistics: PairStatistics, rank: int, seed: int = 0) -> dict[str, Any]:
    """What the artifact's manifest says of a layer pair: `PairFit.report`, the mean cosine on the sampled test rows,
    the ranks that the pair alone would choose, E(r) and the baselines. Keys are text, as JSON has them.

    Args:
        fit: what goes into the artifact, with `rank` coordinates or more.
        ridge: the fit with all coordinates, from which E(r) and the baselines are computed; may be the same.
    """
    curve = normalized_curve(ridge).tolist()
    table = compare(ridge, statistics, seed)
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


def compare(fit: PairFit, statistics: PairStatistics, seed: int = 0) -> dict[str, dict[str, dict[int, float]]]:
    """The fit beside its baselines, for every power of two up to largest_rank, on the test part.

    Returns:
        name -> {"cosine": {rank: mean cosine}, "predicted": {rank: fraction of the teacher's whole variance that is
        predicted through so many coordinates}}. Names:
        "bridge": the fit; "before": the teacher's basis with a random orthonormal student projector, the paper's curve
        before training; "random_basis": random orthonormal teacher coordinates, each predicted as well as can be;
        "reduced_rank": the coordinates that the student predicts best, the optimum of this comparison; "student_pca":
        i-th student component, scaled, for the i-th teacher component; "constant": the same vector for every token,
        the mean direction (cosine only; where massive activations make one coordinate all but constant in sign, this
        is already close to 1).
    """
    ranks = powers_of_two(fit.largest_rank)
    # the same test rows and the same variance for all
    total = float(fit.signal_K.sum())
    result: dict[str, dict[str, dict[int, float]]] = {}
    for name, projection in {"bridge": fit.projection, **_baselines(fit, statistics, seed)}.items():
        signal_K, error_K = projection_error(statistics.moments[TEST], projection)
        predicted = ((signal_K - error_K).cumsum(0) / total).tolist()
        result[name] = {
            "cosine": sampled_cosine(projection, statistics, ranks),
            "predicted": {rank: predicted[rank - 1] for rank in ranks},
        }
    result["constant"] = {"cosine": _constant_cosine(fit, statistics, ranks)}
    return result


def _baselines(fit: PairFit, statistics: PairStatistics, seed: int) -> dict[str, Projection]:
    fitted, train = fit.projection, statistics.moments[TRAIN]
    d_T, d_S = len(train.mean_T), len(train.mean_S)
    count = min(d_T, d_S)
    # the prediction of all of h_T - mu_T; for other coordinates B the ridge solution is B times this
    whole_TS = fitted.basis_KT.T @ fitted.projector_KS
    whole_T = None if fitted.bias_K is None else fitted.basis_KT.T @ fitted.bias_K

    def in_basis(basis_KT: torch.Tensor) -> Projection:
        return Projection(fitted.mean_T, basis_KT, basis_KT @ whole_TS, None if whole_T is None else basis_KT @ whole_T)

    _, reduced_TT = principal_directions(whole_TS @ train.sigma_SS @ whole_TS.T)
    student_values_S, student_SS = principal_directions(train.sigma_SS)
    components_KS = student_SS[:count]
    slope_K = ((components_KS @ train.sigma_ST) * fitted.basis_KT[:count]).sum(1) / student_values_S[:count].clamp_min(
        1e-300
    )
    paired_KS = slope_K[:, None] * components_KS
    random_KS = random_orthonormal(d_S, seed + 1).to(train.mean_T)[:count]
    centre_K = -random_KS @ train.mean_S if fit.center_student else None
    head = fitted.head(count)
    return {
        "before": replace(head, projector_KS=random_KS, bias_K=centre_K),
        "random_basis": in_basis(random_orthonormal(d_T, seed).to(train.mean_T)),
        "reduced_rank": in_basis(reduced_TT),
        "student_pca": replace(head, projector_KS=paired_KS, bias_K=-paired_KS @ train.mean_S),
    }


def random_orthonormal(width: int, seed: int) -> torch.Tensor:
    """[width, width] with orthonormal rows, float64, the same on every machine up to rounding."""
    normal = torch.randn(width, width, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return torch.linalg.qr(normal)[0].T.contiguous()


def _constant_cosine(fit: PairFit, statistics: PairStatistics, ranks: Sequence[int]) -> dict[int, float]:
    train_NK, test_NK = (fit.projection.teacher(_sampled(statistics, part)[0]) for part in (TRAIN, TEST))
    result = {}
    for rank in ranks:
        direction_R = normalize(normalize(train_NK[:, :rank], dim=1).mean(0), dim=0)
        result[rank] = float((normalize(test_NK[:, :rank], dim=1) @ direction_R).mean())
    return result


def _sampled(statistics: PairStatistics, part: int) -> tuple[torch.Tensor, torch.Tensor]:
    teacher_ND, student_ND = statistics.reservoir.rows(part)
    if not len(teacher_ND):
        raise ValueError(
            f"layer pair {statistics.pair.key}: no row of the {PARTS[part]} part among the {len(statistics.reservoir)} "
            f"sampled ones; expected at least one: raise the reservoir's size ({statistics.reservoir.capacity})"
        )
    return teacher_ND, student_ND
