"""The checks of the models' weights as their files hold them: the same twice, damaged, or in another order."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median

import numpy as np
import torch

from nemo_oprd.run.models import ModelFiles
from nemo_oprd.tools.doctor.findings import Finding
from nemo_oprd.tools.doctor.layer_map import LayerMap, origins

_VOCABULARY = ("model.embed_tokens.", "lm_head.")
_LAYER = re.compile(r"model\.layers\.(\d+)\.(.*)")
# the matrix by which layers are recognised: every family has it, and its shape stays when feed-forward blocks shrink
_SIGNATURE = "self_attn.o_proj.weight"
SIGNATURE_ROWS = 64
# root mean squares of one matrix differ by up to 10 between the layers of real models
SCALE, ZERO_ROWS = 100.0, 0.5


@dataclass
class WeightSurvey:
    """The result of reading a model's tensors once; layers count from 1."""

    # name of a layer's matrix without its layer -> {layer: root mean square}
    scales: dict[str, dict[int, float]] = field(default_factory=lambda: defaultdict(dict))
    # layer -> some of the values of one of its matrices
    signatures: dict[int, torch.Tensor] = field(default_factory=dict)
    damage: list[tuple[str, str]] = field(default_factory=list)  # (code, what is wrong) of single tensors


def survey(model: ModelFiles) -> WeightSurvey:
    """Reads all tensors once; of a layer's experts the first one."""
    read, result = model.open(), WeightSurvey()
    for name in tensor_names(model):
        expert = re.search(r"\.experts\.(\d+)\.", name)
        if expert is not None and expert[1] != "0":
            continue
        tensor = read(name)
        sizes = torch.linalg.vector_norm(tensor.reshape(len(tensor), -1).float(), dim=1)
        scale = float(sizes.square().mean().sqrt()) / (tensor[0].numel() ** 0.5)
        layer, is_bias = _LAYER.fullmatch(name), name.endswith(".bias")
        zero_rows = float((sizes == 0).float().mean())
        if not np.isfinite(scale):
            result.damage.append(("weights-not-finite", f"{name} holds NaN or infinity"))
        elif scale == 0 and not is_bias:
            result.damage.append(("weights-zero", f"{name} is zero"))
        elif zero_rows > ZERO_ROWS and tensor.ndim > 1 and layer is not None:
            result.damage.append(("weights-zero", f"{zero_rows:.0%} of the rows of {name} are zero"))
        elif layer is not None and tensor.ndim > 1:
            result.scales[layer[2]][int(layer[1]) + 1] = scale
        if layer is not None and layer[2] == _SIGNATURE:
            rows = tensor[:: max(1, len(tensor) // SIGNATURE_ROWS)]
            result.signatures[int(layer[1]) + 1] = rows.reshape(-1).float()
    return result


def damaged_weights(role: str, found: WeightSurvey) -> Iterator[Finding]:
    """Checks for tensors that no training leaves: a damaged model computes, and teaches, without an error."""
    check, damage = f"{role}'s weights", list(found.damage)
    for name, scales in found.scales.items():
        for layer, scale in scales.items():
            others = [value for other, value in scales.items() if other != layer]
            if others and not 1 / SCALE < scale / median(others) < SCALE:
                text = f"{name} of layer {layer} has values of {scale:.1e}, in the other layers {median(others):.1e}"
                damage.append(("weights-scale", text))
    layers = sorted(found.signatures)
    for one, other in pairwise(layers):
        if torch.equal(found.signatures[one], found.signatures[other]) and found.signatures[one].any():
            damage.append(("layers-repeated", f"layers {one} and {other} have the same {_SIGNATURE}"))
    for code in dict.fromkeys(code for code, _ in damage):
        texts = [text for of, text in damage if of == code]
        more = f" (and {len(texts) - 1} more)" if len(texts) > 1 else ""
        whole = code == "weights-not-finite" or any(text.endswith(" is zero") for text in texts)
        text = f"{texts[0]}{more}; expected weights as training leaves them; fix: the files of the model's source"
        yield Finding(check, "wrong" if whole else "warning", text, {"tensors": texts}, code=code)
    if not damage:
        yield Finding(check, "ok", f"no tensor of the {role} is zero, infinite, or of another size than its like")


def layer_origins(student: WeightSurvey, teacher: WeightSurvey, layers: LayerMap) -> Finding:
    """Runs the check of the layer map that needs no forward pass (`layer_map.origins`)."""
    cosines = np.zeros(layers.depths)
    for i, ours in student.signatures.items():
        for j, theirs in teacher.signatures.items():
            if ours.shape == theirs.shape:
                cosines[i - 1, j - 1] = float(torch.nn.functional.cosine_similarity(ours, theirs, dim=0))
    return origins(np.nan_to_num(cosines), layers)


def same_weights(student: ModelFiles, teacher: ModelFiles, dtype: torch.dtype, *, reads_more: bool) -> Finding:
    """Checks whether student and teacher are the same model.

    A path given twice, or a copy under another name, gives a loss of 0 and a run that learns nothing. Measured tensor
    by tensor in the run's precision, up to the first difference; the vocabularies may be padded differently. Equal
    weights are wrong unless the teacher reads more than the student (`reads_more`: there is a `teacher.prompt`).
    """
    check, one, other = "same weights", tensor_names(student), tensor_names(teacher)
    if one != other or student.spec.hidden_size != teacher.spec.hidden_size:
        return Finding(check, "ok", "student and teacher have different architectures")
    read_student, read_teacher = student.open(), teacher.open()
    for number, name in enumerate(one):
        ours, theirs = read_student(name).to(dtype), read_teacher(name).to(dtype)
        if ours.shape[1:] == theirs.shape[1:] and name.startswith(_VOCABULARY):
            rows = min(len(ours), len(theirs))
            ours, theirs = ours[:rows], theirs[:rows]
        if ours.shape != theirs.shape or not torch.equal(ours, theirs):
            numbers = {"equal_tensors": number}
            if number and name.startswith(_VOCABULARY):
                text = f"the models differ in {name} alone, and all layers are equal; expected trained layers; fix: "
                text += "correct teacher.hf_path or student.hf_path"
                return Finding(check, "warning", text, numbers, code="same-layers")
            return Finding(check, "ok", f"the models differ, first in {name}", numbers)
    numbers = {"equal_tensors": len(one)}
    if reads_more:
        text = "student and teacher are the same model, but the teacher reads more than the student (teacher.prompt)"
        return Finding(check, "ok", text, numbers)
    text = f"{student.weights_directory} and {teacher.weights_directory} hold the same weights in all {len(one)} "
    text += "tensors, so the loss is 0 and nothing is learned; expected another model; fix: correct teacher.hf_path or "
    text += "student.hf_path, or give the teacher privileged information with teacher.prompt"
    return Finding(check, "wrong", text, numbers, code="same-weights")


def tensor_names(model: ModelFiles) -> list[str]:
    """The model's HF tensors, those of the vocabulary last: they are large, and often untrained."""
    mappings = model.spec.family.param_mappings(model.spec)
    names = [name for mapping in mappings for name in mapping.hf]
    return sorted(names, key=lambda name: name.startswith(_VOCABULARY))
