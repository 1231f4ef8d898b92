"""Judges whether a teacher solves more problems than its student, and formats the result for `train` and `doctor`.

A worse teacher cannot improve the student, although the loss falls. The two are compared problem by problem: only
problems that one of them solves more often count. If the models are equally good, each of these problems favours the
teacher with probability 1/2 (the sign test; with one response per problem, McNemar's exact test).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from nemo_oprd.evaluation.grading.grade_sets import read_graded

# probability of a difference as large by chance, one-sided
SIGNIFICANCE = 0.05
# fewer problems than this show only differences of more than half of all problems
MIN_PROBLEMS = 8
# the meaning of +- everywhere: the half width of a 95 % interval, in standard errors
NORMAL_95 = 1.96
FIX = "fix: another teacher, or exchange the paths"


@dataclass(frozen=True)
class TeacherLead:
    """Both models' shares of right responses to each problem, in the same order."""

    student: Sequence[float]
    teacher: Sequence[float]

    @cached_property
    def _gaps(self) -> np.ndarray:
        return np.asarray(self.teacher, dtype=float) - np.asarray(self.student, dtype=float)

    @property
    def wins(self) -> int:
        """Returns the number of problems that the teacher solves more often."""
        return int((self._gaps > 0).sum())

    @property
    def losses(self) -> int:
        """Returns the number of problems that the student solves more often."""
        return int((self._gaps < 0).sum())

    @property
    def means(self) -> tuple[float, float]:
        """Returns the student's and the teacher's share of right responses."""
        return float(np.mean(self.student)), float(np.mean(self.teacher))

    @property
    def error(self) -> float:
        """Returns the standard error of the difference.

        It is Agresti and Min's for paired proportions, which is above 0 even if no problem distinguishes the models.
        """
        count = len(self._gaps) + 2
        return math.sqrt(float((self._gaps**2).sum()) + 1 - float(self._gaps.sum()) ** 2 / count) / count

    @property
    def teacher_is_better(self) -> bool:
        """Returns whether the teacher is better beyond chance."""
        return self.means[1] > self.means[0] and _chance(self.wins, self.losses) < SIGNIFICANCE

    @property
    def student_is_better(self) -> bool:
        """Returns whether the student is better beyond chance."""
        return self.means[0] > self.means[1] and _chance(self.losses, self.wins) < SIGNIFICANCE

    def describe(self, of_set: str = "") -> str:
        """Formats the result: "of 32 problems the teacher solves 25.0% and the student 75.0%, -50.0 +- 24.1 points"."""
        student, teacher = self.means
        said = f"of {len(self._gaps)} problems{of_set} the teacher solves {teacher:.1%} and the student {student:.1%}, "
        return f"{said}{100 * (teacher - student):+.1f} +- {100 * NORMAL_95 * self.error:.1f} points"

    def complaint(self, of_set: str = "", detail: str = "") -> str:
        """Returns the warning about a student that is better."""
        return f"{self.describe(of_set)}: the student is better{detail}; expected a better teacher; {FIX}"


def worse_teacher(student: Path, teacher: Path) -> Iterator[str]:
    """Yields a line for each set on which the teacher is worse than the student, from two evaluations' directories.

    Raises:
        ValueError: a file of an evaluation is damaged.
    """
    ours, theirs = read_graded(student), read_graded(teacher)
    for name in [name for name in ours if name in theirs and ours[name].answers == theirs[name].answers]:
        lead = TeacherLead(*(each.values[f"avg@{each.k}"].tolist() for each in (ours[name], theirs[name])))
        if lead.student_is_better and len(lead.student) >= MIN_PROBLEMS:
            yield lead.complaint(f" of {name}")


def _chance(more: int, fewer: int) -> float:
    """Returns the probability that of more + fewer fair coins at least `more` fall on one given side."""
    total = more + fewer
    ways = found = math.comb(total, more)
    for k in range(more, total):
        ways = ways * (total - k) // (k + 1)
        found += ways
    return found / 2**total
