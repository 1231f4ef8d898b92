"""Builds the parts of a training run, in an order that finds cheap mistakes before expensive work."""

from __future__ import annotations

import json
import logging
import math
import shlex
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from nemo_oprd.batch.types import Rollout
from nemo_oprd.bridge.artifact import save_bridge
from nemo_oprd.config.schema import Config
from nemo_oprd.config.teacher_kinds import TEACHER_KINDS
from nemo_oprd.data.preparation import DataReport
from nemo_oprd.distillation.distiller import Distiller
from nemo_oprd.distillation.sampling_check import SamplingCheck
from nemo_oprd.distillation.trained_projectors import trained_bridge
from nemo_oprd.evaluation.evaluator import Evaluator
from nemo_oprd.evaluation.tables import final_report
from nemo_oprd.megatron.model import lacks_transformer_engine
from nemo_oprd.megatron.parallel import everyones, init_distributed
from nemo_oprd.megatron.weights.hf_export import export_hf
from nemo_oprd.megatron.weights.megatron_checkpoint import mapped_shapes
from nemo_oprd.rollout.concurrent_evaluation import EngineWithEvaluation
from nemo_oprd.rollout.engine import RolloutEngine
from nemo_oprd.rollout.replay import ReplayEngine
from nemo_oprd.rollout.resume_cache import ResumeCache
from nemo_oprd.rollout.schedule import Schedule, lag_metrics, schedule_settings
from nemo_oprd.rollout.stream_rollouts import StreamSampler
from nemo_oprd.rollout.training_rollouts import RolloutSampler, StoppedSampling
from nemo_oprd.run.canary import refuse_wrong_states
from nemo_oprd.run.checkpoint_directory import iteration_directory
from nemo_oprd.run.checkpointer import Checkpointer, skipped_in_a_row
from nemo_oprd.run.config_history import record_environment
from nemo_oprd.run.engine_kinds import ENGINES, make_engine
from nemo_oprd.run.idle_ranks import idle_ranks
from nemo_oprd.run.inputs import ResumePoint, RunInputs, agree_on_resume, checkpoints_of, read_inputs
from nemo_oprd.run.likely_mistakes import likely_mistakes
from nemo_oprd.run.metrics_log import MetricsLog
from nemo_oprd.run.models import RunFiles, RunPlan, build_distiller
from nemo_oprd.run.prompt_files import write_report
from nemo_oprd.run.resolve import RunModels, RunSpec
from nemo_oprd.run.resume import models_of
from nemo_oprd.run.step_recorder import StepRecorder
from nemo_oprd.run.timeline import AHEAD, SAMPLING, PhaseTimer, Timeline
from nemo_oprd.run.training_state import load_checkpoint
from nemo_oprd.run.validation import SourceModels, Validation
from nemo_oprd.runtime.messages import is_first_rank, write_library_log
from nemo_oprd.runtime.run_lock import RunLock
from nemo_oprd.runtime.signals import Signals, Stopped, StoppedWaiting

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class TrainingRun:
    """The parts of a training run. Every rank of the world has one of each.

    Attributes:
        distiller: the student and its teachers, built and loaded: a step's targets and gradients.
        engine: samples from the student's weights, which it gets before the first step and after each.
        sampler: returns the rollouts of a step, some of which the engine sampled during earlier steps.
        sampling_check: compares the engine's log-probabilities of new responses with the student's.
        recorder: writes the rollouts and the metrics of a step.
        validation: samples and grades the validation sets when they are due, and marks the best checkpoint.
        checkpointer: saves when a checkpoint is due, and saves and stops after a signal.
        log: metrics.jsonl, TensorBoard and W&B.
        timeline: timeline.jsonl.
        first_step: completed steps of the checkpoint from which the run resumes; 0 for a new run.
        files: the models' files, for the export.
        evaluator: the validation sets; None if the run does not evaluate.
    """

    config: Config
    distiller: Distiller
    engine: RolloutEngine
    sampler: RolloutSampler
    sampling_check: SamplingCheck
    recorder: StepRecorder
    validation: Validation
    checkpointer: Checkpointer
    log: MetricsLog
    timeline: Timeline
    first_step: int
    files: RunFiles
    evaluator: Evaluator | None

    def check_sampled(self, step: int) -> dict[str, float]:
        """Compares new responses with the student, whose weights sampled them; returns metrics of engine and check.

        Raises:
            ValueError: the engine samples from other weights or in another way.
        """
        found: dict[str, float] = {}
        for rollouts in self.sampler.unchecked():
            found |= self.engine.metrics | self.sampling_check(self.distiller.student, rollouts, step)
        return found

    def check_teachers(self, step: int) -> None:
        """Checks the states of teachers on servers if due (ValueError if wrong); notes `AHEAD` in the timeline."""
        for teacher in self.distiller.teachers:
            if (span := teacher.prefetch_span(step)) is not None:
                self.timeline.note(AHEAD, *span)
            teacher.check(step)

    def settle(self, step: int, timer: PhaseTimer) -> dict[str, float]:
        """Collects and checks the responses sampled during the update of a step, before the weights change.

        Also ends an evaluation of these weights that `EngineWithEvaluation` samples.
        """
        with timer("generate"):
            self.sampler.settle(step)
        with timer("check"):
            found = self.check_sampled(step)
        with self.timeline("evaluation"):
            self.validation.settle()
        return found

    def measure_lag(self, rollouts: list[Rollout], step: int) -> dict[str, float]:
        """Measures the student against the weights that sampled a step's rollouts; {} without `rollout.max_lag`."""
        if not self.config.rollout.max_lag:
            return {}
        student = self.distiller.student
        return lag_metrics(rollouts, student.optimizer_steps) | self.sampling_check.drift(student, rollouts, step)

    def finish(self) -> None:
        """Saves the trained bridge, exports the student, prints the table of evaluations and the next commands."""
        config, student = self.config, self.distiller.student
        if student.objective.trains_bridge and student.role.is_member:
            report = {"trained_with_student": {"steps": config.train.steps, "from": config.bridge.path}}
            bridge = trained_bridge(student.chunks, student.role, student.objective, report)
            if bridge is not None:
                save_bridge(bridge, Path(config.output) / "bridge")
        if config.train.export_hf:
            target = Path(config.output) / "hf"
            export_hf(student.hf_weights(), self.files.student.directory, target, student.spec.torch_dtype)
            if config.data.chat_template is not None and dist.get_rank() == 0:
                # the student has learned to answer in this template, and servers read it from a file of this name
                shutil.copyfile(config.data.chat_template, target / "chat_template.jinja")
                shutil.rmtree(target / "additional_chat_templates", ignore_errors=True)  # they would take its place
            skipped = max(everyones(self.checkpointer.skipped_in_a_row))  # ranks outside the student know of none
            if skipped and is_first_rank():
                steps = "the last step" if skipped == 1 else f"each of the last {skipped} steps"
                logger.warning(
                    f"in {steps} an update was skipped, because its loss or gradient was not finite "
                    f"(train/skipped_update in metrics.jsonl): evaluate the student in {target} before you use it"
                )
            logger.info(f"exported the student to {target}")
        if self.evaluator is not None and dist.get_rank() == 0:
            print(final_report(self.log.path), flush=True)
        if dist.get_rank() == 0:
            print(_what_next(config), flush=True)


