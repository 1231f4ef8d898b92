"""`nemo-oprd compare`: compares students with their teacher, on the teacher's responses and on their own.

    DIR/teacher.json           the sampling settings, and the origin and description of the teacher's responses
    DIR/teacher.jsonl          the teacher's responses: prompt, text, ids
    DIR/NAME.json              one student's measurements
    DIR/NAME.jsonl             that student's responses

An existing file is used again if it was measured with equal settings on the same weights and the same responses of the
teacher, so an interrupted command continues after its last result, and another student can be added later.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from nemo_oprd.data.prompts import Prompt, load_prompts
from nemo_oprd.data.tokenizer import Tokenizer
from nemo_oprd.evaluation.agreement import (
    SampledIds,
    SamplingSettings,
    describe_text,
    load_model,
    measure,
    sample_responses,
    summarize,
)
from nemo_oprd.evaluation.comparison import TEACHER, terminal_table
from nemo_oprd.evaluation.generations import digest
from nemo_oprd.evaluation.responses import read_lines, write_lines
from nemo_oprd.models import read_model_spec
from nemo_oprd.runtime.disk import check_output
from nemo_oprd.runtime.files import read_json, write_atomically
from nemo_oprd.runtime.gpus import check_promise
from nemo_oprd.runtime.output_directories import check_directory, mark

logger = logging.getLogger(__name__)

FORMAT = 1


@dataclass(frozen=True)
class CompareOptions:
    """The models, the prompts and the settings of a comparison; the command's options."""

    teacher: Path
    students: dict[str, Path]
    prompts: Path
    output: Path
    count: int = 64
    dtype: str = "float32"
    teacher_responses: Path | None = None  # recorded responses, in place of new samples
    sampling: SamplingSettings = field(
        default_factory=lambda: SamplingSettings(max_new_tokens=64, temperature=1.0, seed=0, batch=64)
    )


def parse_students(given: Sequence[str]) -> dict[str, Path]:
    """Parses the models named as NAME=DIR.

    Raises:
        ValueError: a text has another form, a name is taken, or a directory does not exist.
    """
    found: dict[str, Path] = {}
    for text in given:
        name, _, directory = text.partition("=")
        if not directory or not name.replace("-", "_").replace(".", "_").isidentifier() or name in {TEACHER, *found}:
            raise ValueError(
                f"student {text!r}: expected NAME=DIR, with a name of letters, digits, '_', '-' and '.' that no other "
                f"model has ({TEACHER!r} is taken); correct it"
            )
        if not Path(directory).is_dir():
            raise ValueError(f"student {text!r}: no such directory; expected a Hugging Face model: correct the path")
        found[name] = Path(directory)
    return found


def compare(options: CompareOptions) -> None:
    """Makes the missing measurements, and prints a table of all students.

    Raises:
        ValueError: a model or the prompts cannot be read, the models do not share token ids, or torch does not see the
            GPUs that a launcher gives.
    """
    check_promise()
    check_output(str(options.output))
    files = {f"{name}.{ending}" for name in options.students for ending in ("json", "jsonl")}
    check_directory(options.output, "compare", "--output", writes=files)
    comparison = Comparison(options)
    results = {name: comparison.student(name) for name in options.students}
    print(terminal_table(results))


