"""What a run reads besides models, checked and made ready before any model is loaded."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

from nemo_oprd.batch.types import Rollout
from nemo_oprd.bridge.maps import Bridge
from nemo_oprd.config.schema import Config, ModelSource, TeacherSource
from nemo_oprd.config.weight_schedule import largest
from nemo_oprd.data.prompts import Prompt, load_prompts
from nemo_oprd.distillation.teacher_routing import Routing
from nemo_oprd.models import ModelSpec, read_model_spec
from nemo_oprd.rollout.engine import Request
from nemo_oprd.rollout.replay import TeacherLimits, own_sequences, read_rollouts
from nemo_oprd.rollout.teacher_inputs import PromptInputs, TeacherInputs, TextInputs
from nemo_oprd.setup.models import model_directory
from nemo_oprd.tokenization.tokenizer import Tokenizer


def check_trains(config: Config) -> None:
    """Raises ValueError where no term has a weight: weight decay alone would change the student."""
    loss = config.loss
    layers = 0.0 if loss.representation.layers == "none" else largest(loss.representation.weight)
    if layers == largest(loss.output.weight) == 0:
        raise ValueError(
            "loss.representation.weight and loss.output.weight are both 0 (a representation term without layers has "
            "none): expected something to learn; give one of them a weight"
        )


def check_sources_stay(config: Config) -> None:
    """Raises ValueError where the export at the end would replace a model that the run reads."""
    models: list[tuple[str, ModelSource]] = [("student", config.student), ("teacher", config.teacher)]
    for role, model in [*models, *((f"teachers[{i}]", teacher) for i, teacher in enumerate(config.teachers))]:
        target = Path(config.output) / "hf"
        if config.train.export_hf and model.hf_path and Path(model.hf_path).resolve() == target.resolve():
            raise ValueError(
                f"{role}.hf_path={model.hf_path} is where output={config.output} exports the student at the end; "
                "expected different directories: choose another output"
            )


def recorded_rollouts(config: Config) -> list[Rollout] | None:
    """The rollouts of `rollout.replay`, checked against both models; None where none are replayed.

    Raises:
        ValueError: as `read_rollouts`.
    """
    if config.rollout.replay is None:
        return None
    student = read_model_spec(model_directory(config.student))
    teachers = [read_model_spec(model_directory(teacher)) for teacher in config.teacher_sources]
    vocabulary = min(teacher.vocab_size for teacher in teachers)
    positions = min(teacher.max_positions for teacher in teachers)
    limits = TeacherLimits(vocabulary, positions, own_sequences(config.teacher))
    known = student.vocab_size if config.teacher.reads == "text" else min(student.vocab_size, vocabulary)
    rollouts = read_rollouts(config.rollout.replay, known, student.max_positions, limits)
    routing = Routing(tuple(config.teacher_sources))
    routing.check((r.data_source for r in rollouts), config.rollout.replay, all_used=False)  # it may be a small part
    return rollouts


def make_teacher_inputs(config: Config, student: Tokenizer) -> list[TeacherInputs | None]:
    """Per teacher, what makes its sequences of rollouts; None where it reads the student's ids.

    Raises:
        ValueError: the tokenizers differ and the teacher is to read ids, or one of them can't be aligned.
    """
    return [_make_reader(config, student, teacher) for teacher in config.teacher_sources]


def _make_reader(config: Config, student: Tokenizer, source: TeacherSource) -> TeacherInputs | None:
    directory, settings = model_directory(source), config.alignment
    positions = read_model_spec(directory).max_positions
    if config.teacher.reads == "text":
        return TextInputs(student, Tokenizer.load(directory), positions, settings.exact, settings.min_coverage)
    check_tokenizers(student, directory)
    return None if config.teacher.prompt is None else PromptInputs(Tokenizer.load(directory), positions)


def check_tokenizers(student: Tokenizer, teacher_directory: Path) -> None:
    """Raises ValueError unless the teacher's tokenizer is the student's: ids mean nothing to another one's model."""
    teacher = Tokenizer.load(teacher_directory)
    if teacher.fingerprint() != student.fingerprint():
        raise ValueError(
            f"the tokenizers of {student.path} and {teacher_directory} differ: the teacher would read other text than "
            "the student wrote; expected the same tokenizer: set teacher.reads=text (with a bridge), or choose another "
            "teacher"
        )


