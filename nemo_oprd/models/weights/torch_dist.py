"""Reads and writes the files of the torch_dist format chunk by chunk, without torch's save and load plans.

A checkpoint consists of `*.distcp` files, which hold tensors one after the other, and the pickled index `.metadata`,
which says where each chunk of each tensor lies. torch's own `save` needs a whole state dict and keeps the last chunk of
every tensor of a file in memory; here a chunk can be freed as soon as it is written. Left out: the names and the
meaning of the tensors, see `models/weights/convert.py`.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from contextlib import ExitStack
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import torch
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader, FileSystemWriter, LoadPlan
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.storage import WriteResult

from nemo_oprd.models.checkpoint_directory import LATEST, check_torch_dist
from nemo_oprd.models.megatron import versions
from nemo_oprd.models.weights import safe_unpickling

safe_unpickling.install()

# What Megatron's sharded state dicts are made with, stored in every checkpoint: Megatron-Bridge makes its own with what
# it finds there, and fails where it finds nothing. The optimizer's format is the only one that loads at another layout.
CONTENT_METADATA: dict[str, Any] = {
    "distrib_optim_sharding_type": "fully_reshardable",
    "chained_optim_avoid_prefix": True,
    "singleton_local_shards": False,
}
# the key under which Megatron-core 0.19 saves what all ranks share
_COMMON_STATE = "common_state/shard_0_1"


class TorchDistWriter(FileSystemWriter):
    """Writes one checkpoint from one process. A context manager; the checkpoint is usable after `complete`.

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


def open_torch_dist(path: Path) -> tuple[FileSystemReader, Metadata]:
    """A reader of the checkpoint in `path`, and its index.

    Raises:
        ValueError: `path` holds no torch_dist checkpoint, or the index or a file is damaged.
    """
    check_torch_dist(path)
    reader = FileSystemReader(path)
    metadata = reader.read_metadata()
    _check_files(path, metadata)
    reader.set_up_storage_reader(metadata, is_coordinator=True)
    return reader, metadata


def read_common_state(path: Path, metadata: Metadata) -> Any:
    """What Megatron saved of the values that all ranks share: the file common.pt, or from 0.19 on a part of the shards.

    Args:
        metadata: the index of the checkpoint in `path`, which `open_torch_dist` has checked.

    Raises:
        ValueError: it can't be read, or it is where the installed Megatron-core does not look for it.
    """
    file, stream = path / "common.pt", None
    if not file.exists():
        places = [info for index, info in metadata.storage_data.items() if index.fqn == _COMMON_STATE]
        if places and not versions.reads_common_state_in_shards():
            raise ValueError(
                f"{path} was written by Megatron-core 0.19 or later, and this is {versions.CORE_VERSION}, which "
                "can't resume from it; expected a version that is not older: resume with Python 3.12 and Megatron-core "
                "0.19, or convert the model with checkpoint_tools/megatron_to_hf.py"
            )
        if places:
            file = path / str(places[0].relative_path)
            with file.open("rb") as shard:
                shard.seek(places[0].offset)
                stream = io.BytesIO(shard.read(places[0].length))
    try:
        return torch.load(stream or file, map_location="cpu", weights_only=True)
    except Exception as error:  # damaged bytes can raise any exception
        reason = str(error).strip().splitlines()[0]
        raise ValueError(
            f"{file} can't be read ({reason}); expected plain values and tensors: copy the checkpoint again, or write "
            f"the number of another one into {path.parent / LATEST}"
        ) from error


def _check_files(path: Path, metadata: Metadata) -> None:
    """Raises ValueError unless every file that the index names lies in `path` and is as long as the index says."""
    ends: dict[str, int] = {}
    for info in metadata.storage_data.values():
        name = str(info.relative_path)
        ends[name] = max(ends.get(name, 0), info.offset + info.length)
    for name, end in sorted(ends.items()):
        file = path / name
        if Path(name).name != name:
            raise ValueError(f"{path / '.metadata'} names the file {name!r}, expected one inside {path}; don't use it")
        if not file.is_file() or file.stat().st_size < end:
            found = f"has {file.stat().st_size} bytes" if file.is_file() else "is missing"
            raise ValueError(f"{file} can't be read (it {found}, expected {end}); copy its *.distcp files again")


def read_megatron_tensor(
    reader: FileSystemReader, metadata: Metadata, key: str, offsets: Sequence[int], sizes: Sequence[int]
) -> torch.Tensor:
    """The slice [offsets, offsets + sizes) of tensor `key`, as stored; reads the chunks that overlap it, one at a time.

    Raises:
        ValueError: the chunks don't cover the slice, or a file is damaged.
    """
    entry = metadata.state_dict_metadata[key]
    assert isinstance(entry, TensorStorageMetadata), f"{key} is not a tensor"
    wanted = ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
    items = create_read_items_for_chunk_list(key, entry, [wanted])
    if sum(prod(item.lengths) for item in items) != prod(sizes):  # chunks don't overlap, so counting is enough
        raise ValueError(
            f"{reader.path}: {key} is incomplete at {tuple(offsets)} + {tuple(sizes)}; expected a whole checkpoint: "
            "was the program that wrote it interrupted?"
        )
    target = torch.empty(tuple(sizes), dtype=entry.properties.dtype)
    try:
        reader.read_data(LoadPlan(items), _Into(target)).wait()
    except (OSError, EOFError, RuntimeError) as error:
        raise ValueError(f"{reader.path}: {key} can't be read ({error}); copy its *.distcp files again") from error
    return target


class _Into(DefaultLoadPlanner):
    """Copies every item that is read to its place in one tensor."""

    def __init__(self, target: torch.Tensor) -> None:
        super().__init__()
        self.target = target

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        """The part of the target that `read_item` fills."""
        ranges = zip(read_item.dest_offsets, read_item.lengths, strict=True)
        return self.target[tuple(slice(start, start + length) for start, length in ranges)]

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        """Nothing to do: `tensor` is a part of the target."""
