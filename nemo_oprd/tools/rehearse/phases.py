"""The parts of a run around its steps, each in a phase of its own: building, sampling, weights for the engine.

Each calls what `train.py` calls. Where a part would leave this process, for a file or for a server, it ends at that
boundary, and what would leave is counted. Checkpoints are in `checkpoints.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from nemo_oprd.batch.types import Rollout
from nemo_oprd.config.schema import Config
from nemo_oprd.config.teacher_kinds import RECORDS
from nemo_oprd.distillation import sampling_check
from nemo_oprd.distillation.student import Student
from nemo_oprd.megatron.weights import hf
from nemo_oprd.megatron.weights.megatron_checkpoint import checkpoint_parameters
from nemo_oprd.rollout.engine import TRAINING_STREAM, GenerationCancelled, Request, RolloutEngine, SamplingParams
from nemo_oprd.run.engine_kinds import ENGINES, make_engine
from nemo_oprd.run.resolve import RunSpec
from nemo_oprd.tools.rehearse.stand_ins import replaced

if TYPE_CHECKING:
    from nemo_oprd.tools.rehearse.recorder import Recorder

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
    """The engine of a run that samples in the trainer's processes; None if it has servers, or replays responses."""
    if not ENGINES[run.config.rollout.engine].in_process or run.config.rollout.replay is not None:
        return None
    with recorder.phase("build engine"):
        # no response ends here, so no id ends one
        student, sampled = files.student, files.sampled_ids
        return make_engine(run.config, student.spec, student.directory, run.student_layout, (), sampled)


def generate(recorder: Recorder, engine: RolloutEngine, run: RunSpec, prompt: int, response: int) -> None:
    """Samples the first batch of a step's responses: the prompts, and `TOKENS` tokens with a cache for all of them."""
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
    """Computes log-probabilities to check an engine that records them, as `train.py`, but compares nothing."""
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
        return [whole, own]  # what the other stages would say of their parameters

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
    from nemo_oprd.vllm.controller import Controlled
    from nemo_oprd.vllm.placement import place_servers
    from nemo_oprd.vllm.weight_transfer import UpdateCalls

    settings, layout, ranks = run.config.rollout.vllm, run.student_layout, range(dist.get_world_size())
    students = range(layout.first_rank, layout.first_rank + layout.size)
    machines = [f"machine {rank // gpus_per_node}" for rank in ranks]
    places = place_servers(settings, machines, [str(rank % gpus_per_node) for rank in ranks], students)
    near = [place for place in places if place.controller == dist.get_rank() and place.transport != "group"]
    own: Any = {number: SimpleNamespace(number=number, generation=1) for number in (place.number for place in near)}
    names = set(hf_names(student.spec))
    mine = Controlled(own, folder=transport.SharedFolder() if own else None)
    calls = UpdateCalls(None, places, len(names), lambda *_: None, settings.start_timeout, settings.request_timeout)

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
            self._bytes = tensor.numel() * tensor.element_size()

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
