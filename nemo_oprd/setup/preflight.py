"""What a command needs of its configuration, checked before anything imports torch."""

from __future__ import annotations

from nemo_oprd.config.schema import Config
from nemo_oprd.models import ModelSpec
from nemo_oprd.setup import checks
from nemo_oprd.setup.resolve import RunSpec, SamplingSpec, resolve, resolve_sampling


def preflight(
    config: Config, world_size: int, command: str, *, against_reference: bool = False
) -> RunSpec | SamplingSpec:
    """Checks what `command` needs of a configuration on `world_size` ranks, and returns what it found.

    Args:
        command: train, verify, fit-bridge or evaluate.
        against_reference: `verify` also computes the Hugging Face reference.

    Raises:
        ValueError: a mistake that the configuration and the models' config.json show by themselves.
    """
    _check_settings(config, command, against_reference=against_reference)
    if command == "evaluate":
        sampling = resolve_sampling(config, world_size)
        _check_engine(config, command, sampling.student.spec)
        return sampling
    run = resolve(config, world_size, fitting=command == "fit-bridge")
    student, teacher = run.models.student.spec, run.models.teachers[0].spec
    _check_engine(config, command, student)
    if command == "train" and config.evaluation.teacher and config.rollout.replay is None:
        checks.check_same_architecture(student, teacher)
    checks.check_dispatcher(run.student_layout, "student.parallel.dispatcher")
    checks.check_dispatcher(run.teacher_layout, "teacher.parallel.dispatcher")
    if command == "fit-bridge":
        checks.check_bridge_rank(config, student, teacher)
    return run


def _check_settings(config: Config, command: str, *, against_reference: bool) -> None:
    """The checks that need no model."""
    if command == "train":
        checks.check_trains(config)
        checks.check_sources_stay(config)
        checks.check_logging(config)
    elif command == "verify":
        checks.check_replays(config, against_reference=against_reference)
    elif command == "fit-bridge":
        checks.check_one_teacher(config)
    else:
        checks.check_evaluates(config)
    if command in ("train", "fit-bridge") and config.rollout.replay is None:
        checks.check_prompts_given(config)
    if command == "evaluate" or (command == "train" and config.evaluation.every):
        checks.check_graders(config)


def _check_engine(config: Config, command: str, student: ModelSpec) -> None:
    if command != "verify" and config.rollout.replay is None:
        checks.check_engine(config, student)