def check_same_architecture(student: ModelSpec, teacher: ModelSpec) -> None:
    """Raises ValueError where the teacher can't be sampled in the student's engine."""
    differing = [
        f.name
        for f in dataclasses.fields(ModelSpec)
        if f.compare and f.name != "dtype" and getattr(student, f.name) != getattr(teacher, f.name)
    ]
    if differing:
        raise ValueError(
            f"evaluation.teacher=true samples the teacher in the student's engine, but they differ in {differing}; "
            "set evaluation.teacher=false and evaluate the teacher with `nemo-oprd evaluate`"
        )


def encode_prompts(config: Config, tokenizer: Tokenizer, max_positions: int) -> list[Request]:
    """The training prompts, tokenized once; those above `data.max_prompt_tokens` are left out.

    Raises:
        ValueError: a file can't be read, no prompt is short enough, one leaves no room for a response, has no teacher,
            or lacks what its teacher is to be told; or a teacher has no prompts.
    """
    limit = config.data.max_prompt_tokens
    requests: list[Request] = []
    for prompt, file in _training_prompts(config):
        where = f"data.train={file}: prompt {prompt.index}"
        try:
            ids = tokenizer.encode_prompt(list(prompt.messages))
            if limit is not None and len(ids) > limit:
                continue
            told = prompt.teacher_messages(config.teacher.prompt)
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from error
        if len(ids) >= max_positions:
            raise ValueError(
                f"{where} has {len(ids)} tokens and leaves no room in the model's {max_positions} positions; set "
                "data.max_prompt_tokens"
            )
        text = prompt.messages[-1]["content"]
        requests.append(Request(ids, text, prompt.data_source, prompt.answer, prompt.messages, told))
    if not requests:
        raise ValueError(
            f"data.train={config.data.train}: every prompt is longer than data.max_prompt_tokens={limit}; raise it"
        )
    Routing(tuple(config.teacher_sources)).check((r.data_source for r in requests), f"data.train={config.data.train}")
    return requests


def _training_prompts(config: Config) -> Iterator[tuple[Prompt, str]]:
    """All prompts, each with its file."""
    files = config.data.train if isinstance(config.data.train, list) else [str(config.data.train)]
    for file in files:
        yield from ((prompt, file) for prompt in load_prompts(file))


def check_teacher_prompts(config: Config, readers: list[TeacherInputs | None], requests: list[Request]) -> None:
    """Raises ValueError where a prompt, as its teacher reads it, leaves no room for a response in its positions."""
    taught_by = Routing(tuple(config.teacher_sources)).teachers_of(request.data_source for request in requests)
    for request, number in zip(requests, taught_by, strict=True):
        reader = readers[number]
        length = 0 if reader is None else len(reader.teacher.encode_prompt(list(request.teacher_messages)))
        if reader is not None and length >= reader.max_positions:
            raise ValueError(
                f"data.train: the teacher reads {length} tokens for the prompt {str(request.prompt)[:60]!r}, which "
                f"leaves no room for a response in its {reader.max_positions} positions; expected fewer: shorten "
                "teacher.prompt or the hint, or set data.max_prompt_tokens"
            )


def check_bridge_tokenizers(bridge: Bridge | None, student: Tokenizer | None, teacher: Tokenizer | None) -> None:
    """Raises ValueError where a bridge was fitted on the text of other tokenizers."""
    if bridge is None:
        return
    for made_for, tokenizer in ((bridge.student, student), (bridge.teacher, teacher or student)):
        if tokenizer is None or made_for.tokenizer is None:
            continue
        if made_for.tokenizer != tokenizer.fingerprint():
            raise ValueError(
                f"bridge.path: the bridge was made with another tokenizer than that of {tokenizer.path}; expected the "
                "same: fit a bridge with these models"
            )
