"""The models of a run on this rank, and the step that they make together: teachers read, the student learns."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch

from nemo_oprd.batch.plan import StepPlan
from nemo_oprd.batch.types import Rollout, TeacherTargets
from nemo_oprd.config.schema import Config
from nemo_oprd.distillation.gradient_noise import gradient_noise, whole_gradient
from nemo_oprd.distillation.objective import Objective
from nemo_oprd.distillation.step_metrics import StepMetrics
from nemo_oprd.distillation.student import Student
from nemo_oprd.distillation.teacher import Teacher
from nemo_oprd.distillation.teacher_routing import Routing


class PhaseTimer:
    """Seconds per phase of the current step. A phase that is entered again adds to its time."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.seconds[phase] = self.seconds.get(phase, 0.0) + time.perf_counter() - start


@dataclass
class System:
    """The models of a run on this rank, and the step they make together."""

    config: Config
    student: Student
    teachers: list[Teacher]
    routing: Routing
    _kept: dict[int, TeacherTargets] | None = None  # for the next update on the same rollouts

    @property
    def objective(self) -> Objective:
        """What the student is trained on; with several teachers that of the first, whose student's side is all's."""
        return self.student.objective

    def accumulate(
        self,
        rollouts: list[Rollout],
        clock: PhaseTimer | None = None,
        *,
        step: int | None = None,
        reuse: int = 0,
        whole_gradients: bool = False,
        watch: bool = True,
    ) -> StepMetrics | None:
        """Teachers' forward, transport, student forward/backward on one batch. None on ranks outside the student.

        The weights of the terms are those of the update after `step` others; None takes the largest of the run. `reuse`
        counts updates on the same rollouts: no teacher reads them again where the targets fit into one wave. Without
        `watch` only the terms of the loss are computed.

        The batch goes through in waves of `teacher.resident_microbatches`, which bounds the targets that are held.
        Their gradients add up, and are reduced over ranks with the last one.
        """
        clock = clock or PhaseTimer()
        # what a teacher reads can change from step to step
        for teacher, objective in zip(self.teachers, self.student.objectives, strict=True):
            teacher.objective = objective if step is None else objective.for_step(step, watch=watch)
        plan = self.plan(rollouts, self.teachers[0].objective)
        waves = plan.microbatch_groups(self.config.teacher.resident_microbatches)
        self.student.start_step(plan, len(rollouts), step, reuse, watch=watch)
        for number, wave in enumerate(waves, start=1):
            with clock("teacher"):
                targets = self._kept if reuse and self._kept is not None else self.teach(rollouts, wave)
            more_to_come = step is not None and reuse + 1 < self.config.train.updates_per_rollout
            self._kept = targets if more_to_come and len(waves) == 1 else None
            with clock("update"):
                self.student.forward_backward(
                    rollouts, wave, targets, last=number == len(waves), whole_gradients=whole_gradients
                )
            del targets  # before the next wave's come
        return self.student.finish_step()

    def gradient_noise(self, rollouts: list[Rollout], step: int) -> dict[str, float]:
        """Signal and noise of the gradient (`gradient_noise.py`), from two passes over half the prompts each.

        Empty where fewer than two prompts train anything, and on ranks outside the student.
        """
        rows = self.plan(rollouts, self.objective.for_step(step)).hidden.table
        prompts: dict[tuple[int, ...], list[Rollout]] = {}
        for i in np.unique(rows.response).tolist():
            prompts.setdefault(tuple(rollouts[i].prompt_ids), []).append(rollouts[i])
        # responses to one prompt are not independent
        groups = list(prompts.values())
        halves = [[rollout for group in groups[number::2] for rollout in group] for number in (0, 1)]
        if not halves[1]:
            return {}
        gradients = []
        for half in halves:
            self.accumulate(half, step=step, whole_gradients=True, watch=False)
            gradients.append(whole_gradient(self.student))
        self._kept = None  # of half a batch
        if not self.student.role.is_member:
            return {}
        return gradient_noise(self.student, gradients[0], gradients[1], (len(halves[0]), len(halves[1])))

    def check_gradients(self) -> str:
        """One real forward and backward on a few short random responses, before anything is sampled.

        Returns:
            What was found, in words.

        Raises:
            CaptureError: a supervised layer does not receive its gradient exactly once on the stage that owns it.
        """
        result = self.accumulate(self._random_rollouts())
        if result is not None and result.nonfinite_reason:
            raise ValueError(
                f"{result.nonfinite_reason}, on random tokens before the first step: expected finite numbers; the "
                "weights of student or teacher are damaged, or too large for this precision"
            )
        return "guard: " + "; ".join(self._found(result) or ["no term has a weight above 0, so nothing is trained"])

    def _random_rollouts(self) -> list[Rollout]:
        """Two short ones for every teacher on every data-parallel rank."""
        draw = np.random.default_rng(self.config.seed)
        specs = [self.objective.student, *(teacher.objective.teacher for teacher in self.teachers)]
        known = min(spec.vocab_size for spec in specs)
        rollouts = []
        for number in range(len(self.teachers)):
            source = self.routing.example(number)
            ids = draw.integers(0, known, (2 * self.student.role.layout.data, 16)).tolist()
            for row in ids:
                told = None if self.config.teacher.prompt is None else row[12:]  # whose teacher reads another prompt
                rollouts.append(Rollout(row[:4], row[4:12], data_source=source, teacher_prompt_ids=told))
        return rollouts

    def _found(self, result: StepMetrics | None) -> list[str]:
        found, layers = [], len(self.objective.layers)
        if self.objective.weight > 0 and layers and (result is None or not result.identical_layers):
            found.append(f"each of the {layers} supervised layers received its gradient once, on its own stage")
        elif self.objective.weight > 0 and layers and result is not None:
            found.append(
                f"student and teacher are identical at {len(result.identical_layers)} of the {layers} supervised "
                "layers, where a gradient of zero is right; the others received theirs once, on their own stage"
            )
        if self.objective.trains_head:
            found.append("the output-space term went back through the head once per microbatch")
        return found

    def plan(self, rollouts: list[Rollout], objective: Objective | None = None) -> StepPlan:
        """The batch packed for the student, for all terms or those of `objective`. What no supervised row depends on is
        not computed."""
        objective, budget = objective or self.objective, self.config.train.tokens_per_microbatch
        taught_by = self.taught_by(rollouts)
        hidden = self.routing.weigh(objective.rows(rollouts), taught_by)
        output = objective.output
        rows = None if output is None else self.routing.weigh(output.rows(rollouts), taught_by)
        return StepPlan.build(hidden, rows, len(rollouts), self.student.role.layout, budget, taught_by)

    def taught_by(self, rollouts: list[Rollout]) -> list[int]:
        """The teacher of each rollout."""
        return self.routing.teachers_of(rollout.data_source for rollout in rollouts)

    def teach(self, rollouts: list[Rollout], student_plan: StepPlan) -> dict[int, TeacherTargets]:
        """What each teacher has to say about its rows of `student_plan`, on the ranks that need it.

        One after the other, each on its own responses; teachers without any are left out.
        """
        budget, targets = self.config.train.tokens_per_microbatch, {}
        for number, teacher in enumerate(self.teachers):
            mine = student_plan.of_teacher(number)
            if mine is not None:
                its_plan = mine.for_teacher(teacher.role.layout, len(rollouts), budget)
                targets[number] = teacher.targets(rollouts, its_plan, mine, self.student.role)
        return targets
