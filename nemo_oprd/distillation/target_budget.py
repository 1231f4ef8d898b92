"""`teacher.resident_microbatches`: the number of microbatches whose targets are in memory; `auto` asks the memory."""

from __future__ import annotations

from typing import Literal

import torch
import torch.distributed as dist

from nemo_oprd.batch.plan import StepPlan
from nemo_oprd.config.memory_bounds import TARGET_SHARE
from nemo_oprd.distillation.objective import StepObjective
from nemo_oprd.models.megatron.device_memory import free_bytes
from nemo_oprd.models.megatron.parallel import Role, device


def resident_microbatches(
    setting: Literal["auto"] | int | None, plan: StepPlan, objective: StepObjective, student: Role, dtype: torch.dtype
) -> int | None:
    """The number of microbatches per group; None: all. With `auto` every rank of the world must call this.

    `setting` is `teacher.resident_microbatches`, `plan` the batch, planned for the student.
    """
    if setting != "auto":
        return setting
    largest = bytes_per_microbatch(plan, objective, student, dtype)
    own = free_bytes(device(), TARGET_SHARE) // max(1, largest)
    smallest = torch.tensor([min(own, 1 << 30)], dtype=torch.int64, device=device())
    dist.all_reduce(smallest, op=dist.ReduceOp.MIN)
    return max(1, int(smallest.item()))


def bytes_per_microbatch(plan: StepPlan, objective: StepObjective, student: Role, dtype: torch.dtype) -> int:
    """Bytes of the targets of this rank's largest microbatch; on ranks outside the student's role 0."""
    coords, run = student.coords, objective.run
    if coords is None:
        return 0
    owned = plan.hidden.layout.owned_layers(coords.pipeline, run.student.num_layers)
    width = max(
        match.width * (dtype.itemsize if match.project is None else torch.float32.itemsize) for match in run.teachers
    )
    per_row = width * sum(1 for layer in run.layers if layer in owned)
    rows = max((len(local.table_index) for local in plan.hidden.local_rows(coords)), default=0)
    total = rows * per_row
    if plan.output is not None and coords.pipeline == plan.hidden.layout.pipeline - 1:
        output_rows = max((len(local.table_index) for local in plan.output.local_rows(coords)), default=0)
        total += output_rows * max(match.spec.hidden_size for match in run.teachers) * dtype.itemsize
    return total
