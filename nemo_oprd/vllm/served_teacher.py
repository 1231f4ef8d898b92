"""A teacher that vLLM servers compute: its ranks request the rows of their own sequences.

The role is data-parallel over the student's ranks and holds no weights. Plans, transfers and everything after them are
those of any teacher. Servers send states in the model's dtype, or a bridge's projections of them, in float32. Servers
that several runs share get no bridge, so the requesting rank projects their states.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from nemo_oprd.batch.plan import StepPlan
from nemo_oprd.batch.types import Rollout
from nemo_oprd.distillation.objective import StepObjective
from nemo_oprd.distillation.target_transfer import RowShard
from nemo_oprd.distillation.teacher import Teacher
from nemo_oprd.vllm.teacher_requests import Shards, wanted_sequences

if TYPE_CHECKING:
    from nemo_oprd.vllm.teacher_servers import TeacherServers


@dataclass
class ServedTeacher(Teacher):
    """The teacher of the ranks that read from servers; see the module's docstring."""

    servers: TeacherServers

    def captured(
        self, rollouts: list[Rollout], plan: StepPlan, objective: StepObjective
    ) -> tuple[RowShard | None, RowShard | None]:
        """See `Teacher`.

        Raises:
            ServerRefused: a server gives no states, or died too often.
        """
        match, term, coords = objective.run.teachers[self.number], objective.output, self.role.coords
        bridge = self.servers.bridge
        wanted = [] if coords is None else wanted_sequences(rollouts, plan, coords.data, match, term, bridge)
        shards = Shards(match, term, self.dtype, objective.run.student.num_layers)
        self.servers.gather([each.request for each in wanted], lambda i, answer: shards.take(wanted[i], answer))
        return (None, None) if coords is None else shards.joined()

    def ask_ahead(self, step: int, rollouts: list[Rollout], plan: StepPlan, objective: StepObjective) -> None:
        """See `Teacher`."""
        match, term, bridge = objective.run.teachers[self.number], objective.output, self.servers.bridge
        if self.servers.ahead is None:
            return
        for data in range(plan.hidden.layout.data):  # whichever rank will need them in the batch
            wanted = wanted_sequences(rollouts, plan, data, match, term, bridge)
            self.servers.ahead.offer(step, [each.request for each in wanted], self.servers.near)

    def asked_ahead(self, step: int) -> tuple[float, float] | None:
        """See `Teacher`."""
        return None if self.servers.ahead is None else self.servers.ahead.span(step)

    def check(self, step: int) -> None:
        """See `Teacher`."""
        self.servers.check(step)

    def close(self) -> None:
        """Ends the servers."""
        self.servers.close()
