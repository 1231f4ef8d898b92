"""Checks a command's configuration before torch is imported, and afterwards whether torch sees the promised GPUs."""

from __future__ import annotations

from nemo_oprd.config.schema import Config
from nemo_oprd.run import checks
from nemo_oprd.run.named_files import Origin, check_files, check_models
from nemo_oprd.run.resolve import RunSpec, SamplingSpec, resolve, resolve_sampling
from nemo_oprd.runtime.gpus import check_promise


def preflight(
    config: Config, world_size: int, command: str, *, against_reference: bool = False, origin: Origin | None = None
) -> RunSpec:
    """Returns the run that `command` makes of a configuration on `world_size` ranks, checked by the config.json files.

    Args:
        command: train, verify, fit-bridge, or doctor, which makes the checks of `train` and examines the engine
            itself.
        against_reference: `verify` also computes the Hugging Face reference.
        origin: returns the file that sets a key, for messages.

    Raises:
        ValueError: the configuration and the models' config.json contain a mistake, or torch does not see the GPUs that
            the launcher gives.
    """
    assert command in ("train", "verify", "fit-bridge", "doctor"), command
    trains = command in ("train", "doctor")
    samples = command != "verify" and config.rollout.replay is None
    if trains:
        checks.check_trains(config)
        checks.check_sources_stay(config)
        checks.check_logging(config)
        if config.evaluation.every:
            checks.check_graders(config)
    elif command == "verify":
        checks.check_replays(config, against_reference=against_reference)
    else:
        checks.check_one_teacher(config)
    if samples:
        checks.check_prompts_given(config)
    check_models(config, origin)
    run = resolve(config, world_size, fitting=command == "fit-bridge")
    student, teacher = run.models.student.spec, run.models.teachers[0].spec
    if samples and command != "doctor":
        checks.check_engine(config, student)
    if command != "doctor":
        checks.check_teacher_servers(config)
    if trains and config.evaluation.teacher and config.rollout.replay is None:
        checks.check_same_architecture(student, teacher)
    checks.check_dispatcher(run.student_layout, "student.parallel.dispatcher")
    checks.check_dispatcher(run.teacher_layout, "teacher.parallel.dispatcher")
    if command == "fit-bridge":
        checks.check_bridge_rank(config, student, teacher)
    check_files(config, command, origin)
    check_promise()
    return run


def preflight_evaluation(config: Config, world_size: int, *, origin: Origin | None = None) -> SamplingSpec:
    """Does what `preflight` does, for `evaluate`, which needs no teacher.

    Raises:
        ValueError: as `preflight`.
    """
    checks.check_evaluates(config)
    checks.check_graders(config)
    check_models(config, origin, student_alone=True)
    sampling = resolve_sampling(config, world_size)
    if config.rollout.replay is None:
        checks.check_engine(config, sampling.student.spec)
    check_files(config, "evaluate", origin)
    check_promise()
    return sampling
