"""The split of the responses into parts, and a bounded sample of rows; both are the same at every layout.

A hash of (seed, response, token) decides, not a random number generator: the decision about a row depends neither on
the rank that holds the row nor on the order in which rows arrive.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
import torch.distributed as dist

TRAIN, SELECTION, TEST = 0, 1, 2
PARTS = ("training", "selection", "test")
# sampled rows per layer pair: the paper's number
RESERVOIR_ROWS = 16384

_PART_SALT, _ROW_SALT = 1, 2
# splitmix64 (Steele, Lea, Flood 2014): the increment and the two multipliers of its finaliser
_INCREMENT, _MIX_1, _MIX_2 = (np.uint64(c) for c in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


def hash_ids(seed: int, *ids_N: np.ndarray) -> np.ndarray:
    """Returns a uint64 hash [N] of the seed and one or more columns of integer ids [N], the same on every machine."""
    state_N = np.full(len(ids_N[0]), seed & (2**64 - 1), dtype=np.uint64)
    for column_N in ids_N:
        z = (state_N ^ np.asarray(column_N, dtype=np.int64).view(np.uint64)) + _INCREMENT
        z = (z ^ (z >> np.uint64(30))) * _MIX_1
        z = (z ^ (z >> np.uint64(27))) * _MIX_2
        state_N = z ^ (z >> np.uint64(31))
    return state_N


def assign_parts(responses: Iterable[int], held_out: float, seed: int = 0) -> dict[int, int]:
    """Returns response id -> TRAIN, SELECTION or TEST, for distinct ids in any order.

    Responses are ordered by a hash of (seed, id). The first share `held_out` of them (rounded, at least one) is the
    test part, an equal number after them the selection part, and the rest is for training. Responses are not divided,
    because their tokens are far from independent. Sizes are exact, because there may be only a few dozen responses.

    Raises:
        ValueError: `held_out` is outside (0, 0.5), an id is repeated, or there are fewer than three responses.
    """
    ids_B = np.fromiter(responses, dtype=np.int64)
    if not 0 < held_out < 0.5:
        raise ValueError(
            f"bridge.held_out={held_out}: expected a number in (0, 0.5), the share of the responses in the test part "
            "and again in the selection part; change it"
        )
    distinct = len(np.unique(ids_B))
    if distinct != len(ids_B):
        raise ValueError(f"{len(ids_B)} response ids, of which {distinct} are distinct; expected no repeats")
    if len(ids_B) < 3:
        raise ValueError(
            f"{len(ids_B)} response(s) with supervised tokens: expected at least 3, one each to train, to select the "
            "penalty and to test; use more rollouts"
        )
    hash_B = hash_ids(seed, np.full_like(ids_B, _PART_SALT), ids_B)
    ordered_B = ids_B[np.lexsort((ids_B, hash_B))]
    each = min(max(1, round(held_out * len(ids_B))), (len(ids_B) - 1) // 2)
    part_B = np.repeat([TEST, SELECTION, TRAIN], [each, each, len(ids_B) - 2 * each])
    return dict(zip(ordered_B.tolist(), part_B.tolist(), strict=True))


def communication_device(group: dist.ProcessGroup | None) -> torch.device:
    """Returns the device that a collective of `group` needs its tensors on."""
    return (
        torch.device("cuda", torch.cuda.current_device()) if dist.get_backend(group) == "nccl" else torch.device("cpu")
    )


class Reservoir:
    """The rows with the smallest hash of (seed, response, token), at most `capacity` of them.

    This is a uniform sample without replacement that depends only on which rows exist: any split over ranks and any
    order of arrival give the same rows. Rows are kept on the CPU in float32, which holds bf16 states exactly. Memory:
    capacity * (Dt + Ds) numbers.
    """

    def __init__(self, teacher_width: int, student_width: int, capacity: int = RESERVOIR_ROWS, seed: int = 0) -> None:
        self.capacity, self.seed = capacity, seed
        self._rows = {"teacher": torch.zeros(0, teacher_width), "student": torch.zeros(0, student_width)}
        # hash, response, token and part of the row in each slot; slots are in no order
        self._keys_4N = np.zeros((4, 0), dtype=np.int64)

    def __len__(self) -> int:
        return self._keys_4N.shape[1]

    def update(
        self,
        teacher_NDt: torch.Tensor,
        student_NDs: torch.Tensor,
        response_N: np.ndarray,
        token_N: np.ndarray,
        part_N: np.ndarray,
    ) -> None:
        """Offers N rows, [N, Dt] and [N, Ds]; only those that enter the sample are copied.

        Raises:
            ValueError: a row (response, token) is in the sample already.
        """
        salt_N = np.full(len(response_N), _ROW_SALT)
        hash_N = hash_ids(self.seed, salt_N, response_N, token_N).view(np.int64)
        new_4N = np.stack([hash_N, response_N, token_N, part_N]).astype(np.int64)
        stored = len(self)
        keep = _smallest(np.concatenate([self._keys_4N, new_4N], axis=1), self.capacity)
        entering = np.sort(keep[keep >= stored] - stored)
        # the first free slots: those past the end while there is room, then those of the rows that leave
        slots = np.setdiff1d(np.arange(min(self.capacity, stored + len(entering))), keep[keep < stored])
        if (missing := len(keep) - stored) > 0:
            self._keys_4N = np.concatenate([self._keys_4N, np.zeros((4, missing), dtype=np.int64)], axis=1)
            for side, rows_ND in self._rows.items():
                self._rows[side] = torch.cat([rows_ND, rows_ND.new_zeros(missing, rows_ND.shape[1])])
        self._keys_4N[:, slots] = new_4N[:, entering]
        for side, rows_ND in (("teacher", teacher_NDt), ("student", student_NDs)):
            index = torch.from_numpy(entering).to(rows_ND.device)
            stored_ND = self._rows[side]
            stored_ND[torch.from_numpy(slots)] = rows_ND.detach()[index].to(stored_ND)

    def all_reduce(self, group: dist.ProcessGroup | None = None) -> None:
        """Gives every rank of `group` the sample of the rows of all ranks.

        The traffic does not grow with the data: an all-gather of 5 * capacity integers per rank says which rank holds
        which of the chosen rows. Each rank then copies its chosen rows into a [C, D] buffer of zeros, and the buffers
        are summed, which is exact.

        Raises:
            ValueError: two ranks were fed the same row (tensor-parallel copies: feed each row on one rank only).
        """
        device = communication_device(group)
        ranks, own_rank = dist.get_world_size(group), dist.get_rank(group)
        own_5C = torch.zeros(5, self.capacity, dtype=torch.int64)
        own_5C[:4, : len(self)] = torch.from_numpy(self._keys_4N)
        own_5C[4, : len(self)] = 1  # marks a used slot
        gathered = [torch.empty_like(own_5C, device=device) for _ in range(ranks)]
        dist.all_gather(gathered, own_5C.to(device), group=group)
        all_5N = torch.cat(gathered, dim=1).cpu().numpy()
        used = np.flatnonzero(all_5N[4])
        keep = used[_smallest(all_5N[:4, used], self.capacity)]
        own = np.flatnonzero(keep // self.capacity == own_rank)
        for side, rows_ND in self._rows.items():
            merged_ND = torch.zeros(len(keep), rows_ND.shape[1], dtype=rows_ND.dtype)
            merged_ND[torch.from_numpy(own)] = rows_ND[torch.from_numpy(keep[own] % self.capacity)]
            merged_ND = merged_ND.to(device)
            if len(keep):
                dist.all_reduce(merged_ND, group=group)
            self._rows[side] = merged_ND.cpu()
        self._keys_4N = all_5N[:4, keep]

    def rows(self, part: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns teacher [N, Dt] and student [N, Ds] rows of a part (None: all parts), in ascending order of hash."""
        order = _smallest(self._keys_4N, len(self))
        if part is not None:
            order = order[self._keys_4N[3, order] == part]
        index = torch.from_numpy(order)
        return self._rows["teacher"][index], self._rows["student"][index]


def _smallest(keys_4N: np.ndarray, count: int) -> np.ndarray:
    """Returns the columns of the `count` smallest (hash, response, token), ascending; ValueError if a row repeats."""
    hash_N = np.ascontiguousarray(keys_4N[0]).view(np.uint64)
    order = np.lexsort((keys_4N[2], keys_4N[1], hash_N))
    ordered_3N = keys_4N[:3, order]
    same = np.flatnonzero((ordered_3N[:, 1:] == ordered_3N[:, :-1]).all(axis=0))
    if len(same):
        _, response, token = ordered_3N[:, same[0]].tolist()
        raise ValueError(
            f"row (response {response}, token {token}) was fed more than once; expected every row once: where "
            "several ranks hold copies of a row, let only one of them feed it"
        )
    return order[:count]