def _what_next(config: Config) -> str:
    """Returns the last lines of a run: commands for the report, the export, and training other models."""
    lines = [f"next: nemo-oprd report {shlex.quote(config.output)}   # the report, a page for a browser"]
    if config.train.export_hf:
        export = json.dumps(str(Path(config.output) / "hf"))
        lines.append(f"      transformers.AutoModelForCausalLM.from_pretrained({export})   # the student, in Python")
    lines.append("      docs/my_models.md   # your own student, teacher and prompts")
    return "\n".join(lines)


@contextmanager
def start_training(spec: RunSpec) -> Iterator[TrainingRun]:
    """Builds a run, and closes its parts when it ends or fails. Every rank of the world enters this context.

    1. `read_inputs` checks all files, and finds the checkpoint to resume from.
    2. The first rank locks the run directory.
    3. The ranks join; the engine is made, and its servers start.
    4. The ranks agree on the checkpoint, whose digests they compare, and build student and teachers
       (`build_distiller`, which also proves the teachers' servers).
    5. The states of models that other programs build or serve are proved; the checkpoint is loaded.
    6. The parts around the models are made; until the metrics' log opens, nothing is written but the lock and what
       servers need: their logs, and the lease of endpoints.
    7. What is known about the run is logged, and its signal handlers are installed.

    Raises:
        ValueError: the configuration, a model, the data or a checkpoint is wrong, or another run uses the directory.
    """
    inputs = read_inputs(spec)
    output = Path(spec.config.output)
    with ExitStack() as records, ExitStack() as opened:  # records close last
        if is_first_rank():
            records.callback(RunLock(output).undo)
        records.callback(write_library_log, None)
        signals = Signals()
        init_distributed()
        engine = _make_engine(inputs)  # before the models, because an engine may start meanwhile
        opened.callback(engine.close)
        resume = agree_on_resume(inputs)
        distiller = build_distiller(inputs.plan)
        opened.callback(distiller.close)
        for line in refuse_wrong_states(inputs.plan, distiller):  # before a checkpoint's weights are loaded
            logger.info(line)
        if resume.step:
            load_checkpoint(checkpoints_of(spec.config), resume.step, distiller.student)
        run = _assemble(inputs, engine, signals, distiller, resume.step or 0, records=records)
        _tell(run, inputs, resume)
        write_library_log(output)
        with signals, _background_writers(run):
            try:
                yield run
            except StoppedSampling as stopped:
                run.checkpointer.stop_while_sampling(stopped)
            except StoppedWaiting as stopped:
                run.checkpointer.stop_while_waiting(stopped)


