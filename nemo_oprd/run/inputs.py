"""The inputs of a command that builds models: the stage between `RunSpec` and `TrainingRun`.

    RunSpec      what a run is, from the configuration and config.json files    resolve.py
    RunInputs    what it reads: tokenizers, prompts or recorded rollouts, weights' files, the checkpoint to resume from
    TrainingRun  what runs: models, engine, sampler, records                    start.py

`read_inputs` makes the `input_checks` of a command, which need no model, in their order. It leaves no trace: it writes
nothing and uses no collective.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from nemo_oprd.config.resume_rules import Change
from nemo_oprd.config.schema import Config
from nemo_oprd.megatron.parallel import first_ranks
from nemo_oprd.megatron.weights.torch_dist import OtherCheckpointError
from nemo_oprd.run.checkpoint_directory import (
    find_checkpoint,
    find_damage_inside,
    find_damage_together,
    has_digests,
    iteration_directory,
    newest_steps,
)
from nemo_oprd.run.checks import (
    Check,
    check_engine,
    check_output_directory,
    refusals,
    stop_at_first,
    wait_for_endpoints,
)
from nemo_oprd.run.data import TrainingData, check_bridge_tokenizers, read_training_data
from nemo_oprd.run.engine_kinds import ENGINES
from nemo_oprd.run.models import RunFiles, RunPlan, make_plan
from nemo_oprd.run.preflight import TEACHER_SAMPLED, Command, samples_teacher
from nemo_oprd.run.resolve import RunSpec
from nemo_oprd.run.resume import check_resume, compare_settings
from nemo_oprd.run.training_state import check_checkpoint, check_resume_signature
from nemo_oprd.runtime.messages import is_first_rank


@dataclass(frozen=True)
class ResumePoint:
    """The checkpoint from which a run goes on.

    Attributes:
        step: steps before it; None for a new run.
        notes: lines about damaged checkpoints that were skipped, and about missing digests.
        changed: settings that differ from those under which the last kept step ran; all are permitted.
        seen: the checkpoints that were there, as `newest_steps` returns them.
    """

    step: int | None
    notes: tuple[str, ...]
    changed: tuple[Change, ...]
    seen: tuple[str | None, tuple[int, ...]]


@dataclass(frozen=True)
class RunInputs:
    """The files that a command reads before it builds models. Each part is read once, when a check needs it first.

    A part raises ValueError if it cannot be read, or does not fit the others.
    """

    spec: RunSpec
    command: Command = "train"

    @property
    def config(self) -> Config:
        """Returns the configuration of the run."""
        return self.spec.config

    @cached_property
    def files(self) -> RunFiles:
        """Returns the files of the run's models."""
        return RunFiles(self.config, self.spec.models)

    @cached_property
    def data(self) -> TrainingData:
        """Returns the encoded prompts, or the recorded rollouts."""
        return read_training_data(self.spec, self.files, evaluates=self.command in ("train", "doctor"))

    @cached_property
    def plan(self) -> RunPlan:
        """Returns the models that the command will build."""
        return make_plan(self.spec, self.files, fitting=self.command == "fit-bridge")

    @cached_property
    def resume(self) -> ResumePoint:
        """Returns the checkpoint from which a training run goes on."""
        return find_resume_point(self.plan)

    def check_sampling_device(self) -> None:
        """Raises ValueError unless the engine can sample from the student on this machine."""
        ENGINES[self.config.rollout.engine].check_device(self.config.rollout, self.files.student.spec)


