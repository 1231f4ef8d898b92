"""Tables of the kinds of teachers (`teacher.weights`, `teacher.engine`) and of the data that rollout engines record.

`run/models.py` builds the teachers. The code of a run compares the values of the two keys nowhere else.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

# The rollout engines by name, and the data of a response that each one records; `checks.py` reads this table.
#
# The engines themselves are in `run/engine_kinds.py`, which imports this package.

EngineName = Literal["megatron", "vllm"]


@dataclass(frozen=True)
class Records:
    """Data of a response besides its ids: None if the engine records them, else a clause that says why not."""

    no_logprobs: str | None = None
    no_expert_routes: str | None = None  # the experts that tokens visit


RECORDS: dict[EngineName, Records] = {
    "megatron": Records(no_logprobs="which samples with the trainer's own weights and records no log-probabilities"),
    "vllm": Records(no_expert_routes="whose servers report no experts to this project"),
}


TeacherWeights = Literal["own", "student", "ema", "initial"]
TeacherEngine = Literal["megatron", "vllm"]
# `teacher.engine` -> whether servers compute the teacher's states, and not ranks of this job
SERVED: dict[TeacherEngine, bool] = {"megatron": False, "vllm": True}


@dataclass(frozen=True)
class TeacherKind:
    """One kind of teacher."""

    own_model: bool = False  # a model with files of its own; otherwise it starts as the student
    moves: bool = False  # its weights change with the student's updates, so that it has the student's ranks and layout
    copied: bool = True  # its weights are in memory beside the student's
    averages: bool = False  # it is the moving average of the student, which checkpoints hold


TEACHER_KINDS: dict[TeacherWeights, TeacherKind] = {
    "own": TeacherKind(own_model=True),
    "student": TeacherKind(moves=True, copied=False),
    "ema": TeacherKind(moves=True, averages=True),
    "initial": TeacherKind(),
}
