"""Reads a bridge made by the paper's own code (`ps_bank.pt`), and refuses what would mean something else here.

The file is a pickle; it is opened with `weights_only=True`, which runs no code from it. Layers are 0-based there.
Hidden states were taken at the response token, the last layer's after the final norm; the student was not centred.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from nemo_oprd.bridge.artifact import checked_pairs
from nemo_oprd.bridge.covariance import LayerPair
from nemo_oprd.bridge.maps import Bridge, CapturePoint, ModelIdentity

# optional settings of the file, and the only value of each that gives frozen linear maps
ONLY = {"projector_type": "linear", "subspace_mode": "full"}


def import_ps_bank(path: str | Path, student: ModelIdentity, teacher: ModelIdentity) -> Bridge:
    """The bridge in `path` for these two models; `save_bridge` makes it an artifact.

    Expects `rank`, `layer_pairs` (pairs, or {"student_layer", "teacher_layer"}), `state_dict` with
    "projectors.s{i}_t{j}.weight" [r, d_S], and `frozen_pt_weights` [r, d_T] and `frozen_pt_means` [d_T] by "s{i}_t{j}".

    Raises:
        ValueError: the file holds something else, or maps of other shapes than these models need.
    """
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"{path}: no such file; expected the ps_bank.pt of the paper's pre-experiment")
    try:
        bank = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # whatever damaged or foreign bytes give
        raise ValueError(
            f"{path}: not readable as tensors and plain values ({type(error).__name__}); nothing else is unpickled"
        ) from error
    needed = ("rank", "layer_pairs", "state_dict", "frozen_pt_weights", "frozen_pt_means")
    missing = [key for key in needed if not isinstance(bank, dict) or key not in bank]
    if missing:
        raise ValueError(f"{path}: {missing} are missing; expected a ps_bank.pt with {list(needed)}")
    for key, only in ONLY.items():
        if bank.get(key, only) != only:
            raise ValueError(
                f"{path}: {key}={bank[key]!r}, only {only!r} can be imported: the others are not frozen linear maps"
            )
    tensors: dict[str, Any] = {}
    pairs = []
    for entry in bank["layer_pairs"]:
        i, j = _zero_based(entry, path)
        pair = LayerPair(i + 1, j + 1)
        pairs.append(pair)
        for name, group, key in (
            ("student_projector", "state_dict", f"projectors.s{i}_t{j}.weight"),
            ("teacher_basis", "frozen_pt_weights", f"s{i}_t{j}"),
            ("teacher_mean", "frozen_pt_means", f"s{i}_t{j}"),
        ):
            value = bank[group].get(key)
            if not isinstance(value, torch.Tensor):
                raise ValueError(f"{path}: {group}[{key!r}] is {type(value).__name__}, expected a tensor")
            tensors[f"{pair.key}.{name}"] = value
    used = {f"projectors.s{s - 1}_t{t - 1}.weight" for s, t in pairs}
    if unused := sorted(set(bank["state_dict"]) - used):
        raise ValueError(
            f"{path}: state_dict has {unused[:4]}, which no layer pair uses; a bias or a projector of several layers "
            "can't be imported"
        )
    rank = bank["rank"]
    if type(rank) is not int:
        raise ValueError(f"{path}: rank is {rank!r}, expected an integer")
    maps = checked_pairs(tensors, pairs, rank, student, teacher, str(path))
    return Bridge(rank, maps, student, teacher, CapturePoint("token", True), {"imported_from": path.name})


def _zero_based(entry: Any, path: Path) -> tuple[int, int]:
    values = (entry.get("student_layer"), entry.get("teacher_layer")) if isinstance(entry, dict) else tuple(entry)
    if len(values) != 2 or not all(type(value) is int for value in values):
        raise ValueError(f"{path}: layer pair {entry!r}, expected two layer numbers")
    return values
