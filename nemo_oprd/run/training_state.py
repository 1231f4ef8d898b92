"""Writes and loads training checkpoints: torch_dist shards of model and optimizer that load at any TP/PP/DP.

Beside the shards lie `state.json` (the step, and the settings that a resumed run must share), `hf/` (config and
tokenizer of the student's source, so that a checkpoint can be exported by itself) and `run_config.yaml` (with which
Megatron-Bridge builds the model). Data order, learning rate and the randomness of sampling are pure functions of
(seed, step), so the step is their whole state; training itself draws no random numbers. `add_extra_states` adds entries
that Transformer Engine's modules need; `in_process_writer` writes and digests shards without helper processes.
"""

from __future__ import annotations

import queue
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync
from torch.distributed.checkpoint.api import CheckpointException

from nemo_oprd.config.schema import Config
from nemo_oprd.config.teacher_kinds import TEACHER_KINDS
from nemo_oprd.distillation.metrics.watched_metrics import ModelNeeds
from nemo_oprd.distillation.objective import Objective
from nemo_oprd.distillation.student import Student
from nemo_oprd.megatron.optimizer_state import (
    load_optimizer_state,
    place_count,
    prepare_adam_for_loading,
    request_saved_form,
    sharded_optimizer_state,
    take_other_form,
)
from nemo_oprd.megatron.parallel import everyones
from nemo_oprd.megatron.versions import checkpoint_writer_names, quieten_checkpoints
from nemo_oprd.megatron.weights.torch_dist import (
    CONTENT_METADATA,
    OtherCheckpointError,
    open_torch_dist,
    read_common_state,
)
from nemo_oprd.models import ModelSpec, copy_hf_config, read_model_spec
from nemo_oprd.models.checkpoint_directory import hf_directory
from nemo_oprd.models.megatron_bridge_config import write_run_config
from nemo_oprd.run.checkpoint_directory import (
    commit_checkpoint,
    iteration_directory,
    partial_directory,
    prune,
    read_state,
    remove_leftovers,
)
from nemo_oprd.runtime.digests import DigestedFile
from nemo_oprd.runtime.disk import naming

# Extra states: entries that Transformer Engine's modules need in a checkpoint, also in one of a model without them.
#
# Every module of Transformer Engine has an extra state, which is empty without FP8, and Megatron's loader fails where a
# checkpoint lacks one that the model asks for. Models of local layers have none in their attention and norms, and
# `DistillingModel` leaves out those of its norms, so that it can load checkpoints that lack them.


# every layer with attention has this one
_PRESENT = "self_attention.linear_proj._extra_state"
_ATTENTION = "self_attention.core_attention"
# name of a norm's weight if the norm is a separate module, and not part of the matrix after it
_OF_A_NORM = "norm.weight"
_FINAL_NORM = "decoder.final_layernorm"


def add_extra_states(state: dict[str, Any]) -> None:
    """Adds the missing extra states, all empty, to a model chunk's sharded state dict, in place."""
    for name, present in [entry for entry in state.items() if entry[0].endswith(_PRESENT)]:
        layer, stored = name.removesuffix(_PRESENT), present.key.removesuffix(_PRESENT)
        # if layers are stored together, the keys of all layers have one prefix
        norms = [
            value.key.removeprefix(stored).removesuffix(".weight")
            for key, value in state.items()
            if key.startswith(layer) and isinstance(value, ShardedTensor) and value.key.endswith(_OF_A_NORM)
        ]
        for module in (_ATTENTION, *norms):
            added = f"{module}._extra_state"
            state.setdefault(layer + added, replace(present, key=stored + added, data=None))
    weight = state.get(f"{_FINAL_NORM}.weight")
    if weight is not None:
        name = f"{_FINAL_NORM}._extra_state"
        state.setdefault(name, ShardedObject(name, None, (1,), (0,), weight.replica_id))


# Writer of a checkpoint's shards in the rank's own process, which digests them while it writes.
#
# Megatron-core starts a manager process that lives as long as the rank, and up to 0.16 two writer processes per rank
# and save. These processes outlive a killed rank: the manager for ever, the writers until they have written
# into a directory that may by then belong to the restarted run. From 0.17 on the writers are threads. Nothing here
# saves in the background, so writing one file after the other only loses the overlap of a rank's two files, and an
# error of the disk arrives as it was raised.
#
# Shards are written from their beginning to their end, tensor after tensor: torch.save, too, writes its archive in
# order. So the digest of a file is that of the bytes as they go to the disk, and no file is read again.


