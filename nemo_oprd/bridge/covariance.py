"""Streaming second moments of paired hidden states: the whole input of the fit, in memory of constant size.

Moments are centred and updated batch by batch (Chan, Golub, LeVeque 1979), never kept as sums of raw products: massive
activations put means of thousands beside variances of one, and E[x^2] - E[x]^2 would cancel every digit.

Each rank feeds the rows that it holds, each row once, in any order. `all_reduce` then gives every rank of a group the
moments of all rows. A rank without any rows of a layer must call it as well.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from nemo_oprd.bridge.row_sample import PARTS, RESERVOIR_ROWS, Reservoir, communication_device


class LayerPair(NamedTuple):
    """A student layer and the teacher layer that it is matched to; both count from 1 over the whole model."""

    student: int
    teacher: int

    @property
    def key(self) -> str:
        """The pair's name in the artifact, e.g. "s2.t3"."""
        return f"s{self.student}.t{self.teacher}"


class Moments:
    """Count, means and centred second moments of the pairs (h_T, h_S).

    `count` is the number of rows seen; the scatters are sums of centred products. All tensors are float64 on `device`:
    Dt^2 + Ds^2 + Ds Dt numbers and the means, for any number of rows.
    """

    def __init__(self, teacher_width: int, student_width: int, device: torch.device | str = "cpu") -> None:
        def zeros(*shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=torch.float64, device=device)

        self.count = 0
        self.mean_Dt, self.mean_Ds = zeros(teacher_width), zeros(student_width)
        self.scatter_DtDt = zeros(teacher_width, teacher_width)
        self.scatter_DsDs = zeros(student_width, student_width)
        self.scatter_DsDt = zeros(student_width, teacher_width)

    def update(self, teacher_NDt: torch.Tensor, student_NDs: torch.Tensor) -> None:
        """Adds N rows, [N, Dt] and [N, Ds], of any floating-point dtype."""
        count = teacher_NDt.shape[0]
        if count == 0:
            return
        teacher_NDt, student_NDs = teacher_NDt.detach().to(self.mean_Dt), student_NDs.detach().to(self.mean_Ds)
        mean_Dt, mean_Ds = teacher_NDt.mean(0), student_NDs.mean(0)
        teacher_NDt, student_NDs = teacher_NDt - mean_Dt, student_NDs - mean_Ds
        self.scatter_DtDt.addmm_(teacher_NDt.T, teacher_NDt)
        self.scatter_DsDs.addmm_(student_NDs.T, student_NDs)
        self.scatter_DsDt.addmm_(student_NDs.T, teacher_NDt)
        # Chan et al.: moving to the common mean adds n_a n_b / n of the outer product of the mean shift
        total = self.count + count
        shift_Dt, shift_Ds = mean_Dt - self.mean_Dt, mean_Ds - self.mean_Ds
        self._add_outer(shift_Dt, shift_Ds, self.count * count / total)
        self.mean_Dt += shift_Dt * (count / total)
        self.mean_Ds += shift_Ds * (count / total)
        self.count = total

    def _add_outer(self, shift_Dt: torch.Tensor, shift_Ds: torch.Tensor, weight: float) -> None:
        self.scatter_DtDt.addr_(shift_Dt, shift_Dt, alpha=weight)
        self.scatter_DsDs.addr_(shift_Ds, shift_Ds, alpha=weight)
        self.scatter_DsDt.addr_(shift_Ds, shift_Dt, alpha=weight)

    def all_reduce(self, group: dist.ProcessGroup | None = None) -> None:
        """Merges the moments of the ranks of `group`; every rank calls this once, after its last update.

        The ranks agree on the common mean first. Each rank then expresses its scatter about that mean, and scatters
        about one point can be added.
        """
        device = communication_device(group)

        def total(value: torch.Tensor) -> torch.Tensor:
            moved = value.to(device, copy=True)
            dist.all_reduce(moved, group=group)
            return moved.to(value.device)

        own_count = self.count
        count = int(total(torch.tensor(own_count)))
        if count == 0:
            return
        mean_Dt, mean_Ds = (total(mean * (own_count / count)) for mean in (self.mean_Dt, self.mean_Ds))
        self._add_outer(self.mean_Dt - mean_Dt, self.mean_Ds - mean_Ds, own_count)
        self.scatter_DtDt, self.scatter_DsDs, self.scatter_DsDt = map(
            total, (self.scatter_DtDt, self.scatter_DsDs, self.scatter_DsDt)
        )
        self.count, self.mean_Dt, self.mean_Ds = count, mean_Dt, mean_Ds

    @property
    def sigma_DtDt(self) -> torch.Tensor:
        """[Dt, Dt] covariance, divided by the count (dividing by count - 1 would change no basis)."""
        return self.scatter_DtDt / max(self.count, 1)

    @property
    def sigma_DsDs(self) -> torch.Tensor:
        """[Ds, Ds] covariance."""
        return self.scatter_DsDs / max(self.count, 1)

    @property
    def sigma_DsDt(self) -> torch.Tensor:
        """[Ds, Dt] cross-covariance."""
        return self.scatter_DsDt / max(self.count, 1)


