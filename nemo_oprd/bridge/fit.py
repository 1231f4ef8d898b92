"""The bridge of one layer pair in closed form: teacher basis by PCA, student projector by ridge regression.

Teacher coordinates are z = V (h_T - mu_T). The rows of V are the eigenvectors of Sigma_TT in descending order of their
eigenvalues (paper, eq. teacher_pca); the basis of rank r is the first r rows. The student projector minimises, over the
training part,

    sum_i [ mean (p_i . h_S + b_i - z_i)^2 + penalty_i ||p_i||^2 ]                   (paper, eq. bridge_train, + ridge)

The rows p_i are independent of each other, so the projector of rank r is the first r rows as well, and each teacher
coordinate has its own penalty. A common penalty would be set by the many trailing coordinates; at 9 training rows per
student dimension that cost 5 % of the error at rank 8, and AdamW with early stopping did better.

With `center_student`, b is free and not penalised: p_i = (Sigma_SS + penalty_i I)^-1 Sigma_ST v_i, b_i = -p_i . mu_S.
Without it (the paper's form) there is no b, and E[h_S h_S^T] = Sigma_SS + mu_S mu_S^T replaces Sigma_SS.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from nemo_oprd.bridge.covariance import LayerPair, Moments, PairStatistics
from nemo_oprd.bridge.maps import LayerBridge
from nemo_oprd.bridge.row_sample import PARTS, SELECTION, TEST, TRAIN

# Candidate penalties in units of the mean eigenvalue of Sigma_SS: two per decade, from no effect in double precision to
# a prediction of almost zero. The grid reaches far down because a few massive activations raise the mean eigenvalue by
# orders of magnitude.
PENALTY_GRID = tuple(10.0 ** (k / 2) for k in range(-20, 5))
# Of the penalties whose selection error is within this factor of the smallest, the largest is chosen. The error hardly
# depends on directions in which the student's states do not vary, but once the student trains, its states move along
# them; a larger penalty keeps the projector small there.
PENALTY_SLACK = 1e-3


@dataclass(frozen=True)
class Projection:
    """R teacher coordinates and the student's prediction of them; the first r rows are the projection of rank r.

    `mean_Dt` is the teacher's training mean; the rows of `basis_RDt` are orthonormal. All tensors are float64 on the
    moments' device.
    """

    mean_Dt: torch.Tensor
    basis_RDt: torch.Tensor
    projector_RDs: torch.Tensor
    bias_R: torch.Tensor | None

    def teacher(self, teacher_NDt: torch.Tensor) -> torch.Tensor:
        """Returns P_T (h_T - mu_T): [N, Dt] -> [N, R], float64."""
        return (teacher_NDt.to(self.mean_Dt) - self.mean_Dt) @ self.basis_RDt.T

    def student(self, student_NDs: torch.Tensor) -> torch.Tensor:
        """Returns P_S h_S + b: [N, Ds] -> [N, R], float64."""
        projected_NR = student_NDs.to(self.mean_Dt) @ self.projector_RDs.T
        return projected_NR if self.bias_R is None else projected_NR + self.bias_R

    def head(self, rank: int) -> Projection:
        """Returns the projection on the first `rank` coordinates."""
        bias = None if self.bias_R is None else self.bias_R[:rank]
        return replace(self, basis_RDt=self.basis_RDt[:rank], projector_RDs=self.projector_RDs[:rank], bias_R=bias)


@dataclass(frozen=True)
class PairFit:
    """A fitted layer pair."""

    pair: LayerPair
    projection: Projection
    eigenvalues_Dt: torch.Tensor  # [Dt] eigenvalues of the training part's Sigma_TT, in descending order
    penalty_R: torch.Tensor | None  # [R] chosen, in units of the mean eigenvalue of Sigma_SS; None for AdamW
    signal_R: torch.Tensor  # [R] mean of z_i^2 over the test part, which is the error of predicting the training mean
    error_R: torch.Tensor  # [R] mean over the test part of the squared prediction error of z_i
    rows: tuple[int, int, int]  # number of rows of the training, selection and test parts
    center_student: bool

    @property
    def largest_rank(self) -> int:
        """The largest possible rank: the least of R, the two widths, and training rows - 1 (centring costs one)."""
        projection = self.projection
        return min(*projection.projector_RDs.shape, projection.basis_RDt.shape[1], self.rows[TRAIN] - 1)

    @property
    def rho2_R(self) -> torch.Tensor:
        """[R] rho_i^2 = 1 - error_i / signal_i: the share of coordinate i on the test part that the student explains.

        The reference is the training mean as predictor: rho_i^2 is negative where the projector predicts worse than
        this mean, and 0 for a coordinate that never varies.
        """
        return torch.where(self.signal_R > 0, 1 - self.error_R / self.signal_R.clamp_min(1e-300), 0.0)

    def check_rank(self, rank: int) -> None:
        """Raises ValueError unless `rank` is in 1..largest_rank."""
        if not 1 <= rank <= self.largest_rank:
            _, student_width = self.projection.projector_RDs.shape
            raise ValueError(
                f"bridge.rank={rank}: layer pair {self.pair.key} allows 1..{self.largest_rank} (teacher width "
                f"{len(self.projection.mean_Dt)}, student width {student_width}, {self.rows[TRAIN]} training rows, "
                "one of them spent on the mean); lower the rank or use more rollouts"
            )

    def bridge(self, rank: int) -> LayerBridge:
        """Returns the maps of this pair in the artifact: R = `rank`, float32, on the CPU; errors as in `check_rank`."""
        self.check_rank(rank)
        head = self.projection.head(rank)

        def plain(value: torch.Tensor) -> torch.Tensor:
            return value.detach().to("cpu", torch.float32, copy=True).contiguous()

        bias_R = None if head.bias_R is None else plain(head.bias_R)
        return LayerBridge(plain(head.mean_Dt), plain(head.basis_RDt), plain(head.projector_RDs), bias_R)

    def report(self, rank: int) -> dict[str, Any]:
        """Returns the fit's part of the pair's report in the manifest: numbers for the first `rank` coordinates."""
        total = float(self.eigenvalues_Dt.sum())
        return {
            "rows": dict(zip(PARTS, self.rows, strict=True)),
            "penalty": None if self.penalty_R is None else self.penalty_R[:rank].tolist(),
            "explained_variance": float(self.eigenvalues_Dt[:rank].sum()) / total,
            "held_out_rho2": self.rho2_R[:rank].tolist(),
            "held_out_error": float(self.error_R[:rank].sum() / self.signal_R[:rank].sum().clamp_min(1e-300)),
        }


def fit_ridge(statistics: PairStatistics, *, center_student: bool = False) -> PairFit:
    """Fits all R = Dt coordinates of one layer pair from the statistics of all rows.

    The penalty of a teacher coordinate is the largest of `PENALTY_GRID` whose error in that coordinate on the selection
    part is within `PENALTY_SLACK` of the smallest. The penalty does not depend on the rank.

    Raises:
        ValueError: a part has no rows, there are fewer than two training rows, or the states do not vary.
    """
    train, selection = statistics.moments[TRAIN], statistics.moments[SELECTION]
    for name, moments, needed in zip(PARTS, statistics.moments, (2, 1, 1), strict=True):
        if moments.count < needed:
            raise ValueError(
                f"layer pair {statistics.pair.key}: {moments.count} rows in the {name} part, expected at least "
                f"{needed}; use more rollouts or check that every layer was captured"
            )
    eigenvalues_Dt, basis_DtDt = principal_directions(train.sigma_DtDt)
    cross_DtDs = basis_DtDt @ train.sigma_DsDt.T
    gram_DsDs = train.sigma_DsDs
    unit = float(gram_DsDs.diagonal().mean())
    for side, layer, variance in (
        ("teacher", statistics.pair.teacher, float(eigenvalues_Dt[0])),
        ("student", statistics.pair.student, unit),
    ):
        if not variance > 0:
            raise ValueError(
                f"{side} layer {layer}: all {train.count} training rows are equal, so there is nothing to align; "
                "check the rollouts and the checkpoint"
            )
    if not center_student:
        gram_DsDs = gram_DsDs + torch.outer(train.mean_Ds, train.mean_Ds)
    scale_Ds, rotation_DsDs = torch.linalg.eigh(gram_DsDs)
    rotated_cross_DtDs = cross_DtDs @ rotation_DsDs

    def solve(penalty_Dt1: torch.Tensor) -> torch.Tensor:
        return rotated_cross_DtDs / (scale_Ds.clamp_min(0) + penalty_Dt1 * unit)

    # in these coordinates each penalty only rescales columns, so the selection moments are rotated once for all of them
    rotated = _CentredMoments.from_moments(selection, train.mean_Dt, basis_DtDt, rotation_DsDs)
    shift_Ds = (selection.mean_Ds - train.mean_Ds if center_student else selection.mean_Ds) @ rotation_DsDs
    grid_G = torch.tensor(PENALTY_GRID, dtype=scale_Ds.dtype, device=scale_Ds.device)
    candidates = (solve(penalty) for penalty in grid_G)
    error_GDt = torch.stack([rotated.error(rotated_DtDs, rotated_DtDs @ shift_Ds) for rotated_DtDs in candidates])
    good_GDt = error_GDt <= (1 + PENALTY_SLACK) * error_GDt.amin(0)
    penalty_Dt = torch.where(good_GDt, grid_G[:, None], 0.0).amax(0)
    projector_DtDs = solve(penalty_Dt[:, None]) @ rotation_DsDs.T
    bias_Dt = -projector_DtDs @ train.mean_Ds if center_student else None
    projection = Projection(train.mean_Dt, basis_DtDt, projector_DtDs, bias_Dt)
    return evaluated(statistics, projection, eigenvalues_Dt, penalty_R=penalty_Dt, center_student=center_student)


def principal_directions(sigma_DD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns eigenvalues [D] of a covariance, descending and clamped at 0, and its eigenvectors as rows [D, D].

    The entry of largest magnitude of each eigenvector is made positive, which fixes the sign.
    """
    values_D, vectors_DD = torch.linalg.eigh(sigma_DD)
    basis_DD = vectors_DD.flip(1).T.contiguous()
    largest_D1 = basis_DD.gather(1, basis_DD.abs().argmax(1, keepdim=True))
    return values_D.flip(0).clamp_min(0), basis_DD * torch.where(largest_D1 < 0, -1.0, 1.0).to(basis_DD)


