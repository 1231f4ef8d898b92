"""Diagonal and low-rank maps of a teacher's hidden states, as bridges between models of one width.

A squared difference of hidden states of a real language model is mostly that of a few massive dimensions. A bridge
whose maps are the same for both models compares something else with no new code: the states in units of each
dimension's own standard deviation, or without the massive dimensions, or on the leading principal directions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

# a dimension is left out if its mean square is more than this many times the median dimension's
OUTLIER = 100.0
PRINCIPAL = 64


@torch.no_grad()
def teacher_moments(model: Any, sequences: Sequence[tuple[list[int], int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Means [L, D] and second moments [L, D, D], float64, of all layers at response tokens; the last one is normed.

    Args:
        sequences: (all ids, number of prompt ids) each.
    """
    sums, squares, rows = torch.zeros(0), torch.zeros(0), 0
    for ids, prompt in sequences:
        states = model.model(torch.tensor([ids]), output_hidden_states=True, use_cache=False).hidden_states[1:]
        states_LND = torch.stack([state[0, prompt:] for state in states]).double()
        each = states_LND.sum(1), torch.einsum("lnd,lne->lde", states_LND, states_LND)
        sums, squares = (sums + each[0], squares + each[1]) if rows else each
        rows += states_LND.shape[1]
    return sums / rows, squares / rows


def standardized(mean_D: torch.Tensor, second_DD: torch.Tensor) -> torch.Tensor:
    """diag(1 / standard deviation): every dimension in its own unit."""
    variance_D = second_DD.diagonal() - mean_D.square()
    return torch.diag(variance_D.clamp_min(1e-12).rsqrt())


def without_outliers(mean_D: torch.Tensor, second_DD: torch.Tensor) -> torch.Tensor:
    """diag(1 or 0): 0 for dimensions whose mean square is far above the median dimension's."""
    square_D = second_DD.diagonal()
    return torch.diag((square_D <= OUTLIER * square_D.median()).double())


def principal(mean_D: torch.Tensor, second_DD: torch.Tensor) -> torch.Tensor:
    """The leading eigenvectors of the covariance, [PRINCIPAL, D]."""
    covariance_DD = second_DD - torch.outer(mean_D, mean_D)
    return torch.linalg.eigh(covariance_DD).eigenvectors.flip(-1).T[:PRINCIPAL].contiguous()


def principal_whitened(mean_D: torch.Tensor, second_DD: torch.Tensor) -> torch.Tensor:
    """The leading principal coordinates, each in units of its standard deviation, [PRINCIPAL, D]."""
    covariance_DD = second_DD - torch.outer(mean_D, mean_D)
    values, vectors = torch.linalg.eigh(covariance_DD)
    leading = vectors.flip(-1).T[:PRINCIPAL]
    return leading / values.flip(-1)[:PRINCIPAL].clamp_min(1e-12).sqrt()[:, None]


MAPS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "standardized": standardized,
    "without_outliers": without_outliers,
    "principal": principal,
    "principal_whitened": principal_whitened,
}


def write_bridge(
    kind: str,
    moments: tuple[torch.Tensor, torch.Tensor],
    layer_map: dict[int, int],
    models: tuple[Path, Path],
    to: Path,
) -> None:
    """Writes the bridge in which both models' states are mapped by `MAPS[kind]` of the teacher's moments.

    Args:
        layer_map: student layer -> teacher layer.
        models: directories of student and teacher.
    """
    from nemo_oprd.bridge.artifact import save_bridge
    from nemo_oprd.bridge.covariance import LayerPair
    from nemo_oprd.bridge.maps import Bridge, CapturePoint, LayerBridge, ModelIdentity
    from nemo_oprd.models import read_model_spec

    pairs = {}
    for student, teacher in layer_map.items():
        map_RD = MAPS[kind](moments[0][teacher - 1], moments[1][teacher - 1]).float()
        mean_D = torch.zeros(map_RD.shape[1])
        pairs[LayerPair(student, teacher)] = LayerBridge(mean_D, map_RD, map_RD.clone())
    identities = [
        ModelIdentity(spec.model_type, spec.num_layers, spec.hidden_size, spec.vocab_size)
        for spec in map(read_model_spec, models)
    ]
    rank = MAPS[kind](moments[0][-1], moments[1][-1]).shape[0]
    save_bridge(Bridge(rank, pairs, identities[0], identities[1], CapturePoint()), to)
