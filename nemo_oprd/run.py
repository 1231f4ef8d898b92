"""What a training run holds (system, engine, data, logs, lock) and what happens around its steps."""

from __future__ import annotations

import os
import resource
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist

from nemo_oprd.batch.types import Rollout
from nemo_oprd.bridge.artifact import save_bridge
from nemo_oprd.checkpointing.directory import find_checkpoint
from nemo_oprd.checkpointing.training_state import (
    check_checkpoint,
    check_resume_signature,
    load_checkpoint,
    save_checkpoint,
)
from nemo_oprd.config.schema import Config
from nemo_oprd.config.weight_schedule import weight_at
from nemo_oprd.data.prompts import prompt_order
from nemo_oprd.distillation.step import PhaseTimer
from nemo_oprd.distillation.step_metrics import StepMetrics
from nemo_oprd.distillation.student import Update
from nemo_oprd.distillation.trained_projectors import trained_bridge
from nemo_oprd.evaluation.sample import TRAINING_STREAM, Evaluator, before_and_after, table
from nemo_oprd.evaluation.validation import Validation
from nemo_oprd.fault_tolerance.disk import check_output
from nemo_oprd.fault_tolerance.run_lock import RunLock
from nemo_oprd.fault_tolerance.signals import Signals, Stopped, agree
from nemo_oprd.megatron.parallel import device
from nemo_oprd.models import ModelSpec, read_model_spec
from nemo_oprd.observability.loss_spikes import TERMS, LossSpikeDetector
from nemo_oprd.observability.metrics_log import MetricsLog
from nemo_oprd.rollout.engine import GenerationCancelled, Request, RolloutEngine, SamplingParams
from nemo_oprd.rollout.megatron_engine import MegatronEngine
from nemo_oprd.rollout.replay import ReplayEngine, write_rollouts
from nemo_oprd.rollout.resume_cache import ResumeCache
from nemo_oprd.rollout.teacher_inputs import TeacherInputs, add_teacher_inputs, alignment_metrics
from nemo_oprd.setup.data import (
    check_bridge_tokenizers,
    check_teacher_prompts,
    encode_prompts,
    make_teacher_inputs,
    recorded_rollouts,
)
from nemo_oprd.setup.models import RunPlan, check_vocabulary, make_plan, make_system
from nemo_oprd.setup.preflight import (
    check_prompts_given,
    check_same_architecture,
    check_sources_stay,
    check_trains,
    model_directory,
)
from nemo_oprd.tokenization.tokenizer import Tokenizer
from nemo_oprd.weights.hf_export import export_hf


