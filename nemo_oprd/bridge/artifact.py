"""The bridge as two files in a directory: `bridge.safetensors` holds the maps, `bridge.json` describes them.

The tensors of a layer pair are `s{i}.t{j}.teacher_mean` [Dt], `s{i}.t{j}.teacher_basis` [R, Dt],
`s{i}.t{j}.student_projector` [R, Ds] and, where there is one, `s{i}.t{j}.student_bias` [R]. The student layer i and the
teacher layer j count from 1 over the whole model. A full-width bridge (R = Dt, `"full_width": true` in the manifest)
has the student's tensors only.

Loading compares everything that the files say with the run: with a bridge of other models, layers or positions the
loss falls, too, but the student learns nothing. The manifest holds the hash of the tensors: the two files are replaced
one after the other, and a directory in which only one of them was replaced is refused.
"""

from __future__ import annotations

import hashlib
import json
import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save

from nemo_oprd.bridge.covariance import LayerPair
from nemo_oprd.bridge.maps import Bridge, CapturePoint, LayerBridge, ModelIdentity
from nemo_oprd.runtime.files import read_json, replacing, write_atomically

TENSORS, MANIFEST = "bridge.safetensors", "bridge.json"
FORMAT = 1


def save_bridge(bridge: Bridge, directory: str | Path) -> None:
    """Writes both files; each appears complete or not at all. Other files in the directory are kept.

    Raises:
        ValueError: the tensors contradict the bridge's own description.
    """
    tensors = {name: value.detach().cpu().float().contiguous() for name, value in bridge.tensors().items()}
    models = bridge.student, bridge.teacher
    checked_pairs(tensors, list(bridge.pairs), bridge.rank, *models, "this bridge", full_width=bridge.full_width)
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    with replacing(directory / TENSORS) as partial:
        partial.write_bytes(save(tensors))
    write_manifest(bridge, directory)


def write_manifest(bridge: Bridge, directory: str | Path) -> None:
    """Writes `bridge.json` beside the existing `bridge.safetensors`, which must hold the tensors of `bridge`."""
    directory = Path(directory)
    manifest = {
        "format": FORMAT,
        "rank": bridge.rank,
        **({"full_width": True} if bridge.full_width else {}),
        "layer_pairs": [list(pair) for pair in sorted(bridge.pairs)],
        "student": asdict(bridge.student),
        "teacher": asdict(bridge.teacher),
        "capture": asdict(bridge.capture),
        "sha256": hashlib.sha256((directory / TENSORS).read_bytes()).hexdigest(),
        "report": bridge.report,
    }
    write_atomically(directory / MANIFEST, json.dumps(manifest, indent=1) + "\n")


def describe_tensors(
    directory: str | Path, student: ModelIdentity, teacher: ModelIdentity, capture: CapturePoint
) -> Bridge:
    """Reads a bridge from `bridge.safetensors` alone: the tensors' names and shapes give the layer pairs and the rank.

    It serves tensors that another program made; `write_manifest(describe_tensors(...), directory)` turns them into an
    artifact. Errors as in `load_bridge`.
    """
    file = Path(directory) / TENSORS
    tensors, _ = _read_tensors(file)
    pairs, rank = [], 0
    for name, value in tensors.items():
        if name.endswith(".teacher_basis"):
            key = name.removesuffix(".teacher_basis")
            numbers = re.fullmatch(r"s(\d+)\.t(\d+)", key)
            if numbers is None:
                raise ValueError(f"{file}: tensor group {key!r}, expected names like s2.t3.teacher_basis")
            pairs.append(LayerPair(*map(int, numbers.groups())))
            rank = value.shape[0]
    maps = checked_pairs(tensors, pairs, rank, student, teacher, str(file))
    return Bridge(rank, maps, student, teacher, capture)


