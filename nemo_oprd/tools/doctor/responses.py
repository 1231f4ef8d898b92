"""The checks of sampled responses: whether they end, and whether the teacher solves more than the student."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from nemo_oprd.batch.types import Rollout
from nemo_oprd.evaluation.teacher_lead import MIN_PROBLEMS, TeacherLead
from nemo_oprd.tools.doctor.findings import Finding

# responses "dominate" if they are more than half of all
DOMINATES = 0.5
# Repetitions never end, whatever the limit, so fewer of them matter.
LOOPS_DOMINATE = 0.25
# the end of a response that is looked at, and the longest repeated part: it stands there twice at least
LOOP_TOKENS, LONGEST_PERIOD = 64, 32


def truncation(
    rollouts: list[Rollout], limit: int, run_limit: int, *, limited_by: str = "rollout.max_new_tokens"
) -> Finding:
    """Checks whether most responses are cut off at their limit.

    A cut response has no end and no answer: with `positions=last_k` the supervised tokens are in the middle of a
    thought, or in a loop, and the loss falls on text that no evaluation grades. If the limit is below the run's, few
    cut responses show that the longer limit cuts no more, while many show nothing, unless they repeat themselves.

    Args:
        limit, run_limit: the most tokens of a response here, and in the run.
        limited_by: the key of the limit. A key other than `rollout.max_new_tokens` ends responses on purpose: they
            are supervised completely, and only loops are a fault.
    """
    chosen = limited_by != "rollout.max_new_tokens"
    cut = [rollout for rollout in rollouts if rollout.finish_reason == "length"]
    loops = sum(repeats_itself(rollout.response_ids) for rollout in cut)
    share, looping = len(cut) / len(rollouts), loops / len(rollouts)
    lengths = [len(rollout.response_ids) for rollout in rollouts]
    numbers = {"responses": len(rollouts), "cut": share, "loops": looping, "limit": limit, "run_limit": run_limit}
    numbers["mean_tokens"] = float(np.mean(lengths))
    said = f"{len(cut)} of {len(rollouts)} responses reach the limit of {limit} tokens"
    said += f", {loops} of them in a loop" if cut else ""
    said += f" (mean length {numbers['mean_tokens']:.0f})"
    if looping > LOOPS_DOMINATE:
        text = f"{said}; expected endings: a loop never ends; fix: a student that ends, or another rollout.temperature"
        text += "; compare the stop ids and the templates above"
        return Finding("truncation", "warning", text, numbers, code="responses-loop")
    if share <= DOMINATES or chosen:
        said += f"; {limited_by} ends them there on purpose (rollout.stop_after=supervised)" if chosen else ""
        return Finding("truncation", "ok", said, numbers)
    if limit < run_limit:
        text = f"{said}, but the run's limit is {run_limit}: what is cut here may end; --max-new-tokens {run_limit} "
        return Finding("truncation", "skipped", f"{text}shows it", numbers)
    text = f"{said}; expected at most half; fix: raise rollout.max_new_tokens={run_limit}, or compare the stop ids "
    return Finding("truncation", "warning", f"{text}above", numbers, code="responses-cut")


def repeats_itself(ids: Sequence[int] | np.ndarray) -> bool:
    """Whether the last 64 tokens repeat one part of at most 32 tokens."""
    end = [*map(int, ids[-LOOP_TOKENS:])]
    if len(end) < LOOP_TOKENS:
        return False
    return any(end[period:] == end[:-period] for period in range(1, LONGEST_PERIOD + 1))


@dataclass(frozen=True)
class Answers:
    """One model's responses to validation problems."""

    solved: Sequence[bool]
    without_answer: int = 0  # responses in which the grader found no answer
    cut: int = 0  # responses that reached the limit

    def describe(self, limit: int) -> str:
        """A text on how the responses ended, which may explain an accuracy."""
        return f"{self.without_answer} had no answer and {self.cut} were cut at {limit} tokens"


def teacher_is_better(student: Answers, teacher: Answers, limit: int, run_limit: int) -> Finding:
    """Checks whether the teacher solves more validation problems than the student.

    A teacher that is no better has nothing to give, and the loss falls nevertheless. Each model gives one response per
    problem, paired: only problems that exactly one of the two solves count, and with equal models either is the solver
    with probability 1/2 (McNemar's exact test).

    Args:
        limit, run_limit: the most tokens of a response here, and in the run's evaluations.
    """
    check, count = "teacher is better", len(student.solved)
    lead = TeacherLead(student.solved, teacher.solved)
    accuracies = lead.means
    cut = student.cut + teacher.cut
    numbers = {"problems": count, "student": accuracies[0], "teacher": accuracies[1], "only_teacher": lead.wins}
    numbers |= {"only_student": lead.losses, "cut": cut, "limit": limit, "student_cut": student.cut}
    numbers["teacher_cut"] = teacher.cut
    numbers |= {"student_without_answer": student.without_answer, "teacher_without_answer": teacher.without_answer}
    numbers["standard_error"] = lead.error
    if count < MIN_PROBLEMS:
        return Finding(check, "skipped", f"{count} problems show nothing; expected at least {MIN_PROBLEMS}", numbers)
    if limit < run_limit and cut > 2 * count * LOOPS_DOMINATE:
        text = f"{cut} of {2 * count} responses are cut at {limit} tokens, where evaluations allow {run_limit}: "
        return Finding(check, "skipped", f"{text}--max-new-tokens {run_limit} compares them whole", numbers)
    said = lead.describe()
    if lead.student_is_better:
        text = lead.complaint(detail=f" ({_both(student, teacher, limit)})")
        return Finding(check, "wrong", text, numbers, code="teacher-worse")
    if not any(teacher.solved):
        text = f"{said}: of the teacher's responses {teacher.describe(limit)}, of the student's "
        text += f"{student.describe(limit)}; expected a teacher that solves some; fix: "
        if teacher.cut > count / 2:
            text += "evaluation.max_new_tokens, or the stop ids above"
        elif teacher.without_answer > count / 2:
            text += "a prompt that asks for the answer as the grader expects it (data.suffix, evaluation.graders)"
        else:
            text += "easier problems, or another teacher"
        return Finding(check, "warning", text, numbers, code="teacher-solves-nothing")
    if lead.teacher_is_better:
        return Finding(check, "ok", said, numbers)
    text = f"{said}: no more than the student beyond chance ({_both(student, teacher, limit)}); expected a better "
    text += f"teacher; fix: another teacher, or --problems above {count} to see a small difference"
    return Finding(check, "warning", text, numbers, code="teacher-not-better")


def _both(student: Answers, teacher: Answers, limit: int) -> str:
    return f"of the teacher's responses {teacher.describe(limit)}, of the student's {student.describe(limit)}"
