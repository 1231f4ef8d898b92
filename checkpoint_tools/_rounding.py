"""Makes a damaged student from a model: the weights of its layers are rounded to a few bits.

Every group of consecutive weights of a matrix's row is rounded to the nearest of 2^bits equally spaced values between
the group's smallest and its largest weight. The result is a model in full precision that computes what a quantised one
computes: distillation then trains these weights back without further rounding. Embeddings, the head and norms are kept.
"""

from __future__ import annotations

from pathlib import Path

import torch

from nemo_oprd.megatron.weights.hf import HFCheckpoint
from nemo_oprd.megatron.weights.hf_export import write_hf_model
from nemo_oprd.megatron.weights.megatron_checkpoint import ignored_tensors
from nemo_oprd.models import ModelSpec, read_model_spec


def round_matrix(weight_OI: torch.Tensor, bits: int, group: int) -> torch.Tensor:
    """The matrix [O, I] with every group of `group` weights of a row rounded to 2^bits values, in its own dtype.

    Raises:
        ValueError: I is not a multiple of `group`, or there is less than 1 bit.
    """
    outputs, inputs = weight_OI.shape
    if bits < 1 or group < 1 or inputs % group:
        raise ValueError(
            f"{bits} bits and groups of {group} for rows of {inputs} weights: expected at least 1 bit, and groups that "
            "divide a row; choose others"
        )
    grouped = weight_OI.double().view(outputs, inputs // group, group)
    low = grouped.amin(-1, keepdim=True)
    step = (grouped.amax(-1, keepdim=True) - low) / (2**bits - 1)
    levels = torch.where(step > 0, ((grouped - low) / step).round(), 0.0)
    return (low + levels * step).view_as(weight_OI).to(weight_OI.dtype)


def round_layers(source: Path, target: Path, bits: int, group: int) -> ModelSpec:
    """Writes the model in `source` with the matrices of all its layers rounded to `target`; returns its architecture.

    Tensors that this project leaves out of a model are left out here, too.

    Raises:
        ValueError: `source` is no model of a known family, or has tensors that would be lost, or as `round_matrix`.
    """
    spec = read_model_spec(source)
    checkpoint = HFCheckpoint(source)

    def rounded(name: str) -> torch.Tensor:
        value = checkpoint[name]
        return round_matrix(value, bits, group) if name.startswith("model.layers.") and value.dim() == 2 else value

    names = sorted(set(checkpoint.keys()).difference(ignored_tensors(checkpoint, spec)))
    write_hf_model(((name, rounded(name)) for name in names), source, target, spec.torch_dtype)
    return read_model_spec(target)
