"""The batch of one update: its rollouts, planned for the student, and the update's objective."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from nemo_oprd.batch.plan import StepPlan
from nemo_oprd.batch.types import Rollout
from nemo_oprd.distillation.metrics.token_metrics import TokenSlots
from nemo_oprd.distillation.objective import StepObjective
from nemo_oprd.distillation.router_losses import RouterTerm


@dataclass(frozen=True)
class StepBatch:
    """The batch of an update, the same on every rank.

    `groups` divides the microbatches of `plan`. The models process one group after the other, the gradients of the
    groups add up, and only one group's targets are in memory at a time.
    """

    rollouts: list[Rollout]
    objective: StepObjective
    plan: StepPlan
    groups: list[StepPlan]

    @cached_property
    def token_slots(self) -> TokenSlots | None:
        """The responses whose values per token are kept; None if there are none."""
        return TokenSlots.choose(self.rollouts, self.objective.kept_responses)

    @cached_property
    def routers(self) -> RouterTerm | None:
        """The routers' part of the update; None for a student without experts."""
        return RouterTerm.build(self.plan, self.objective, len(self.rollouts))