@contextmanager
def in_process_writer() -> Iterator[dict[str, str]]:
    """Keeps `dist_checkpointing.save` from starting a process within the context.

    Yields a dict that at the end of the context holds name -> SHA-256 of each file that this rank has written.

    Raises:
        OSError, RuntimeError: this rank could not write its part; on the other ranks, that another rank could not.
    """
    quieten_checkpoints()
    results: queue.Queue[Any] = queue.Queue()
    failures: list[Exception] = []
    files: list[DigestedFile] = []
    digests: dict[str, str] = {}

    def opened(path: str, mode: str) -> DigestedFile:
        """Replaces `open` in Megatron's writer; returns a file that digests what is written."""
        assert mode == "wb", mode
        files.append(DigestedFile(path))
        return files[-1]

    def write(transforms: list[Any], use_msc: bool, rank: int, buckets: list[Any], results: queue.Queue[Any]) -> None:
        """Replaces Megatron's function of this signature."""
        answer = _write(transforms, buckets, use_msc)
        if isinstance(answer, Exception):
            failures.append(answer)
        results.put(answer)

    queue_maker, writer = checkpoint_writer_names()
    with (
        _replaced(filesystem_async, queue_maker, lambda *_: results),
        _replaced(FileSystemWriterAsync, writer, staticmethod(write)),
        _replaced(filesystem_async, "open", opened, before=open),
    ):
        try:
            yield digests
            digests.update({Path(str(file.name)).name: file.sha256 for file in files})
        except CheckpointException as error:  # not an Exception, and without a reason on most ranks
            if failures:
                raise failures[0] from None
            raise RuntimeError(f"another rank could not write its part of the checkpoint: {error}") from error


@contextmanager
def _replaced(owner: Any, name: str, value: Any, before: Any = None) -> Iterator[None]:
    """Sets `owner.name` to `value` within the context. Raises KeyError for a misspelt name, if `before` is None.

    `before`: the builtin function to restore, if `owner` has no such name.
    """
    before = vars(owner)[name] if before is None else before
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def _write(transforms: list[Any], buckets: list[Any], use_msc: bool) -> dict[int, Any] | Exception:
    """Writes one bucket after the other with Megatron's own code; returns its results per bucket, or the error."""
    written: dict[int, Any] = {}
    for number, bucket in enumerate(buckets):
        answers: queue.Queue[Any] = queue.Queue()
        waiting: queue.Queue[int] = queue.Queue()
        waiting.put(number)
        FileSystemWriterAsync.write_preloaded_data(transforms, number, bucket, answers, waiting, True, use_msc=use_msc)
        _, written[number] = answers.get_nowait()
        if isinstance(written[number], Exception):
            return written[number]
    return written


def check_checkpoint(root: Path, step: int, spec: ModelSpec) -> None:
    """Raises ValueError unless the checkpoint after `step` steps can be read and holds a model of `spec`."""
    directory = iteration_directory(root, step)
    saved = read_model_spec(hf_directory(directory), spec.family)
    differing = [f.name for f in fields(ModelSpec) if f.compare and getattr(saved, f.name) != getattr(spec, f.name)]
    if differing:
        name = differing[0]
        raise OtherCheckpointError(
            f"{directory} is a checkpoint of another model: {name}={getattr(saved, name)} there, and "
            f"{getattr(spec, name)} in the student's config.json; expected a checkpoint of the same student: choose "
            "another output"
        )
    _, metadata = open_torch_dist(directory)
    read_common_state(directory, metadata)