class PairStatistics:
    """The statistics of one layer pair: the moments of each part of the data, and one sample of rows.

    `moments[p]` belongs to part p of `row_sample.PARTS`. Basis, means and projector are computed from the training part
    alone.
    """

    def __init__(
        self,
        pair: LayerPair,
        teacher_width: int,
        student_width: int,
        *,
        seed: int = 0,
        reservoir_rows: int = RESERVOIR_ROWS,
        device: torch.device | str = "cpu",
    ) -> None:
        self.pair = pair
        self.moments = [Moments(teacher_width, student_width, device) for _ in PARTS]
        self.reservoir = Reservoir(teacher_width, student_width, reservoir_rows, seed)

    def update(
        self,
        teacher_NDt: torch.Tensor,
        student_NDs: torch.Tensor,
        response_N: np.ndarray,
        token_N: np.ndarray,
        part_N: np.ndarray,
    ) -> None:
        """Adds N rows: hidden states [N, Dt] and [N, Ds] of any floating-point dtype.

        Args:
            response_N, token_N: the response of each row and the token's index in it; together they identify the row.
            part_N: the part that each row's response belongs to (`row_sample.assign_parts`).

        Raises:
            ValueError: the shapes do not fit, a value is not finite, or a row is in the sample already.
        """
        self._check(teacher_NDt, student_NDs, len(response_N))
        self.reservoir.update(teacher_NDt, student_NDs, response_N, token_N, part_N)
        for part, moments in enumerate(self.moments):
            index = torch.from_numpy(np.flatnonzero(part_N == part)).to(teacher_NDt.device)
            moments.update(teacher_NDt[index], student_NDs[index])

    def _check(self, teacher_NDt: torch.Tensor, student_NDs: torch.Tensor, count: int) -> None:
        moments = self.moments[0]
        for side, layer, rows_ND, mean in (
            ("teacher", self.pair.teacher, teacher_NDt, moments.mean_Dt),
            ("student", self.pair.student, student_NDs, moments.mean_Ds),
        ):
            if rows_ND.shape != (count, len(mean)):
                raise ValueError(
                    f"{side} layer {layer}: hidden states of shape {list(rows_ND.shape)}, expected "
                    f"[{count} rows, width {len(mean)}]"
                )
            if bad := int((~torch.isfinite(rows_ND)).any(-1).sum()):
                raise ValueError(
                    f"{side} layer {layer}: {bad} of {count} rows have non-finite values; expected finite "
                    f"hidden states: check the {side}'s weights and its precision"
                )

    def sampled(self, part: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the sampled rows of a part, [N, Dt] and [N, Ds]; raises ValueError if there are none."""
        teacher_NDt, student_NDs = self.reservoir.rows(part)
        if not len(teacher_NDt):
            raise ValueError(
                f"layer pair {self.pair.key}: none of the {len(self.reservoir)} sampled rows belongs to the "
                f"{PARTS[part]} part, expected at least one; use more rollouts or change bridge.held_out"
            )
        return teacher_NDt, student_NDs

    def all_reduce(self, group: dist.ProcessGroup | None = None) -> None:
        """Merges the statistics of the ranks of `group`; every rank calls this once per pair, after its last update."""
        self.reservoir.all_reduce(group)
        for moments in self.moments:
            moments.all_reduce(group)
