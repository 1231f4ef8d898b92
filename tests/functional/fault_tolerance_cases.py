"""What the pool's workers run for test_skipped_updates.py and test_updates_per_rollout.py: training that is watched."""

from __future__ import annotations

from typing import Any
from unittest import mock

import numpy as np
import torch
from messages import messages

from nemo_oprd.config.loading import load_config
from nemo_oprd.distillation.step import GradientAccumulation, MicrobatchGroup
from nemo_oprd.distillation.student import Student
from nemo_oprd.megatron.param_names import named_parameters


def run_poisoned_train(
    overrides: list[str],
    *,
    steps: list[int],
    response: int = 0,
    layer: int | None = 2,
    value: str | None = None,
    factor: float | None = None,
    parameter: str | None = None,
) -> dict[str, Any]:
    """`train`, with something wrong in `steps` (0-based, of this start).

    Args:
        value: "nan" or "inf" in the teacher's states of `response` at `layer`; None: in those that the output-space
            term compares.
        factor: those states are multiplied by it.
        parameter: an infinite number in the gradient of this parameter (name of ours).

    Returns:
        "said": what the run said; "updates": [(weights changed, nonfinite_reason)] per step, of the first rank.
    """
    from nemo_oprd.train import train

    passes = -2  # the pass of the gradient check comes first
    updates: list[tuple[bool, str | None]] = []
    begin, make_microbatches = GradientAccumulation.__init__, GradientAccumulation._microbatches
    update = Student.optimizer_step

    def start(accumulation: GradientAccumulation, *args: Any, **kwargs: Any) -> None:
        nonlocal passes
        passes += 1
        begin(accumulation, *args, **kwargs)

    def poison_targets(accumulation: GradientAccumulation, group: MicrobatchGroup, *more: Any) -> Any:
        if passes in steps and (value or factor):
            sent = group.targets[0]
            states = sent.output if layer is None else sent.hidden.get(layer)
            plan = group.plan.output if layer is None else group.plan.hidden
            row = np.concatenate([rows.table_index for rows in plan.local_rows(group.coords)])
            poisoned = torch.from_numpy(plan.table.response[row]) == response
            if states is not None:
                states[poisoned] = states[poisoned] * factor if factor else float(str(value))
        return make_microbatches(accumulation, group, *more)

    def watched_update(student: Student, step: int, objective: Any, measured: Any) -> Any:
        if passes in steps and parameter:
            named = named_parameters(student.chunks)
            if parameter in named:
                named[parameter].main_grad.view(-1)[0] = float("inf")
        before = weights(student)
        result = update(student, step, objective, measured)
        if result is not None:
            changed = any(not torch.equal(before[name], now) for name, now in weights(student).items())
            updates.append((changed, result.nonfinite_reason))
        return result

    with (
        mock.patch.object(GradientAccumulation, "__init__", start),
        mock.patch.object(GradientAccumulation, "_microbatches", poison_targets),
        mock.patch.object(Student, "optimizer_step", watched_update),
        messages() as said,
    ):
        train(load_config("verify", overrides))
    return {"said": said, "updates": updates}


def weights(student: Student) -> dict[str, torch.Tensor]:
    """Copies of all whole weights; every student rank calls this."""
    return {name: value.clone() for name, value in student.hf_weights()} if student.role.is_member else {}


def versions_of_weights(overrides: list[str]) -> list[int]:
    """`train` on recorded rollouts; the optimizer steps of each update of the engine, the same on every rank."""
    import torch.distributed as dist

    from nemo_oprd.rollout.replay import ReplayEngine
    from nemo_oprd.train import train

    given: list[int] = []
    with mock.patch.object(ReplayEngine, "update_weights", lambda self, weights, step: given.append(step)):
        train(load_config("verify", overrides))
    everyones: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyones, given)
    assert all(theirs == given for theirs in everyones)
    return given