def save_checkpoint(
    root: Path,
    step: int,
    student: Student,
    source: Path,
    keep: int,
    *,
    best: dict[str, Any] | None = None,
    more: dict[str, Any] | None = None,
    write_more: Callable[[Path], dict[str, str]] = lambda directory: {},
) -> None:
    """Writes the checkpoint after `step` steps; every rank of the world calls this.

    Args:
        source: HF directory whose config and tokenizer files are copied into the checkpoint.
        keep: number of checkpoints to keep, the newest first; 0 keeps all.
        best: content of best.json if this checkpoint is the best so far; None otherwise, and off the first rank.
        more: additional keys of state.json.
        write_more: writes additional files into the checkpoint (on the first rank), and returns the SHA-256 of each by
            its path in the checkpoint.

    Raises:
        OSError, RuntimeError: a rank can't write its part; the previous checkpoint stays the newest.
    """
    from megatron.core import dist_checkpointing

    from nemo_oprd.data.tokenizer import copy_tokenizer_files

    partial = partial_directory(root, step)
    if dist.get_rank() == 0:
        remove_leftovers(root)
        partial.mkdir(parents=True)
    if torch.cuda.is_available():
        torch.cuda.empty_cache()  # Megatron gathers whole float32 buffers, whose sizes occur in no training step
    dist.barrier()
    try:
        with naming(partial), in_process_writer() as written, ExitStack() as saved_forms:
            if student.role.is_member:
                saved_forms.enter_context(student.partial_training.one_count())
            if student.average is not None:
                saved_forms.enter_context(student.average.in_float32())
            dist_checkpointing.save(
                _sharded_state(student, is_loading=False),
                str(partial),
                preprocess_common_before_consistancy_check=_that_all_ranks_share,
                content_metadata=dict(CONTENT_METADATA),
            )
        digests = {name: digest for of_rank in everyones(written) for name, digest in of_rank.items()}
        if dist.get_rank() == 0:
            with naming(partial):
                (partial / "hf").mkdir()
                copy_hf_config(source, partial / "hf")
                copy_tokenizer_files(source, partial / "hf")
                digests |= write_more(partial)
                write_run_config(partial, student.spec, str(student.dtype).removeprefix("torch."))
                state: dict[str, Any] = {"step": step, "optimizer_steps": student.optimizer_steps}
                state |= resume_signature(student.config, student.objective, student.needs)
                # read by earlier versions only: a file's form is recognised by its keys (megatron/optimizer_state.py)
                state["distributed_optimizer"] = student.config.distributes_optimizer(student.role.layout)
                state["adaptive_gaps"] = student.adaptive.state()
                if student.objective.trains_in_parts:
                    state["partial_training_updates"] = student.partial_training.state
                commit_checkpoint(root, {**state, **(more or {})}, best, digests)
            prune(root, keep, step)
    except Exception:
        if dist.get_rank() == 0:  # on a full disk, the partial checkpoint would keep the run from starting again
            shutil.rmtree(partial, ignore_errors=True)
        raise
    dist.barrier()


def resume_signature(config: Config, objective: Objective, needs: ModelNeeds) -> dict[str, Any]:
    """Returns the settings that a resumed run must share with its checkpoint; others may change, e.g. the layout."""
    averages = TEACHER_KINDS[config.teacher.weights].averages
    return {
        "seed": config.seed,
        "precision": config.precision,
        # which parameters have optimizer state
        "deepest_trained_layer": objective.trained_depth,
        "final_norm_trained": objective.final_layer is not None or objective.trains_head,
        "head_trained": objective.trains_head,
        "trained_projectors": _trained_projectors(objective),
        # whether some parameters have a step count of their own, see megatron/partial_training.py
        "partially_trained": objective.trains_in_parts,
        # of the teacher that is the student's moving average; 0 for another teacher
        "moving_average_layers": needs.teacher_depth(objective, 0) if averages else 0,
    }


def _trained_projectors(objective: Objective) -> str | None:
    """Returns rank and layer pairs of the trained bridge; None if the bridge is frozen, or if there is no bridge."""
    match = objective.teachers[0]
    if match.bridge is None or not objective.trains_bridge:
        return None
    pairs = " ".join(f"{student}:{teacher}" for student, teacher in sorted(match.layers.items()))
    return f"rank {match.bridge.rank}, layers {pairs}"


def check_resume_signature(root: Path, step: int, config: Config, objective: Objective, needs: ModelNeeds) -> None:
    """Raises ValueError if the run can't resume from the checkpoint after `step` steps."""
    state = read_state(iteration_directory(root, step))
    for name, value in resume_signature(config, objective, needs).items():
        if state.get(name) != value:
            raise ValueError(
                f"{iteration_directory(root, step)} was made with {name}={state.get(name)}, this run has {value}; "
                "expected the same value to resume: set it back, or choose another output"
            )


