"""Functions that the pool's workers run for the bridge: each rank feeds some of the same synthetic rows."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from nemo_oprd.bridge.covariance import LayerPair, PairStatistics
from nemo_oprd.bridge.fit import fit_ridge
from nemo_oprd.bridge.row_sample import assign_parts

TEACHER_WIDTH, STUDENT_WIDTH, RESPONSES, TOKENS = 7, 5, 30, 20
SPLITS = ("interleaved", "uneven", "one rank has nothing", "by response", "different order")


def all_rows() -> tuple[torch.Tensor, torch.Tensor, np.ndarray, np.ndarray]:
    """float32 states with a mean of 1e4 on one side; response and token of each row."""
    rng = np.random.default_rng(0)
    shared = rng.standard_normal((RESPONSES * TOKENS, 3))
    teacher = (
        shared @ rng.standard_normal((3, TEACHER_WIDTH)) + 0.3 * rng.standard_normal((len(shared), TEACHER_WIDTH)) + 1e4
    )
    student = shared @ rng.standard_normal((3, STUDENT_WIDTH)) + 0.3 * rng.standard_normal((len(shared), STUDENT_WIDTH))
    response_N, token_N = np.repeat(np.arange(RESPONSES), TOKENS), np.tile(np.arange(TOKENS), RESPONSES)
    return torch.from_numpy(teacher).float(), torch.from_numpy(student).float(), response_N, token_N


def owner(split: str, ranks: int) -> np.ndarray:
    """[N] the rank that feeds each row."""
    row = np.arange(RESPONSES * TOKENS)
    return {
        "interleaved": row % ranks,
        "uneven": np.where(row < 37, 0, ranks - 1),
        "one rank has nothing": np.full_like(row, ranks - 1),
        "by response": row // TOKENS % ranks,
        "different order": row % ranks,
    }[split]


def collect(split: str, capacity: int, rank: int, ranks: int) -> PairStatistics:
    """The statistics of one rank's rows, fed in chunks of 64."""
    teacher_NDt, student_NDs, response_N, token_N = all_rows()
    part = assign_parts(range(RESPONSES), 0.1)
    statistics = PairStatistics(LayerPair(1, 2), TEACHER_WIDTH, STUDENT_WIDTH, reservoir_rows=capacity)
    mine = np.flatnonzero(owner(split, ranks) == rank)
    if split == "different order":
        mine = np.random.default_rng(rank).permutation(mine)
    for start in range(0, len(mine), 64):
        index = mine[start : start + 64]
        part_N = np.array([part[r] for r in response_N[index].tolist()])
        statistics.update(teacher_NDt[index], student_NDs[index], response_N[index], token_N[index], part_N)
    return statistics


def summary(statistics: PairStatistics) -> dict[str, Any]:
    """Everything that must not depend on the layout, as numpy arrays."""
    fit = fit_ridge(statistics, center_student=True)
    result = {f"{p}.{name}": np.asarray(v) for p, m in enumerate(statistics.moments) for name, v in vars(m).items()}
    result["teacher rows"], result["student rows"] = (rows.numpy() for rows in statistics.reservoir.rows())
    result["basis"], result["projector"] = fit.projection.basis_RDt.numpy(), fit.projection.projector_RDs.numpy()
    result["bias"], result["rho2"] = np.asarray(fit.projection.bias_R), fit.rho2_R.numpy()
    return result


def reduced(split: str, capacity: int) -> dict[str, Any]:
    """The summary after merging, which must be equal on all ranks."""
    import torch.distributed as dist

    from nemo_oprd.megatron.parallel import init_distributed

    init_distributed()
    statistics = collect(split, capacity, dist.get_rank(), dist.get_world_size())
    statistics.all_reduce()
    result = summary(statistics)
    others: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(others, result)
    for other in others:
        for name, value in result.items():
            assert np.array_equal(value, other[name]), name
    return result


def fed_twice() -> str:
    """Two ranks that hold copies of the same rows, as under plain tensor parallelism, both feed them."""
    from nemo_oprd.megatron.parallel import init_distributed

    init_distributed()
    statistics = collect("one rank has nothing", 100, 0, 1)
    try:
        statistics.all_reduce()
    except ValueError as error:
        return str(error)
    return "no error"


def nobody_has_rows() -> int:
    """A pair for which no rank was fed anything."""
    from nemo_oprd.megatron.parallel import init_distributed

    init_distributed()
    statistics = PairStatistics(LayerPair(1, 2), TEACHER_WIDTH, STUDENT_WIDTH)
    statistics.all_reduce()
    return len(statistics.reservoir) + sum(moments.count for moments in statistics.moments)


def alone() -> dict[str, Any]:
    """Each rank is a group of its own and holds all rows; merging changes only the order of the sample's slots."""
    import torch.distributed as dist

    from nemo_oprd.megatron.parallel import init_distributed

    init_distributed()
    groups = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    statistics = collect("one rank has nothing", 100, 0, 1)
    statistics.all_reduce(groups[dist.get_rank()])
    return summary(statistics)
