"""The bridge of one layer pair in closed form: teacher basis by PCA, student projector by ridge regression.

Teacher coordinates are z = V (h_T - mu_T), the rows of V being all eigenvectors of Sigma_TT in descending order
(paper, eq. teacher_pca; the rank-r basis is a slice). The student projector minimises, over the training part,

    sum_i [ mean (p_i . h_S + b_i - z_i)^2 + penalty_i ||p_i||^2 ]                   (paper, eq. bridge_train, + ridge)

whose rows p_i are independent of each other: a projector of rank r is a slice as well, and each teacher coordinate has
the penalty that suits it. One for all would be set by the many trailing coordinates; at 9 training rows per student
dimension that cost 5 % of the error at rank 8, and AdamW with early stopping did better. Two variants:
`center_student`: b is free and not penalised, p_i = (Sigma_SS + penalty_i I)^-1 Sigma_ST v_i, b_i = -p_i . mu_S;
otherwise (the paper): no b, and E[h_S h_S^T] = Sigma_SS + mu_S mu_S^T takes the place of Sigma_SS.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from nemo_oprd.bridge.covariance import LayerPair, Moments, PairStatistics
from nemo_oprd.bridge.maps import LayerBridge
from nemo_oprd.bridge.sampling import PARTS, SELECTION, TEST, TRAIN

# Candidate penalties in units of the mean eigenvalue of Sigma_SS: two per decade, from "none" in double precision to
# "predict almost nothing". Wide downwards because a few massive activations raise that mean by orders of magnitude.
PENALTY_GRID = tuple(10.0 ** (k / 2) for k in range(-20, 5))
# Of penalties that differ by less than this in selection error the largest is taken: directions in which the student
# hardly varies are free to fit now, and the ones that its states move along once it trains.
PENALTY_SLACK = 1e-3


@dataclass(frozen=True)
class Projection:
    """Teacher coordinates and the student's prediction of them: K rows each, any rank up to K is a slice.

    `basis_KT` [K, d_T], `projector_KS` [K, d_S], `bias_K` [K] or None; float64, on the moments' device.
    """

    mean_T: torch.Tensor
    basis_KT: torch.Tensor
    projector_KS: torch.Tensor
    bias_K: torch.Tensor | None

    def teacher(self, teacher_ND: torch.Tensor) -> torch.Tensor:
        """[n, d_T] -> [n, K]."""
        return (teacher_ND.to(self.mean_T) - self.mean_T) @ self.basis_KT.T

    def student(self, student_ND: torch.Tensor) -> torch.Tensor:
        """[n, d_S] -> [n, K]."""
        projected_NK = student_ND.to(self.mean_T) @ self.projector_KS.T
        return projected_NK if self.bias_K is None else projected_NK + self.bias_K

    def head(self, rank: int) -> Projection:
        """The first `rank` coordinates."""
        bias = None if self.bias_K is None else self.bias_K[:rank]
        return replace(self, basis_KT=self.basis_KT[:rank], projector_KS=self.projector_KS[:rank], bias_K=bias)


@dataclass(frozen=True)
class PairFit:
    """A fitted layer pair.

    Attributes:
        eigenvalues_T: [d_T] of the training part's Sigma_TT, descending.
        penalty_K: [K] chosen ones, in units of the mean eigenvalue of Sigma_SS; None where there was no choice (AdamW).
        signal_K: [K] test mean of z_i^2, the error of predicting the training mean.
        error_K: [K] test mean of the squared prediction error of z_i.
        rows: of each part.
        largest_rank: what the widths and the number of training rows allow.
    """

    pair: LayerPair
    projection: Projection
    eigenvalues_T: torch.Tensor
    penalty_K: torch.Tensor | None
    signal_K: torch.Tensor
    error_K: torch.Tensor
    rows: tuple[int, int, int]
    center_student: bool

    @property
    def largest_rank(self) -> int:
        """No more coordinates than either width, than centred training rows can span, than were fitted."""
        projection = self.projection
        return min(*projection.projector_KS.shape, projection.basis_KT.shape[1], self.rows[TRAIN] - 1)

    @property
    def rho2_K(self) -> torch.Tensor:
        """[K] rho_i^2 = 1 - error_i / signal_i: what the student explains of coordinate i on the test part.

        Measured against the training mean as predictor, so it is negative where the projector does worse than that;
        0 for a coordinate that never varies.
        """
        return torch.where(self.signal_K > 0, 1 - self.error_K / self.signal_K.clamp_min(1e-300), 0.0)

    def check_rank(self, rank: int) -> None:
        """Raises ValueError for a rank that this pair can't have."""
        if not 1 <= rank <= self.largest_rank:
            _, d_S = self.projection.projector_KS.shape
            raise ValueError(
                f"bridge.rank={rank}: layer pair {self.pair.key} allows 1..{self.largest_rank} (teacher width "
                f"{len(self.projection.mean_T)}, student width {d_S}, {self.rows[TRAIN]} training rows, one of "
                "them spent on the mean); lower the rank or use more rollouts"
            )

    def bridge(self, rank: int) -> LayerBridge:
        """The pair's part of the artifact: rank `rank`, float32, on the CPU.

        Raises:
            ValueError: the rank is not in 1..largest_rank.
        """
        self.check_rank(rank)
        head = self.projection.head(rank)

        def plain(value: torch.Tensor) -> torch.Tensor:
            return value.detach().to("cpu", torch.float32, copy=True).contiguous()

        return LayerBridge(
            plain(head.mean_T),
            plain(head.basis_KT),
            plain(head.projector_KS),
            None if head.bias_K is None else plain(head.bias_K),
        )

    def report(self, rank: int) -> dict[str, Any]:
        """What the artifact's manifest says of this pair: plain numbers."""
        total = float(self.eigenvalues_T.sum())
        return {
            "rows": dict(zip(PARTS, self.rows, strict=True)),
            "penalty": None if self.penalty_K is None else self.penalty_K[:rank].tolist(),
            "explained_variance": float(self.eigenvalues_T[:rank].sum()) / total,
            "held_out_rho2": self.rho2_K[:rank].tolist(),
            "held_out_error": float(self.error_K[:rank].sum() / self.signal_K[:rank].sum().clamp_min(1e-300)),
        }


