"""Which responses belong to which part of the data, and a bounded sample of rows that no layout can change.

Both are decided by a hash of (seed, response, token), never by a random number generator: whoever holds a row, whenever
it arrives, the decision about it is the same.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

TRAIN, SELECTION, TEST = 0, 1, 2
PARTS = ("training", "selection", "test")
# rows per layer pair; the paper's number
RESERVOIR_ROWS = 16384

_PART_SALT, _ROW_SALT = 1, 2
# splitmix64 (Steele, Lea, Flood 2014): the increment and the two multipliers of its finaliser
_INCREMENT, _MIX_1, _MIX_2 = (np.uint64(c) for c in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


def hash_ids(seed: int, *ids_N: np.ndarray) -> np.ndarray:
    """A uint64 hash [N] of the seed and one or more columns of integer ids [N], the same on every machine."""
    state_N = np.full(len(ids_N[0]), seed & (2**64 - 1), dtype=np.uint64)
    for column_N in ids_N:
        z = (state_N ^ np.asarray(column_N, dtype=np.int64).view(np.uint64)) + _INCREMENT
        z = (z ^ (z >> np.uint64(30))) * _MIX_1
        z = (z ^ (z >> np.uint64(27))) * _MIX_2
        state_N = z ^ (z >> np.uint64(31))
    return state_N


def assign_parts(responses: Iterable[int], held_out: float, seed: int = 0) -> dict[int, int]:
    """Response id -> TRAIN, SELECTION or TEST.

    Responses are ordered by a hash of (seed, id); the first `held_out` of them, rounded, at least one, are the test
    part, as many after them the selection part, the rest is for training. Whole responses, because the tokens of one
    are far from independent; exact fractions, because a few dozen responses may be all there is.

    Args:
        responses: distinct ids of the responses that have rows; any order.
        held_out: `bridge.held_out`.

    Raises:
        ValueError: `held_out` outside (0, 0.5), repeated ids, or fewer than three responses.
    """
    ids_B = np.fromiter(responses, dtype=np.int64)
    if not 0 < held_out < 0.5:
        raise ValueError(
            f"bridge.held_out={held_out}: expected a number in (0, 0.5); this fraction goes to the test part "
            "and the same again to the selection part"
        )
    if len(np.unique(ids_B)) != len(ids_B):
        raise ValueError(
            f"{len(ids_B)} response ids, of which {len(np.unique(ids_B))} are distinct; expected no repeats"
        )
    if len(ids_B) < 3:
        raise ValueError(
            f"{len(ids_B)} response(s) with supervised tokens: a bridge needs at least 3, one each to train, to select "
            "the regulariser and to test; use more rollouts"
        )
    hash_B = hash_ids(seed, np.full_like(ids_B, _PART_SALT), ids_B)
    ordered_B = ids_B[np.lexsort((ids_B, hash_B))]
    each = min(max(1, round(held_out * len(ids_B))), (len(ids_B) - 1) // 2)
    part_B = np.repeat([TEST, SELECTION, TRAIN], [each, each, len(ids_B) - 2 * each])
    return dict(zip(ordered_B.tolist(), part_B.tolist(), strict=True))


def communication_device(group: dist.ProcessGroup | None) -> torch.device:
    """Where tensors must be for a collective of `group`."""
    return (
        torch.device("cuda", torch.cuda.current_device()) if dist.get_backend(group) == "nccl" else torch.device("cpu")
    )


class Reservoir:
    """The rows with the smallest hash of (seed, response, token), at most `capacity` of them.

    A uniform sample without replacement that depends only on which rows exist: any split over ranks, any order of
    arrival and any number of interruptions end in the same rows. Rows are kept on the CPU in `dtype`; float32 holds
    bf16 states exactly. Memory: capacity * (d_T + d_S) numbers.
    """

    def __init__(
        self,
        teacher_width: int,
        student_width: int,
        capacity: int = RESERVOIR_ROWS,
        seed: int = 0,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.capacity, self.seed = capacity, seed
        self._rows = {"teacher": torch.zeros(0, teacher_width, dtype=dtype)}
        self._rows["student"] = torch.zeros(0, student_width, dtype=dtype)
        # hash, response, token, part of the row in each slot; slots are in no order
        self._keys_4N = np.zeros((4, 0), dtype=np.int64)

    def __len__(self) -> int:
        return self._keys_4N.shape[1]

    def update(
        self,
        teacher_ND: torch.Tensor,
        student_ND: torch.Tensor,
        response_N: np.ndarray,
        token_N: np.ndarray,
        part_N: np.ndarray,
    ) -> None:
        """Offers N rows; only those that enter are copied.

        Raises:
            ValueError: a row (response, token) that is here already.
        """
        salt_N = np.full(len(response_N), _ROW_SALT)
        hash_N = hash_ids(self.seed, salt_N, response_N, token_N).view(np.int64)
        new_4N = np.stack([hash_N, response_N, token_N, part_N]).astype(np.int64)
        held = len(self)
        keep = _smallest(np.concatenate([self._keys_4N, new_4N], axis=1), self.capacity)
        entering = np.sort(keep[keep >= held] - held)
        # the first free slots: those past the end while there is room, then those of rows that leave
        slots = np.setdiff1d(np.arange(min(self.capacity, held + len(entering))), keep[keep < held])
        self._grow(len(keep))
        self._keys_4N[:, slots] = new_4N[:, entering]
        for side, rows_ND in (("teacher", teacher_ND), ("student", student_ND)):
            index = torch.from_numpy(entering).to(rows_ND.device)
            stored_ND = self._rows[side]
            stored_ND[torch.from_numpy(slots)] = rows_ND.detach()[index].to(stored_ND)

    def _grow(self, size: int) -> None:
        missing = size - len(self)
        if missing > 0:
            self._keys_4N = np.concatenate([self._keys_4N, np.zeros((4, missing), dtype=np.int64)], axis=1)
            for side, rows_ND in self._rows.items():
                self._rows[side] = torch.cat([rows_ND, rows_ND.new_zeros(missing, rows_ND.shape[1])])

    def merge(self, other: Reservoir) -> None:
        """Offers all rows of `other`, a sample with the same seed and capacity."""
        self.update(*other.rows(), *other.ids())

    def all_reduce(self, group: dist.ProcessGroup | None = None) -> None:
        """Makes every rank of `group` hold the sample of all their rows.

        What is sent does not grow with the data: an all-gather of 4 * capacity integers per rank says who holds which
        of the chosen rows, then each rank puts its own into a [capacity, d] buffer of zeros and the buffers are summed,
        which is exact.

        Raises:
            ValueError: two ranks were fed the same row (tensor-parallel copies: feed each row on one rank only).
        """
        device = communication_device(group)
        ranks, me = dist.get_world_size(group), dist.get_rank(group)
        mine_5C = torch.zeros(5, self.capacity, dtype=torch.int64)
        mine_5C[:4, : len(self)] = torch.from_numpy(self._keys_4N)
        mine_5C[4, : len(self)] = 1
        gathered = [torch.empty_like(mine_5C, device=device) for _ in range(ranks)]
        dist.all_gather(gathered, mine_5C.to(device), group=group)
        all_5N = torch.cat(gathered, dim=1).cpu().numpy()
        used = np.flatnonzero(all_5N[4])
        keep = used[_smallest(all_5N[:4, used], self.capacity)]
        here = np.flatnonzero(keep // self.capacity == me)
        for side, rows_ND in self._rows.items():
            merged_ND = torch.zeros(len(keep), rows_ND.shape[1], dtype=rows_ND.dtype)
            merged_ND[torch.from_numpy(here)] = rows_ND[torch.from_numpy(keep[here] % self.capacity)]
            merged_ND = merged_ND.to(device)
            if len(keep):
                dist.all_reduce(merged_ND, group=group)
            self._rows[side] = merged_ND.cpu()
        self._keys_4N = all_5N[:4, keep]

    def rows(self, part: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Teacher [n, d_T] and student [n, d_S] rows of one part (None: of all), in ascending order of their hash."""
        order = _smallest(self._keys_4N, len(self))
        if part is not None:
            order = order[self._keys_4N[3, order] == part]
        index = torch.from_numpy(order)
        return self._rows["teacher"][index], self._rows["student"][index]

    def ids(self) -> np.ndarray:
        """(response, token, part) [3, n] of the rows, in the order of `rows()`."""
        return self._keys_4N[1:, _smallest(self._keys_4N, len(self))]

    def state_dict(self) -> dict[str, Any]:
        """Everything needed to go on; tensors and integers only."""
        return {
            "keys": torch.from_numpy(self._keys_4N.copy()),
            "seed": self.seed,
            "capacity": self.capacity,
            **{side: rows_ND.clone() for side, rows_ND in self._rows.items()},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Raises ValueError where the state was made with another seed or capacity: it would mix two samples."""
        for name in ("seed", "capacity"):
            if state[name] != getattr(self, name):
                raise ValueError(
                    f"saved statistics have reservoir {name}={state[name]}, this run has {getattr(self, name)}; "
                    "resume with the same value or start the statistics again"
                )
        self._keys_4N = state["keys"].numpy().copy()
        self._rows = {side: state[side].to(self._rows[side].dtype).clone() for side in self._rows}


def _smallest(keys_4N: np.ndarray, count: int) -> np.ndarray:
    """Columns with the `count` smallest (hash, response, token), ascending by them."""
    hash_N = np.ascontiguousarray(keys_4N[0]).view(np.uint64)
    order = np.lexsort((keys_4N[2], keys_4N[1], hash_N))
    ordered_3N = keys_4N[:3, order]
    same = np.flatnonzero((ordered_3N[:, 1:] == ordered_3N[:, :-1]).all(axis=0))
    if len(same):
        _, response, token = ordered_3N[:, same[0]].tolist()
        raise ValueError(
            f"row (response {response}, token {token}) was fed more than once; expected every row once: under plain "
            "tensor parallelism only one of the ranks that hold a row feeds it, and a resumed pass skips the responses "
            "that it has seen"
        )
    return order[:count]
