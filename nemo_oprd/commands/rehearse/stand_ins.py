"""The values that a rehearsal invents, by the place that reads them, and why a step goes the same way with any value.

What the host has put on the device itself is not invented (`host_values.py`). A read at a place that is not listed ends
the rehearsal, because a value may decide what a step does: how many microbatches' targets fit, for instance.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from nemo_oprd.commands.rehearse.places import Place


class UnknownValue(Exception):  # noqa: N818 - a finding, not a fault of this program
    """The step read a value of the device for which no stand-in is known."""


@dataclass(frozen=True)
class StandIn:
    """A value, and why it may be any."""

    value: float
    why: str


# (file, function) of the innermost line of this package or of Megatron
STAND_INS = {
    ("nemo_oprd/distillation/metrics/named_sums.py", "reduced"): StandIn(1.0, "sums of losses, for metrics"),
    ("nemo_oprd/distillation/sampling_check.py", "student_logprobs"): StandIn(-1.0, "as the rehearsed responses say"),
    ("nemo_oprd/rollout/vllm/worker/nemo_oprd_buckets.py", "add"): StandIn(1.0, "sums of weights, for a digest"),
    ("nemo_oprd/distillation/teacher.py", "_host_copy"): StandIn(0.0, "weights, which come back as they went"),
    ("megatron/core/optimizer/clip_grads.py", "get_grad_norm_fp32"): StandIn(1.0, "the gradient's norm, finite"),
    ("nemo_oprd/distillation/student.py", "optimizer_step"): StandIn(1.0, "the same, left on the device"),
    ("megatron/core/pipeline_parallel/p2p_communication.py", "_communicate_shapes"): StandIn(
        1.0, "shapes from the neighbouring stage, which are then taken from the plan"
    ),
}


def stand_in(place: Place, dtype: torch.dtype) -> float | int | bool:
    """The value of a read at `place`.

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