def load_checkpoint(root: Path, step: int, student: Student) -> None:
    """Loads model and optimizer, at whatever layout the student has now; every rank of the world calls this.

    A checkpoint without a count of optimizer steps has `step` times the current `train.updates_per_rollout`.
    """
    from megatron.core import dist_checkpointing

    quieten_checkpoints()
    directory = iteration_directory(root, step)
    if student.role.is_member:
        prepare_adam_for_loading(student.optimizer)
    average, saved = student.average, read_state(directory)
    in_other_form = False
    with average.in_float32() if average is not None else nullcontext():
        state = _sharded_state(student, is_loading=True)
        if "optimizer" in state:
            in_other_form = request_saved_form(student.optimizer, state["optimizer"], saved_keys(directory))
        loaded = dist_checkpointing.load(state, str(directory))
        for i, chunk in enumerate(average.chunks if average is not None else ()):
            if f"average{i}" in state:
                chunk.load_state_dict(loaded[f"average{i}"])
    student.optimizer_steps = saved.get("optimizer_steps", step * student.config.train.updates_per_rollout)
    if not student.role.is_member:
        return
    for i, chunk in enumerate(student.ddp):
        chunk.module.load_state_dict(loaded[f"model{i}"])
    if "optimizer" in state:
        if in_other_form:
            take_other_form(student.optimizer, loaded["optimizer"])
        place_count(student.optimizer, loaded["optimizer"])
        load_optimizer_state(student.optimizer, loaded["optimizer"])
    student.adaptive.restore(saved["adaptive_gaps"])
    if student.objective.trains_in_parts:
        student.partial_training.restore(saved["partial_training_updates"])


def saved_keys(directory: Path) -> Iterable[str]:
    """Returns all keys in a checkpoint's index."""
    return open_torch_dist(directory)[1].state_dict_metadata


def _sharded_state(student: Student, *, is_loading: bool) -> dict[str, Any]:
    """Returns Megatron's sharded state; empty on ranks outside the student's role, which only join the collectives."""
    if not student.role.is_member:
        return {}
    metadata = {
        "dp_cp_group": student.role.member_groups.dp_cp,
        **CONTENT_METADATA,
        # gathered over gloo on the first data-parallel rank only: no other rank's host holds the whole float32 state
        "distrib_optim_fully_reshardable_mem_efficient": not is_loading,
    }
    chunks = _sharded_model(student, metadata)
    for chunk in () if is_loading else chunks.values():
        add_extra_states(chunk)
    model = {**chunks, **_sharded_average(student, metadata)}
    if not any(p.requires_grad for chunk in student.chunks for p in chunk.parameters()):
        return model  # a stage above the deepest supervised layer trains nothing
    by_layer = _sharded_model(student, {**metadata, "non_homogeneous_layers": True})
    optimizer = sharded_optimizer_state(student.optimizer, by_layer, metadata, is_loading=is_loading)
    return {**model, "optimizer": optimizer}


def _that_all_ranks_share(common: dict[str, Any]) -> dict[str, Any]:
    """Returns `common` without the optimizer, which some ranks lack: Megatron expects equal values on all ranks."""
    return {key: value for key, value in common.items() if key != "optimizer"}


def _sharded_average(student: Student, metadata: dict[str, Any]) -> dict[str, Any]:
    """Returns shards of the student's moving average, one key per layer: it may have fewer layers than the student."""
    from megatron.core.dist_checkpointing.utils import add_prefix_for_sharding

    parts = {}
    for i, chunk in enumerate([] if student.average is None else student.average.chunks):
        part = chunk.sharded_state_dict(metadata={**metadata, "non_homogeneous_layers": True})
        add_prefix_for_sharding(part, "teacher_average.")
        if part:  # a chunk whose layers the teacher doesn't have holds nothing
            parts[f"average{i}"] = part
    return parts


def _sharded_model(student: Student, metadata: dict[str, Any]) -> dict[str, Any]:
    return {f"model{i}": chunk.module.sharded_state_dict(metadata=metadata) for i, chunk in enumerate(student.ddp)}
