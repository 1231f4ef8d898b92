"""A Megatron torch_dist checkpoint under HF names, read tensor by tensor in one process.

Reading follows the family's weight mappings and holds only a few tensors at a time. A Megatron checkpoint holds one
array per kind of parameter, with all layers stacked (`decoder.layers.mlp.linear_fc2.weight` [L, D, F]; F is the size of
the feed-forward block), cut into chunks. Megatron's loader takes from the chunks what its own layout needs, so a
checkpoint loads at any layout.

Left out: optimizer state, Megatron's older checkpoint formats, and writing (`checkpoint_tools/_convert.py`). A model
with a tensor that has no weight mapping is refused, so no tensor is dropped silently.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from nemo_oprd.megatron.param_names import TE_NAMES
from nemo_oprd.megatron.weights.hf import HFCheckpoint
from nemo_oprd.megatron.weights.torch_dist import open_torch_dist, read_megatron_tensor
from nemo_oprd.models import Family, ModelSpec, has_other_name, read_model_spec
from nemo_oprd.models.architecture import ParamMapping, Vocabulary, concatenated, stacked_part
from nemo_oprd.models.checkpoint_directory import checkpoint_directory, hf_directory
from nemo_oprd.models.complete_config import LEFT_OUT
from nemo_oprd.models.families import fused_name

# Prefixes that programs put before a model's keys ("model.", "model0.", "module."). No other prefix is accepted,
# because the optimizer's tensors end like the parameters to which they belong ("optimizer.state.exp_avg.decoder...").
_PREFIX = r"(?:(?:model|module)\d*\.)*"
# what a model's own keys begin with; a run's checkpoint also holds its optimizer, trained projectors, an average
_OF_THE_MODEL = re.compile(_PREFIX + r"(?:decoder|embedding|output_layer)\..*")
_OF_ONE_LAYER = re.compile(_PREFIX + r"decoder\.layers\.\d+\..*")


@dataclass(frozen=True)
class Parameter:
    """The place of one weight mapping's joined tensor in a torch_dist checkpoint.

    Attributes:
        key: name in the checkpoint, without a prefix and without a section's ending.
        shape: without vocabulary padding, and without the leading dimensions of the stored array (layers, experts).
        index, counts: place in these leading dimensions (the layer, the expert), and their sizes.
        sections: (ending of the key, rows) of the parts that are stored separately; empty if there is one, at `key`.
    """

    mapping: ParamMapping
    key: str
    shape: tuple[int, ...]
    index: tuple[int, ...] = ()
    counts: tuple[int, ...] = ()
    sections: tuple[tuple[str, int], ...] = ()

    @property
    def stored(self) -> list[tuple[str, tuple[int, ...]]]:
        """Returns (key, shape like `shape`) of each stored tensor; stacked along rows, they are the joined tensor."""
        if not self.sections:
            return [(self.key, self.shape)]
        return [(f"{self.key}.{name}", (rows, *self.shape[1:])) for name, rows in self.sections]


def stacks_layers(spec: ModelSpec) -> bool:
    """Returns whether Megatron stores a parameter of all layers in one array, which needs layers of one kind."""
    return spec.delta is None and not spec.layer_heads and (spec.experts is None or all(spec.experts.sparse))


def _shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Returns Megatron's name, without numbers of layers and experts -> shape of the joined tensor."""
    hidden, qkv = spec.hidden_size, (spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "embedding.word_embeddings.weight": (spec.vocab_size, hidden),
        "input_layernorm.weight": (hidden,),
        "self_attention.linear_qkv.weight": (qkv, hidden),
        "self_attention.linear_qkv.bias": (qkv,),
        "self_attention.q_layernorm.weight": (spec.head_dim,),
        "self_attention.k_layernorm.weight": (spec.head_dim,),
        "self_attention.linear_proj.weight": (hidden, spec.num_heads * spec.head_dim),
        "self_attention.linear_proj.bias": (hidden,),
        "pre_mlp_layernorm.weight": (hidden,),
        "mlp.linear_fc1.weight": (2 * spec.ffn_size, hidden),
        "mlp.linear_fc2.weight": (hidden, spec.ffn_size),
        "decoder.final_layernorm.weight": (hidden,),
        "output_layer.weight": (spec.vocab_size, hidden),
    }
    if spec.experts is not None:
        shapes |= {
            "mlp.router.weight": (spec.experts.count, hidden),
            "mlp.experts.experts.linear_fc1.weight": (2 * spec.experts.ffn_size, hidden),
            "mlp.experts.experts.linear_fc2.weight": (hidden, spec.experts.ffn_size),
        }
    return shapes