def open_bridge(
    directory: Path, *, student: ModelIdentity, teacher: ModelIdentity, layers: Sequence[int], capture: CapturePoint
) -> Bridge:
    """Returns a run's bridge; the run takes its layer map.

    Tensors without a manifest were made by another program. Only their names, shapes and values can be checked, and a
    warning says so.

    Args:
        layers: the supervised student layers, each of which the bridge must have.

    Raises:
        ValueError: as `load_bridge`, or the bridge lacks a layer.
    """
    if (directory / TENSORS).is_file() and not (directory / MANIFEST).is_file():
        warnings.warn(
            f"{directory}: no {MANIFEST} beside {TENSORS} says which models and positions the bridge was made for; "
            "only shapes are checked",
            stacklevel=2,
        )
        bridge = describe_tensors(directory, student, teacher, capture)
    else:
        bridge = load_bridge(directory, student=student, teacher=teacher, capture=capture)
    for layer in layers:
        if layer not in bridge.layers:
            raise ValueError(
                f"{directory}: no maps for student layer {layer}, the bridge has student layers "
                f"{sorted(bridge.layers)}; change loss.representation.layers, or fit again with this layer"
            )
    return bridge


def load_bridge(
    directory: str | Path,
    *,
    student: ModelIdentity | None = None,
    teacher: ModelIdentity | None = None,
    capture: CapturePoint | None = None,
) -> Bridge:
    """Reads and checks a bridge.

    Args:
        student, teacher: the models of this run; None is not compared, nor are fields that are None on either side.
        capture: the hidden states of this run; None is not compared.

    Raises:
        ValueError: a file is missing or damaged, a tensor is missing, superfluous, of the wrong shape or not finite, or
            the bridge was made for another model or other hidden states than those of this run.
    """
    directory = Path(directory)
    tensors, digest = _read_tensors(directory / TENSORS)
    manifest = _read_manifest(directory / MANIFEST)
    where = str(directory)
    if manifest["sha256"] != digest:
        raise ValueError(
            f"{where}: {MANIFEST} belongs to tensors with sha256 {manifest['sha256'][:12]}.., {TENSORS} has "
            f"{digest[:12]}..; the two files belong to different fits: copy both again, or rerun fit-bridge"
        )
    try:
        pairs = [LayerPair(int(s), int(t)) for s, t in manifest["layer_pairs"]]
        models = ModelIdentity(**manifest["student"]), ModelIdentity(**manifest["teacher"])
        taken = CapturePoint(**manifest["capture"])
        made_rank, full_width = int(manifest["rank"]), bool(manifest.get("full_width", False))
    except (TypeError, ValueError) as error:
        raise ValueError(f"{where}/{MANIFEST}: {error}; expected a manifest that fit-bridge wrote") from error
    maps = checked_pairs(tensors, pairs, made_rank, *models, where, full_width=full_width)
    bridge = Bridge(made_rank, maps, *models, taken, manifest["report"])
    _check_models(bridge, {"student": student, "teacher": teacher}, where)
    for key, value in asdict(capture).items() if capture else ():
        if getattr(taken, key) != value:
            raise ValueError(
                f"{where}: made from hidden states with {key}={getattr(taken, key)}, this run has "
                f"loss.representation.{key}={value}; set it to {getattr(taken, key)}, or fit again"
            )
    return bridge


def _check_models(bridge: Bridge, expected: Mapping[str, ModelIdentity | None], where: str) -> None:
    for role, ours in expected.items():
        theirs = getattr(bridge, role)
        for key, value in asdict(ours).items() if ours else ():
            made = getattr(theirs, key)
            if key != "name" and value is not None and made is not None and value != made:
                raise ValueError(
                    f"{where}: made for a {role} with {key}={made} ({theirs.name or 'unnamed'}), this run's {role} has "
                    f"{key}={value}; point bridge.path to a bridge of these models or fit one with fit-bridge"
                )