def input_checks(command: Command, config: Config) -> Iterator[Check[RunInputs]]:
    """Yields the checks of `RunInputs` that this command needs, in order."""
    samples = config.rollout.replay is None
    if command == "doctor":  # the other commands make these in `run_checks`, before those of files
        yield Check("engine", lambda inputs: check_engine(config, inputs.files.student.spec))
        if samples_teacher(config):
            yield Check(TEACHER_SAMPLED.code, lambda inputs: TEACHER_SAMPLED.function(inputs.spec))
    writes = "train" if command == "doctor" else command
    yield Check("output", lambda inputs: check_output_directory(config, writes))
    yield Check("data", lambda inputs: inputs.data)
    if samples:
        yield Check("sampling-device", RunInputs.check_sampling_device)
    yield Check("model-files", lambda inputs: inputs.plan)
    if samples:
        yield Check("bridge-tokenizers", lambda inputs: check_bridge_tokenizers(inputs.plan.objective, inputs.files))
    if command == "train":
        yield Check("checkpoint", lambda inputs: inputs.resume)
    if command in ("train", "doctor"):
        yield Check("endpoints", lambda inputs: wait_for_endpoints(config), waits=True)


def read_inputs(spec: RunSpec, command: Command = "train") -> RunInputs:
    """Reads and checks everything that a command needs before models are built. Every rank calls this.

    Raises:
        ValueError: the configuration, a model, the data or a checkpoint is wrong.
    """
    inputs = RunInputs(spec, command)
    stop_at_first(refusals(input_checks(command, spec.config), inputs))
    return inputs


def find_resume_point(plan: RunPlan, damaged: Mapping[int, str] | None = None) -> ResumePoint:
    """Finds the checkpoint to resume from, the newest undamaged one; its `step` is None if there are no checkpoints.

    Args:
        damaged: step of a checkpoint -> the damage that its digests have shown.

    Raises:
        ValueError: all checkpoints are damaged, the newest one is of another student or of a run that cannot go on with
            these settings, or settings that change the result differ without permission.
    """
    config, root, known = plan.spec.config, checkpoints_of(plan.spec.config), dict(damaged or {})
    seen = newest_steps(root)
    while True:
        step, notes = find_checkpoint(root, known)
        damage = None if step is None else _check(plan, root, step)
        if step is None or damage is None:
            return ResumePoint(step, tuple(notes), tuple(check_resume(config, step)), seen)
        known[step] = damage


def _check(plan: RunPlan, root: Path, step: int) -> str | None:
    """Returns the damage of a checkpoint that cannot be read; None if this run can go on from it.

    Raises:
        ValueError: it is of another student, or of a run that cannot go on with these settings.
    """
    config = plan.spec.config
    try:
        check_checkpoint(root, step, plan.files.student.spec)
    except OtherCheckpointError:
        raise
    except ValueError:
        damage = find_damage_inside(iteration_directory(root, step))
        if damage is None:
            raise
        return damage
    try:
        check_resume_signature(root, step, config, plan.objective, plan.needs)
    except ValueError as error:  # no run can resume with this one setting; the message should list the others, too
        refused = ", ".join(map(str, compare_settings(config, step).refused))
        raise ValueError(f"{error}" + (f" (changed settings: {refused})" if refused else "")) from error
    return None


def agree_on_resume(inputs: RunInputs) -> ResumePoint:
    """Returns the first rank's resume point, after a comparison of its files with their digests, on every rank.

    A refused start leaves no trace, so the point was found before the directory was locked. The first rank, which holds
    the lock by now, looks again only if another run has written a checkpoint in between. Every rank reads its share of
    the checkpoint's files; those that show damage are left out.

    Raises:
        ValueError: as `find_resume_point`.
    """
    point, root, damaged = inputs.resume, checkpoints_of(inputs.config), dict[int, str]()
    if is_first_rank() and newest_steps(root) != point.seen:
        point = find_resume_point(inputs.plan)
    while True:
        point = first_ranks(point)
        if point.step is None:
            return point
        directory = iteration_directory(root, point.step)
        damage = find_damage_together(directory)
        if damage is None:
            break
        damaged[point.step] = damage
        point = find_resume_point(inputs.plan, damaged)
    if has_digests(directory):
        return point
    note = f"{directory} has no digests (an earlier version wrote it): only its files' sizes were checked"
    return replace(point, notes=(*point.notes, note))


def checkpoints_of(config: Config) -> Path:
    """Returns the directory of a run's checkpoints."""
    return Path(config.output) / "checkpoints"
