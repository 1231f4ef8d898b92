"""Checks a command's configuration before torch is imported, and afterwards whether torch sees the promised GPUs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from nemo_oprd.config.schema import Config, ModelSource
from nemo_oprd.config.teacher_kinds import TEACHER_KINDS
from nemo_oprd.run import checks
from nemo_oprd.run.resolve import RunSpec, SamplingSpec, resolve, resolve_sampling
from nemo_oprd.runtime.files import why_no_file
from nemo_oprd.runtime.gpus import check_promise

# Checks that the files which a configuration names exist, before any slow import.
#
# A shipped configuration names files that a new user does not have, so a message names the YAML file that sets the key.


# key -> the YAML file that sets it; None for the command line and for defaults
Origin = Callable[[str], Path | None]

_PROMPTS = "a .parquet or .jsonl file with prompts"
# commands that read no prompts and no templates; `verify` works on recorded rollouts
_MODELS_ALONE = ("plan", "rehearse", "verify")


@dataclass(frozen=True)
class NamedFile:
    """A file, or a directory (`is_directory`), that a command reads.

    Attributes:
        expected, fix: for the message where it is missing.
        extensions: of files that a user may name in place of a directory.
    """

    key: str
    path: str
    expected: str
    fix: str
    extensions: tuple[str, ...] = ()
    is_directory: bool = False

    def check(self, origin: Origin | None) -> None:
        """Raises ValueError, with the YAML file that names the path, unless something readable is there."""
        path = Path(self.path)
        if path.is_dir() if self.is_directory else path.is_file():
            return
        if self.is_directory and path.is_file():
            return  # its reader reports the kind of the file more precisely
        found = why_no_file(path, *self.extensions)
        found = "no such directory" if self.is_directory and found == "no such file" else found
        file = None if origin is None else origin(self.key)
        named = f" ({file} names it, not the command line)" if file is not None else ""
        raise ValueError(f"{self.key}={self.path}: {found}{named}; expected {self.expected}: {self.fix}")


def check_models(config: Config, origin: Origin | None = None, *, student_alone: bool = False) -> None:
    """Raises ValueError unless the directories of the models exist; `origin` names the file that sets a key."""
    for named in _models(config, student_alone=student_alone):
        named.check(origin)


def check_files(config: Config, command: str, origin: Origin | None = None) -> None:
    """Raises ValueError unless the files exist that `command` reads besides the models; see `check_models`."""
    for named in _files(config, command):
        named.check(origin)


def _models(config: Config, *, student_alone: bool) -> Iterator[NamedFile]:
    sources: list[tuple[str, ModelSource]] = [("student", config.student)]
    if not student_alone and config.teachers:
        sources += [(f"teachers[{number}]", teacher) for number, teacher in enumerate(config.teachers)]
    elif not student_alone and TEACHER_KINDS[config.teacher.weights].own_model:
        sources.append(("teacher", config.teacher))
    for key, source in sources:
        if source.checkpoint is not None:
            what = "a torch_dist checkpoint"
            yield NamedFile(f"{key}.checkpoint", source.checkpoint, what, f"set {key}.checkpoint=DIR", (), True)
        elif source.hf_path is not None:
            what, fix = "that of a Hugging Face model", f"download it first, or set {key}.hf_path=DIR"
            yield NamedFile(f"{key}.hf_path", source.hf_path, what, fix, (".safetensors",), True)


def _files(config: Config, command: str) -> Iterator[NamedFile]:
    data, replay, formats = config.data, config.rollout.replay, (".parquet", ".jsonl")
    reads_prompts = command not in _MODELS_ALONE and (replay is None or command in ("data", "doctor"))
    if reads_prompts and (command != "evaluate" or data.held_out):
        for file in data.train_files:
            yield NamedFile("data.train", file, _PROMPTS, "give its path in data.train=FILE", formats)
    # the contamination check alone skips sets that do not exist
    evaluates = command in ("evaluate", "doctor") or (command == "train" and config.evaluation.every > 0)
    if reads_prompts and evaluates:
        do_without = "data.validation={}" + (" evaluation.every=0" if config.evaluation.every else "")
        for name, file in data.validation.items():
            own = f"set data.validation.{name}=FILE"
            fix = f"{own}, or all sets by 'data.validation={{NAME:FILE}}'"
            if command != "evaluate":
                fix = f"{own}, or do without by {do_without}"
            yield NamedFile(f"data.validation.{name}", file, _PROMPTS, fix, formats)
    if data.chat_template is not None and command not in (*_MODELS_ALONE, "data"):
        fix = "correct the path, or set data.chat_template=null"
        yield NamedFile("data.chat_template", data.chat_template, "a file with a Jinja template", fix, (".jinja",))
    if replay is not None and command in ("train", "verify", "fit-bridge"):
        what = "a JSONL of rollouts (rollout.save writes them)"
        yield NamedFile("rollout.replay", replay, what, "give its path", (".jsonl",))
    if command in ("train", "verify"):
        yield from _bridges(config)


def _bridges(config: Config) -> Iterator[NamedFile]:
    named = [(f"teachers[{number}].bridge", teacher.bridge) for number, teacher in enumerate(config.teachers)]
    for key, path in named or [("bridge.path", config.bridge.path)]:
        if path not in (None, "none", "full_width"):
            fix = f"make it, or set {key}=DIR"
            yield NamedFile(key, str(path), "a bridge made by nemo-oprd fit-bridge", fix, (".safetensors",), True)


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
