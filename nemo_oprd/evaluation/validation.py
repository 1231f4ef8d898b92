"""The validation sets in a run: when they are due, what is put off to the next start, which checkpoint is the best."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist

from nemo_oprd.checkpointing.directory import iteration_directory, mark_best, prune, read_state
from nemo_oprd.config.schema import Config
from nemo_oprd.distillation.step import System
from nemo_oprd.evaluation.sample import Evaluator
from nemo_oprd.fault_tolerance.signals import agree
from nemo_oprd.megatron.parallel import device
from nemo_oprd.observability.metrics_log import MetricsLog
from nemo_oprd.rollout.engine import GenerationCancelled, RolloutEngine
from nemo_oprd.rollout.megatron_engine import MegatronEngine
from nemo_oprd.setup.models import open_model

# in state.json of a checkpoint whose evaluation waits for the next start
_PUT_OFF = "evaluation_deferred"


class Validation:
    """Every rank has one and takes part in its calls.

    Args:
        evaluator: None where there is nothing to evaluate.
        checkpoints: the run's directory of checkpoints.
        asked_to_stop: whether this process got a signal; what is being evaluated is then put off.
    """

    def __init__(
        self,
        config: Config,
        evaluator: Evaluator | None,
        log: MetricsLog,
        checkpoints: Path,
        asked_to_stop: Callable[[], bool],
    ) -> None:
        self.config, self.evaluator, self.log, self.checkpoints = config, evaluator, log, checkpoints
        self._asked_to_stop = asked_to_stop
        self.put_off = False  # whether the last evaluation was
        self.best: dict[str, Any] | None = None  # what best.json says of the last evaluation, if it is the best so far

    def start(self, engine: RolloutEngine, system: System) -> None:
        """The student before training and, if asked for, the teacher.

        Raises:
            GenerationCancelled: a signal came.
        """
        if self.evaluator is None:
            return
        self.log.say("evaluating the student before training")
        metrics = self.evaluator.evaluate(engine, give_up=self._asked_to_stop)
        if self.config.evaluation.teacher:
            self.log.say("evaluating the teacher")
            assert isinstance(engine, MegatronEngine)
            engine.load(open_model(self.config.teacher, system.objective.teacher), "teacher")
            metrics.update(self.evaluator.evaluate(engine, prefix="teacher/", give_up=self._asked_to_stop))
            engine.update_weights(system.student)
        self.log.write(0, metrics)

    def resume(self, engine: RolloutEngine, done: int) -> None:
        """What was put off after update `done`, unless it has been made since.

        Raises:
            GenerationCancelled: a signal came; it stays put off.
        """
        if self.evaluator is None or not read_state(iteration_directory(self.checkpoints, done)).get(_PUT_OFF, False):
            return
        (owed,) = agree(device(), dist.get_rank() == 0 and not self.log.evaluated(done))
        if not owed:
            return
        self.log.say(f"step {done}: the evaluation that was put off")
        metrics = self.evaluator.evaluate(engine, give_up=self._asked_to_stop)
        best = self._if_best(done, metrics)
        if best is not None:  # before the log: a run that is killed in between finds the evaluation still owed
            mark_best(self.checkpoints, best)
            prune(self.checkpoints, self.config.train.keep_checkpoints, done)
        self._write(done, metrics)

    def after(self, engine: RolloutEngine, done: int) -> None:
        """The sets after update `done`, where they are due; put off to the next start if a signal comes."""
        self.best, self.put_off = None, False
        last = done == self.config.train.steps
        if self.evaluator is None or not (last or done % self.config.evaluation.every == 0):
            return
        try:
            metrics = self.evaluator.evaluate(engine, give_up=self._asked_to_stop)
        except GenerationCancelled:
            self.log.say(f"step {done}: the evaluation is put off: asked to stop")
            self.put_off = True
            return
        self.best = self._if_best(done, metrics)
        self._write(done, metrics)

    def state(self) -> dict[str, Any]:
        """What a checkpoint must say of the last evaluation."""
        return {_PUT_OFF: True} if self.put_off else {}

    def _if_best(self, done: int, metrics: dict[str, float]) -> dict[str, Any] | None:
        """On the first rank, {"step", "metric", "value"} of `train.keep_best` if no earlier checkpoint had more."""
        metric = str(self.config.train.keep_best)
        # the start is no checkpoint
        before = [value for step, value in self.log.history(metric).items() if 0 < step < done]
        value = metrics.get(metric)
        is_best = dist.get_rank() == 0 and value is not None and value > max(before, default=float("-inf"))
        return {"step": done, "metric": metric, "value": value} if is_best else None

    def _write(self, done: int, metrics: dict[str, float]) -> None:
        self.log.write(done, metrics)
        shown = [f"{name} {value:.3f}" for name, value in metrics.items() if "avg@" in name]
        self.log.say(f"step {done}/{self.config.train.steps}  " + "  ".join(shown))
