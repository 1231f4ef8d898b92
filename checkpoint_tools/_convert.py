"""HF checkpoint <-> Megatron torch_dist checkpoint, tensor by tensor in one process.

Both directions follow the family's weight mappings and hold only a few tensors at a time;
`nemo_oprd/megatron/weights/megatron_checkpoint.py` has the layout. Left out: optimizer state (a converted checkpoint
starts a training, it doesn't resume one) and Megatron's older checkpoint formats. A model with a tensor that has no
weight mapping is refused, so no tensor is dropped silently.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, BinaryIO

import torch
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.storage import WriteResult
from tqdm import tqdm

from nemo_oprd.batch.layout import Layout
from nemo_oprd.megatron.weights.hf import HFCheckpoint, owner_stage
from nemo_oprd.megatron.weights.megatron_checkpoint import (
    MegatronCheckpoint,
    Parameter,
    check_source,
    checkpoint_parameters,
    stacks_layers,
)
from nemo_oprd.megatron.weights.torch_dist import CONTENT_METADATA
from nemo_oprd.models import Family, ModelSpec, copy_hf_config, read_model_spec
from nemo_oprd.models.architecture import GateUp, Vocabulary, stack_parts
from nemo_oprd.models.checkpoint_directory import checkpoint_directory, hf_directory
from nemo_oprd.models.megatron_bridge_config import write_run_config
from nemo_oprd.run.checkpoint_directory import refuse_damage
from nemo_oprd.runtime.files import replacing_directory

DTYPES = ("float32", "bfloat16", "float16")

# Megatron's linear layers and norms have an extra state (for FP8) that its loader requires if the model is made of
# Transformer Engine's modules; without FP8 the state is None. Parameters of other modules:
_OF_PLAIN_MODULES = re.compile(
    r"mlp\.router\..*|mlp\.shared_experts\.gate_weight|self_attention\.(?:core_attention\.)?(?:\w+|conv1d\.\w+)"
)
# it has an extra state and, in most families, no parameter
_ATTENTION = "self_attention.core_attention"


def hf_to_megatron(
    hf_path: str | Path,
    output: str | Path,
    *,
    tensor: int = 1,
    pipeline: int = 1,
    family: Family | None = None,
    progress: bool = True,
) -> None:
    """Writes the HF model in `hf_path` as the torch_dist checkpoint `output`, its config and tokenizer in `output/hf`.

    Every tensor keeps its dtype; quantised ones are dequantised to bfloat16. The checkpoint loads at any layout; at the
    given sizes, each rank reads whole chunks. It is written beside `output` and renamed at the end.

    Args:
        tensor, pipeline: the tensor-parallel size and the number of pipeline stages for which chunks and files are cut.
        family: as for `read_model_spec`.

    Raises:
        ValueError: an unsupported or broken model, sizes that don't divide it, or an `output` that isn't empty.
    """
    source, target = Path(hf_path), _new_directory(output)
    spec = read_model_spec(source, family)
    if tensor < 1 or pipeline < 1:
        raise ValueError(f"tensor={tensor}, pipeline={pipeline}; expected sizes of at least 1")
    spec.check_tensor_parallel(tensor, "--tensor")
    layout = Layout(tensor=tensor, pipeline=pipeline)
    layout.layers_per_stage(spec.num_layers)
    checkpoint = HFCheckpoint(source)
    check_source(checkpoint, spec)
    from nemo_oprd.data.tokenizer import copy_tokenizer_files

    with replacing_directory(target, overwrite=False) as partial:
        dtype = _write(checkpoint, spec, layout, partial, progress)
        copy_tokenizer_files(source, partial / "hf")
        copy_hf_config(source, partial / "hf")
        write_run_config(partial, spec, str(dtype).removeprefix("torch."))


def megatron_to_hf(
    megatron_path: str | Path,
    output: str | Path,
    *,
    hf_path: str | Path | None = None,
    dtype: str | None = None,
    family: Family | None = None,
    max_shard_bytes: int = 4 << 30,
    progress: bool = True,
) -> None:
    """Writes a torch_dist checkpoint (converted, or saved in training) as the HF model directory `output`.

    Holds one safetensors file (at most `max_shard_bytes`, or one larger tensor) and one parameter in memory.

    Args:
        hf_path: for a checkpoint of Megatron-Bridge: the directory with the model's config.json and tokenizer.
        dtype: one of `DTYPES`; None takes the dtype in config.json, or the stored dtype if the config has none.
        family: as for `read_model_spec`.

    Raises:
        ValueError: not a checkpoint of the model in its `hf/config.json`, a bad dtype, or an `output` that isn't empty.
    """
    target = _new_directory(output)
    if dtype not in (None, *DTYPES):
        raise ValueError(f"dtype={dtype!r}; expected one of {', '.join(DTYPES)}")
    refuse_damage(checkpoint_directory(Path(megatron_path)), together=False)
    directory = None if hf_path is None else hf_directory(Path(megatron_path), Path(hf_path), family)
    checkpoint = MegatronCheckpoint(megatron_path, directory, family)
    from nemo_oprd.megatron.weights.hf_export import write_hf_model

    hf_config = checkpoint.spec.hf_config
    named = dtype or hf_config.get("dtype") or hf_config.get("torch_dtype")
    written = getattr(torch, str(named).removeprefix("torch."), None) if named else checkpoint.stored_dtype
    if not isinstance(written, torch.dtype):
        file = checkpoint.hf_directory / "config.json"
        raise ValueError(f"{file} names the dtype {named!r}; give one of {', '.join(DTYPES)}")
    names = tqdm(checkpoint.keys(), desc="Megatron to HF", unit="tensor", disable=not progress)
    stream = ((name, checkpoint[name]) for name in names)
    write_hf_model(stack_parts(stream), checkpoint.hf_directory, target, written, max_shard_bytes)


def _write(checkpoint: HFCheckpoint, spec: ModelSpec, layout: Layout, directory: Path, progress: bool) -> torch.dtype:
    """Reads, joins, cuts and writes one parameter after the other; returns the dtype of the embedding."""
    parameters = checkpoint_parameters(spec)
    with TorchDistWriter(directory) as writer:
        for parameter in tqdm(parameters, desc="HF to Megatron", unit="parameter", disable=not progress):
            _write_parameter(parameter, checkpoint, spec, layout, writer)
        for layer, key in _extra_states(parameters, spec):
            file = _file(layout, layout.stage_of_layer(layer + 1, spec.num_layers)[0], 0)
            writer.add_object(file, key, [None])  # Megatron expects a list of one item
        last = _file(layout, layout.pipeline - 1, 0)
        writer.add_object(last, "decoder.final_layernorm._extra_state/shard_0_1", [None])
        writer.complete()
        return writer.dtype_of("embedding.word_embeddings.weight")


def _extra_states(parameters: Sequence[Parameter], spec: ModelSpec) -> Iterator[tuple[int, str]]:
    """(Layer from 0, Megatron's name) of extra states: `key/shard_INDEX_SIZE`, several dimensions joined by dots."""
    modules = dict[tuple[int, str], Parameter]()
    for parameter in parameters:
        layer = parameter.mapping.layer
        if layer is None:
            continue
        name = parameter.key.removeprefix("decoder.layers.").removeprefix(f"{layer}.")
        if _OF_PLAIN_MODULES.fullmatch(name) is None:
            modules.setdefault((layer, f"{parameter.key.rpartition('.')[0]} {parameter.index}"), parameter)
    for (layer, _), parameter in modules.items():
        index, counts = parameter.index or (0,), parameter.counts or (1,)
        shard = f"shard_{'.'.join(map(str, index))}_{'.'.join(map(str, counts))}"
        yield layer, f"{parameter.key.rpartition('.')[0]}._extra_state/{shard}"
    for layer in range(spec.num_layers):
        if spec.delta is None or not spec.delta.layers[layer]:
            stacked = stacks_layers(spec)
            prefix = "decoder.layers" if stacked else f"decoder.layers.{layer}"
            shard = f"{layer}_{spec.num_layers}" if stacked else "0_1"
            yield layer, f"{prefix}.{_ATTENTION}._extra_state/shard_{shard}"


def _write_parameter(
    parameter: Parameter, checkpoint: HFCheckpoint, spec: ModelSpec, layout: Layout, writer: TorchDistWriter
) -> None:
    form = parameter.mapping.form
    joined = form.join([checkpoint[name] for name in parameter.mapping.hf], spec)
    stage = owner_stage(parameter.mapping, spec, layout)
    rows = spec.padded_vocab(layout.tensor) if isinstance(form, Vocabulary) else parameter.shape[0]
    # an expert is not split: that is the default, and Megatron reads what another layout needs
    parts = layout.tensor if parameter.mapping.expert is None else 1
    for rank in range(1 if form.axis is None else parts):
        shard = form.shard(joined, rank, parts, spec)
        for (key, of_key), of_rank in zip(parameter.stored, _sections(shard, parameter, parts), strict=True):
            shape = (*parameter.counts, rows if not parameter.sections else of_key[0], *of_key[1:])
            # in the whole tensor, all of gate lies above all of up, so a rank's parts of the two are not adjacent
            for i, piece in enumerate(of_rank.chunk(2) if isinstance(form, GateUp) else (of_rank,)):
                start = [0] * piece.dim()
                if form.axis is not None:
                    start[form.axis] = (i * parts + rank) * piece.shape[form.axis]
                stored = piece[(None,) * len(parameter.index)]
                writer.add(_file(layout, stage, rank), key, shape, (*parameter.index, *start), stored)


def _sections(shard: torch.Tensor, parameter: Parameter, parts: int) -> tuple[torch.Tensor, ...]:
    """The parts of a rank's shard that are stored one by one."""
    return shard.split([rows // parts for _, rows in parameter.sections]) if parameter.sections else (shard,)


def _file(layout: Layout, stage: int, rank: int) -> str:
    return f"__{stage * layout.tensor + rank}_0.distcp"


def _new_directory(output: str | Path) -> Path:
    target = Path(output).absolute()
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ValueError(f"{output} exists and is not an empty directory; choose another output or remove it")
    return target


class TorchDistWriter(FileSystemWriter):
    """Writes one checkpoint from one process. A context manager; the checkpoint is usable after `complete`.

    torch's own `save` needs a whole state dict and keeps the last chunk of every tensor of a file in memory; here a
    chunk can be freed as soon as it is written.

    >>> with TorchDistWriter(directory) as writer:  # doctest: +SKIP
    ...     writer.add("__0_0.distcp", "w", (4, 8), (0, 0), torch.zeros(2, 8))
    ...     writer.add("__1_0.distcp", "w", (4, 8), (2, 0), torch.zeros(2, 8))
    ...     writer.complete()
    """

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.directory = directory
        self._entries: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
        self._written: list[WriteResult] = []
        self._files: dict[str, BinaryIO] = {}
        self._open = ExitStack()

    def __enter__(self) -> TorchDistWriter:
        return self

    def __exit__(self, *_: Any) -> None:
        self._open.close()

    def add(
        self, file: str, key: str, global_shape: Sequence[int], offsets: Sequence[int], chunk: torch.Tensor
    ) -> None:
        """Appends to `file` the chunk of tensor `key` that starts at `offsets`.

        Raises:
            ValueError: an earlier chunk of the same tensor has another dtype.
        """
        entry = self._entries.get(key)
        if entry is None:
            entry = TensorStorageMetadata(TensorProperties(dtype=chunk.dtype), torch.Size(global_shape), [])
            self._entries[key] = entry
        assert isinstance(entry, TensorStorageMetadata)
        if chunk.dtype != entry.properties.dtype:
            raise ValueError(
                f"{key} is {chunk.dtype} at {tuple(offsets)} and {entry.properties.dtype} before; expected one dtype "
                "in all layers: save the source in one dtype first"
            )
        entry.chunks.append(ChunkStorageMetadata(torch.Size(offsets), chunk.shape))
        chunk = chunk.contiguous()
        if chunk.untyped_storage().nbytes() != chunk.nbytes:
            chunk = chunk.clone()  # torch.save writes the whole storage of a view
        self._append(file, MetadataIndex(key, offsets), chunk)

    def add_object(self, file: str, key: str, value: Any) -> None:
        """Appends an object that is not a tensor."""
        self._entries[key] = BytesStorageMetadata()
        self._append(file, MetadataIndex(key), value)

    def dtype_of(self, key: str) -> torch.dtype:
        """The dtype of a tensor of which a chunk was written."""
        entry = self._entries[key]
        assert isinstance(entry, TensorStorageMetadata), f"{key} is not a tensor"
        return entry.properties.dtype

    def complete(self) -> None:
        """Writes the index and the further files that Megatron-core's loader requires."""
        for stream in self._files.values():
            stream.flush()
        self.finish(Metadata(dict(self._entries)), [self._written])
        torch.save({"content_metadata": CONTENT_METADATA}, self.directory / "common.pt")
        save_config(CheckpointingConfig("torch_dist"), str(self.directory))

    def storage_meta(self) -> None:
        """Returns nothing: torch would store the directory of the checkpoint, which is renamed later."""

    def _append(self, file: str, index: MetadataIndex, value: Any) -> None:
        if file not in self._files:
            self._files[file] = self._open.enter_context((self.directory / file).open("wb"))
        stream = self._files[file]
        start = stream.tell()
        if isinstance(value, torch.Tensor):
            torch.save(value, stream)
        else:
            buffer = io.BytesIO()
            torch.save(value, buffer)
            stream.write(buffer.getbuffer())
        length = stream.tell() - start
        self._written.append(WriteResult(index, length, _StorageInfo(file, start, length)))