class Run:
    """One run of `train`; use as a context. Every rank of the world has one."""

    def __init__(self, config: Config) -> None:
        """Every mistake that can be found without models is found before they are loaded.

        Raises:
            ValueError: bad configuration, models or data, or the directory is in use by another run.
        """
        self.config, self.clock, self.signals = config, PhaseTimer(), Signals()
        self.output = Path(config.output)
        self.checkpoints = self.output / "checkpoints"
        check_output(config.output)
        check_trains(config)
        self.source = model_directory(config.student)
        spec = read_model_spec(self.source)
        check_sources_stay(config)
        self.tokenizer: Tokenizer | None = None
        self.evaluator: Evaluator | None = None
        self.prompts: list[Request] = []
        self.readers: list[TeacherInputs | None] = []
        rollouts = recorded_rollouts(config)
        recorded = ReplayEngine(rollouts) if rollouts is not None else None
        if recorded is None:
            self._read_data(spec)
        plan = make_plan(config)
        for objective, reader in zip(plan.objectives, self.readers, strict=False):  # none without a tokenizer
            of_teacher = self.tokenizer if reader is None else reader.teacher
            check_bridge_tokenizers(objective.bridge, self.tokenizer, of_teacher)
        self._find_checkpoint(spec, plan)  # what is wrong with it is said before anything is written
        # before anything is read for good that another run might be about to replace
        self.lock = RunLock(self.output) if is_first_rank() else None
        try:
            self._prepare(spec, plan, recorded)
        except BaseException:
            if self.lock is not None:
                self.lock.undo()
            raise

    def _find_checkpoint(self, spec: ModelSpec, plan: RunPlan) -> tuple[int | None, list[str]]:
        found, passed_over = find_checkpoint(self.checkpoints)
        if found is not None:
            check_checkpoint(self.checkpoints, found, spec)
            check_resume_signature(self.checkpoints, found, self.config, plan.objective)
        return found, passed_over

    def _prepare(self, spec: ModelSpec, plan: RunPlan, recorded: ReplayEngine | None) -> None:
        config = self.config
        found, passed_over = self._find_checkpoint(spec, plan)
        self.system = make_system(config, plan)
        student = self.system.student
        self.first_step = self._agree_on_first_step(found) or 0
        eos_ids = self.tokenizer.eos_ids if self.tokenizer else ()
        self.engine: RolloutEngine = recorded or MegatronEngine(
            config, spec, student.role.layout, eos_ids, min(objective.vocab_limit for objective in plan.objectives)
        )
        if self.first_step:
            load_checkpoint(self.checkpoints, self.first_step, student)
        self.log = MetricsLog(config, self.first_step)
        self.pending = ResumeCache(
            self.output / "rollouts", {"student": str(self.source), "precision": config.precision}
        )
        self.skipped_in_a_row = _last_in_a_row(list(self.log.history("train/skipped_update").values()))
        self.validation = Validation(config, self.evaluator, self.log, self.checkpoints, self._asked_to_stop)
        weights = dict(zip(TERMS, (config.loss.representation.weight, config.loss.output.weight), strict=True))
        past = {  # of the updates in which the term had a weight
            name: [value for done, value in self.log.history(name).items() if done and weight_at(weight, done - 1) > 0]
            for name, weight in weights.items()
        }
        self.spikes = LossSpikeDetector(config.logging.spike_factor, past)
        for note in passed_over:
            self.log.say(note)
        if self.first_step:
            self.log.say(f"resumed from {self.checkpoints} after {self.first_step} of {config.train.steps} steps")
        self._show_bridge()
        if config.teacher.weights == "student":
            self.log.say(
                "teacher.weights=student: both move, and can agree by saying nothing. Watch validation, or take "
                "ema or initial weights (docs/teachers.md)"
            )
        self.log.say(self.system.check_gradients())
        self.engine.update_weights(student)

    def _agree_on_first_step(self, found: int | None) -> int | None:
        """The first rank's answer. Others may have looked before it held the lock, or at a file system's old answer."""
        agreed = [found]
        dist.broadcast_object_list(agreed, src=0)
        return agreed[0]

    def _read_data(self, spec: ModelSpec) -> None:
        config = self.config
        check_prompts_given(config)
        self.tokenizer = Tokenizer.load(self.source)
        check_vocabulary(self.tokenizer, spec, self.source)
        self.readers = make_teacher_inputs(config, self.tokenizer)
        if config.evaluation.teacher:
            check_same_architecture(spec, read_model_spec(model_directory(config.teacher)))
        self.prompts = encode_prompts(config, self.tokenizer, spec.max_positions)
        check_teacher_prompts(config, self.readers, self.prompts)
        if config.evaluation.every:
            self.evaluator = Evaluator(config, self.tokenizer, spec.max_positions)

    def _show_bridge(self) -> None:
        """Says what is matched to what, and keeps the frozen maps with the run."""
        for number, objective in enumerate(self.system.student.objectives):
            bridge, trained = objective.bridge, objective.trains_bridge
            if bridge is None:
                continue
            pairs = "  ".join(f"{student}:{teacher}" for student, teacher in objective.layers.items())
            learns = ", trained with the student" if trained else ""
            self.log.say(f"bridge of rank {bridge.rank}{learns}, student layer:teacher layer  {pairs}")
            if dist.get_rank() == 0 and not trained:  # trained ones are written at the end
                several = f"_{number}" if self.config.teachers else ""
                save_bridge(bridge, self.output / f"bridge{several}")

    def __enter__(self) -> Run:
        self.signals.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.signals.__exit__(kind)
        self.log.close()
        if self.lock is not None:
            self.lock.release()

    def rollouts(self, step: int) -> list[Rollout]:
        """The rollouts of a step, with what the teacher reads where it doesn't read the same ids."""
        requests = self.requests(step)
        rollouts = self._sampled(step, requests)
        return add_teacher_inputs(self.readers, self.system.taught_by(rollouts), rollouts, requests)

    def _sampled(self, step: int, requests: list[Request]) -> list[Rollout]:
        """Sampled now, or those that the run had already sampled when it was interrupted."""
        sampling = self.sampling(step)
        if step == self.first_step and self.prompts:
            kept = self.pending.take(step, requests, sampling)
            if kept is not None:
                self.log.say(f"step {step + 1} goes on with the {len(kept)} rollouts sampled before the interruption")
                return kept
        rollouts = self.engine.generate(requests, sampling)
        if self.prompts:
            self.pending.put(step, rollouts, sampling)
        return rollouts

    def learn(self, step: int, rollouts: list[Rollout]) -> tuple[StepMetrics | None, Update | None]:
        """`train.updates_per_rollout` updates on the rollouts: what the first one measured, and what became of them.

        The ratio to the student that sampled is the last one's. None on ranks outside the student.
        """
        every = self.config.logging.gradient_noise_every
        self.noise: dict[str, float] = {}
        if every and (step == 0 or (step + 1) % every == 0):
            with self.clock("gradient_noise"):
                self.noise = self.system.gradient_noise(rollouts, step)
        results: list[StepMetrics | None] = []
        updates: list[Update | None] = []
        for reuse in range(self.config.train.updates_per_rollout):
            results.append(self.system.accumulate(rollouts, self.clock, step=step, reuse=reuse))
            with self.clock("update"):
                updates.append(self.system.student.update(step, results[-1]))
        measured, update, last = results[0], updates[0], results[-1]
        if measured is None or update is None or last is None:
            return None, None
        of_the_ratio = {name: value for name, value in last.output_means.items() if name in ("ratio", "clipped")}
        measured.output_means |= of_the_ratio
        troubles = [each.nonfinite_reason for each in updates if each is not None and each.nonfinite_reason is not None]
        return measured, replace(update, nonfinite_reason=troubles[0] if troubles else None)

    def requests(self, step: int) -> list[Request]:
        """The prompts of a step, each `rollout.per_prompt` times; a pure function of (seed, step)."""
        if not self.prompts:
            return []
        count = self.config.train.prompts_per_step
        chosen = prompt_order(len(self.prompts), self.config.seed, step * count, count)
        return [self.prompts[index] for index in chosen for _ in range(self.config.rollout.per_prompt)]

    def sampling(self, step: int) -> SamplingParams:
        """How the rollouts of a step are sampled."""
        rollout = self.config.rollout
        key = (self.config.seed, TRAINING_STREAM, step)
        return SamplingParams(rollout.temperature, rollout.top_p, rollout.max_new_tokens, key)

    def log_step(self, done: int, rollouts: list[Rollout], measured: StepMetrics | None, update: Update | None) -> None:
        """Metrics, progress and, if asked for, the rollouts of update `done`."""
        seconds = self.clock.seconds
        tokens = sum(rollout.length for rollout in rollouts)
        lengths = [len(rollout.response_ids) for rollout in rollouts]
        metrics = {
            **(measured.metrics() if measured else {}),
            **(self._metrics_per_teacher(rollouts, measured) if self.config.teachers and measured else {}),
            **(update.metrics() if update else {}),
            **self.noise,
            "response_length/mean": sum(lengths) / len(lengths),
            "response_length/max": float(max(lengths)),
            **alignment_metrics(rollouts),
            **_share_finished(rollouts),
            **{f"timing/{phase}_s": value for phase, value in seconds.items()},
            "perf/tokens_per_s": tokens / sum(seconds.values()),
            "perf/peak_memory_gb": _peak_memory_gb(),
            "perf/targets_gb": measured.targets_bytes / 1e9 if measured else 0.0,
        }
        seconds.clear()
        self.log.write(done, metrics)
        self.log.progress(done, metrics)
        if dist.get_rank() != 0:
            return
        if self.config.rollout.save and self.prompts:
            write_rollouts(self.output / "rollouts" / f"step_{done:07d}.jsonl", self._with_text(rollouts))
        if update is not None and update.nonfinite_reason:
            self.log.say(f"step {done}: this update was skipped: {update.nonfinite_reason}")
        if measured is not None:
            self._keep_spikes(done, rollouts, measured)

    def _metrics_per_teacher(self, rollouts: list[Rollout], measured: StepMetrics) -> dict[str, float]:
        taught_by = self.system.taught_by(rollouts)
        losses = {"output_loss": measured.output_loss_per_teacher}
        if not self.config.loss.representation.adaptive.positions:
            losses["rep_loss"] = measured.rep_loss_per_teacher
        named = {}
        for number, teacher in enumerate(self.config.teachers):
            named[f"teachers/{teacher.label}/responses"] = float(taught_by.count(number))
            for name, per_teacher in losses.items():
                if number in per_teacher:
                    named[f"teachers/{teacher.label}/{name}"] = per_teacher[number]
        return named

    def _keep_spikes(self, done: int, rollouts: list[Rollout], measured: StepMetrics) -> None:
        """Keeps the rollouts of a step that stands out, those that contribute most first."""
        what = self.spikes.see(measured)
        if what is None:
            return
        share = measured.loss_per_response
        order = sorted(range(len(rollouts)), key=lambda i: (share[i] == share[i], -abs(share[i])))  # NaN first
        file = self.output / "rollouts" / f"spike_{done:07d}.jsonl"
        losses = [share[i] for i in order]
        write_rollouts(file, self._with_text([rollouts[i] for i in order]), loss_share=losses)
        self.log.say(f"step {done}: {what}; its rollouts are in {file}")

    def _with_text(self, rollouts: list[Rollout]) -> list[Rollout]:
        if self.tokenizer is None:
            return rollouts
        decode = self.tokenizer.decode
        return [Rollout(**{**vars(rollout), "response": decode(rollout.response_ids)}) for rollout in rollouts]

    def evaluate_before(self) -> None:
        """The student's start and, if asked for, the teacher on the validation sets; after a resume, only what the run
        put off when it was asked to stop.

        Raises:
            Stopped: a signal asked for the run's end, before this start trained anything.
        """
        try:
            if self.first_step:
                self.validation.resume(self.engine, self.first_step)
            else:
                self.validation.start(self.engine, self.system)
        except GenerationCancelled:
            where = f"after step {self.first_step}" if self.first_step else "before training"
            raise Stopped(
                f"stopped by {self._stopped_by()} in the evaluation {where}: nothing was trained since the last save; "
                "the same command starts again from there"
            ) from None

    def _asked_to_stop(self) -> bool:
        return self.signals.received is not None

    def _stopped_by(self) -> str:
        return self.signals.received or "a signal to another rank"

    def save_after(self, done: int, update: Update | None) -> None:
        """A checkpoint where it is due: periodically, after the last step, for a new best, before an early end.

        Raises:
            ValueError: updates were skipped in too many steps in a row.
            Stopped: a signal asked for the run's end.
        """
        train = self.config.train
        skipped = update is not None and update.nonfinite_reason is not None
        self.skipped_in_a_row = self.skipped_in_a_row + 1 if skipped else 0
        give_up = self.skipped_in_a_row >= train.stop_after_skipped
        stop, give_up, best = agree(device(), self._asked_to_stop(), give_up, self.validation.best is not None)
        if give_up:
            reason = (
                update.nonfinite_reason if update is not None and update.nonfinite_reason else "see the student's ranks"
            )
            raise ValueError(
                f"updates were skipped in {train.stop_after_skipped} steps in a row, up to step {done}: {reason}. No "
                "skipped update changed the weights; lower train.lr, look at the rollouts kept in "
                "rollouts/spike_*.jsonl, or go back to an earlier checkpoint"
            )
        last = done == train.steps
        if stop or best or (train.save_every and (last or done % train.save_every == 0)):
            save_checkpoint(
                self.checkpoints,
                done,
                self.system.student,
                self.source,
                train.keep_checkpoints,
                best=self.validation.best,
                more=self.validation.state(),
            )
            if not stop:  # asked while it saved: the next step could be a long one
                (stop,) = agree(device(), self._asked_to_stop())
        if stop and (self.validation.put_off or not last):
            raise Stopped(
                f"stopped by {self._stopped_by()} after step {done} of {train.steps}, and saved; "
                "the same command goes on from there"
            )

    def finish(self) -> None:
        """The trained bridge, HF export and the closing table."""
        if self.system.objective.trains_bridge and self.system.student.role.is_member:
            student, start, steps = self.system.student, self.config.bridge.path, self.config.train.steps
            report = {"trained_with_student": {"steps": steps, "from": start}}
            bridge = trained_bridge(student.chunks, student.role, student.objective, report)
            if bridge is not None:
                save_bridge(bridge, self.output / "bridge")
        if self.config.train.export_hf:
            target = self.output / "hf"
            student = self.system.student
            export_hf(student.hf_weights(), self.source, target, student.spec.torch_dtype)
            self.log.say(f"exported the student to {target}")
        if self.evaluator is not None and dist.get_rank() == 0:
            print(table(before_and_after(self.log.path), self.config.evaluation.samples), flush=True)


def _share_finished(rollouts: list[Rollout]) -> dict[str, float]:
    """Nothing for recorded rollouts that don't say how they ended."""
    reasons = [rollout.finish_reason for rollout in rollouts]
    return {} if None in reasons else {"rollout/finished": reasons.count("stop") / len(reasons)}


def _last_in_a_row(flags: list[float]) -> int:
    """How many of the last flags are set, without a gap."""
    unset = [i for i, flag in enumerate(flags) if not flag]
    return len(flags) - 1 - unset[-1] if unset else len(flags)


def is_first_rank() -> bool:
    """Whether this is the world's first rank, also before the process group is joined."""
    return os.environ.get("RANK", "0") == "0"


def _peak_memory_gb() -> float:
    """Peak of CUDA allocations since it was asked last; of this process's resident memory on a machine without CUDA."""
    if torch.cuda.is_available():
        peak = torch.cuda.max_memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        return peak / 1e9
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9
