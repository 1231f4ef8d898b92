"""Imports a bridge that the paper's own code made (`ps_bank.pt`).

The file is a pickle. It is opened with `weights_only=True`, which runs no code from it. Its layers count from 0, ours
from 1. Its hidden states were taken at the response token, those of the last layer after the final norm. The student
was not centred, so the maps have no bias. Files whose maps are not frozen and linear are refused.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from nemo_oprd.bridge.artifact import checked_pairs
from nemo_oprd.bridge.covariance import LayerPair
from nemo_oprd.bridge.maps import Bridge, CapturePoint, ModelIdentity
from nemo_oprd.runtime.files import why_no_file

# optional settings of the file, each with the only value that gives frozen linear maps
REQUIRED_SETTINGS = {"projector_type": "linear", "subspace_mode": "full"}


def import_ps_bank(path: str | Path, student: ModelIdentity, teacher: ModelIdentity) -> Bridge:
    """The bridge in the file `path` for these two models; `save_bridge` writes it as an artifact.

    The file is expected to hold `rank`, `layer_pairs` (pairs, or {"student_layer", "teacher_layer"}), `state_dict` with
    "projectors.s{i}_t{j}.weight" [R, Ds], and under the keys "s{i}_t{j}" `frozen_pt_weights` [R, Dt] and
    `frozen_pt_means` [Dt].

    Raises:
        ValueError: the file holds something else, or its maps have other shapes than these models need.
    """
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"{path}: {why_no_file(path, '.pt')}; expected the ps_bank.pt that the paper's code wrote")
    try:
        bank = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # damaged bytes make torch.load raise many types
        raise ValueError(
            f"{path}: not readable as tensors and plain values ({type(error).__name__}); expected nothing else in "
            "the file, because no code from it is run: copy it again, or save it again without other objects"
        ) from error
    needed = ("rank", "layer_pairs", "state_dict", "frozen_pt_weights", "frozen_pt_means")
    missing = [key for key in needed if not isinstance(bank, dict) or key not in bank]
    if missing:
        raise ValueError(
            f"{path}: {missing} are missing; expected a ps_bank.pt with {list(needed)}: name the right file"
        )
    for key, only in REQUIRED_SETTINGS.items():
        if bank.get(key, only) != only:
            raise ValueError(
                f"{path}: {key}={bank[key]!r}, expected {only!r}: other values do not stand for frozen linear maps and "
                "cannot be imported; make the bridge with fit-bridge"
            )
    kinds = dict.fromkeys(("state_dict", "frozen_pt_weights", "frozen_pt_means"), dict) | {"layer_pairs": list | tuple}
    for key, kind in kinds.items():
        if not isinstance(bank[key], kind):
            expected = "a dictionary of tensors" if kind is dict else "a list of layer pairs such as [(0, 2)]"
            raise ValueError(f"{path}: {key} is {type(bank[key]).__name__}, expected {expected}; copy the file again")
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
                raise ValueError(
                    f"{path}: {group}[{key!r}] is {type(value).__name__}, expected a tensor; copy the file again"
                )
            tensors[f"{pair.key}.{name}"] = value
    used = {f"projectors.s{s - 1}_t{t - 1}.weight" for s, t in pairs}
    if unused := sorted(set(bank["state_dict"]) - used):
        raise ValueError(
            f"{path}: state_dict has {unused[:4]}, which no layer pair uses; expected one weight per layer pair: a "
            "bias or a projector of several layers cannot be imported, make the bridge with fit-bridge"
        )
    rank = bank["rank"]
    if type(rank) is not int:
        raise ValueError(f"{path}: rank is {rank!r}, expected an integer; correct the file")
    maps = checked_pairs(tensors, pairs, rank, student, teacher, str(path))
    return Bridge(rank, maps, student, teacher, CapturePoint("token", True), {"imported_from": path.name})


def _zero_based(entry: Any, path: Path) -> tuple[int, int]:
    values = (entry.get("student_layer"), entry.get("teacher_layer")) if isinstance(entry, dict) else entry
    if not isinstance(values, list | tuple) or len(values) != 2 or not all(type(value) is int for value in values):
        raise ValueError(f"{path}: layer pair {entry!r}, expected two layer numbers such as (0, 2); correct the file")
    return values[0], values[1]
