"""Synthetic layer pairs whose per-direction alignment is known, and maps for two small models."""

from __future__ import annotations

import numpy as np
import torch

from nemo_oprd.bridge.covariance import LayerPair, PairStatistics
from nemo_oprd.bridge.maps import LayerBridge, ModelIdentity
from nemo_oprd.bridge.sampling import assign_parts

# a pair whose rho^2 crosses 1/2 after six coordinates
LAMBDAS = np.array([50.0, 30, 20, 12, 8, 5, 3, 2, 1.5, 1, 0.7, 0.5])
RHO2 = np.array([0.97, 0.93, 0.9, 0.85, 0.8, 0.65, 0.35, 0.3, 0.2, 0.1, 0.05, 0.0])


def rotation(width: int) -> np.ndarray:
    """[width, width], always the same: data of different seeds come from one distribution."""
    return np.linalg.qr(np.random.default_rng(1000 + width).standard_normal((width, width)))[0]


def gaussian_pair(
    lambdas_T: np.ndarray, rho2_T: np.ndarray, d_S: int, n: int, *, mean: float = 0.0, seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """n rows [n, d_T], [n, d_S]: teacher principal component i has variance lambda_i and R^2 rho2_i given the student.

    Student component i (i < d_T <= d_S) is rho_i z_i / sqrt(lambda_i) + sqrt(1 - rho_i^2) noise, the rest is noise;
    both sides are then turned by a random rotation and moved by `mean`.
    """
    rng = np.random.default_rng(seed)
    turn_TT, turn_SS = rotation(len(lambdas_T)), rotation(d_S)
    unit_NT = rng.standard_normal((n, len(lambdas_T)))
    student_NS = rng.standard_normal((n, d_S))
    student_NS[:, : len(rho2_T)] *= np.sqrt(1 - rho2_T)
    student_NS[:, : len(rho2_T)] += unit_NT * np.sqrt(rho2_T)
    teacher_NT = (unit_NT * np.sqrt(lambdas_T)) @ turn_TT + mean
    return torch.from_numpy(teacher_NT), torch.from_numpy(student_NS @ turn_SS + mean)


def collected(
    teacher_NT: torch.Tensor, student_NS: torch.Tensor, *, responses: int = 40, held_out: float = 0.1, rows: int = 16384
) -> PairStatistics:
    """The statistics of these rows, split into equal responses."""
    stats = PairStatistics(LayerPair(1, 2), teacher_NT.shape[1], student_NS.shape[1], reservoir_rows=rows)
    part = assign_parts(range(responses), held_out)
    n = len(teacher_NT)
    response_N = np.arange(n) * responses // n
    part_N = np.array([part[r] for r in response_N.tolist()])
    stats.update(teacher_NT, student_NS, response_N, np.arange(n), part_N)
    return stats


STUDENT = ModelIdentity("qwen3", 2, 4, 61, tokenizer="aa", name="small")
TEACHER = ModelIdentity("qwen3", 3, 6, 61, tokenizer="bb", weights="w", name="large")


def maps(seed: int, rank: int = 2, bias: bool = True) -> LayerBridge:
    generator = torch.Generator().manual_seed(seed)
    mean, basis, projector, offset = (
        torch.randn(shape, generator=generator) for shape in ((6,), (rank, 6), (rank, 4), (rank,))
    )
    return LayerBridge(mean, basis, projector, offset if bias else None)