def fit_ridge(statistics: PairStatistics, *, center_student: bool = False) -> PairFit:
    """Fits one layer pair from its reduced statistics; every rank at once.

    The penalty of a teacher coordinate is the largest of `PENALTY_GRID` whose error in that coordinate on the selection
    part is within `PENALTY_SLACK` of the smallest. It doesn't depend on the rank.

    Raises:
        ValueError: a part without rows, fewer than two training rows, or states that don't vary.
    """
    train, selection = statistics.moments[TRAIN], statistics.moments[SELECTION]
    _check_rows(statistics)
    eigenvalues_T, basis_TT = principal_directions(train.sigma_TT)
    cross_TS = basis_TT @ train.sigma_ST.T
    second_SS = train.sigma_SS
    unit = float(second_SS.diagonal().mean())
    for side, layer, variance in (
        ("teacher", statistics.pair.teacher, float(eigenvalues_T[0])),
        ("student", statistics.pair.student, unit),
    ):
        if not variance > 0:
            raise ValueError(
                f"{side} layer {layer}: all {train.count} training rows are equal, so there is nothing to align; "
                "check the rollouts and the checkpoint"
            )
    if not center_student:
        second_SS = second_SS + torch.outer(train.mean_S, train.mean_S)
    scale_S, rotation_SS = torch.linalg.eigh(second_SS)
    rotated_TS = cross_TS @ rotation_SS

    def solve(penalty_T1: torch.Tensor) -> torch.Tensor:
        return rotated_TS / (scale_S.clamp_min(0) + penalty_T1 * unit)

    # everything the selection error needs, once, in the coordinates in which each penalty is a rescaling of columns
    rotated = _Second.from_moments(selection, train.mean_T, basis_TT, rotation_SS)
    shift_S = (selection.mean_S - train.mean_S if center_student else selection.mean_S) @ rotation_SS
    grid_G = torch.tensor(PENALTY_GRID, dtype=scale_S.dtype, device=scale_S.device)
    error_GT = torch.stack([rotated.error(solve(penalty), shift_S) for penalty in grid_G])
    good_GT = error_GT <= (1 + PENALTY_SLACK) * error_GT.amin(0)
    penalty_T = torch.where(good_GT, grid_G[:, None], 0.0).amax(0)
    projector_TS = solve(penalty_T[:, None]) @ rotation_SS.T
    bias_T = -projector_TS @ train.mean_S if center_student else None
    return evaluated(
        statistics,
        Projection(train.mean_T, basis_TT, projector_TS, bias_T),
        eigenvalues_T,
        penalty_K=penalty_T,
        center_student=center_student,
    )


