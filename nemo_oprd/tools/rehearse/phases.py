"""The parts of a run around its steps, each in a phase of its own: building, sampling, weights, checkpoints.

Each calls what `train.py` calls. Where data would leave this process, for a file or for a server, the part ends at that
boundary, and the bytes that would leave are counted.
"""

from __future__ import annotations

import copy
import gc
import io
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_leaves

from nemo_oprd.batch.plan import BatchPlan
from nemo_oprd.batch.types import Rollout
from nemo_oprd.config.schema import Config
from nemo_oprd.config.teacher_kinds import RECORDS
from nemo_oprd.distillation import distiller as distiller_module
from nemo_oprd.distillation import hidden_state_loss, sampling_check
from nemo_oprd.distillation import step as step_module
from nemo_oprd.distillation.metrics.injection_counts import CaptureError
from nemo_oprd.distillation.student import Student
from nemo_oprd.megatron.optimizer_state import WEIGHT_KEYS, is_distributed
from nemo_oprd.megatron.parallel import Role
from nemo_oprd.megatron.weights import hf
from nemo_oprd.megatron.weights.megatron_checkpoint import checkpoint_parameters
from nemo_oprd.rollout.engine import TRAINING_STREAM, GenerationCancelled, Request, RolloutEngine, SamplingParams
from nemo_oprd.run import training_state
from nemo_oprd.run.engine_kinds import ENGINES, make_engine
from nemo_oprd.run.resolve import RunSpec
from nemo_oprd.tools.rehearse.recorder import BETWEEN_GROUPS, Recorder
from nemo_oprd.tools.rehearse.stand_ins import replaced

# Checks of the losses on the rehearsed rank: injected gradients, whose sums over all ranks are not known, and targets.
#
# A target has the run's precision, or float32 behind a bridge; one with more bits costs memory and nothing else.


class Injections:
    """Takes the place of `check_injections` for the layers of this rank."""

    def __init__(self) -> None:
        self.role: Role | None = None
        self.is_repeated = False  # whether an earlier step has allocated everything that stays
        self._counts: Counter[int] = Counter()
        self._layer = 0

    def install(self, recorder: Recorder) -> None:
        """Changes the modules of the losses."""
        supervise, inject = hidden_state_loss.HiddenStateLoss._supervise, hidden_state_loss.inject_gradient

        def of_layer(loss: Any, layer: int, *args: Any, **kwargs: Any) -> torch.Tensor:
            self._layer = layer
            return supervise(loss, layer, *args, **kwargs)

        def counted(*args: Any, on_injected: Callable[[torch.Tensor], None], **kwargs: Any) -> torch.Tensor:
            layer = self._layer

            def count(squared: torch.Tensor) -> None:
                self._counts[layer] += 1
                on_injected(squared)

            return inject(*args, on_injected=count, **kwargs)

        hidden_state_loss.HiddenStateLoss._supervise = of_layer  # type: ignore[method-assign,assignment]
        hidden_state_loss.inject_gradient = counted  # type: ignore[assignment]
        step_module.check_injections = self.check  # type: ignore[assignment]
        step_module.check_output_passes = lambda *_: None  # a sum over ranks, too
        targets = distiller_module.Distiller.targets

        def checked(distiller: Any, batch: Any, group: Any) -> Any:
            if self.is_repeated:
                recorder.settled(BETWEEN_GROUPS)
            sent = targets(distiller, batch, group)
            for number, of_teacher in sent.items():
                is_projected = batch.objective.run.teachers[number].project is not None
                expected = torch.float32 if is_projected else distiller.teachers[number].dtype
                for layer, target in of_teacher.hidden.items():
                    if target.dtype != expected:
                        found, wanted = (str(dtype).removeprefix("torch.") for dtype in (target.dtype, expected))
                        text = f"the targets of layer {layer} are {found}, expected {wanted}"
                        recorder.mistake("target-dtype", text, recorder.memory.allocated_at(target))
            return sent

        distiller_module.Distiller.targets = checked  # type: ignore[method-assign,assignment]

    def check(self, sums: Any, plan: BatchPlan, num_layers: int) -> None:
        """Raises CaptureError unless each layer of this rank got its gradient once per microbatch with rows."""
        assert self.role is not None
        coords = self.role.member_coords
        expected = sum(1 for local in plan.local_rows(coords) if len(local.table_index))
        owned = set(self.role.layout.owned_layers(coords.pipeline, num_layers)) & set(sums)
        found, self._counts = self._counts, Counter()
        for layer in sorted(owned | set(found)):
            if found[layer] != (expected if layer in owned else 0):
                raise CaptureError(
                    f"layer {layer} received its loss gradient {found[layer]} time(s) in this step on this rank, "
                    f"expected {expected if layer in owned else 0}: the layer's forward was bypassed or its output was "
                    "detached"
                )