def checkpoint_parameters(spec: ModelSpec, *, stacked: bool | None = None) -> list[Parameter]:
    """Returns all parameters of a model, in the order of its weight mappings.

    Args:
        stacked: whether one array has a parameter of all layers; None: as this project writes them (`stacks_layers`).
    """
    stacked = stacks_layers(spec) if stacked is None else stacked
    parameters = []
    for mapping, name, shape in mapped_shapes(spec):
        if mapping.layer is None:
            parameters.append(Parameter(mapping, name, shape))
            continue
        index, counts = ((mapping.layer,), (spec.num_layers,)) if stacked else ((), ())
        if mapping.expert is not None:
            assert spec.experts is not None
            index, counts = (*index, mapping.expert), (*counts, spec.experts.count)
        fused = TE_NAMES.get(name, name)
        if fused.startswith("mlp.linear_fc1.") and spec.is_sparse(mapping.layer + 1):
            fused = name  # the norm before a router is stored by itself
        if spec.latent is not None and fused.startswith("self_attention.linear_qkv."):
            fused = name  # and so is the norm before latent attention's two projections
        prefix = "decoder.layers." if stacked else f"decoder.layers.{mapping.layer}."
        parameters.append(Parameter(mapping, prefix + fused, shape, index, counts, mapping.form.sections(spec)))
    return parameters


def mapped_shapes(spec: ModelSpec) -> list[tuple[ParamMapping, str, tuple[int, ...]]]:
    """Lists (weight mapping, Megatron's name without numbers of layer and expert, shape of the joined tensor).

    The sum of the shapes' products is the number of a model's parameters.
    """
    sizes, found = _shapes(spec), []
    for mapping in spec.family.param_mappings(spec):
        name = mapping.megatron if mapping.layer is None else mapping.megatron.split(".", 3)[3]
        if mapping.expert is not None:  # Megatron puts the experts of all ranks below one more "experts"
            name = name.replace(f"local_experts.{mapping.expert}.", "experts.")
        found.append((mapping, name, _joined_shape(mapping, spec) or sizes[name]))
    return found


def _joined_shape(mapping: ParamMapping, spec: ModelSpec) -> tuple[int, ...] | None:
    """Returns the shape of a mapping's joined tensor; None unless the family knows its tensors' shapes."""
    if spec.family.own:
        return None
    parts = [spec.family.hf_shape(hf_name, spec) for hf_name in mapping.hf]
    if any(shape is None for shape in parts):
        return None
    empty = [torch.empty(shape, device="meta") for shape in parts if shape is not None]
    return tuple(mapping.form.join(empty, spec).shape)


