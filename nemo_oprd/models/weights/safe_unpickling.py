"""Reads torch_dist checkpoints without running code that is written in them.

Why torch isn't enough: torch.distributed.checkpoint stores its index `.metadata` as a pickle and opens it with
`pickle.load`, and it reads the objects between the tensors with `weights_only=False`; neither has a setting. So a
checkpoint from somebody else could run any program. `torch.load(weights_only=True)` refuses the index, even with its
classes allowed, because the index is a plain pickle and not a file of torch.save. `install` replaces both readers for
the whole process, because Megatron creates its own reader and planner objects: the index may hold only the classes that
an index consists of, and objects go through torch's weights-only reader.
"""

from __future__ import annotations

import io
import pickle  # only its parser; see `_IndexUnpickler.find_class`
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import ReadItem

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
        """The class, if an index may hold it; the names are compared before anything is imported or called."""
        if name in _ALLOWED.get(module, ()):
            return super().find_class(module, name)
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        raise pickle.UnpicklingError(f"asks for {module}.{name}, which is not part of an index")


def read_index(file: Path) -> Metadata:
    """The index of a torch_dist checkpoint.

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
    """torch's own method, with `weights_only=True`."""
    loaded, name = torch.load(value, weights_only=True), read_item.dest_index.fqn
    if self.flatten_state_dict:
        set_element(self.original_state_dict, self.mappings[name], loaded)
    else:
        self.state_dict[name] = loaded


def install() -> None:
    """Makes this process read every checkpoint in this way from now on."""
    FileSystemReader.read_metadata = _read_metadata  # type: ignore[method-assign]
    DefaultLoadPlanner.load_bytes = _load_bytes  # type: ignore[method-assign]