def checked_pairs(
    tensors: Mapping[str, torch.Tensor],
    pairs: list[LayerPair],
    rank: int,
    student: ModelIdentity,
    teacher: ModelIdentity,
    where: str,
    *,
    full_width: bool = False,
) -> dict[LayerPair, LayerBridge]:
    """Checks tensors, by their names in the file; returns the maps of every pair, float32.

    Raises:
        ValueError: a tensor is missing, superfluous, of the wrong shape or not finite, or `pairs` or `rank` do not fit
            the models.
    """
    if not pairs or len({pair.student for pair in pairs}) != len(pairs):
        raise ValueError(
            f"{where}: layer pairs {[tuple(p) for p in pairs]}; expected at least one, and each student layer once"
        )
    limit = min(student.hidden_size, teacher.hidden_size)
    if full_width and rank != teacher.hidden_size:
        raise ValueError(f"{where}: full-width maps of rank {rank}, expected the teacher's width {teacher.hidden_size}")
    if not full_width and not 1 <= rank <= limit:
        raise ValueError(f"{where}: rank {rank}, expected 1..{limit}, the smaller of the two widths")
    shapes = {
        "teacher_mean": (teacher.hidden_size,),
        "teacher_basis": (rank, teacher.hidden_size),
        "student_projector": (rank, student.hidden_size),
        "student_bias": (rank,),
    }
    if full_width:
        del shapes["teacher_mean"], shapes["teacher_basis"]
    known = {f"{pair.key}.{name}" for pair in pairs for name in shapes}
    if extra := sorted(set(tensors) - known):
        raise ValueError(f"{where}: tensors {extra[:4]} belong to none of the layer pairs {[p.key for p in pairs]}")
    result = {}
    for pair in pairs:
        if not (1 <= pair.student <= student.num_layers and 1 <= pair.teacher <= teacher.num_layers):
            raise ValueError(
                f"{where}: layer pair {pair.key} is outside models of {student.num_layers} and {teacher.num_layers} "
                "layers (student, teacher); layers are 1-based"
            )
        parts = {}
        for name, shape in shapes.items():
            value = tensors.get(f"{pair.key}.{name}")
            if value is None and name != "student_bias":
                raise ValueError(f"{where}: {pair.key}.{name} is missing; expected a tensor of shape {list(shape)}")
            if value is None:
                continue
            if tuple(value.shape) != shape:
                raise ValueError(
                    f"{where}: {pair.key}.{name} is {list(value.shape)}, expected {list(shape)} (rank {rank}, student "
                    f"width {student.hidden_size}, teacher width {teacher.hidden_size}); the tensor belongs to another "
                    "bridge: copy the files again, or fit again"
                )
            if bad := int((~torch.isfinite(value)).sum()):
                raise ValueError(
                    f"{where}: {pair.key}.{name} (student layer {pair.student}, teacher layer {pair.teacher}) has "
                    f"{bad} values that are not finite; fit the bridge again"
                )
            parts[name] = value.float()
        result[pair] = LayerBridge(**parts)
    return result


def _read_tensors(file: Path) -> tuple[dict[str, torch.Tensor], str]:
    if not file.is_file():
        raise ValueError(f"{file}: no such file; expected a bridge made by nemo-oprd fit-bridge in {file.parent}")
    data = file.read_bytes()
    try:
        return load(data), hashlib.sha256(data).hexdigest()
    except SafetensorError as error:
        raise ValueError(f"{file}: not a readable safetensors file ({error}); copy it again") from error


def _read_manifest(file: Path) -> dict[str, Any]:
    if not file.is_file():
        raise ValueError(
            f"{file}: no such file; a bridge is {TENSORS} and {MANIFEST} together. For tensors made elsewhere, "
            "nemo_oprd.bridge.artifact.write_manifest writes it"
        )
    manifest = read_json(file, "a manifest that fit-bridge wrote", "copy it again")
    needed = ("format", "rank", "layer_pairs", "student", "teacher", "capture", "sha256", "report")
    missing = [key for key in needed if key not in manifest]
    if missing:
        raise ValueError(f"{file}: {missing} are missing; expected a manifest that fit-bridge wrote")
    if manifest["format"] != FORMAT:
        raise ValueError(f"{file}: format {manifest['format']}, this version reads {FORMAT}; fit the bridge again")
    return manifest