class MegatronCheckpoint:
    """A torch_dist checkpoint under HF names: `checkpoint[name]` reads one whole tensor in its stored dtype.

    It has the interface of `HFCheckpoint`, so both kinds load through the same code. It keeps the parts of the last
    parameter that was read, since q, k and v are one parameter.

    Args:
        path: the checkpoint, or a directory of checkpoints, as for `checkpoint_directory`.
        hf_path: a directory with the model's config.json; None: `hf_directory` finds it.
        family: as for `read_model_spec`.

    Raises:
        ValueError: there is no torch_dist checkpoint, it has no config.json, or config.json is of another model.
    """

    def __init__(self, path: str | Path, hf_path: str | Path | None = None, family: Family | None = None) -> None:
        self.path = checkpoint_directory(Path(path))
        self._reader, self._metadata = open_torch_dist(self.path)
        self.hf_directory = hf_directory(self.path, family=family) if hf_path is None else Path(hf_path)
        self.spec = read_model_spec(self.hf_directory, family)
        entries = self._metadata.state_dict_metadata.items()
        self._tensors = {key: entry for key, entry in entries if isinstance(entry, TensorStorageMetadata)}
        # Megatron stores each layer by itself even where layers are alike, if `moe_layer_freq` is a list
        parameters = checkpoint_parameters(self.spec, stacked=not any(map(_OF_ONE_LAYER.fullmatch, self._tensors)))
        self._parameter_of = {name: parameter for parameter in parameters for name in parameter.mapping.hf}
        # one array may hold the parameters of many layers and experts
        first = dict[str, tuple[Parameter, tuple[int, ...]]]()
        for parameter in parameters:
            for key, shape in parameter.stored:
                first.setdefault(key, (parameter, shape))
        self._found = {key: self._find(key, *about) for key, about in first.items()}
        self._check_all_are_used()
        self._last: dict[str, torch.Tensor] = {}

    @property
    def _config(self) -> str:
        return "hf/config.json" if self.hf_directory.parent == self.path else str(self.hf_directory / "config.json")

    def keys(self) -> list[str]:
        """Returns the HF names of all tensors; parts of one parameter or tensor (`stacked_part`) are neighbours."""
        return list(self._parameter_of)

    @property
    def stored_dtype(self) -> torch.dtype:
        """Dtype of the embedding."""
        return self._tensors[self._found["embedding.word_embeddings.weight"]].properties.dtype

    def __getitem__(self, name: str) -> torch.Tensor:
        if name not in self._last:
            if f"{name}[0]" in self._parameter_of:
                return torch.stack([self[part] for part in self._parameter_of if stacked_part(part)[0] == name])
            if name not in self._parameter_of:
                raise ValueError(f"{self.path}: no tensor {name!r}; expected an HF name such as {self.keys()[0]!r}")
            self._last = {}  # free the memory before the next parameter is read
            parameter = self._parameter_of[name]
            # vocabulary padding lies behind the shape, so it is not read
            joined = concatenated([self._read(parameter, key, shape) for key, shape in parameter.stored])
            parts = parameter.mapping.form.split_to_hf(joined, self.spec)
            self._last = dict(zip(parameter.mapping.hf, parts, strict=True))
        return self._last[name]

    def _read(self, parameter: Parameter, key: str, shape: tuple[int, ...]) -> torch.Tensor:
        start = (*parameter.index, *(0 for _ in shape))
        sizes = (*(1 for _ in parameter.index), *shape)
        return read_megatron_tensor(self._reader, self._metadata, self._found[key], start, sizes).reshape(shape)

    def _find(self, stored: str, parameter: Parameter, of_parameter: tuple[int, ...]) -> str:
        """Returns the key of a parameter or section in this checkpoint, including its prefix; checks the shape."""
        found = [key for key in self._tensors if re.fullmatch(_PREFIX + re.escape(stored), key)]
        if not found:
            raise ValueError(
                f"{self.path}: tensor {stored!r} is missing among {', '.join([*self._tensors][:3])}, ...; "
                f"expected every weight of the {self.spec.model_type} model in {self._config}: is it another model's "
                "config?"
            )
        if len(found) > 1:
            raise ValueError(f"{self.path}: holds several models ({', '.join(found)}); expected a checkpoint of one")
        expected, shape = (*parameter.counts, *of_parameter), tuple(self._tensors[found[0]].size)
        padded = int(isinstance(parameter.mapping.form, Vocabulary) and shape[0] >= expected[0])
        if shape[padded:] != expected[padded:]:
            raise ValueError(
                f"{self.path}: {found[0]} is {shape}, but {self._config} asks for {expected}; "
                "the weights and the config are of different models"
            )
        return found[0]

    def _check_all_are_used(self) -> None:
        """Raises ValueError if the model in the checkpoint has a tensor that no weight mapping uses."""
        used = set(self._found.values())
        lost = [key for key in self._tensors if _OF_THE_MODEL.fullmatch(key) and key not in used]
        lost = sorted(key for key in lost if not key.endswith("._extra_state"))
        if lost:
            raise ValueError(
                f"{self.path}: {len(lost)} tensor(s) that the {self.spec.model_type} model in {self._config} does not "
                f"have, such as {lost[0]!r}; they would be lost: is it another model's config?"
            )


