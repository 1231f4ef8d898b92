"""HF checkpoint <-> Megatron torch_dist checkpoint, tensor by tensor in one process.

Both directions follow the family's weight mappings and hold only a few tensors at a time. A Megatron checkpoint holds
one array per kind of parameter, with all layers stacked (`decoder.layers.mlp.linear_fc2.weight` [L, D, F]; F is the
size of the feed-forward block), cut into chunks. Megatron's loader takes from the chunks what its own layout needs, so
a checkpoint loads at any layout.

Left out: optimizer state (a converted checkpoint starts a training, it doesn't resume one) and Megatron's older
checkpoint formats. A model with a tensor that has no weight mapping is refused, so no tensor is dropped silently.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from tqdm import tqdm

from nemo_oprd.fault_tolerance.files import replacing_directory
from nemo_oprd.layout import Layout
from nemo_oprd.megatron.param_names import TE_NAMES
from nemo_oprd.models import FAMILIES, ModelSpec, read_model_spec
from nemo_oprd.models.base import GateUp, ParamMapping, Vocabulary
from nemo_oprd.models.bridge_config import write_run_config
from nemo_oprd.models.checkpoint_directory import checkpoint_directory, hf_directory
from nemo_oprd.weights.hf import HFCheckpoint
from nemo_oprd.weights.torch_dist import TorchDistWriter, open_torch_dist, read_megatron_tensor

DTYPES = ("float32", "bfloat16", "float16")

# Megatron's linear layers have an extra state (for FP8) that its loader requires; without FP8 the state is None.
# Transformer Engine's attention has one, too.
_WITH_EXTRA_STATE = (
    "self_attention.linear_qkv",
    "self_attention.core_attention",
    "self_attention.linear_proj",
    "mlp.linear_fc1",
    "mlp.linear_fc2",
)
# Transformer Engine's norms have one; Megatron's loader requires it if the model is made of its modules.
_NORMS_WITH_EXTRA_STATE = ("self_attention.q_layernorm", "self_attention.k_layernorm")
# Prefixes that programs put before a model's keys ("model.", "model0.", "module."). No other prefix is accepted,
# because the optimizer's tensors end like the parameters to which they belong ("optimizer.state.exp_avg.decoder...").
_PREFIX = r"(?:(?:model|module)\d*\.)*"


@dataclass(frozen=True)
class Parameter:
    """The place of one weight mapping's joined tensor in a torch_dist checkpoint.

    Attributes:
        key: name in the checkpoint, without a prefix.
        layer: 0-based, None outside the layers.
        shape: without the layer dimension and without vocabulary padding.
    """

    mapping: ParamMapping
    key: str
    layer: int | None
    shape: tuple[int, ...]

    def with_layer(self, first: int, rest: Sequence[int]) -> tuple[int, ...]:
        """`(first, *rest)` if the checkpoint has a layer dimension for this parameter, else `rest`."""
        return tuple(rest) if self.layer is None else (first, *rest)


def checkpoint_parameters(spec: ModelSpec) -> list[Parameter]:
    """All parameters of a model, in the order of its weight mappings."""
    hidden, qkv = spec.hidden_size, (spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim
    shapes = {
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
    parameters = []
    for mapping in FAMILIES[spec.model_type].param_mappings(spec):
        if mapping.megatron.startswith("decoder.layers."):
            _, _, layer, name = mapping.megatron.split(".", 3)
            key = f"decoder.layers.{TE_NAMES.get(name, name)}"
            parameters.append(Parameter(mapping, key, int(layer), shapes[name]))
        else:
            parameters.append(Parameter(mapping, mapping.megatron, None, shapes[mapping.megatron]))
    return parameters


def hf_to_megatron(
    hf_path: str | Path, output: str | Path, *, tensor: int = 1, pipeline: int = 1, progress: bool = True
) -> None:
    """Writes the HF model in `hf_path` as the torch_dist checkpoint `output`, its config and tokenizer in `output/hf`.

    Every tensor keeps its dtype. The checkpoint loads at any layout; at the given sizes, each rank reads whole chunks.
    It is written beside `output` and renamed at the end.

    Args:
        tensor, pipeline: the tensor-parallel size and the number of pipeline stages for which chunks and files are cut.

    Raises:
        ValueError: an unsupported or broken model, sizes that don't divide it, or an `output` that isn't empty.
    """
    source, target = Path(hf_path), _new_directory(output)
    spec = read_model_spec(source)
    layout = _layout(spec, tensor, pipeline)
    checkpoint = HFCheckpoint(source)
    check_source(checkpoint, spec)
    from nemo_oprd.tokenization.tokenizer import copy_tokenizer_files

    with replacing_directory(target, overwrite=False) as partial:
        dtype = _write(checkpoint, spec, layout, partial, progress)
        copy_tokenizer_files(source, partial / "hf")
        shutil.copyfile(source / "config.json", partial / "hf" / "config.json")
        write_run_config(partial, spec, str(dtype).removeprefix("torch."))


def megatron_to_hf(
    megatron_path: str | Path,
    output: str | Path,
    *,
    hf_path: str | Path | None = None,
    dtype: str | None = None,
    max_shard_bytes: int = 4 << 30,
    progress: bool = True,
) -> None:
    """Writes a torch_dist checkpoint (converted, or saved in training) as the HF model directory `output`.

    Holds one safetensors file (at most `max_shard_bytes`, or one larger tensor) and one parameter in memory.

    Args:
        hf_path: for a checkpoint of Megatron-Bridge: the directory with the model's config.json and tokenizer.
        dtype: one of `DTYPES`; None takes the dtype in config.json, or the stored dtype if the config has none.

    Raises:
        ValueError: not a checkpoint of the model in its `hf/config.json`, a bad dtype, or an `output` that isn't empty.
    """
    target = _new_directory(output)
    if dtype not in (None, *DTYPES):
        raise ValueError(f"dtype={dtype!r}; expected one of {', '.join(DTYPES)}")
    directory = None if hf_path is None else hf_directory(Path(megatron_path), Path(hf_path))
    checkpoint = MegatronCheckpoint(megatron_path, directory)
    from nemo_oprd.weights.hf_export import write_hf_model

    hf_config = checkpoint.spec.hf_config
    named = dtype or hf_config.get("dtype") or hf_config.get("torch_dtype")
    written = getattr(torch, str(named).removeprefix("torch."), None) if named else checkpoint.stored_dtype
    if not isinstance(written, torch.dtype):
        file = checkpoint.hf_directory / "config.json"
        raise ValueError(f"{file} names the dtype {named!r}; give one of {', '.join(DTYPES)}")
    names = tqdm(checkpoint.keys(), desc="Megatron to HF", unit="tensor", disable=not progress)
    stream = ((name, checkpoint[name]) for name in names)
    write_hf_model(stream, checkpoint.hf_directory, target, written, max_shard_bytes)


class MegatronCheckpoint:
    """A torch_dist checkpoint under HF names: `checkpoint[name]` reads one whole tensor in its stored dtype.

    It has the interface of `HFCheckpoint`, so both kinds load through the same code. It keeps the parts of the last
    parameter that was read, since q, k and v are one parameter.

    Args:
        path: the checkpoint, or a directory of checkpoints, of which the one in its tracker file is read.
        hf_path: a directory with the model's config.json; None: `hf_directory` finds it.

    Raises:
        ValueError: not a torch_dist checkpoint, without a config.json, or of another model than that describes.
    """

    def __init__(self, path: str | Path, hf_path: str | Path | None = None) -> None:
        self.path = checkpoint_directory(Path(path))
        self._reader, self._metadata = open_torch_dist(self.path)
        self.hf_directory = hf_directory(self.path) if hf_path is None else Path(hf_path)
        self.spec = read_model_spec(self.hf_directory)
        parameters = checkpoint_parameters(self.spec)
        self._parameter_of = {name: parameter for parameter in parameters for name in parameter.mapping.hf}
        # the parameters of the first layer stand for those of all layers
        self._found = {p.key: self._find(p) for p in parameters if not p.layer}
        self._last: dict[str, torch.Tensor] = {}

    @property
    def _config(self) -> str:
        return "hf/config.json" if self.hf_directory.parent == self.path else str(self.hf_directory / "config.json")

    def keys(self) -> list[str]:
        """HF names of all tensors, the parts of one parameter next to each other."""
        return list(self._parameter_of)

    @property
    def stored_dtype(self) -> torch.dtype:
        """Dtype of the embedding."""
        entry = self._metadata.state_dict_metadata[self._found["embedding.word_embeddings.weight"]]
        assert isinstance(entry, TensorStorageMetadata)
        return entry.properties.dtype

    def __getitem__(self, name: str) -> torch.Tensor:
        if name not in self._last:
            if name not in self._parameter_of:
                raise ValueError(f"{self.path}: no tensor {name!r}; expected an HF name such as {self.keys()[0]!r}")
            self._last = {}  # free the memory before the next parameter is read
            parameter = self._parameter_of[name]
            parts = parameter.mapping.form.split_to_hf(self._read(parameter), self.spec)
            self._last = dict(zip(parameter.mapping.hf, parts, strict=True))
        return self._last[name]

    def _read(self, parameter: Parameter) -> torch.Tensor:
        """The joined tensor, without padding."""
        start = parameter.with_layer(parameter.layer or 0, [0] * len(parameter.shape))
        sizes = parameter.with_layer(1, parameter.shape)
        joined = read_megatron_tensor(self._reader, self._metadata, self._found[parameter.key], start, sizes)
        return joined.reshape(parameter.shape)

    def _find(self, parameter: Parameter) -> str:
        """The key of a parameter in this checkpoint, including its prefix; checks the shape."""
        entries = self._metadata.state_dict_metadata.items()
        tensors = {key: entry for key, entry in entries if isinstance(entry, TensorStorageMetadata)}
        found = [key for key in tensors if re.fullmatch(_PREFIX + re.escape(parameter.key), key)]
        if not found:
            raise ValueError(
                f"{self.path}: tensor {parameter.key!r} is missing among {', '.join([*tensors][:3])}, ...; expected "
                f"every weight of the {self.spec.model_type} model in {self._config}: is it another model's config?"
            )
        if len(found) > 1:
            raise ValueError(f"{self.path}: holds several models ({', '.join(found)}); expected a checkpoint of one")
        expected, shape = parameter.with_layer(self.spec.num_layers, parameter.shape), tuple(tensors[found[0]].size)
        padded = int(isinstance(parameter.mapping.form, Vocabulary) and shape[0] >= expected[0])
        if shape[padded:] != expected[padded:]:
            raise ValueError(
                f"{self.path}: {found[0]} is {shape}, but {self._config} asks for {expected}; "
                "the weights and the config are of different models"
            )
        return found[0]


def ignored_tensors(checkpoint: HFCheckpoint, spec: ModelSpec) -> list[str]:
    """Names of tensors that no weight mapping uses and whose content is redundant.

    These are a second copy of tied embeddings, and tables of rotary frequencies that old programs saved.

    Raises:
        ValueError: another tensor has no mapping and would be lost, or a tied head differs from the embedding.
    """
    known = {name for mapping in FAMILIES[spec.model_type].param_mappings(spec) for name in mapping.hf}
    by_megatron = {mapping.megatron: mapping.hf[0] for mapping in FAMILIES[spec.model_type].mappings}
    head, embedding = by_megatron["output_layer.weight"], by_megatron["embedding.word_embeddings.weight"]
    unknown = [name for name in checkpoint.keys() if name not in known]  # noqa: SIM118 - not a dictionary
    lost = [name for name in unknown if not name.endswith(".rotary_emb.inv_freq")]
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


def _write(checkpoint: HFCheckpoint, spec: ModelSpec, layout: Layout, directory: Path, progress: bool) -> torch.dtype:
    """Reads, joins, cuts and writes one parameter after the other; returns the dtype of the embedding."""
    parameters = checkpoint_parameters(spec)
    with (
        TorchDistWriter(directory) as writer,
        tqdm(total=len(parameters), desc="HF to Megatron", unit="parameter", disable=not progress) as bar,
    ):
        for parameter in parameters:
            _write_parameter(parameter, checkpoint, spec, layout, writer)
            bar.update()
        for layer in range(spec.num_layers):
            file = _file(layout, layout.stage_of_layer(layer + 1, spec.num_layers)[0], 0)
            for module in _WITH_EXTRA_STATE + (_NORMS_WITH_EXTRA_STATE if spec.qk_norm else ()):
                # Megatron's name for part `layer` of L of an object that isn't a tensor; it expects a list of one item
                key = f"decoder.layers.{module}._extra_state/shard_{layer}_{spec.num_layers}"
                writer.add_object(file, key, [None])
        writer.add_object(
            _file(layout, layout.pipeline - 1, 0), "decoder.final_layernorm._extra_state/shard_0_1", [None]
        )
        writer.complete()
        return writer.dtype_of("embedding.word_embeddings.weight")


def _write_parameter(
    parameter: Parameter, checkpoint: HFCheckpoint, spec: ModelSpec, layout: Layout, writer: TorchDistWriter
) -> None:
    form = parameter.mapping.form
    joined = form.join([checkpoint[name] for name in parameter.mapping.hf], spec)
    if parameter.layer is not None:
        stage = layout.stage_of_layer(parameter.layer + 1, spec.num_layers)[0]
    else:
        stage = 0 if parameter.key.startswith("embedding.") else layout.pipeline - 1
    rows = spec.padded_vocab(layout.tensor) if isinstance(form, Vocabulary) else parameter.shape[0]
    shape = parameter.with_layer(spec.num_layers, (rows, *parameter.shape[1:]))
    for rank, start, chunk in _chunks(joined, parameter, spec, layout.tensor):
        offsets = parameter.with_layer(parameter.layer or 0, start)
        stored = chunk if parameter.layer is None else chunk[None]
        writer.add(_file(layout, stage, rank), parameter.key, shape, offsets, stored)


def _chunks(
    joined: torch.Tensor, parameter: Parameter, spec: ModelSpec, size: int
) -> Iterator[tuple[int, list[int], torch.Tensor]]:
    """(tensor rank, offsets in the whole tensor, chunk) as `size` tensor ranks would write them."""
    form = parameter.mapping.form
    for rank in range(1 if form.axis is None else size):
        shard = form.shard(joined, rank, size, spec)
        # in the whole tensor, all of gate lies above all of up, so a rank's parts of the two are not adjacent
        pieces = shard.chunk(2) if isinstance(form, GateUp) else (shard,)
        for i, piece in enumerate(pieces):
            start = [0] * piece.dim()
            if form.axis is not None:
                start[form.axis] = (i * size + rank) * piece.shape[form.axis]
            yield rank, start, piece


def _file(layout: Layout, stage: int, rank: int) -> str:
    return f"__{stage * layout.tensor + rank}_0.distcp"


def _layout(spec: ModelSpec, tensor: int, pipeline: int) -> Layout:
    if tensor < 1 or pipeline < 1:
        raise ValueError(f"tensor={tensor}, pipeline={pipeline}; expected sizes of at least 1")
    spec.check_tensor_parallel(tensor, "--tensor")
    layout = Layout(tensor=tensor, pipeline=pipeline)
    layout.layers_per_stage(spec.num_layers)
    return layout


def _new_directory(output: str | Path) -> Path:
    target = Path(output).absolute()
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ValueError(f"{output} exists and is not an empty directory; choose another output or remove it")
    return target
