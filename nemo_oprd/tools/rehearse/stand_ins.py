"""The values that a rehearsal invents, by the place that reads them, and why a step goes the same way with any value.

Numbers that the host itself put on the device are not invented (`host_values.py`). A read at an unlisted place ends
the rehearsal, because a value may decide what a step does: how many microbatches' targets fit, for instance.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from nemo_oprd.batch.types import Rollout
from nemo_oprd.config.schema import Config
from nemo_oprd.run.idle_ranks import shares
from nemo_oprd.tools.plan.workload import bridge_rank, step_responses
from nemo_oprd.tools.rehearse.places import CodeLocation

# Stand-ins for the files that a rehearsal does not read: rollouts and bridges.


def longest_responses(config: Config, prompt: int, response: int) -> list[Rollout]:
    """Returns the rollouts of a step, all as long as they may be, divided evenly among the teachers.

    A teacher that reads other ids than the student has as many of them, and a target for every response token.
    """
    ids, logprobs = np.ones(prompt + response, np.int32), np.full(response, -1.0, np.float32)
    one = Rollout(ids[:prompt], ids[prompt:], finish_reason="length", logprobs=logprobs)
    if config.teacher.reads == "text" or config.own_prompts:
        index = np.arange(response, dtype=np.int32)
        one = replace(one, teacher_prompt_ids=ids[:prompt], teacher_response_ids=ids[prompt:], teacher_index=index)
    count = step_responses(config)
    if not config.teachers:
        return [one] * count
    each = zip(config.teachers, shares(count, len(config.teachers)), strict=True)
    sources = [
        teacher.data_sources[0] if teacher.data_sources else None for teacher, share in each for _ in range(share)
    ]
    return [replace(one, data_source=source) for source in sources]


def unread_bridges(config: Config) -> None:
    """Makes the objective use zero bridges of the run's rank between the configured layers, not `bridge.path`."""
    from nemo_oprd.bridge.covariance import LayerPair
    from nemo_oprd.bridge.maps import FULL_WIDTH, Bridge, CapturePoint, LayerBridge
    from nemo_oprd.distillation import objective

    read = objective._bridge

    def unread(loss: Any, source: Any, student: Any, teacher: Any, pairs: dict[int, int]) -> Bridge | None:
        if source.bridge in (None, FULL_WIDTH):
            return read(loss, source, student, teacher, pairs)
        rank = bridge_rank(config, source.bridge, student.hidden_size, teacher.hidden_size)
        maps = LayerBridge(
            torch.zeros(teacher.hidden_size),
            torch.zeros(rank, teacher.hidden_size),
            torch.zeros(rank, student.hidden_size),
            torch.zeros(rank),
        )
        layers = {LayerPair(*pair): maps for pair in pairs.items()}
        identity = objective.model_identity(teacher, source.path)
        return Bridge(rank, layers, student, identity, CapturePoint(loss.position, loss.final_norm))

    objective._bridge = unread


class UnknownValue(Exception):  # noqa: N818 - a finding, not a fault of this program
    """Raised when the step reads a value of the device for which no stand-in is known."""


@dataclass(frozen=True)
class StandIn:
    """A value, and the reason why any value would do."""

    value: float
    why: str


# (file, function) of the innermost line of this package or of Megatron
STAND_INS = {
    ("nemo_oprd/distillation/metrics/step_metrics.py", "reduced"): StandIn(1.0, "sums of losses, for metrics"),
    ("nemo_oprd/distillation/sampling_check.py", "student_logprobs"): StandIn(-1.0, "as the rehearsed responses say"),
    ("nemo_oprd/vllm/worker/nemo_oprd_buckets.py", "add"): StandIn(1.0, "sums of weights, for a digest"),
    ("nemo_oprd/distillation/teacher.py", "_host_copy"): StandIn(0.0, "weights, which come back as they went"),
    ("megatron/core/optimizer/clip_grads.py", "get_grad_norm_fp32"): StandIn(1.0, "the gradient's norm, finite"),
    ("nemo_oprd/distillation/student.py", "optimizer_step"): StandIn(1.0, "the same, left on the device"),
    ("megatron/core/pipeline_parallel/p2p_communication.py", "_communicate_shapes"): StandIn(
        1.0, "shapes from the neighbouring stage, which are then taken from the plan"
    ),
}


def stand_in(place: CodeLocation, dtype: torch.dtype) -> float | int | bool:
    """Returns the stand-in, of this dtype, for a value that the code at `place` reads from the device.

    Raises:
        UnknownValue: no stand-in is known there.
    """
    known = STAND_INS.get(place.innermost)
    if known is None:
        file, function = place.innermost
        raise UnknownValue(
            f"{place}: {function} reads a {str(dtype).removeprefix('torch.')} of the device; expected a place whose "
            f"value may be invented: if the step goes the same way with any value, list {file}, {function} in "
            "stand_ins.py"
        )
    return known.value if dtype.is_floating_point else bool(known.value) if dtype is torch.bool else int(known.value)


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Sets an attribute of a module or class within the context; an inherited one is inherited again afterwards."""
    before = vars(owner).get(name, _ABSENT)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if before is _ABSENT:
            delattr(owner, name)
        else:
            setattr(owner, name, before)


_ABSENT = object()
