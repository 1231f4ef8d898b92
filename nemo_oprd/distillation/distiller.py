"""The student and its teachers on this rank: plans of a batch, targets, and the start of a gradient accumulation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
import torch.distributed as dist

from nemo_oprd.batch.plan import StepPlan
from nemo_oprd.batch.types import Rollout, TeacherTargets
from nemo_oprd.config.memory_bounds import TARGET_SHARE
from nemo_oprd.config.schema import Config
from nemo_oprd.config.teacher_routing import Routing
from nemo_oprd.distillation.metrics.watched_metrics import WatchedMetrics
from nemo_oprd.distillation.objective import Objective, StepObjective
from nemo_oprd.distillation.step import GradientAccumulation, Logprobs
from nemo_oprd.distillation.step_batch import StepBatch
from nemo_oprd.distillation.student import Student
from nemo_oprd.distillation.teacher import Teacher
from nemo_oprd.megatron.parallel import Role, device, free_bytes

# `teacher.resident_microbatches`: how many microbatches' targets are in memory; `auto` measures the free memory.


def resident_microbatches(
    setting: Literal["auto"] | int | None, plan: StepPlan, objective: StepObjective, student: Role, dtype: torch.dtype
) -> int | None:
    """Returns the number of microbatches per group; None: all. With `auto` every rank of the world must call this.

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
    """Returns an upper bound of the bytes of targets per microbatch of this rank; 0 outside the student's role."""
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


@dataclass(frozen=True)
class Distiller:
    """The student and its teachers, and their common steps in an update. Every rank has one, whatever its roles."""

    config: Config
    objective: Objective
    watched: WatchedMetrics | None
    student: Student
    teachers: list[Teacher]
    routing: Routing

    def close(self) -> None:
        """Stops everything that the teachers have started."""
        for teacher in self.teachers:
            teacher.close()

    def objective_of(self, step: int | None, *, watch: bool = True) -> StepObjective:
        """Returns the objective of one update.

        Args:
            step: number of steps before this update's; None: every loss at its largest weight (the gradient check).
            watch: include values that are only measured (`metrics/watched_metrics.py`, `metrics/token_metrics.py`).
        """
        adaptive = self.student.adaptive
        objective = self.objective.for_step(
            step,
            layer_weights=adaptive.layer_weights(self.objective.layer_weights),
            position_factors=adaptive.position_factors(),
        )
        if not watch:
            return objective
        if self.config.logging.keeps_token_metrics(step, self.config.train.steps):
            objective = replace(objective, kept_responses=self.config.logging.token_metrics)
        return objective if self.watched is None else self.watched.add_to(objective, step)

    def batch(self, rollouts: list[Rollout], objective: StepObjective) -> StepBatch:
        """Plans one update on `rollouts`. Every rank of the world calls this.

        Raises:
            ValueError: no token of the rollouts is supervised.
        """
        plan = self.plan(rollouts, objective)
        setting = self.config.teacher.resident_microbatches
        at_a_time = resident_microbatches(setting, plan, objective, self.student.role, self.student.dtype)
        return StepBatch(rollouts, objective, plan, plan.microbatch_groups(at_a_time))

    def plan(self, rollouts: list[Rollout], objective: StepObjective) -> StepPlan:
        """Returns the batch packed for the student, without the tokens that no supervised row depends on.

        Every rank makes the same plan, except that row weights by position (`loss.representation.adaptive.positions`)
        are known on the student's ranks only: no other rank reads row weights.
        """
        taught_by = self.taught_by(rollouts)
        weights = self.routing.weights(taught_by)
        hidden = objective.weigh_positions(objective.run.rows(rollouts).scale_responses(weights))
        term = objective.output
        output = None if term is None else term.rows(rollouts).scale_responses(weights)
        budget = self.config.train.tokens_per_microbatch
        return StepPlan.build(hidden, output, len(rollouts), self.student.role.layout, budget, taught_by)

    def taught_by(self, rollouts: Sequence[Rollout]) -> list[int]:
        """Returns the number of each rollout's teacher."""
        return self.routing.teachers_of([rollout.data_source for rollout in rollouts])

    def targets(self, batch: StepBatch, group: StepPlan) -> dict[int, TeacherTargets]:
        """Returns teacher number -> its targets for the rows of `group` that this rank needs. Every rank calls this.

        The teachers run one after the other, each on its own responses. Teachers without rows in the group are absent.
        """
        budget, targets = self.config.train.tokens_per_microbatch, {}
        for number, teacher in enumerate(self.teachers):
            part = group.of_teacher(number)
            if part is not None:
                plan = part.for_teacher(teacher.role.layout, len(batch.rollouts), budget)
                targets[number] = teacher.targets(batch.rollouts, plan, part, self.student.role, batch.objective)
        return targets

    def prefetch(self, step: int, rollouts: Sequence[Rollout]) -> None:
        """Lets teachers begin with complete responses of a step (0-based) before its batch is full; from any thread.

        Does nothing in an update that measures drawn rows (`only_watched`), because the draw needs the whole batch.
        """
        objective, budget = self.objective_of(step), self.config.train.tokens_per_microbatch
        if objective.output is not None and objective.output.only_watched:
            return
        for rollout in rollouts:
            if not any(rollout.mask):
                continue  # no token of it is supervised
            plan = self.plan([rollout], objective)
            for number, teacher in enumerate(self.teachers):
                part = plan.of_teacher(number)
                if part is not None:
                    made = part.for_teacher(teacher.role.layout, 1, budget)
                    teacher.prefetch(step, [rollout], made, objective)

    def start(
        self, batch: StepBatch, sampled_logprobs: Logprobs | None = None, *, whole_gradients: bool = False
    ) -> GradientAccumulation:
        """Starts the accumulation of the gradient of a batch; the arguments are those of `GradientAccumulation`."""
        return GradientAccumulation(self.student, batch, sampled_logprobs, whole_gradients=whole_gradients)
