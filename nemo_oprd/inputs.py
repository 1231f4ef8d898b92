"""What a run reads besides models, checked and made ready before any model is loaded."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from nemo_oprd.bridge.maps import Bridge
from nemo_oprd.config import Config
from nemo_oprd.data.prompts import load_prompts
from nemo_oprd.families import ModelSpec, read_model_spec
from nemo_oprd.rollout.base import Request
from nemo_oprd.rollout.reading import TextReader
from nemo_oprd.rollout.replay import TeacherLimits, read_rollouts
from nemo_oprd.setup import model_directory
from nemo_oprd.tokens.tokenizer import Tokenizer
from nemo_oprd.types import Rollout


def check_sources_stay(config: Config) -> None:
    """Raises ValueError where the export at the end would replace a model that the run reads."""
    for role, model in (("student", config.student), ("teacher", config.teacher)):
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
    student, teacher = (read_model_spec(model_directory(model)) for model in (config.student, config.teacher))
    if config.teacher.reads == "text":
        limits = TeacherLimits(teacher.vocab_size, teacher.max_positions)
        return read_rollouts(config.rollout.replay, student.vocab_size, student.max_positions, limits)
    known = min(student.vocab_size, teacher.vocab_size)
    return read_rollouts(config.rollout.replay, known, student.max_positions)


def make_reader(config: Config, student: Tokenizer) -> TextReader | None:
    """What makes the teacher's sequences of rollouts; None where the teacher reads the student's ids.

    Raises:
        ValueError: the tokenizers differ and the teacher is to read ids, or one of them can't be aligned.
    """
    directory = model_directory(config.teacher)
    if config.teacher.reads == "ids":
        check_tokenizers(student, directory)
        return None
    positions = read_model_spec(directory).max_positions
    settings = config.alignment
    return TextReader(student, Tokenizer.load(directory), positions, settings.exact, settings.min_coverage)


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
        ValueError: the file can't be read, no prompt is short enough, or one leaves no room for a response.
    """
    limit = config.data.max_prompt_tokens
    requests = []
    for prompt in load_prompts(str(config.data.train)):
        try:
            ids = tokenizer.encode_prompt(list(prompt.messages))
        except ValueError as error:
            raise ValueError(f"data.train={config.data.train}: prompt {prompt.index}: {error}") from error
        if limit is not None and len(ids) > limit:
            continue
        if len(ids) >= max_positions:
            raise ValueError(
                f"data.train={config.data.train}: prompt {prompt.index} has {len(ids)} tokens and leaves no room in "
                f"the model's {max_positions} positions; set data.max_prompt_tokens"
            )
        text = prompt.messages[-1]["content"]
        requests.append(Request(ids, text, prompt.data_source, prompt.answer, prompt.messages))
    if not requests:
        raise ValueError(
            f"data.train={config.data.train}: every prompt is longer than data.max_prompt_tokens={limit}; raise it"
        )
    return requests


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