def ignored_tensors(checkpoint: HFCheckpoint, spec: ModelSpec) -> list[str]:
    """Returns the names of tensors that no weight mapping uses, all of which may be left out.

    These are a second copy of tied embeddings, tables of rotary frequencies that old programs saved, the layers for
    multi-token prediction of DeepSeek-V3, GLM 4.5, Qwen3.5 and MiMo, and the towers of pictures, which transformers
    leaves out, too.

    Raises:
        ValueError: another tensor has no mapping and would be lost, or a tied head differs from the embedding.
    """
    known = {name for mapping in spec.family.param_mappings(spec) for name in mapping.hf}
    stored = set(checkpoint.keys())
    # experts that are stored together
    known |= {whole for name in known - stored for whole in (stacked_part(name)[0], fused_name(name)[0])}
    by_megatron = {mapping.megatron: mapping.hf[0] for mapping in spec.family.mappings}
    # a family whose heads are always tied has no mapping of the head
    head = by_megatron.get("output_layer.weight", "lm_head.weight")
    embedding = by_megatron["embedding.word_embeddings.weight"]
    unknown = sorted(stored - known)
    predicting = tuple(f"model.layers.{layer}." for layer in _dropped_layers(spec))
    predicting += LEFT_OUT if not spec.family.own or has_other_name(checkpoint.path) else ()
    lost = [name for name in unknown if not name.endswith(".rotary_emb.inv_freq") and not name.startswith(predicting)]
    if head in lost and spec.tied_embeddings:
        if not torch.equal(checkpoint[head], checkpoint[embedding]):
            raise ValueError(
                f"{checkpoint.path}: {head} differs from {embedding}, but config.json has tie_word_embeddings=true; "
                "set it to false, or remove the head from the files"
            )
        lost.remove(head)
    if lost:
        raise ValueError(
            f"{checkpoint.path}: {len(lost)} tensor(s) that a {spec.model_type} model with this config.json does not "
            f"have, such as {lost[0]!r}; they would be lost: do the weights and the config belong together?"
        )
    return unknown


def _dropped_layers(spec: ModelSpec) -> range:
    """Returns the numbers (0-based) of the layers for multi-token prediction behind the model's own."""
    count = 0 if spec.family.own else spec.hf_config.get("num_nextn_predict_layers") or 0
    return range(spec.num_layers, spec.num_layers + count)


def check_source(checkpoint: HFCheckpoint, spec: ModelSpec) -> None:
    """Raises ValueError unless names and shapes of all tensors are those of `spec`; reads only a tied head's data."""
    for parameter in checkpoint_parameters(spec):
        # tensors without data show the shapes of the parts
        parts = parameter.mapping.form.split_to_hf(torch.empty(parameter.shape, device="meta"), spec)
        for name, part in zip(parameter.mapping.hf, parts, strict=True):
            if checkpoint.shape(name) != tuple(part.shape):
                raise ValueError(
                    f"{checkpoint.path}: {name} is {checkpoint.shape(name)}, but config.json asks for "
                    f"{tuple(part.shape)}; the weights and the config are of different models"
                )
    ignored_tensors(checkpoint, spec)
