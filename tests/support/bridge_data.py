"""Synthetic layer pairs whose per-direction alignment is known, and maps for two small models."""

from __future__ import annotations

import numpy as np
import torch

from nemo_oprd.bridge.covariance import LayerPair, PairStatistics
from nemo_oprd.bridge.maps import LayerBridge, ModelIdentity
from nemo_oprd.bridge.row_sample import assign_parts

PAIR = LayerPair(1, 2)
# a pair whose rho^2 crosses 1/2 after six coordinates
LAMBDAS = np.array([50.0, 30, 20, 12, 8, 5, 3, 2, 1.5, 1, 0.7, 0.5])
RHO2 = np.array([0.97, 0.93, 0.9, 0.85, 0.8, 0.65, 0.35, 0.3, 0.2, 0.1, 0.05, 0.0])


def rotation(width: int) -> np.ndarray:
    """[width, width], always the same: data of different seeds come from one distribution."""
    return np.linalg.qr(np.random.default_rng(1000 + width).standard_normal((width, width)))[0]


def gaussian_pair(
    lambdas_Dt: np.ndarray, rho2_Dt: np.ndarray, student_width: int, n: int, *, mean: float = 0.0, seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """n rows [N, Dt], [N, Ds]: teacher principal component i has variance lambda_i and R^2 rho2_i given the student.

    Student component i (i < Dt <= Ds) is rho_i z_i / sqrt(lambda_i) + sqrt(1 - rho_i^2) noise, the rest is noise;
    both sides are then turned by a random rotation and moved by `mean`.
    """
    rng = np.random.default_rng(seed)
    turn_DtDt, turn_DsDs = rotation(len(lambdas_Dt)), rotation(student_width)
    unit_NDt = rng.standard_normal((n, len(lambdas_Dt)))
    student_NDs = rng.standard_normal((n, student_width))
    student_NDs[:, : len(rho2_Dt)] *= np.sqrt(1 - rho2_Dt)
    student_NDs[:, : len(rho2_Dt)] += unit_NDt * np.sqrt(rho2_Dt)
    teacher_NDt = (unit_NDt * np.sqrt(lambdas_Dt)) @ turn_DtDt + mean
    return torch.from_numpy(teacher_NDt), torch.from_numpy(student_NDs @ turn_DsDs + mean)


def collected(
    teacher_NDt: torch.Tensor,
    student_NDs: torch.Tensor,
    *,
    responses: int = 40,
    held_out: float = 0.1,
    pair: LayerPair = PAIR,
) -> PairStatistics:
    """The statistics of these rows, split into equal responses."""
    stats = PairStatistics(pair, teacher_NDt.shape[1], student_NDs.shape[1])
    part = assign_parts(range(responses), held_out)
    n = len(teacher_NDt)
    response_N = np.arange(n) * responses // n
    part_N = np.array([part[r] for r in response_N.tolist()])
    stats.update(teacher_NDt, student_NDs, response_N, np.arange(n), part_N)
    return stats


STUDENT = ModelIdentity("qwen3", 2, 4, 61, tokenizer="aa", name="small")
TEACHER = ModelIdentity("qwen3", 3, 6, 61, tokenizer="bb", weights="w", name="large")


def maps(seed: int, rank: int = 2, bias: bool = True) -> LayerBridge:
    generator = torch.Generator().manual_seed(seed)
    mean, basis, projector, offset = (
        torch.randn(shape, generator=generator) for shape in ((6,), (rank, 6), (rank, 4), (rank,))
    )
    return LayerBridge(mean, basis, projector, offset if bias else None)