def evaluated(
    statistics: PairStatistics,
    projection: Projection,
    eigenvalues_Dt: torch.Tensor,
    *,
    penalty_R: torch.Tensor | None,
    center_student: bool,
) -> PairFit:
    """Returns the `PairFit` of a projection, with its errors on the test part."""
    signal_R, error_R = projection_error(statistics.moments[TEST], projection)
    train, selection, test = (moments.count for moments in statistics.moments)
    rows = train, selection, test
    return PairFit(
        statistics.pair,
        projection,
        eigenvalues_Dt=eigenvalues_Dt,
        penalty_R=penalty_R,
        signal_R=signal_R,
        error_R=error_R,
        rows=rows,
        center_student=center_student,
    )


def projection_error(moments: Moments, projection: Projection) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the exact means of z_i^2 [R] and of its squared prediction error [R] over all rows of `moments`."""
    second = _CentredMoments.from_moments(moments, projection.mean_Dt, projection.basis_RDt, None)
    at_mean_R = projection.student(moments.mean_Ds[None])[0]
    return second.signal(), second.error(projection.projector_RDs, at_mean_R)


@dataclass(frozen=True)
class _CentredMoments:
    """Centred second moments of teacher coordinates z and student states, and the mean of z.

    An error is a centred quadratic form plus the square of a mean. Means of thousands therefore never cancel against
    each other.
    """

    variance_R: torch.Tensor  # of z
    cross_RDs: torch.Tensor  # covariance of z and h_S
    student_DsDs: torch.Tensor  # covariance of h_S
    mean_R: torch.Tensor  # of z

    @staticmethod
    def from_moments(
        moments: Moments, mean_Dt: torch.Tensor, basis_RDt: torch.Tensor, rotation_DsDs: torch.Tensor | None
    ) -> _CentredMoments:
        cross_RDs, student_DsDs = basis_RDt @ moments.sigma_DsDt.T, moments.sigma_DsDs
        if rotation_DsDs is not None:
            cross_RDs, student_DsDs = cross_RDs @ rotation_DsDs, rotation_DsDs.T @ student_DsDs @ rotation_DsDs
        variance_R = ((basis_RDt @ moments.sigma_DtDt) * basis_RDt).sum(1)
        return _CentredMoments(variance_R, cross_RDs, student_DsDs, basis_RDt @ (moments.mean_Dt - mean_Dt))

    def signal(self) -> torch.Tensor:
        return self.variance_R.clamp_min(0) + self.mean_R.square()

    def error(self, projector_RDs: torch.Tensor, at_mean_R: torch.Tensor) -> torch.Tensor:
        """Returns the mean squared error [R] of a prediction whose value at the mean student state is `at_mean_R`."""
        quadratic_R = ((projector_RDs @ self.student_DsDs) * projector_RDs).sum(1)
        varying_R = self.variance_R - 2 * (projector_RDs * self.cross_RDs).sum(1) + quadratic_R
        return varying_R.clamp_min(0) + (at_mean_R - self.mean_R).square()
