"""Makes a shallower student from a model: leaves out the layers that change their input least.

The influence of a layer on a token is 1 - cos(input of the layer, output of the layer): a layer with a small influence
passes its input on almost unchanged (block influence, arXiv 2403.03853). Distillation then teaches the remaining layers
to stand in for the others. Everything here is a plain Hugging Face model in one process.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path

import torch

from nemo_oprd.megatron.weights.hf import HFCheckpoint, transformers_model
from nemo_oprd.megatron.weights.hf_export import write_hf_model
from nemo_oprd.megatron.weights.megatron_checkpoint import ignored_tensors
from nemo_oprd.models import ModelSpec, read_model_spec
from nemo_oprd.runtime.files import read_json
from nemo_oprd.runtime.gpus import check_promise

_LAYER = re.compile(r"^model\.layers\.(\d+)\.")


@torch.no_grad()
def layer_influences(directory: Path, token_ids: Iterable[Sequence[int]], dtype: torch.dtype) -> list[float]:
    """The mean influence of every layer, over all tokens.

    Args:
        token_ids: ids of the texts, one sequence at a time.
        dtype: in which the model runs; the cosines are computed in float32.

    Returns:
        One number per layer, from 0 (the layer changes only its input's length) to 2.

    Raises:
        ValueError: there is no text, or torch does not see the GPUs that a launcher gives.
    """
    check_promise()
    model = transformers_model(directory, dtype)
    place = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    layers = model.eval().to(place).model.layers
    sums = torch.zeros(len(layers), dtype=torch.float64, device=place)
    tokens = 0

    def measure(number: int, _: torch.nn.Module, args: tuple, kwargs: dict, output: torch.Tensor | tuple) -> None:
        before = args[0] if args else kwargs["hidden_states"]
        after = output[0] if isinstance(output, tuple) else output
        sums[number] += (1 - torch.cosine_similarity(before.float(), after.float(), dim=-1)).double().sum()

    for number, layer in enumerate(layers):
        layer.register_forward_hook(partial(measure, number), with_kwargs=True)
    for ids in token_ids:
        if len(ids):
            model.model(input_ids=torch.tensor([list(ids)], device=place), use_cache=False)
            tokens += len(ids)
    if not tokens:
        raise ValueError("there is no text to measure the layers' influence on; expected prompts: give a file of them")
    return (sums / tokens).tolist()


def layers_to_keep(influences: Sequence[float], keep: int) -> list[int]:
    """The `keep` layers (1-based, ascending) of most influence; of equal ones the lower layer.

    Raises:
        ValueError: the model does not have so many layers.
    """
    if not 1 <= keep <= len(influences):
        raise ValueError(f"{keep} layers to keep, expected 1 to {len(influences)}, the model's number: choose others")
    by_influence = sorted(range(len(influences)), key=lambda layer: (-influences[layer], layer))
    return sorted(layer + 1 for layer in by_influence[:keep])


def prune_layers(source: Path, target: Path, kept: Sequence[int]) -> ModelSpec:
    """Writes the layers `kept` (1-based, ascending) of the model in `source` to `target`; returns its architecture.

    Weights keep their dtype and their bits. The tokenizer is copied.

    Raises:
        ValueError: `source` is no model of a known family, has tensors that would be lost, or `kept` are not layers of
            it.
    """
    spec = read_model_spec(source)
    if list(kept) != sorted(set(kept)) or not kept or not 1 <= kept[0] <= kept[-1] <= spec.num_layers:
        expected = f"expected ascending numbers in 1..{spec.num_layers}"
        raise ValueError(f"layers to keep {list(kept)}: {expected}; correct them")
    if spec.experts is not None and not all(spec.experts.sparse):
        raise ValueError(
            f"{source}: only some of its layers have experts, by their numbers, which change when layers are left out; "
            "expected a model whose layers are of one kind: choose another model"
        )
    hf_config = read_json(source / "config.json", "an object", "copy the file from the model's source again")
    changes: dict[str, object] = {"num_hidden_layers": len(kept)}
    if isinstance(hf_config.get("layer_types"), list):
        changes["layer_types"] = [hf_config["layer_types"][layer - 1] for layer in kept]
    write_hf_model(_kept_tensors(source, spec, kept), source, target, spec.torch_dtype, config_changes=changes)
    return read_model_spec(target)


def kept_map(kept: Sequence[int], num_layers: int) -> str:
    """The setting that compares every layer of a pruned student with the teacher's layer whose weights it has.

    The last layers (`num_layers`: the teacher's) are compared with each other, because their states are taken after the
    final norm.

    >>> kept_map([1, 3, 5], 6)
    'loss.representation.layer_map={1:1,2:3,3:6}'
    """
    matched = [*kept[:-1], num_layers]
    pairs = ",".join(f"{student}:{teacher}" for student, teacher in enumerate(matched, start=1))
    return f"loss.representation.layer_map={{{pairs}}}"


def _kept_tensors(source: Path, spec: ModelSpec, kept: Sequence[int]) -> Iterator[tuple[str, torch.Tensor]]:
    """(New name, tensor) of the tensors outside of layers and of the kept layers, which are numbered anew.

    Tensors that this project leaves out of a model are left out here, too.
    """
    checkpoint = HFCheckpoint(source)
    number = {layer - 1: position for position, layer in enumerate(kept)}
    for name in sorted(set(checkpoint.keys()).difference(ignored_tensors(checkpoint, spec))):
        found = _LAYER.match(name)
        if found is None:
            yield name, checkpoint[name]
        elif int(found[1]) in number:
            yield f"model.layers.{number[int(found[1])]}.{name[found.end() :]}", checkpoint[name]