def principal_directions(sigma_DD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Eigenvalues [D], descending and not below 0, and eigenvectors as rows [D, D] of a covariance.

    The entry of largest magnitude of each eigenvector is positive, which fixes its sign.
    """
    values_D, vectors_DD = torch.linalg.eigh(sigma_DD)
    basis_DD = vectors_DD.flip(1).T.contiguous()
    largest_D1 = basis_DD.gather(1, basis_DD.abs().argmax(1, keepdim=True))
    return values_D.flip(0).clamp_min(0), basis_DD * torch.where(largest_D1 < 0, -1.0, 1.0).to(basis_DD)


def evaluated(
    statistics: PairStatistics,
    projection: Projection,
    eigenvalues_T: torch.Tensor,
    *,
    penalty_K: torch.Tensor | None,
    center_student: bool,
) -> PairFit:
    """A `PairFit` of any projection, with its errors on the test part."""
    signal_K, error_K = projection_error(statistics.moments[TEST], projection)
    train, selection, test = (moments.count for moments in statistics.moments)
    return PairFit(
        statistics.pair,
        projection,
        eigenvalues_T,
        penalty_K,
        signal_K,
        error_K,
        (train, selection, test),
        center_student,
    )


def projection_error(moments: Moments, projection: Projection) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean of z_i^2 [K], and of the squared error of its prediction [K], over the rows of `moments`: exact."""
    second = _Second.from_moments(moments, projection.mean_T, projection.basis_KT, None)
    # the prediction at the mean student state is P (mean_S + c) for the c that b stands for; only its value matters
    at_mean_K = projection.student(moments.mean_S[None])[0]
    return second.signal(), second.error(projection.projector_KS, None, at_mean_K)


@dataclass(frozen=True)
class _Second:
    """Centred second moments of teacher coordinates and student states, and the mean of the former.

    Errors are a centred quadratic form plus the square of a mean: both are sums of like terms, so that means of
    thousands don't cancel against each other.
    """

    zz_K: torch.Tensor
    zs_KS: torch.Tensor
    ss_SS: torch.Tensor
    mean_K: torch.Tensor

    @staticmethod
    def from_moments(
        moments: Moments, mean_T: torch.Tensor, basis_KT: torch.Tensor, rotation_SS: torch.Tensor | None
    ) -> _Second:
        zs_KS, ss_SS = basis_KT @ moments.sigma_ST.T, moments.sigma_SS
        if rotation_SS is not None:
            zs_KS, ss_SS = zs_KS @ rotation_SS, rotation_SS.T @ ss_SS @ rotation_SS
        zz_K = ((basis_KT @ moments.sigma_TT) * basis_KT).sum(1)
        return _Second(zz_K, zs_KS, ss_SS, basis_KT @ (moments.mean_T - mean_T))

    def signal(self) -> torch.Tensor:
        return self.zz_K.clamp_min(0) + self.mean_K.square()

    def error(
        self, projector_KS: torch.Tensor, at_S: torch.Tensor | None, at_mean_K: torch.Tensor | None = None
    ) -> torch.Tensor:
        """[K]; the prediction at the mean student state is given, or is P times `at_S`."""
        if at_mean_K is None:
            at_mean_K = projector_KS @ at_S
        quadratic_K = ((projector_KS @ self.ss_SS) * projector_KS).sum(1)
        varying_K = self.zz_K - 2 * (projector_KS * self.zs_KS).sum(1) + quadratic_K
        return varying_K.clamp_min(0) + (at_mean_K - self.mean_K).square()


def _check_rows(statistics: PairStatistics) -> None:
    for name, moments, needed in zip(PARTS, statistics.moments, (2, 1, 1), strict=True):
        if moments.count < needed:
            raise ValueError(
                f"layer pair {statistics.pair.key}: {moments.count} rows in the {name} part, expected at least "
                f"{needed}; use more rollouts or check that every layer was captured"
            )
