"""Reads the files of the torch_dist format chunk by chunk, without torch's load plans and without running stored code.

A checkpoint consists of `*.distcp` files, which hold tensors one after the other, and the pickled index `.metadata`,
which says where each chunk of each tensor lies. Left out: the names and the meaning of the tensors
(`megatron/weights/megatron_checkpoint.py`), and writing (`checkpoint_tools/_convert.py`).
"""

from __future__ import annotations

import io
import pickle  # only its parser; see `_IndexUnpickler.find_class`
from collections.abc import Sequence
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader, LoadPlan
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    StorageMeta,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from nemo_oprd.megatron import versions
from nemo_oprd.models.checkpoint_directory import LATEST, check_torch_dist
from nemo_oprd.runtime.files import refuse_lfs_pointer

# Reads torch_dist checkpoints without running code that is written in them.
#
# Why torch isn't enough: torch.distributed.checkpoint stores its index `.metadata` as a pickle and opens it with
# `pickle.load`, and it reads the objects between the tensors with `weights_only=False`; neither has a setting. So a
# checkpoint of another author could run any program. `torch.load(weights_only=True)` refuses the index, even with its
# classes allowed, because the index is a plain pickle and not a file of torch.save. `install` replaces both readers for
# the whole process, because Megatron creates its own reader and planner objects: the index may hold only the classes
# that an index consists of, and objects go through torch's weights-only reader.


# Everything that torch and Megatron-core write into an index; creating such an object has no side effect.
_ALLOWED = {
    "torch": {"Size"},
    "torch.serialization": {"_get_layout"},
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.planner": {
        "BytesIOWriteData",
        "SavePlan",
        "TensorWriteData",
        "WriteItem",
        "WriteItemType",
    },
    "collections": {"OrderedDict"},
    "pathlib": {"Path", "PosixPath", "PurePath", "PurePosixPath"},
}


class _IndexUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        """Returns the class, if an index may hold it; the names are compared before anything is imported or called."""
        if name in _ALLOWED.get(module, ()):
            return super().find_class(module, name)
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        raise pickle.UnpicklingError(f"asks for {module}.{name}, which is not part of an index")


def read_index(file: Path) -> Metadata:
    """Reads the index of a torch_dist checkpoint.

    Raises:
        ValueError: the file is missing or damaged, or holds anything but an index.
    """
    try:
        metadata = _IndexUnpickler(io.BytesIO(file.read_bytes())).load()
    except Exception as error:  # damaged bytes can raise any exception in the parser
        raise ValueError(
            f"{file} can't be read ({error}); expected the index of a torch_dist checkpoint and nothing else: "
            "copy the checkpoint again, from a source that you trust"
        ) from error
    if not isinstance(metadata, Metadata) or not isinstance(metadata.storage_data, dict):
        raise ValueError(f"{file} holds a {type(metadata).__name__}, expected an index; copy the checkpoint again")
    return metadata


def _read_metadata(self: FileSystemReader, *_: Any, **kwargs: Any) -> Metadata:
    metadata = read_index(Path(str(self._get_metadata_path(kwargs.get("rank")))))
    metadata.storage_meta = metadata.storage_meta or StorageMeta()
    metadata.storage_meta.load_id = self.load_id
    return metadata


def _load_bytes(self: DefaultLoadPlanner, read_item: ReadItem, value: io.BytesIO) -> None:
    """Does the work of torch's own method, with `weights_only=True`."""
    loaded, name = torch.load(value, weights_only=True), read_item.dest_index.fqn
    if self.flatten_state_dict:
        set_element(self.original_state_dict, self.mappings[name], loaded)
    else:
        self.state_dict[name] = loaded


def install() -> None:
    """Replaces torch's readers of indices and objects in this process, so that no checkpoint can run code."""
    FileSystemReader.read_metadata = _read_metadata  # type: ignore[method-assign]
    DefaultLoadPlanner.load_bytes = _load_bytes  # type: ignore[method-assign]


install()

# The settings of Megatron's sharded state dicts, stored in every checkpoint: Megatron-Bridge takes the settings of its
# own from there, and fails where it finds none. The optimizer's format is the only one that loads at another layout.
CONTENT_METADATA: dict[str, Any] = {
    "distrib_optim_sharding_type": "fully_reshardable",
    "chained_optim_avoid_prefix": True,
    "singleton_local_shards": False,
}
# the key under which Megatron-core 0.19 saves what all ranks share
_COMMON_STATE = "common_state/shard_0_1"


class OtherCheckpointError(ValueError):
    """A checkpoint that is whole, but of another model or of another version."""


def open_torch_dist(path: Path) -> tuple[FileSystemReader, Metadata]:
    """Returns a reader of the checkpoint in `path`, and its index.

    Raises:
        ValueError: `path` holds no torch_dist checkpoint, or the index or a file is damaged.
    """
    check_torch_dist(path)
    for file in (path / ".metadata", *path.glob("*.distcp")):
        refuse_lfs_pointer(file)
    reader = FileSystemReader(path)
    metadata = reader.read_metadata()
    _check_files(path, metadata)
    reader.set_up_storage_reader(metadata, is_coordinator=True)
    return reader, metadata


def read_common_state(path: Path, metadata: Metadata) -> Any:
    """Reads the values that all ranks share: from the file common.pt, or from 0.19 on from a part of the shards.

    Args:
        metadata: the index of the checkpoint in `path`, which `open_torch_dist` has checked.

    Raises:
        ValueError: it can't be read, or it is where the installed Megatron-core does not look for it.
    """
    file, stream = path / "common.pt", None
    if not file.exists():
        places = [info for index, info in metadata.storage_data.items() if index.fqn == _COMMON_STATE]
        if places and not versions.reads_common_state_in_shards():
            raise OtherCheckpointError(
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
    """Returns slice [offsets, offsets + sizes) of tensor `key`, as stored; reads the overlapping chunks one by one.

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
        """Returns the part of the target that `read_item` fills."""
        ranges = zip(read_item.dest_offsets, read_item.lengths, strict=True)
        return self.target[tuple(slice(start, start + length) for start, length in ranges)]

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        """Does nothing: `tensor` is a part of the target."""
