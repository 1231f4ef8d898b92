"""What a run reads besides models, checked and made ready before any model is loaded."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from nemo_oprd.bridge.maps import Bridge
from nemo_oprd.config import Config
from nemo_oprd.data.prompts import load_prompts
from nemo_oprd.families import ModelSpec
from nemo_oprd.rollout.base import Request
from nemo_oprd.tokens.tokenizer import Tokenizer


def check_sources_stay(config: Config) -> None:
    """Raises ValueError where the export at the end would replace a model that the run reads."""
    for role, model in (("student", config.student), ("teacher", config.teacher)):
        target = Path(config.output) / "hf"
        if config.train.export_hf and model.hf_path and Path(model.hf_path).resolve() == target.resolve():
            raise ValueError(
                f"{role}.hf_path={model.hf_path} is where output={config.output} exports the student at the end; "
                "expected different directories: choose another output"
            )


def check_tokenizers(student: Tokenizer, teacher_directory: Path) -> None:
    """Raises ValueError unless the teacher's tokenizer is the student's: ids mean nothing to another one's model."""
    teacher = Tokenizer.load(teacher_directory)
    if teacher.fingerprint() != student.fingerprint():
        raise ValueError(
            f"the tokenizers of {student.path} and {teacher_directory} differ: the teacher would read other text than "
            "the student wrote; both models need the same tokenizer"
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
        requests.append(Request(ids, prompt.messages[-1]["content"], prompt.data_source, prompt.answer))
    if not requests:
        raise ValueError(
            f"data.train={config.data.train}: every prompt is longer than data.max_prompt_tokens={limit}; raise it"
        )
    return requests


def check_bridge_tokenizer(bridge: Bridge | None, tokenizer: Tokenizer | None) -> None:
    """Raises ValueError where a bridge was fitted on the text of another tokenizer."""
    if bridge is None or tokenizer is None or bridge.student.tokenizer is None:
        return
    if bridge.student.tokenizer != tokenizer.fingerprint():
        raise ValueError(
            f"bridge.path: the bridge was made with another tokenizer than that of {tokenizer.path}; expected the "
            "same: fit a bridge with these models"
        )