@contextmanager
def _background_writers(run: TrainingRun) -> Iterator[None]:
    """Waits for the background writers when the run ends or stops, and raises their errors.

    After any other error, the writers end with the process (`runtime/background.py`), so that this error comes first.
    """
    failed = True
    try:
        yield
        failed = False
    except Stopped:
        failed = False
        raise
    finally:
        try:
            run.sampler.cache.finish(failed=failed)
        finally:
            run.recorder.finish(failed=failed)


def _make_engine(inputs: RunInputs) -> RolloutEngine:
    if inputs.data.recorded is not None:
        return ReplayEngine(inputs.data.recorded)
    run, files = inputs.spec, inputs.files.student
    sampled, eos_ids = inputs.files.sampled_ids, files.tokenizer.eos_ids
    return make_engine(run.config, files.spec, files.directory, run.student_layout, eos_ids, sampled)


def _assemble(
    inputs: RunInputs,
    engine: RolloutEngine,
    signals: Signals,
    distiller: Distiller,
    first_step: int,
    *,
    records: ExitStack,
) -> TrainingRun:
    """Makes the parts of a run around its models, each from those before it; `records` closes the metrics' log."""
    config, data, files = inputs.config, inputs.data, inputs.files
    timeline = Timeline(Path(config.output), first_step, writes=dist.get_rank() == 0)
    with_evaluation = _overlapping(config, engine)
    # before anything is written, because it may refuse the responses that the checkpoint holds
    sampler = _make_sampler(
        inputs, engine, signals, distiller, timeline, with_evaluation=with_evaluation, first_step=first_step
    )
    log = MetricsLog(config, first_step)
    records.callback(log.close)
    timeline.drop_later_steps()
    recorder = StepRecorder(
        config, inputs.spec.models.routing, log, None if data.recorded is not None else files.student.tokenizer
    )
    checkpointer = Checkpointer(
        config.train,
        checkpoints_of(config),
        student=distiller.student,
        source=files.student.directory,
        signals=signals,
        skipped_in_a_row=skipped_in_a_row(list(log.history("train/skipped_update").values())),
        saved=first_step,
        before_save=recorder.finish,
        write_pending=sampler.write_pending,
    )
    teacher = files.teachers[0]  # with several teachers, `evaluation.teacher` is refused
    validation = Validation(
        config,
        data.evaluator,
        engine=engine,
        models=SourceModels(files.student.weights_directory, teacher.weights_directory, teacher.open),
        log=log,
        checkpoints=checkpoints_of(config),
        first_step=first_step,
        signals=signals,
        with_evaluation=with_evaluation,
    )
    return TrainingRun(
        config,
        distiller,
        engine=engine,
        sampler=sampler,
        sampling_check=SamplingCheck(config, files.sampled_ids),
        recorder=recorder,
        validation=validation,
        checkpointer=checkpointer,
        log=log,
        timeline=timeline,
        first_step=first_step,
        files=files,
        evaluator=data.evaluator,
    )


def _make_sampler(
    inputs: RunInputs,
    engine: RolloutEngine,
    signals: Signals,
    distiller: Distiller,
    timeline: Timeline,
    *,
    with_evaluation: EngineWithEvaluation | None,
    first_step: int,
) -> RolloutSampler:
    """Makes the sampler of the run's rollouts; it reads the responses of later steps that a checkpoint holds."""
    config, data = inputs.config, inputs.data
    kind = StreamSampler if config.rollout.mode == "stream" else RolloutSampler
    prefetches = bool(config.served_teachers and config.teacher.vllm.ahead_gib)
    sampler = kind(
        config,
        inputs.spec.models.routing,
        engine=engine,
        schedule=Schedule(config, data.prompts, distiller.student.spec.max_positions),
        teacher_inputs=data.teacher_inputs,
        cache=_resume_cache(config, inputs.files.student.directory),
        first_step=first_step,
        should_cancel=lambda: signals.stop_requested,
        note=partial(timeline.note, SAMPLING),
        with_evaluation=with_evaluation,
        complete=distiller.prefetch if prefetches else None,
    )
    if first_step:
        sampler.read_pending(iteration_directory(checkpoints_of(config), first_step))
    return sampler


