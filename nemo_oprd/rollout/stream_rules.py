"""Which responses a step takes with `rollout.mode=stream`, and how many are under way: arithmetic on their places.

A place is (group, number): the step whose prompts these would be if every step took its own, and the number among
them. With N = `rollout.max_lag`, the groups up to v + N // 2 are admitted while the student has made v steps. A step
takes the oldest responses that are complete, as many as one group has. It waits if what it would leave could not be
taken in time: a response that was admitted after v steps is taken by step v + N at the latest, so none of its tokens
is more than N steps old. Nothing is dropped, and every place is taken once.

The half of N that is not ahead is the time that a long response has beyond the others. Without it, with N // 2 = N,
the places of every step would be fixed.
"""

from __future__ import annotations

from collections.abc import Container, Iterable
from dataclasses import dataclass
from typing import TypeAlias

Place: TypeAlias = "tuple[int, int]"


@dataclass(frozen=True)
class StreamRules:
    """See the module's docstring.

    Attributes:
        lag: `rollout.max_lag`.
        ahead: groups that are admitted beyond the one of the next step; less than `lag`.
        size: responses of a group and of a step.
        steps: groups and steps of the run.
    """

    lag: int
    ahead: int
    size: int
    steps: int

    def admitted(self, done: int) -> int:
        """How many groups are admitted while the student has made `done` steps."""
        return min(done + self.ahead + 1, self.steps)

    def deadline(self, group: int) -> int:
        """The last step that may take a response of a group, whose first tokens may be of its admission."""
        return max(0, group - self.ahead) + self.lag

    def batch(self, step: int, pool: Iterable[Place], complete: Container[Place]) -> list[Place] | None:
        """What step `step` (from 0) takes of the `pool` of all places not yet taken; None: it has to wait."""
        oldest_first = sorted(pool)
        chosen = [place for place in oldest_first if place in complete][: self.size]
        taken = set(chosen)
        left = [place for place in oldest_first if place not in taken]
        # deadlines never fall: the later steps take what is left in this order at the latest
        in_time = all(self.deadline(group) > step + i // self.size for i, (group, _) in enumerate(left))
        return chosen if in_time and len(chosen) == self.size else None
