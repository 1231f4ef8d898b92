"""Saves checkpoints when they are due, and ends a run early after skipped updates in a row or after a signal."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from nemo_oprd.config.schema import TrainConfig
from nemo_oprd.distillation.student import Student, Update
from nemo_oprd.megatron.parallel import device
from nemo_oprd.rollout.training_rollouts import StoppedSampling
from nemo_oprd.run.training_state import save_checkpoint
from nemo_oprd.runtime.signals import Signals, Stopped, StoppedWaiting, agree

# Key in the state.json of a checkpoint after which the next start has to make an evaluation. Its value is the name of
# the weights in the responses that are already kept; `true`, from earlier versions: no responses are kept.
EVALUATION_DEFERRED = "evaluation_deferred"


@dataclass(frozen=True)
class EvaluationOutcome:
    """The result of a step's evaluation, as far as the step's checkpoint depends on it.

    `best`: on the first rank, the content of best.json if this is the best evaluation so far; else None. `deferred`:
    if the evaluation has not ended, the name of its weights; a start from this checkpoint makes the evaluation.
    """

    best: dict[str, Any] | None = None
    deferred: str | None = None


@dataclass
class Checkpointer:
    """Saves a run's checkpoints when they are due. Every rank has one and takes part in its calls.

    Attributes:
        root: the run's directory of checkpoints.
        source: directory of the student's config.json and tokenizer, which are copied into every checkpoint.
        skipped_in_a_row: number of consecutive last steps with a skipped update; after a resume, those before it, too.
        saved: the last step that was saved, or that the run resumed from; 0 in a new run.
        before_save: waits for the background writer: a run that resumes after a step does not write its files again.
        write_pending: given (steps so far, directory of a checkpoint), writes the responses already sampled for later
            steps into it; returns path in the directory -> SHA-256, of the files that it digested.
    """

    train: TrainConfig
    root: Path
    student: Student
    source: Path
    signals: Signals
    skipped_in_a_row: int
    saved: int
    before_save: Callable[[], None] = lambda: None
    write_pending: Callable[[int, Path], dict[str, str]] = lambda done, directory: {}
    _saved_at: float = field(default_factory=lambda: time.monotonic())
    _deferred: str | None = None  # of the last step
    _after: tuple[int, int] | None = None  # (steps, optimizer steps) after the last step of this process

    def after_step(self, done: int, updates: list[Update | None], evaluation: EvaluationOutcome) -> None:
        """Saves a checkpoint if one is due: periodically, after the last step, for a new best, or after a signal.

        `done` is the number of steps so far; an update of the last step is None on ranks outside the student.

        Raises:
            ValueError: updates were skipped in too many steps in a row.
            Stopped: a signal asked the run to stop.
        """
        train, self._deferred = self.train, evaluation.deferred
        self._after = done, self.student.optimizer_steps
        reason = next((update.nonfinite_reason for update in updates if update and update.nonfinite_reason), None)
        self.skipped_in_a_row = self.skipped_in_a_row + 1 if reason else 0
        too_many = self.skipped_in_a_row >= train.stop_after_skipped
        stop, too_many, is_best, too_long = agree(
            device(), self.stop_requested(), too_many, evaluation.best is not None, self._too_long()
        )
        if too_many:
            raise ValueError(
                f"updates were skipped in {train.stop_after_skipped} steps in a row, up to step {done}: "
                f"{reason or 'the ranks of the student show the reason'}. No skipped update changed the weights; lower "
                "train.lr, look at the rollouts kept in rollouts/spike_*.jsonl, or go back to an earlier checkpoint"
            )
        last = done == train.steps
        if stop or is_best or too_long or (train.save_every and (last or done % train.save_every == 0)):
            self._save(done, evaluation)
            if not stop:  # a signal may have arrived while saving, and the next step may be long
                (stop,) = agree(device(), self.stop_requested())
        if stop and (evaluation.deferred is not None or not last):
            raise Stopped(
                f"stopped by {self.signals.by} after step {done} of "
                f"{train.steps}, and saved; the same command resumes from there"
            )

    def stop_while_sampling(self, stopped: StoppedSampling) -> NoReturn:
        """Stops the run in a step whose responses are not complete.

        Raises:
            Stopped: always; the weights after the last complete step are saved, unless a checkpoint has them.
        """
        if stopped.done > self.saved:
            self._save(stopped.done, EvaluationOutcome(deferred=self._deferred))
        raise Stopped(
            f"stopped by {self.signals.by} while sampling step {stopped.sampled + 1} of {self.train.steps}, "
            f"with {stopped.completed} of {stopped.requests} responses complete and kept; the same command resumes "
            "from there"
        )

    def stop_while_waiting(self, stopped: StoppedWaiting) -> NoReturn:
        """Stops the run in a step that waited for a server; the results of that step are lost.

        Raises:
            Stopped: always; the weights after the last complete step are saved, unless a later update changed them.
        """
        done, optimizer_steps = self._after or (self.saved, self.student.optimizer_steps)
        if done > self.saved and self.student.optimizer_steps == optimizer_steps:
            self._save(done, EvaluationOutcome(deferred=self._deferred))
        raise Stopped(
            f"{stopped} in step {done + 1} of {self.train.steps}, with the weights after step {self.saved} saved; the "
            "same command resumes from there"
        )

    def stop_requested(self) -> bool:
        """Returns whether this process received a signal that asks it to stop."""
        return self.signals.stop_requested

    def _too_long(self) -> bool:
        minutes = self.train.save_minutes
        return minutes > 0 and time.monotonic() - self._saved_at >= 60 * minutes

    def _save(self, done: int, evaluation: EvaluationOutcome) -> None:
        self.before_save()
        more = None if evaluation.deferred is None else {EVALUATION_DEFERRED: evaluation.deferred}
        keep = self.train.keep_checkpoints
        save_checkpoint(
            self.root,
            done,
            self.student,
            self.source,
            keep,
            best=evaluation.best,
            more=more,
            write_more=lambda directory: self.write_pending(done, directory),
        )
        self.saved, self._saved_at = done, time.monotonic()


def skipped_in_a_row(flags: list[float]) -> int:
    """Counts the consecutive set flags of `train/skipped_update` at the end of `flags`."""
    unset = [i for i, flag in enumerate(flags) if not flag]
    return len(flags) - 1 - unset[-1] if unset else len(flags)
