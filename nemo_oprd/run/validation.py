"""Validation during a run: makes due evaluations and, after a resume, deferred ones; selects the best checkpoint."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from nemo_oprd.config.schema import Config
from nemo_oprd.config.teacher_kinds import TEACHER_KINDS
from nemo_oprd.distillation.student import Student
from nemo_oprd.evaluation.evaluator import Evaluator
from nemo_oprd.evaluation.generations import Generations, model_identity, trained_identity
from nemo_oprd.evaluation.tables import EVALUATIONS, step_directory
from nemo_oprd.evaluation.teacher_lead import worse_teacher
from nemo_oprd.megatron.parallel import device, first_ranks
from nemo_oprd.megatron.weights.hf import TensorReader
from nemo_oprd.rollout.concurrent_evaluation import EngineWithEvaluation
from nemo_oprd.rollout.engine import GenerationCancelled, RolloutEngine
from nemo_oprd.run.checkpoint_directory import iteration_directory, mark_best, prune, read_state
from nemo_oprd.run.checkpointer import EVALUATION_DEFERRED, EvaluationOutcome
from nemo_oprd.run.metrics_log import MetricsLog
from nemo_oprd.runtime.signals import Signals, Stopped, StoppedWaiting, agree

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class SourceModels:
    """The models on disk that a run begins with.

    Attributes:
        student: directory of the student's weights.
        teacher: directory of the weights of the teacher that `evaluation.teacher` samples.
        open_teacher: opens these weights; called only before the engine loads them.
    """

    student: Path
    teacher: Path
    open_teacher: Callable[[], TensorReader]


class Validation:
    """Evaluates the validation sets when they are due. Every rank has one and takes part in its calls.

    Args:
        evaluator: None if the run does not evaluate.
        models: those that the run begins with.
        checkpoints: the run's directory of checkpoints.
        first_step: the step that the run begins with; above 0 in a resumed run.
        signals: a received signal defers the current evaluation to the next start.
        with_evaluation: samples an evaluation together with the next responses of training, while the gradient of a
            step is computed; None: evaluations are sampled alone.
    """

    def __init__(
        self,
        config: Config,
        evaluator: Evaluator | None,
        engine: RolloutEngine,
        models: SourceModels,
        log: MetricsLog,
        checkpoints: Path,
        first_step: int,
        signals: Signals,
        with_evaluation: EngineWithEvaluation | None = None,
    ) -> None:
        self._with_evaluation = with_evaluation
        self._begun: tuple[int, Generations] | None = None  # steps before the evaluation that is in progress
        self._config, self._evaluator, self._engine, self._models = config, evaluator, engine, models
        self._log, self._checkpoints, self._first_step, self._signals = log, checkpoints, first_step, signals

    def before_training(self, student: Student) -> None:
        """Evaluates the student and, if configured, the teacher; in a resumed run, makes only a deferred evaluation.

        Raises:
            Stopped: a signal asked the run to stop.
        """
        if self._evaluator is None:
            (stop,) = agree(device(), self._stop_requested())
            if stop:
                raise Stopped(
                    f"stopped by {self._signals.by} before training; the same command starts again from there"
                )
            return
        try:
            if self._first_step:
                self._evaluate_deferred(self._evaluator, self._first_step)
            else:
                self._evaluate_at_start(self._evaluator, student)
        except GenerationCancelled:
            where = f"after step {self._first_step}" if self._first_step else "before training"
            raise Stopped(
                f"stopped by {self._signals.by} in the evaluation {where}: nothing was trained since the last save; "
                "the same command starts again from there"
            ) from None

    def after_step(self, done: int) -> EvaluationOutcome:
        """Evaluates the student if an evaluation is due after step `done`; a signal defers it to the next start.

        With `with_evaluation` this only starts an evaluation, and `settle` ends it.
        """
        due = done == self._config.train.steps or done % max(1, self._config.evaluation.every) == 0
        if self._evaluator is None or not due:
            return EvaluationOutcome()
        # an interrupted run that repeats this step from an earlier checkpoint has other weights
        weights = _new_name()
        named = trained_identity(self._models.student, done, weights)
        generations = self._generations(self._evaluator, step_directory(done), named, afresh=True)
        if self._with_evaluation is not None and done + self._config.rollout.early_steps < self._config.train.steps:
            self._with_evaluation.add(self._evaluator.evaluation_requests(generations))
            self._begun = done, generations
            return EvaluationOutcome(deferred=weights)  # if the run is stopped or killed before `settle`
        try:
            metrics = self._evaluator.evaluate(lambda: self._engine, generations, should_cancel=self._stop_requested)
        except GenerationCancelled:
            logger.info(f"step {done}: the evaluation is deferred to the next start: asked to stop")
            return EvaluationOutcome(deferred=weights)
        best = self._if_best(done, metrics)
        self._write(done, metrics)
        return EvaluationOutcome(best=best)

    def settle(self) -> None:
        """Ends an evaluation that was sampled while a gradient was computed, before the weights change.

        The caller has collected the training responses that were requested with it.
        """
        if self._begun is None or self._evaluator is None or self._with_evaluation is None:
            return
        (done, generations), self._begun = self._begun, None
        self._with_evaluation.drop()  # `evaluate` now samples the requests that were not made
        try:
            metrics = self._evaluator.evaluate(lambda: self._engine, generations)
        except GenerationCancelled:  # a signal ended the wait for a server; the last checkpoint has it as deferred
            raise StoppedWaiting(f"asked to stop while the evaluation of step {done} waited for a server") from None
        self._write(done, metrics)

    def _evaluate_at_start(self, evaluator: Evaluator, student: Student) -> None:
        logger.info("evaluating the student before training")
        generations = self._generations(evaluator, step_directory(0), model_identity(self._models.student))
        metrics = evaluator.evaluate(lambda: self._engine, generations, should_cancel=self._stop_requested)
        if self._config.evaluation.teacher:
            logger.info("evaluating the teacher")
            metrics |= self._evaluate_teacher(evaluator, student)
            self._compare_with_teacher()
        self._log.write(0, metrics)

    def _compare_with_teacher(self) -> None:
        """Warns on the first rank if the teacher is worse than the student, for example if the two were swapped."""
        teacher = self._config.teacher
        # one of several teachers has only some problems, and one with its own prompt knows more than the problems tell
        own_model = TEACHER_KINDS[teacher.weights].own_model
        comparable = own_model and not self._config.own_prompts and not self._config.teachers
        if comparable and dist.get_rank() == 0:
            evaluations = Path(self._config.output) / EVALUATIONS
            for line in worse_teacher(evaluations / step_directory(0), evaluations / "teacher"):
                logger.warning(line)

    def _evaluate_teacher(self, evaluator: Evaluator, student: Student) -> dict[str, float]:
        """Returns the teacher's metrics; the engine has the student's weights again afterwards."""
        loaded = False

        def engine() -> RolloutEngine:
            nonlocal loaded
            if not loaded:
                self._engine.load(self._models.open_teacher(), "teacher")
                loaded = True
            return self._engine

        generations = self._generations(evaluator, "teacher", model_identity(self._models.teacher))
        metrics = evaluator.evaluate(engine, generations, prefix="teacher/", should_cancel=self._stop_requested)
        if loaded:
            self._engine.update_weights(student.hf_weights, 0)
        return metrics

    def _evaluate_deferred(self, evaluator: Evaluator, done: int) -> None:
        """Evaluates the student after step `done`, if the checkpoint defers that and no result is logged yet."""
        weights = read_state(iteration_directory(self._checkpoints, done)).get(EVALUATION_DEFERRED, False)
        if not weights:
            return
        (is_due,) = agree(device(), dist.get_rank() == 0 and not self._log.evaluated(done))
        if not is_due:
            return
        logger.info(f"step {done}: the evaluation that was deferred")
        # a checkpoint of an earlier version does not name its weights: no kept response can be theirs
        weights = weights if isinstance(weights, str) else _new_name()
        named = trained_identity(self._models.student, done, weights)
        generations = self._generations(evaluator, step_directory(done), named)
        metrics = evaluator.evaluate(lambda: self._engine, generations, should_cancel=self._stop_requested)
        best = self._if_best(done, metrics)
        if best is not None:
            # marked before the evaluation is logged: if the run is killed in between, it evaluates again
            mark_best(self._checkpoints, best)
            prune(self._checkpoints, self._config.train.keep_checkpoints, done)
        self._write(done, metrics)

    def _generations(
        self, evaluator: Evaluator, name: str, model: dict[str, Any], *, afresh: bool = False
    ) -> Generations:
        """Returns an evaluation's directory, without results of other settings or weights; with `afresh`, empty."""
        generations = evaluator.generations(Path(self._config.output) / EVALUATIONS / name, model)
        if dist.get_rank() == 0:
            generations.begin(afresh=afresh or generations.difference() is not None)
        return generations

    def _stop_requested(self) -> bool:
        return self._signals.stop_requested

    def _if_best(self, done: int, metrics: dict[str, float]) -> dict[str, Any] | None:
        """Returns best.json's content on rank 0 for a new maximum of `train.keep_best`, without step 0; else None."""
        metric = str(self._config.train.keep_best)
        # the evaluation before training (step 0) has no checkpoint
        before = [value for step, value in self._log.history(metric).items() if 0 < step < done]
        value = metrics.get(metric)
        is_best = dist.get_rank() == 0 and value is not None and value > max(before, default=float("-inf"))
        return {"step": done, "metric": metric, "value": value} if is_best else None

    def _write(self, done: int, metrics: dict[str, float]) -> None:
        self._log.write(done, metrics)
        shown = [f"{name} {value:.3f}" for name, value in metrics.items() if "avg@" in name]
        logger.info(f"step {done}/{self._config.train.steps}  " + "  ".join(shown))


def _new_name() -> str:
    """Returns a random name for weights, the same on every rank."""
    return first_ranks(secrets.token_hex(8))