# Saves and loads a checkpoint as `train.py` does, with Megatron's planning, up to the files: no byte reaches the disk.
#
# The shards of other ranks are not known: each rank plans for itself alone, and the rehearsal does not validate that
# all shards together cover the checkpoint.


class _WouldWrite(Exception):  # noqa: N818 - the boundary
    """Raised when everything that this rank would write is in host memory; ends the save there."""


def save_and_load(recorder: Recorder, student: Student, source: Path) -> None:
    """Saves a checkpoint in the phase "save", and loads it in the phase "load"."""
    common: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder, _alone(common), recorder.invented_host_memory():
        with recorder.phase("save"):
            _save(recorder, Path(folder), student, source)
        gc.collect()  # objects of the interrupted save refer to each other in a circle
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
    """Makes Megatron plan for this rank only within the context; puts the state common to all ranks into `common`."""
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
    return tensor.nbytes


# tokens that the in-process engine samples; every later one does the same with as much memory
TOKENS = 4


def name_parts_of_building(recorder: Recorder) -> None:
    """Puts the building of a student and its teachers into the phases "build student", "... optimizer", ..."""
    from nemo_oprd.distillation import student
    from nemo_oprd.run import models

    for owner, name, phase in (
        (models, "build_chunks", "build student"),
        (student, "load_hf", "build student"),
        (student, "wrap_ddp", "build optimizer"),
        (student, "make_optimizer", "build optimizer"),
        (models, "_build_teacher", "build teachers"),
    ):
        setattr(owner, name, _in_phase(recorder, phase, vars(owner)[name]))


def _in_phase(recorder: Recorder, phase: str, call: Callable[..., Any]) -> Callable[..., Any]:
    def called(*args: Any, **kwargs: Any) -> Any:
        if recorder.phase_name != "build":
            return call(*args, **kwargs)
        with recorder.phase(phase):
            return call(*args, **kwargs)

    return called


def in_process_engine(recorder: Recorder, run: RunSpec, files: Any) -> RolloutEngine | None:
    """Returns the engine of a run that samples in the trainer's processes; None with servers, or recorded responses."""
    if not ENGINES[run.config.rollout.engine].in_process or run.config.rollout.replay is not None:
        return None
    with recorder.phase("build engine"):
        # no response ends here, so no id ends one
        student, sampled = files.student, files.sampled_ids
        return make_engine(run.config, student.spec, student.directory, run.student_layout, (), sampled)


def generate(recorder: Recorder, engine: RolloutEngine, run: RunSpec, prompt: int, response: int) -> None:
    """Samples `TOKENS` tokens after the prompts of a step's first batch, with a cache for whole responses."""
    from nemo_oprd.rollout import decoding
    from nemo_oprd.rollout import in_process_engine as engine_module

    agree = engine_module.agree
    config, asked = run.config, 0

    def should_cancel() -> bool:
        nonlocal asked
        asked += 1
        return asked > 1  # not before the first token

    def share(_: Any) -> dict[int, Any]:
        return {}  # no response is complete

    def agreed(place: torch.device, *flags: bool, group: Any = None) -> list[bool]:
        found = agree(place, *flags, group=group)
        return found if group is not None else [True] * len(found)  # some rank of the world has cancelled

    requests = [Request([1] * prompt)] * (config.train.prompts_per_step * config.rollout.per_prompt)
    sampling = SamplingParams(config.rollout.temperature, config.rollout.top_p, response, (0, TRAINING_STREAM, 0))
    engine._exchange.share = share  # type: ignore[attr-defined]
    with (
        recorder.phase("generation"),
        replaced(decoding, "CANCEL_CHECK_EVERY", TOKENS),
        replaced(engine_module, "agree", agreed),
        suppress(GenerationCancelled),
    ):
        engine.generate(requests, sampling, should_cancel)


