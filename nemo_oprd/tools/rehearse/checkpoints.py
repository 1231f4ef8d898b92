"""Saves and loads a checkpoint as `train.py` does, with Megatron's planning, up to the files: no byte reaches the disk.

The shards of other ranks are not known: each rank plans for itself alone, and the rehearsal does not validate that all
shards together cover the checkpoint.
"""

from __future__ import annotations

import copy
import gc
import io
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_leaves

from nemo_oprd.distillation.student import Student
from nemo_oprd.megatron.optimizer_state import WEIGHT_KEYS, is_distributed
from nemo_oprd.run import training_state
from nemo_oprd.tools.rehearse.stand_ins import replaced

if TYPE_CHECKING:
    from nemo_oprd.tools.rehearse.recorder import Recorder


class _WouldWrite(Exception):  # noqa: N818 - the boundary
    """Raised when everything that this rank would write is in host memory; ends the save there."""


def save_and_load(recorder: Recorder, student: Student, source: Path) -> None:
    """Saves a checkpoint in the phase "save", and loads it in the phase "load"."""
    common: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder, _alone(common), recorder.invented_host_memory():
        with recorder.phase("save"):
            _save(recorder, Path(folder), student, source)
        gc.collect()  # what led to the boundary has references in a circle
        with recorder.phase("load"):
            _load(recorder, Path(folder), student, common)


def _save(recorder: Recorder, root: Path, student: Student, source: Path) -> None:
    def write(_: Any, buckets: list[Any], __: Any) -> Any:
        tensors = [leaf for leaf in tree_leaves([data for *_, (_, data) in buckets]) if isinstance(leaf, torch.Tensor)]
        recorder.leave("checkpoint files", sum(_bytes(tensor) for tensor in tensors))
        raise _WouldWrite

    with replaced(training_state, "_write", write):
        try:
            training_state.save_checkpoint(root, 1, student, source, keep=0)
        except _WouldWrite:
            return


def _load(recorder: Recorder, root: Path, student: Student, common: dict[str, Any]) -> None:
    from megatron.core.dist_checkpointing import serialization
    from megatron.core.dist_checkpointing.strategies import torch as torch_dist
    from torch.distributed._shard.sharded_tensor import Shard

    saved: dict[str, Any] = {"adaptive_gaps": student.adaptive.state()}
    if student.objective.trains_in_parts:
        saved["partial_training_updates"] = student.partial_training.state

    def read(state: dict[str, Any], *_: Any, **__: Any) -> None:
        whole = [value for value in state.values() if not isinstance(value, io.BytesIO)]
        parts = [part for value in whole for part in getattr(value, "_local_shards", [value])]
        tensors = [part.tensor if isinstance(part, Shard) else part._sh_ten.data for part in parts]
        recorder.leave("checkpoint files, read", sum(map(_bytes, tensors)))
        for name, value in state.items():
            if isinstance(value, io.BytesIO):  # an object; here as this process has just written it
                value.seek(0)
                state[name] = torch.load(value, weights_only=True)

    def load_common(*_: Any) -> dict[str, Any]:
        return copy.deepcopy(common)

    def strategies(*_: Any) -> tuple[Any, Any]:
        return torch_dist.TorchDistLoadShardedStrategy(), SimpleNamespace(load_common=load_common)

    # those by which an optimizer's form is recognised: its own
    parts = [] if student.optimizer is None else student.optimizer.chained_optimizers
    keys = [f"{WEIGHT_KEYS[is_distributed(part)]}weight" for part in parts]
    reader = SimpleNamespace(read_metadata=lambda: None)
    with ExitStack() as stack:
        for owner, name, value in (
            # Megatron-core 0.16, and 0.19
            (serialization, "verify_checkpoint_and_load_strategy", strategies),
            (serialization, "verify_checkpoint", lambda _: None),
            (serialization, "load_common_state_dict", load_common),
            (torch_dist, "_get_filesystem_reader", lambda *_, **__: reader),
            (torch_dist, "checkpoint", SimpleNamespace(load_state_dict=read, load=read)),
            (training_state, "read_state", lambda _: saved),
            (training_state, "saved_keys", lambda _: keys),
        ):
            if hasattr(owner, name):
                stack.enter_context(replaced(owner, name, value))
        training_state.load_checkpoint(root, 1, student)


@contextmanager
def _alone(common: dict[str, Any]) -> Iterator[None]:
    """Within the context, Megatron plans checkpoints of this rank only; `common` gets the state common to all ranks."""
    from megatron.core.dist_checkpointing import serialization, state_dict_utils, validation
    from megatron.core.dist_checkpointing.strategies import common as common_strategies
    from torch.distributed.checkpoint.utils import _DistWrapper

    def gather(_: Any, plan: Any) -> list[Any]:
        return [plan]

    preprocess = serialization.save_preprocess

    def keeping(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
        sharded, shared = preprocess(*args, **kwargs)
        common.update(copy.deepcopy(shared))
        return sharded, shared

    nothing = lambda *_, **__: None  # noqa: E731
    with ExitStack() as stack:
        for owner, name, value in (
            (state_dict_utils, "validate_sharding_integrity", nothing),
            (validation, "validate_sharding_integrity", nothing),
            (serialization, "save_preprocess", keeping),
            # a file of its own in Megatron-core 0.16
            (getattr(common_strategies, "TorchCommonSaveStrategy", None), "save_common", nothing),
            (_DistWrapper, "gather_object", gather),
        ):
            if owner is not None:
                stack.enter_context(replaced(owner, name, value))
        yield


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()
