"""When a run saves, and when it ends early: after skipped updates in a row, or because it was asked to stop."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nemo_oprd.checkpointing.training_state import save_checkpoint
from nemo_oprd.config.schema import TrainConfig
from nemo_oprd.distillation.student import Student, Update
from nemo_oprd.fault_tolerance.signals import Signals, Stopped, agree
from nemo_oprd.megatron.parallel import device

# key of state.json in a checkpoint whose evaluation the next start has to make
EVALUATION_DEFERRED = "evaluation_deferred"


@dataclass(frozen=True)
class EvaluationOutcome:
    """What a checkpoint must say of the evaluation before it.

    `best` is the content of best.json if this is the best evaluation so far, known on the first rank. `deferred` says
    that a signal interrupted the evaluation, so the next start makes it.
    """

    best: dict[str, Any] | None = None
    deferred: bool = False


class Checkpointer:
    """Saves a run's checkpoints where they are due. Every rank has one and takes part in its calls.

    Args:
        root: the run's directory of checkpoints.
        source: directory of the student's config.json and tokenizer, which a checkpoint carries along.
        skipped_in_a_row: steps with a skipped update, up to the step that the run resumed after.
    """

    def __init__(
        self,
        train: TrainConfig,
        root: Path,
        student: Student,
        source: Path,
        signals: Signals,
        skipped_in_a_row: int,
    ) -> None:
        self._train, self._root, self._student, self._source = train, root, student, source
        self._signals, self._skipped_in_a_row = signals, skipped_in_a_row

    def after_step(self, done: int, updates: list[Update | None], evaluation: EvaluationOutcome) -> None:
        """A checkpoint where it is due: periodically, after the last step, for a new best, before an early end.

        Args:
            done: steps so far.
            updates: of the last step; None on ranks outside the student.

        Raises:
            ValueError: updates were skipped in too many steps in a row.
            Stopped: a signal asked for the run's end.
        """
        train = self._train
        reason = next((each.nonfinite_reason for each in updates if each and each.nonfinite_reason), None)
        self._skipped_in_a_row = self._skipped_in_a_row + 1 if reason else 0
        too_many = self._skipped_in_a_row >= train.stop_after_skipped
        stop, too_many, is_best = agree(device(), self._asked_to_stop(), too_many, evaluation.best is not None)
        if too_many:
            raise ValueError(
                f"updates were skipped in {train.stop_after_skipped} steps in a row, up to step {done}: "
                f"{reason or 'the ranks of the student say why'}. No skipped update changed the weights; lower "
                "train.lr, look at the rollouts kept in rollouts/spike_*.jsonl, or go back to an earlier checkpoint"
            )
        last = done == train.steps
        if stop or is_best or (train.save_every and (last or done % train.save_every == 0)):
            save_checkpoint(
                self._root,
                done,
                self._student,
                self._source,
                train.keep_checkpoints,
                best=evaluation.best,
                more={EVALUATION_DEFERRED: True} if evaluation.deferred else None,
            )
            if not stop:  # asked while it saved: the next step could be a long one
                (stop,) = agree(device(), self._asked_to_stop())
        if stop and (evaluation.deferred or not last):
            raise Stopped(
                f"stopped by {self._signals.received or 'a signal to another rank'} after step {done} of "
                f"{train.steps}, and saved; the same command resumes from there"
            )

    def _asked_to_stop(self) -> bool:
        return self._signals.received is not None


def skipped_in_a_row(flags: list[float]) -> int:
    """How many of the last flags of `train/skipped_update` are set, without a gap."""
    unset = [i for i, flag in enumerate(flags) if not flag]
    return len(flags) - 1 - unset[-1] if unset else len(flags)
