"""Streaming second moments of paired hidden states: what the fit needs of any number of tokens, in bounded memory.

Moments are kept centred and merged pairwise (Chan, Golub, LeVeque 1979), never as sums of raw products: massive
activations put means of thousands beside variances of one, and E[x^2] - E[x]^2 would cancel every digit.

Each rank feeds the rows that it holds, each row once, in any order. `all_reduce` then gives every rank of a group the
moments of all rows; a rank that has none of a layer's rows takes part all the same.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from nemo_oprd.bridge.sampling import PARTS, RESERVOIR_ROWS, Reservoir, communication_device


class LayerPair(NamedTuple):
    """A student layer and the teacher layer that it is matched to, 1-based and absolute."""

    student: int
    teacher: int

    @property
    def key(self) -> str:
        """The pair's name in the artifact, e.g. "s2.t3"."""
        return f"s{self.student}.t{self.teacher}"


class Moments:
    """Count, means and centred second moments of the pairs (h_T, h_S).

    Attributes:
        count: rows seen.
        mean_T, mean_S: [d_T], [d_S].
        scatter_TT, scatter_SS, scatter_ST: sums of centred products, [d_T, d_T], [d_S, d_S], [d_S, d_T].

    On `device`; the means in float64, the scatters in `dtype`: d_T^2 + d_S^2 + d_S d_T numbers, whatever the number of
    rows. float32 halves them and suits devices that are slow in double precision; rows are centred in float64 all the
    same, so that what is lost is rounding of the sums only.
    """

    def __init__(
        self,
        teacher_width: int,
        student_width: int,
        dtype: torch.dtype = torch.float64,
        device: torch.device | str = "cpu",
    ) -> None:
        self.count = 0
        self.mean_T = torch.zeros(teacher_width, dtype=torch.float64, device=device)
        self.mean_S = torch.zeros(student_width, dtype=torch.float64, device=device)
        self.scatter_TT = torch.zeros(teacher_width, teacher_width, dtype=dtype, device=device)
        self.scatter_SS = torch.zeros(student_width, student_width, dtype=dtype, device=device)
        self.scatter_ST = torch.zeros(student_width, teacher_width, dtype=dtype, device=device)

    def _tensors(self) -> dict[str, torch.Tensor]:
        return {name: value for name, value in vars(self).items() if isinstance(value, torch.Tensor)}

    def update(self, teacher_ND: torch.Tensor, student_ND: torch.Tensor) -> None:
        """Adds N rows, [N, d_T] and [N, d_S]."""
        count = teacher_ND.shape[0]
        if count == 0:
            return
        teacher_ND, student_ND = teacher_ND.detach().to(self.mean_T), student_ND.detach().to(self.mean_S)
        mean_T, mean_S = teacher_ND.mean(0), student_ND.mean(0)
        teacher_ND, student_ND = ((teacher_ND - mean_T).to(self.scatter_TT), (student_ND - mean_S).to(self.scatter_TT))
        self.scatter_TT.addmm_(teacher_ND.T, teacher_ND)
        self.scatter_SS.addmm_(student_ND.T, student_ND)
        self.scatter_ST.addmm_(student_ND.T, teacher_ND)
        self._shift_means(count, mean_T, mean_S)

    def merge(self, other: Moments) -> None:
        """Adds the rows that `other` has seen."""
        if other.count == 0:
            return
        for name, scatter in other._tensors().items():
            if name.startswith("scatter"):
                getattr(self, name).add_(scatter.to(self.scatter_TT))
        self._shift_means(other.count, other.mean_T.to(self.mean_T), other.mean_S.to(self.mean_S))

    def _shift_means(self, count: int, mean_T: torch.Tensor, mean_S: torch.Tensor) -> None:
        """Chan et al.: the scatter about the common mean gains n_a n_b / n of the outer product of the mean shift."""
        total = self.count + count
        shift_T, shift_S = mean_T - self.mean_T, mean_S - self.mean_S
        self._add_outer(shift_T, shift_S, self.count * count / total)
        self.mean_T += shift_T * (count / total)
        self.mean_S += shift_S * (count / total)
        self.count = total

    def _add_outer(self, shift_T: torch.Tensor, shift_S: torch.Tensor, weight: float) -> None:
        shift_T, shift_S = shift_T.to(self.scatter_TT), shift_S.to(self.scatter_TT)
        self.scatter_TT.addr_(shift_T, shift_T, alpha=weight)
        self.scatter_SS.addr_(shift_S, shift_S, alpha=weight)
        self.scatter_ST.addr_(shift_S, shift_T, alpha=weight)

    def all_reduce(self, group: dist.ProcessGroup | None = None) -> None:
        """The exact merge over the ranks of `group`, once, after the last update.

        The common mean comes first; every rank then moves its scatter to that mean, and scatters about one point add.
        """
        device = communication_device(group)

        def total(value: torch.Tensor) -> torch.Tensor:
            moved = value.to(device, copy=True)
            dist.all_reduce(moved, group=group)
            return moved.to(value.device)

        mine = self.count
        count = int(total(torch.tensor(mine)))
        if count == 0:
            return
        mean_T, mean_S = (total(mean * (mine / count)) for mean in (self.mean_T, self.mean_S))
        self._add_outer(self.mean_T - mean_T, self.mean_S - mean_S, mine)
        self.scatter_TT, self.scatter_SS, self.scatter_ST = map(
            total, (self.scatter_TT, self.scatter_SS, self.scatter_ST)
        )
        self.count, self.mean_T, self.mean_S = count, mean_T, mean_S

    @property
    def sigma_TT(self) -> torch.Tensor:
        """[d_T, d_T] covariance, float64, divided by n (the n - 1 of an unbiased estimate changes no basis)."""
        return self.scatter_TT.double() / max(self.count, 1)

    @property
    def sigma_SS(self) -> torch.Tensor:
        """[d_S, d_S]."""
        return self.scatter_SS.double() / max(self.count, 1)

    @property
    def sigma_ST(self) -> torch.Tensor:
        """[d_S, d_T]."""
        return self.scatter_ST.double() / max(self.count, 1)

    def state_dict(self) -> dict[str, Any]:
        """Everything needed to go on; tensors and one integer."""
        return {"count": self.count, **{name: tensor.clone() for name, tensor in self._tensors().items()}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Raises ValueError where the state is of models of other widths."""
        for name, tensor in self._tensors().items():
            if state[name].shape != tensor.shape:
                raise ValueError(
                    f"saved statistics: {name} is {list(state[name].shape)}, these models need {list(tensor.shape)}; "
                    "they were made with other models, start the statistics again"
                )
            setattr(self, name, state[name].to(tensor, copy=True))
        self.count = int(state["count"])


class PairStatistics:
    """What is known of one layer pair: the moments of each part of the data, and one sample of rows.

    `moments[p]` is that of part p of `sampling.PARTS`. Basis, means and projector come from the training part alone.
    """

    def __init__(
        self,
        pair: LayerPair,
        teacher_width: int,
        student_width: int,
        *,
        seed: int = 0,
        reservoir_rows: int = RESERVOIR_ROWS,
        dtype: torch.dtype = torch.float64,
        device: torch.device | str = "cpu",
    ) -> None:
        self.pair = pair
        self.moments = [Moments(teacher_width, student_width, dtype, device) for _ in PARTS]
        self.reservoir = Reservoir(teacher_width, student_width, reservoir_rows, seed)

    def update(
        self,
        teacher_ND: torch.Tensor,
        student_ND: torch.Tensor,
        response_N: np.ndarray,
        token_N: np.ndarray,
        part_N: np.ndarray,
    ) -> None:
        """Adds N rows: hidden states [N, d_T] and [N, d_S] of token `token_N` of response `response_N`.

        Args:
            part_N: the part that each row's response belongs to (`sampling.assign_parts`).

        Raises:
            ValueError: shapes that don't fit, a value that is not finite, or a row that was fed before.
        """
        self._check(teacher_ND, student_ND, len(response_N))
        self.reservoir.update(teacher_ND, student_ND, response_N, token_N, part_N)
        for part, moments in enumerate(self.moments):
            index = torch.from_numpy(np.flatnonzero(part_N == part)).to(teacher_ND.device)
            moments.update(teacher_ND[index], student_ND[index])

    def _check(self, teacher_ND: torch.Tensor, student_ND: torch.Tensor, count: int) -> None:
        moments = self.moments[0]
        for side, layer, rows_ND, mean in (
            ("teacher", self.pair.teacher, teacher_ND, moments.mean_T),
            ("student", self.pair.student, student_ND, moments.mean_S),
        ):
            if rows_ND.shape != (count, len(mean)):
                raise ValueError(
                    f"{side} layer {layer}: hidden states of shape {list(rows_ND.shape)}, expected "
                    f"[{count} rows, width {len(mean)}]"
                )
            bad = int((~torch.isfinite(rows_ND)).any(-1).sum())
            if bad:
                raise ValueError(
                    f"{side} layer {layer}: {bad} of {count} rows have values that are not finite; check the "
                    f"{side}'s weights and precision (bf16 instead of fp16)"
                )

    def merge(self, other: PairStatistics) -> None:
        """Adds what `other` has seen, e.g. a rank of an interrupted run that had more ranks than this one."""
        self.reservoir.merge(other.reservoir)
        for mine, theirs in zip(self.moments, other.moments, strict=True):
            mine.merge(theirs)

    def all_reduce(self, group: dist.ProcessGroup | None = None) -> None:
        """Merges over the ranks of `group`, all of which call this for the same pair, once, after the last update."""
        self.reservoir.all_reduce(group)
        for moments in self.moments:
            moments.all_reduce(group)

    def state_dict(self) -> dict[str, Any]:
        """For `torch.save`; loads with `weights_only=True`."""
        return {
            "pair": list(self.pair),
            "moments": [moments.state_dict() for moments in self.moments],
            "reservoir": self.reservoir.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Raises ValueError where the state is of another pair, other widths or another sample."""
        if list(state["pair"]) != list(self.pair):
            raise ValueError(
                f"saved statistics are of layer pair {LayerPair(*state['pair']).key}, expected {self.pair.key}; "
                "the layer map changed, start the statistics again"
            )
        for moments, saved in zip(self.moments, state["moments"], strict=True):
            moments.load_state_dict(saved)
        self.reservoir.load_state_dict(state["reservoir"])
