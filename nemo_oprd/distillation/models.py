"""The student and its teachers on this rank: what a step asks of them together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from nemo_oprd.batch.plan import StepPlan
from nemo_oprd.batch.types import Rollout, TeacherTargets
from nemo_oprd.config.schema import Config
from nemo_oprd.distillation.objective import Objective, StepObjective
from nemo_oprd.distillation.step import GradientAccumulation, KeptResults, StepBatch
from nemo_oprd.distillation.student import Student
from nemo_oprd.distillation.teacher import Teacher
from nemo_oprd.distillation.teacher_routing import Routing
from nemo_oprd.distillation.watched_metrics import WatchedMetrics


@dataclass(frozen=True)
class Models:
    """The student and its teachers. Every rank has all the objects, whatever roles it has."""

    config: Config
    objective: Objective
    watched: WatchedMetrics | None
    student: Student
    teachers: list[Teacher]
    routing: Routing

    def objective_of(self, step: int | None, *, watch: bool = True) -> StepObjective:
        """The objective of the update after `step` others; None: all terms at their largest weights.

        Args:
            watch: False leaves out what is only watched.
        """
        adaptive = self.student.adaptive
        objective = self.objective.for_step(
            step,
            layer_weights=adaptive.of_layers(self.objective.layer_weights),
            position_factors=adaptive.position_factors(),
        )
        return objective if self.watched is None or not watch else self.watched.add_to(objective, step)

    def batch(
        self,
        rollouts: list[Rollout],
        objective: StepObjective,
        kept: KeptResults | None = None,
        *,
        is_last: bool = True,
    ) -> StepBatch:
        """Plans one update on `rollouts`.

        Args:
            kept: shared by the updates on the same rollouts; None: there is only one.
            is_last: no other update on these rollouts follows.
        """
        plan = self.plan(rollouts, objective)
        groups = plan.microbatch_groups(self.config.teacher.resident_microbatches)
        return StepBatch(rollouts, objective, plan, groups, kept or KeptResults(), is_last)

    def plan(self, rollouts: list[Rollout], objective: StepObjective) -> StepPlan:
        """The batch packed for the student. What no supervised row depends on is not computed."""
        taught_by = self.taught_by(rollouts)
        hidden = objective.weigh_positions(self.routing.weigh(objective.run.rows(rollouts), taught_by))
        term = objective.output
        output = None if term is None else self.routing.weigh(term.rows(rollouts), taught_by)
        budget = self.config.train.tokens_per_microbatch
        return StepPlan.build(hidden, output, len(rollouts), self.student.role.layout, budget, taught_by)

    def taught_by(self, rollouts: Sequence[Rollout]) -> list[int]:
        """The number of each rollout's teacher."""
        return self.routing.teachers_of(rollout.data_source for rollout in rollouts)

    def targets(self, batch: StepBatch, group: StepPlan) -> dict[int, TeacherTargets]:
        """Teacher's number -> what it says about its rows of `group`, on the ranks that need it.

        The teachers read one after the other, each its own responses; teachers without rows in the group are left out.
        """
        kept = batch.kept.targets
        targets = self._read(batch, group) if kept is None else kept
        batch.kept.targets = None if batch.is_last or len(batch.groups) > 1 else targets
        return targets

    def _read(self, batch: StepBatch, group: StepPlan) -> dict[int, TeacherTargets]:
        budget, targets = self.config.train.tokens_per_microbatch, {}
        for number, teacher in enumerate(self.teachers):
            part = group.of_teacher(number)
            if part is not None:
                plan = part.for_teacher(teacher.role.layout, len(batch.rollouts), budget)
                targets[number] = teacher.targets(batch.rollouts, plan, part, self.student.role, batch.objective)
        return targets

    def start(self, batch: StepBatch, *, whole_gradients: bool = False) -> GradientAccumulation:
        """Begins the gradient of a batch.

        Args:
            whole_gradients: every student rank ends up with complete gradients, also under the distributed optimizer.
        """
        return GradientAccumulation(self.student, batch, whole_gradients=whole_gradients)