class Comparison:
    """The models and prompts of one comparison; loads a model when a measurement needs it."""

    def __init__(self, options: CompareOptions) -> None:
        self.options = options
        self.tokenizer = Tokenizer.load(options.teacher)
        for name, directory in options.students.items():
            if Tokenizer.load(directory).fingerprint() != self.tokenizer.fingerprint():
                raise ValueError(
                    f"student {name}={directory} has another vocabulary than the teacher {options.teacher}: their "
                    "next-token distributions can't be compared; expected the same tokenizer: choose another model"
                )
        self.prompts: list[Prompt] = load_prompts(options.prompts)[: options.count]
        self.ids = [self.tokenizer.encode_prompt(prompt.messages, prompt.tools) for prompt in self.prompts]
        self.recorded = None if options.teacher_responses is None else self._recorded(options.teacher_responses)
        limit = read_model_spec(options.teacher).max_positions
        longest = max(map(len, self.ids)) + options.sampling.max_new_tokens
        if longest > limit:
            raise ValueError(
                f"the longest prompt and {options.sampling.max_new_tokens} new tokens are {longest} tokens, the models "
                f"have {limit} positions; expected at most these: lower --max-new-tokens, or shorten {options.prompts}"
            )

    @cached_property
    def settings(self) -> dict[str, Any]:
        """Returns the settings that must be equal for a measurement to be used again."""
        return {
            "format": FORMAT,
            "teacher": _weights_digest(self.options.teacher),
            "prompts": digest(self.ids),
            "count": len(self.ids),
            "dtype": self.options.dtype,
            "sampling": asdict(self.options.sampling),
        }

    @cached_property
    def teacher(self) -> Any:
        """Returns the teacher's model."""
        return self._load(self.options.teacher)

    @cached_property
    def teacher_responses(self) -> list[SampledIds]:
        """Returns the teacher's responses, sampled or read."""
        # Recorded responses are compared themselves: if they are equal, their origin does not matter. Files of earlier
        # versions do not say whether responses were sampled: these are sampled again.
        origin = {"recorded": False} if self.recorded is None else {"responses": _digest_of(self.recorded)}
        if self._kept(TEACHER, {**self.settings, **origin}) is not None:
            return _read_responses(self.options.output / f"{TEACHER}.jsonl")
        logger.info(f"{TEACHER}: {self.options.teacher}")
        responses = self._sample(self.teacher) if self.recorded is None else self.recorded
        described = {"responses": _digest_of(responses), "text": describe_text(responses)}
        self._write(TEACHER, {**self.settings, "recorded": self.recorded is not None, **described}, responses)
        return responses

    def student(self, name: str) -> dict[str, Any]:
        """Returns the measurements of one student."""
        directory = self.options.students[name]
        teachers = self.teacher_responses
        settings = {**self.settings, "responses": _digest_of(teachers), "student": _weights_digest(directory)}
        kept = self._kept(name, settings)
        if kept is not None:
            return kept
        logger.info(f"{name}: {directory}")
        model = self._load(directory)
        own = self._sample(model)
        on_teacher, on_student = (
            measure(model, self.teacher, responses, self.tokenizer.vocab_size) for responses in (teachers, own)
        )
        result = {
            **settings,
            "on_teacher": summarize(on_teacher),
            "on_student": {**summarize(on_student), **describe_text(own)},
            "per_prompt": {"on_teacher": list(map(asdict, on_teacher)), "on_student": list(map(asdict, on_student))},
        }
        self._write(name, result, own)
        return result

    def _sample(self, model: Any) -> list[SampledIds]:
        known = self.tokenizer.ids(model.config.vocab_size)
        return sample_responses(model, self.ids, self.tokenizer.eos_ids, known, self.options.sampling)

    def _load(self, directory: Path) -> Any:
        import torch

        return load_model(directory, getattr(torch, self.options.dtype))

    def _kept(self, name: str, settings: dict[str, Any]) -> dict[str, Any] | None:
        """Returns an earlier measurement with these settings, if there is one."""
        file = self.options.output / f"{name}.json"
        if not file.is_file():
            return None
        kept = read_json(file, "an object", "remove it to measure again")
        return kept if all(kept.get(key) == value for key, value in settings.items()) else None

    def _write(self, name: str, result: dict[str, Any], responses: list[SampledIds]) -> None:
        """Removes an older NAME.json, then writes the responses and NAME.json last: if it exists, both are complete."""
        mark(self.options.output, "compare")
        (self.options.output / f"{name}.json").unlink(missing_ok=True)
        lines = (
            {
                "prompt": prompt.text,
                "response": self.tokenizer.decode(response.tokens),
                "ended": response.ended,
                "prompt_ids": response.prompt,
                "response_ids": response.tokens,
            }
            for prompt, response in zip(self.prompts, responses, strict=True)
        )
        write_lines(self.options.output / f"{name}.jsonl", lines)
        write_atomically(self.options.output / f"{name}.json", json.dumps(result, indent=1) + "\n")

    def _recorded(self, file: Path) -> list[SampledIds]:
        """Reads the responses to these prompts in a file that an earlier comparison wrote."""
        responses = _read_responses(file)[: len(self.ids)]
        for number, (ids, response) in enumerate(zip(self.ids, responses, strict=False), 1):
            if response.prompt != ids:
                raise ValueError(
                    f"{file}, line {number} answers another prompt than line {number} of {self.options.prompts}; "
                    "expected responses to the same prompts in the same order: give the file that belongs to them"
                )
        if len(responses) < len(self.ids):
            raise ValueError(
                f"{file} holds {len(responses)} responses, expected {len(self.ids)}, one per prompt: lower --count, or "
                "give another file"
            )
        return responses


def _digest_of(responses: Sequence[SampledIds]) -> str:
    return digest(list(map(asdict, responses)))


def _weights_digest(directory: Path) -> str:
    """Returns sha256 (hex) of a model's weights and config.json: a repeated export counts as the same model."""
    found = hashlib.sha256()
    for file in sorted([*directory.glob("*.safetensors"), directory / "config.json"]):
        with file.open("rb") as stream:
            found.update(hashlib.file_digest(stream, "sha256").digest())
    return found.hexdigest()


def _read_responses(file: Path) -> list[SampledIds]:
    """Reads the responses in a file that `Comparison` wrote."""
    fix, found = "give a file that nemo-oprd compare wrote", []
    for where, record in read_lines(file, "responses with prompt_ids and response_ids", fix):
        try:
            found.append(SampledIds(record["prompt_ids"], record["response_ids"], record["ended"]))
        except KeyError as error:
            raise ValueError(f"{where} has no {error}; expected prompt_ids, response_ids and ended; {fix}") from error
    return found