def _tell(run: TrainingRun, inputs: RunInputs, resume: ResumePoint) -> None:
    """Logs the facts about the run before its first step, and stores them in the run directory."""
    config, plan, data = run.config, inputs.plan, inputs.data
    for note in resume.notes:
        logger.info(note)
    if run.first_step:
        logger.info(f"resumed from {checkpoints_of(config)} after {run.first_step} of {config.train.steps} steps")
    for change in resume.changed:
        logger.info(f"changed: {change}")
    recorded = None if data.recorded is None else len(data.recorded)
    layouts = plan.spec.student_layout, plan.spec.teacher_layout
    idle = idle_ranks(config, *layouts, recorded=recorded, has_gpus=torch.cuda.is_available())
    if idle is not None and is_first_rank():
        logger.warning(idle.line)
    if is_first_rank():
        for line in likely_mistakes(plan, data):
            logger.warning(line)
        if (lacking := lacks_transformer_engine(run.distiller.student.dtype)) is not None:
            logger.warning(lacking)
    _record_environment(run, plan)
    if data.report is not None:
        _record_prompts(run, data.report)
    _show_bridges(run)
    if not TEACHER_KINDS[config.teacher.weights].copied and is_first_rank():
        logger.warning(
            "teacher.weights=student: both models change, and can agree on responses without content. Watch the "
            "validation metrics, or choose ema or initial weights (docs/teachers.md)"
        )


def _resume_cache(config: Config, student: Path) -> ResumeCache:
    """Returns the cache of the last samples, for a resumed run with equal sampling settings."""
    sampled_with = {"student": str(student), "precision": config.precision}
    sampled_with |= ENGINES[config.rollout.engine].sampled_with
    sampled_with |= schedule_settings(config)
    if config.student.router_dtype is not None:
        sampled_with["router_dtype"] = config.student.router_dtype
    return ResumeCache(Path(config.output) / "rollouts", sampled_with)


def _overlapping(config: Config, engine: RolloutEngine) -> EngineWithEvaluation | None:
    """Returns an engine that samples evaluations together with later steps; None if evaluations are sampled alone.

    They are sampled alone without `rollout.max_lag`, by an in-process engine, and with `train.keep_best`, because the
    checkpoint of a best evaluation is written before the next step.
    """
    waits = ENGINES[config.rollout.engine].in_process or config.train.keep_best is not None
    return None if waits or not config.rollout.max_lag else EngineWithEvaluation(engine)


def _record_environment(run: TrainingRun, plan: RunPlan) -> None:
    """Logs the kernels in use, and stores them in the run directory with the versions of all packages."""
    kernels = run.distiller.student.kernels()
    logger.info("kernels: " + ", ".join(f"{purpose}: {kernel}" for purpose, kernel in kernels.items()))
    if dist.get_rank() == 0:
        run_spec = plan.spec
        layouts = {"student": run_spec.student_layout.describe(), "teacher": run_spec.teacher_layout.describe()}
        start = {"config": run.log.config_file, "after_step": run.first_step, "models": models_of(run.config)}
        start |= {"conversations": plan.files.conversations(), "model_sizes": _model_sizes(plan.spec.models)}
        record_environment(Path(run.config.output), dist.get_world_size(), layouts, kernels, start)


def _model_sizes(models: RunModels) -> dict[str, dict[str, Any]]:
    """Returns a model's key in the configuration -> family and size; parameters of a model on servers are unknown."""
    found = {}
    for model in (models.student, *(teacher.model for teacher in models.teachers)):
        size = {"model_type": model.spec.model_type, "layers": model.spec.num_layers}
        size |= {"hidden_size": model.spec.hidden_size}
        if not model.served:
            size |= {"parameters": sum(math.prod(shape) for _, _, shape in mapped_shapes(model.spec))}
        found[model.key] = size
    return found


def _record_prompts(run: TrainingRun, report: DataReport) -> None:
    """Logs the preparation of the prompts, and stores it in the run directory."""
    for line in report.lines:
        logger.info(line)
    if dist.get_rank() == 0:
        warning = write_report(report, Path(run.config.output))
        if warning is not None and run.first_step:
            logger.warning(warning)


def _show_bridges(run: TrainingRun) -> None:
    """Logs the layer pairs of each bridge, and saves frozen bridges in the run directory."""
    objective = run.distiller.objective
    for number, match in enumerate(objective.teachers):
        if match.bridge is None:
            continue
        pairs = "  ".join(f"{student}:{teacher}" for student, teacher in match.layers.items())
        training = ", trained with the student" if objective.trains_bridge else ""
        logger.info(f"bridge of rank {match.bridge.rank}{training}, student layer:teacher layer  {pairs}")
        if dist.get_rank() == 0 and not objective.trains_bridge:  # a trained bridge is saved at the end
            suffix = f"_{number}" if run.config.teachers else ""
            save_bridge(match.bridge, Path(run.config.output) / f"bridge{suffix}")
