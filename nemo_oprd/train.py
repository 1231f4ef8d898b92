"""On-policy representation distillation, start to end: read `train` and you have read the system.

Every rank runs this same loop. A rank has a part of the student, of the teachers, of both or of neither; the objects of
a role that it does not have take part in the transfers and return None.

    prompts -> rollouts               rollout/training_rollouts.py; the engines: run/engine_kinds.py
    what an update trains on          distillation/objective.py; weights over the steps: config/weight_schedule.py
    which teacher reads a response    config/teacher_routing.py
    rollouts -> teacher targets       distillation/teacher.py, capture.py; to the student's ranks: target_transfer.py
    targets -> gradients              distillation/step.py, hidden_state_loss.py; on every pipeline stage:
                                      gradient_injection.py; the losses themselves: losses/
    gradients -> weights              distillation/student.py
    weights -> engine                 megatron/weights/hf.py
    an engine's log-probabilities     distillation/sampling_check.py compares them with the student's
    validation sets                   run/validation.py
    checkpoints                       run/checkpointer.py says when, training_state.py writes and loads them
    metrics, and times of all phases  run/step_recorder.py, metrics_log.py, timeline.py
    a first gradient, of random ids   distillation/gradient_check.py
    signals, locks, dead ranks        runtime/

The command comes here by `commands/train.py`, which loads the `Config` and makes the checks of `preflight`. Before the
loop, a start has stages, each made from the one before it; the top of `run/preflight.py` lists them with their checks:
`Config`; `RunSpec`, what the run is (`run/resolve.py`); `RunInputs`, what it reads (`run/inputs.py`), a `RunPlan` of
the models among it (`run/models.py`); and `TrainingRun`, its parts (`run/start.py`).
"""

from __future__ import annotations

import logging

from nemo_oprd.config.schema import Config
from nemo_oprd.distillation.distiller import Distiller
from nemo_oprd.distillation.gradient_check import check_gradients
from nemo_oprd.distillation.metrics.gradient_noise import is_noise_due, measure_gradient_noise
from nemo_oprd.distillation.step import KeptResults, StepResult
from nemo_oprd.distillation.step_batch import StepBatch
from nemo_oprd.run.models import world_size
from nemo_oprd.run.preflight import preflight
from nemo_oprd.run.resolve import RunSpec
from nemo_oprd.run.start import start_training
from nemo_oprd.run.timeline import PhaseTimer

logger = logging.getLogger(__name__)


def train(config: Config | RunSpec) -> None:
    """Distils `config.student` on its own rollouts into the run directory `config.output` (docs/runs.md).

    Args:
        config: or the result of `preflight` for it, if the caller has that.

    Raises:
        ValueError: bad configuration, models or data, before anything expensive starts; an engine, teacher or server
            that turns out wrong later; or `train.stop_after_skipped` steps in a row with an update whose loss or
            gradient is not finite.
        CaptureError: a layer did not get its gradient exactly once.
        Stopped: a signal asked the process to stop; the run has saved what it had made, and can be resumed.
    """
    spec = config if isinstance(config, RunSpec) else preflight(config, world_size(), "train")
    with start_training(spec) as run:
        config, distiller, student, engine = run.config, run.distiller, run.distiller.student, run.engine
        timeline, timer = run.timeline, PhaseTimer(run.timeline.note)
        logger.info(check_gradients(distiller, accumulate_gradients))
        updates_per_step = config.train.updates_per_rollout
        with timeline("sync"):
            engine.update_weights(student.hf_weights, student.optimizer_steps)
        with timeline("evaluation"):
            run.validation.before_training(student)
        for step in range(run.first_step, config.train.steps):
            timeline.begin(step + 1)
            with timer("generate"):
                rollouts = run.sampler.rollouts(step)
            with timer("check"):
                measured = run.check_sampled(step) | run.measure_lag(rollouts, step)
                run.check_teachers(step)
            if is_noise_due(config.logging, step):
                with timer("gradient_noise"):
                    measured |= measure_gradient_noise(distiller, rollouts, step, accumulate_gradients)
            updates, kept = [], KeptResults()  # targets and log-probabilities that later updates use again
            for number in range(1, updates_per_step + 1):
                batch = distiller.batch(rollouts, distiller.objective_of(step))
                keep = number < updates_per_step
                metrics, kept = accumulate_gradients(distiller, batch, timer, kept, keep=keep)
                if number == 1 and config.rollout.max_lag:
                    measured |= run.settle(step, timer)  # the weights are still those that sample
                with timer("update", "optimizer"):
                    updates.append((metrics, student.optimizer_step(step, batch.objective, metrics)))
            with timer("sync"):
                engine.update_weights(student.hf_weights, student.optimizer_steps)
            run.recorder.record(step + 1, rollouts, updates, timer.take(), measured)
            with timeline("evaluation"):
                evaluation = run.validation.after_step(step + 1)
            with timeline("save"):
                run.checkpointer.after_step(step + 1, [update for _, update in updates], evaluation)
        run.finish()


def accumulate_gradients(
    distiller: Distiller,
    batch: StepBatch,
    timer: PhaseTimer | None = None,
    kept: KeptResults = KeptResults(),  # noqa: B008 (immutable)
    *,
    keep: bool = False,
    whole_gradients: bool = False,
) -> StepResult:
    """Accumulates a batch's gradient over its groups of microbatches; returns metrics and what later updates reuse.

    Args:
        kept: the results of an earlier update on the same rollouts.
        keep: whether another update on the same rollouts follows.
        whole_gradients: every student rank ends up with complete gradients, even under the distributed optimizer.
    """
    timer, later = timer or PhaseTimer(), KeptResults()
    accumulation = distiller.start(batch, kept.sampled_logprobs, whole_gradients=whole_gradients)
    for group in batch.groups:
        with timer("teacher"):
            targets = distiller.targets(batch, group) if kept.targets is None else kept.targets
        with timer("update", "gradient"):
            accumulation.forward_backward(group, targets)
        if keep:
            reused = targets if len(batch.groups) == 1 else None
            later = KeptResults(reused, kept.sampled_logprobs or accumulation.logprobs)
        del targets  # before the targets of the next group come
    return StepResult(accumulation.finish(), later)
