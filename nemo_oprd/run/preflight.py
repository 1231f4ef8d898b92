"""The stages of a start with their tables of checks; here are those of `StartRequest` and `RunSpec`.

    stage         made by                   from                             its checks, in order
    Config        config/loading.py         YAML files, overrides            config/schema.py, config/checks.py
    StartRequest  preflight.py              Config, ranks, command           config_checks
    RunSpec       resolve.py: derive        StartRequest, config.json files  run_checks
    RunInputs     inputs.py: read_inputs    RunSpec                          input_checks
    TrainingRun   start.py: start_training  RunInputs                        what it builds refuses while it is built

`derive` and the parts of `RunInputs` raise, too, what they cannot derive or read. `evaluate` has `SamplingSpec` with
`sampling_checks` in place of `RunSpec`, and `EvaluationInputs` with `EVALUATION_CHECKS` (evaluate.py) in place of the
rest. `preflight` stops at the first check that fails; `refused_start` returns all refusals, for `doctor`. Only
`check_promise`, the last check of `run_checks`, and a user's grader import torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

from nemo_oprd.config.schema import Config, ModelSource
from nemo_oprd.config.teacher_kinds import TEACHER_KINDS
from nemo_oprd.run import checks
from nemo_oprd.run.checks import LAYOUT_CHECKS, Check, Refusal, refusals, stop_at_first
from nemo_oprd.run.resolve import RunSpec, SamplingSpec, derive, resolve_sampling
from nemo_oprd.runtime.files import why_no_file
from nemo_oprd.runtime.gpus import check_promise

# key -> the YAML file that sets it; None for the command line and for defaults. Messages name it, because a shipped
# configuration names files that a new user does not have.
Origin = Callable[[str], Path | None]

_PROMPTS = "a .parquet or .jsonl file with prompts"
# commands that read no prompts and no templates; `verify` works on recorded rollouts
_MODELS_ALONE = ("plan", "rehearse", "verify")


@dataclass(frozen=True)
class NamedFile:
    """A file, or a directory (`is_directory`), that a command reads.

    Attributes:
        expected, fix: for the message if it is missing.
        extensions: of files to list in the message if the path is a directory.
    """

    key: str
    path: str
    expected: str
    fix: str
    extensions: tuple[str, ...] = ()
    is_directory: bool = False

    def check(self, origin: Origin | None) -> None:
        """Raises ValueError, naming the YAML file, unless `path` is a file or, with `is_directory`, a directory."""
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
    """Raises ValueError unless the files exist that `command` reads besides models; `origin` as in `check_models`."""
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
    if replay is not None and command in ("train", "verify", "fit-bridge", *_WITHOUT_LAUNCH):
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


# `doctor` makes the checks of `train`: that of the engine in `input_checks`, that of teachers' servers by itself
Command: TypeAlias = Literal["train", "verify", "fit-bridge", "doctor", "plan", "rehearse", "evaluate"]
_TRAIN: tuple[Command, ...] = ("train", "doctor")
_WITHOUT_LAUNCH: tuple[Command, ...] = ("plan", "rehearse")  # they start nothing here


@dataclass(frozen=True)
class StartRequest:
    """A command, its configuration and its number of ranks.

    Attributes:
        ranks: the number of ranks of the job.
        against_reference: `verify` also computes the Hugging Face reference.
        origin: returns the file that sets a key, for messages.
    """

    config: Config
    ranks: int
    command: Command
    against_reference: bool = False
    origin: Origin | None = None

    @property
    def samples(self) -> bool:
        """Returns whether the command samples responses: `evaluate` does so even if training replays recorded ones."""
        if self.command == "evaluate":
            return True
        return self.command not in ("verify", *_WITHOUT_LAUNCH) and self.config.rollout.replay is None

    def check_models(self) -> None:
        """Raises ValueError unless the directories of the models exist."""
        check_models(self.config, self.origin, student_alone=self.command == "evaluate")

    def check_replays(self) -> None:
        """Raises ValueError unless `verify` has recorded rollouts, and `hf_path` of all models for the reference."""
        checks.check_replays(self.config, against_reference=self.against_reference)


def config_checks(request: StartRequest) -> Iterator[Check[StartRequest]]:
    """Yields the checks of a `StartRequest` that this command needs, in order."""
    evaluates = request.command == "evaluate"
    trains = request.command in _TRAIN
    if trains or request.command in _WITHOUT_LAUNCH:
        yield Check("no-loss", lambda request: checks.check_trains(request.config))
    if trains:
        yield Check("export-over-model", lambda request: checks.check_sources_stay(request.config))
        yield Check("logger-missing", lambda request: checks.check_logging(request.config))
    if evaluates:
        yield Check("no-validation", lambda request: checks.check_evaluates(request.config))
    if evaluates or (trains and request.config.evaluation.every):
        yield Check("grader-missing", lambda request: checks.check_graders(request.config))
    if request.command == "verify":
        yield Check("no-recording", StartRequest.check_replays)
    if request.command == "fit-bridge":
        yield Check("several-teachers", lambda request: checks.check_one_teacher(request.config))
    if request.samples and not evaluates:
        yield Check("no-prompts", lambda request: checks.check_prompts_given(request.config))
    yield Check(MODEL_MISSING, StartRequest.check_models)


MODEL_MISSING = "model-missing"


def run_checks(request: StartRequest) -> Iterator[Check[RunSpec]]:
    """Yields the checks of a `RunSpec` that this command needs, in order."""
    for check in LAYOUT_CHECKS:
        yield Check(check.code, lambda run, function=check.function: function(run.placed))  # type: ignore[misc]
    files = Check[RunSpec]("file-missing", lambda run: check_files(run.config, request.command, request.origin))
    if request.command in _WITHOUT_LAUNCH:
        yield files
        return
    launches = request.command != "doctor"
    if request.samples and launches:
        yield Check("engine", lambda run: checks.check_engine(run.config, run.models.student.spec))
    if launches:
        yield Check("teacher-servers", lambda run: checks.check_teacher_servers(run.config))
    if request.command == "train" and samples_teacher(request.config) and request.config.rollout.replay is None:
        yield TEACHER_SAMPLED
    yield Check("dispatcher", _check_dispatchers)
    if request.command == "fit-bridge":
        yield Check(
            "bridge-rank",
            lambda run: checks.check_bridge_rank(run.config, run.models.student.spec, run.models.teachers[0].spec),
        )
    yield files
    yield Check("gpus-missing", lambda run: check_promise())


TEACHER_SAMPLED = Check[RunSpec](
    "teacher-not-sampled",
    lambda run: checks.check_same_architecture(run.models.student.spec, run.models.teachers[0].spec),
)


def samples_teacher(config: Config) -> bool:
    """Returns whether the evaluations of a run sample the teacher, too."""
    return config.evaluation.teacher and config.evaluation.every > 0


def _check_dispatchers(run: RunSpec) -> None:
    checks.check_dispatcher(run.student_layout, "student.parallel.dispatcher")
    checks.check_dispatcher(run.teacher_layout, "teacher.parallel.dispatcher")


def preflight(
    config: Config, world_size: int, command: Command, *, against_reference: bool = False, origin: Origin | None = None
) -> RunSpec:
    """Returns the run that `command` makes of a configuration on `world_size` ranks, after its checks.

    Args:
        against_reference, origin: as in `StartRequest`.

    Raises:
        ValueError: there is a mistake in the configuration or a model's config.json, a file or a package is missing, or
            torch does not see the GPUs that the launcher gives.
    """
    request = StartRequest(config, world_size, command, against_reference, origin)
    stop_at_first(refusals(config_checks(request), request))
    run = derive(config, world_size, fitting=command == "fit-bridge")
    stop_at_first(refusals(run_checks(request), run))
    return run


def refused_start(request: StartRequest) -> list[Refusal]:
    """Returns every refusal of `preflight`, which raises the first one; [] if it raises none.

    Without the models' config.json, or with one that can't be read, the later stages are not checked.
    """
    found = list(refusals(config_checks(request), request))
    if any(refusal.code == MODEL_MISSING for refusal in found):
        return found
    try:
        run = derive(request.config, request.ranks, fitting=request.command == "fit-bridge")
    except ValueError as error:
        return [*found, Refusal("models", error)]
    return [*found, *refusals(run_checks(request), run)]


def preflight_evaluation(config: Config, world_size: int, *, origin: Origin | None = None) -> SamplingSpec:
    """Does what `preflight` does, for `evaluate`, which needs no teacher.

    Raises:
        ValueError: as `preflight`.
    """
    request = StartRequest(config, world_size, "evaluate", origin=origin)
    stop_at_first(refusals(config_checks(request), request))
    sampling = resolve_sampling(config, world_size)
    stop_at_first(refusals(sampling_checks(request), sampling))
    return sampling


def sampling_checks(request: StartRequest) -> Iterator[Check[SamplingSpec]]:
    """Yields the checks of a program that only samples, in order."""
    if request.samples:
        yield Check("engine", lambda sampling: checks.check_engine(sampling.config, sampling.student.spec))
    yield Check("file-missing", lambda sampling: check_files(sampling.config, request.command, request.origin))
    yield Check("gpus-missing", lambda sampling: check_promise())
