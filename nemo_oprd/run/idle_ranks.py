"""Finds ranks without a response in a step, for `plan` and a starting run. Plain arithmetic, without torch.

A response is not divided over data-parallel ranks, so some may have none.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from nemo_oprd.batch.layout import Layout
from nemo_oprd.config.schema import Config
from nemo_oprd.run.engine_kinds import ENGINES

CODE = "idle_ranks"


@dataclass(frozen=True)
class Idle:
    """Ranks of one role, `idle` of them without a response; `groups` data-parallel groups share the responses."""

    role: str
    idle: int
    ranks: int
    groups: int


@dataclass(frozen=True)
class IdleRanks:
    """The roles with idle ranks in a step of `responses` responses, and the fix."""

    responses: int
    roles: tuple[Idle, ...]
    fix: str

    @property
    def line(self) -> str:
        return f"warning ({CODE}): {self.text}"

    @property
    def text(self) -> str:
        """Returns a message: the finding, the expected state, and the fix."""
        counts = [f"{each.idle} of {each.ranks} {each.role} ranks" for each in self.roles]
        named = counts[0] if len(counts) == 1 else f"{', '.join(counts[:-1])} and {counts[-1]}"
        most = max(each.groups for each in self.roles)
        return (
            f"{named} have no response in a step of {self.responses}, because a response is not divided over "
            f"data-parallel ranks; expected at least one for each of {most} groups of ranks: {self.fix}"
        )

    def as_json(self) -> dict[str, Any]:
        numbers = {"responses": self.responses, "roles": [asdict(each) for each in self.roles]}
        return {"code": CODE, "text": self.text, "numbers": numbers}


def shares(responses: int, teachers: int) -> list[int]:
    """Returns the number of responses per teacher, spread evenly: ranks divide each teacher's responses separately."""
    return [responses // teachers + (number < responses % teachers) for number in range(teachers)]


def idle_ranks(
    config: Config, student: Layout, teacher: Layout, *, recorded: int | None = None, has_gpus: bool = True
) -> IdleRanks | None:
    """Returns the idle ranks of a step; None if every rank has a response.

    Args:
        recorded: number of recorded responses, all of which every step uses; None: the number that a step samples.
        has_gpus: whether ranks have GPUs, on which servers of this run sample.
    """
    responses = config.train.prompts_per_step * config.rollout.per_prompt if recorded is None else recorded
    teachers = len(config.teacher_sources)
    of_one_teacher = shares(responses, teachers)[0]
    found = [_idle("student", student.size, student.data, of_one_teacher)]
    if (teacher.ranks, teacher.data) != (student.ranks, student.data):
        found.append(_idle("teacher", teacher.size, teacher.data, of_one_teacher))
    kind = ENGINES[config.rollout.engine]
    groups = kind.groups(config.rollout, student.size)
    on_ranks = groups.placement != "elsewhere" and (kind.in_process or has_gpus)
    if config.rollout.replay is None and on_ranks:
        found.append(_idle("sampling", groups.count * groups.gpus, groups.count, responses))
    idle = tuple(each for each in found if each.idle)
    if not idle:
        return None
    needed = max(each.groups * (1 if each.role == "sampling" else teachers) for each in idle)
    return IdleRanks(responses, idle, _fix(config, idle, needed))


def _idle(role: str, ranks: int, groups: int, responses: int) -> Idle:
    """Returns the idle ranks of one role: those of the groups for which no response is left."""
    return Idle(role, max(0, groups - responses) * (ranks // groups), ranks, groups)


def _fix(config: Config, idle: tuple[Idle, ...], needed: int) -> str:
    """Describes how every rank would get a response; `needed`: a sufficient number of responses."""
    if config.rollout.replay is not None:
        return f"replay at least {needed} responses, or start fewer ranks"
    prompts, each = config.train.prompts_per_step, config.rollout.per_prompt
    keys = {
        "student": "student.parallel.tensor, context or pipeline",
        "teacher": "teacher.parallel.tensor, context or pipeline",
        "sampling": f"{ENGINES[config.rollout.engine].key}.tensor",
    }
    larger = "; ".join(keys[role.role] for role in idle)
    return (
        f"raise train.prompts_per_step from {prompts} to {-(-needed // each)}, start fewer ranks, or raise what "
        f"divides a response ({larger})"
    )