def check_sampling(
    recorder: Recorder, config: Config, files: Any, student: Student, rollouts: list[Rollout], step: int
) -> None:
    """Computes the log-probabilities by which `train.py` checks an engine that records its own; compares nothing."""
    if RECORDS[config.rollout.engine].no_logprobs is None:
        with recorder.phase("sampling check"), replaced(sampling_check, "compare", lambda *_, **__: {}):
            sampling_check.SamplingCheck(config, files.sampled_ids)(student, rollouts, step)


def send_weights(
    recorder: Recorder, engine: RolloutEngine | None, run: RunSpec, student: Student, gpus_per_node: int
) -> None:
    """Sends the student's weights, as one stream, to the in-process engine or up to the boundary of the servers."""
    if run.config.rollout.replay is not None:
        return
    whole = {p.mapping.megatron: (p.shape, student.dtype) for p in checkpoint_parameters(student.spec)}

    def everyones(own: dict[str, Any], _: Any) -> list[dict[str, Any]]:
        return [whole, own]  # `whole` stands for the parameters of the other stages

    with recorder.phase("weights"), replaced(hf, "everyones", everyones):
        if engine is not None:
            engine.update_weights(student.hf_weights, 1)
        else:
            _push(recorder, run, student, gpus_per_node)


def _push(recorder: Recorder, run: RunSpec, student: Student, gpus_per_node: int) -> None:
    """Runs `WeightPush` with the servers' places and without servers."""
    import torch.distributed as dist

    from nemo_oprd.megatron.parallel import device
    from nemo_oprd.megatron.weights.hf import hf_names
    from nemo_oprd.vllm import transport, weight_transfer
    from nemo_oprd.vllm.fleet import Fleet
    from nemo_oprd.vllm.placement import place_servers
    from nemo_oprd.vllm.weight_transfer import UpdateCalls

    settings, layout, ranks = run.config.rollout.vllm, run.student_layout, range(dist.get_world_size())
    students = range(layout.first_rank, layout.first_rank + layout.size)
    machines = [f"machine {rank // gpus_per_node}" for rank in ranks]
    places = place_servers(settings, machines, [str(rank % gpus_per_node) for rank in ranks], students)
    near = [place for place in places if place.controller == dist.get_rank() and place.transport != "group"]
    own: Any = {number: SimpleNamespace(number=number, generation=1) for number in (place.number for place in near)}
    names = set(hf_names(student.spec))
    mine = Fleet(settings.start_timeout, servers=own, folder=transport.SharedFolder() if own else None)
    calls = UpdateCalls(mine, places, len(names), lambda *_: None, settings.request_timeout)

    class Group:
        """Takes the place of the group of the first rank and the servers' workers."""

        def __init__(self, *_: Any) -> None: ...

        def meet(self, _: Any) -> None: ...

        def ended(self) -> None: ...

        def send(self, bucket: Any) -> None:
            if bucket is not None and dist.get_rank() == 0 and any(place.transport == "group" for place in places):
                recorder.leave("broadcast to servers", len(bucket.data))

        def watch(self, *_: Any) -> None: ...

        def wait_for(self, *_: Any) -> None: ...

    def handle(bucket: Any) -> tuple[str, list[Any]]:
        recorder.leave("handles of device memory", len(bucket.data))
        return "", []

    class Unwritten:
        """Takes the place of a bucket's host copy, which is not written to shared memory."""

        def __init__(self, tensor: torch.Tensor) -> None:
            self._bytes = tensor.nbytes

        def tofile(self, _: Any) -> None:
            recorder.leave("shared memory", self._bytes)

    try:
        with (
            recorder.invented_host_memory(),
            replaced(weight_transfer, "WeightGroup", Group),
            replaced(transport, "memory_handle", handle),
            replaced(transport, "shareable_room", transport.room),  # a setting of the CUDA allocator
            replaced(FakeTensor, "numpy", Unwritten),
        ):
            push = weight_transfer.WeightPush(places, mine, calls, names, device(), students, settings.memory_share)
            push.push(student.hf_weights, 1)
    finally:
        if mine.folder is not None:
            mine.folder.close()
