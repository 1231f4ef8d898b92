"""The data of a run, read before any model: encoded prompts with their visiting order, and recorded rollouts."""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass, replace

from nemo_oprd.batch.types import Rollout
from nemo_oprd.config.schema import Config
from nemo_oprd.config.teacher_routing import Routing
from nemo_oprd.data.conversation import non_text_fields
from nemo_oprd.data.order import PromptOrder, exact_weights
from nemo_oprd.data.preparation import DataReport, PreparedPrompts
from nemo_oprd.data.prompts import Prompt
from nemo_oprd.data.template_use import template_notes
from nemo_oprd.data.tokenizer import Tokenizer
from nemo_oprd.distillation.objective import Objective
from nemo_oprd.evaluation.evaluator import Evaluator
from nemo_oprd.rollout.engine import Request
from nemo_oprd.rollout.replay import TeacherLimits, own_sequences, read_rollouts
from nemo_oprd.rollout.schedule import NO_PROMPTS, TrainingPrompts
from nemo_oprd.rollout.teacher_inputs import PromptInputs, TeacherInputs, TextInputs
from nemo_oprd.run.checks import check_prompts_given
from nemo_oprd.run.models import RunFiles
from nemo_oprd.run.prompt_files import prepare_prompts, say_shares
from nemo_oprd.run.resolve import RunModels, RunSpec

# The prompts of a run, encoded with the student's tokenizer, and the order in which training visits them.


@dataclass(frozen=True)
class RunPrompts:
    """Encoded training prompts, the problems that `data.held_out` sets aside, and the report of the preparation."""

    training: TrainingPrompts
    held_out: list[Prompt]
    report: DataReport


def read_run_prompts(config: Config, tokenizer: Tokenizer, max_positions: int) -> RunPrompts:
    """Reads, prepares and encodes the training prompts; raises ValueError as `prepare_prompts` and `encode_prompts`."""
    report = DataReport()
    prepared = prepare_prompts(config, report)
    requests = encode_prompts(config, prepared, tokenizer, max_positions, report)
    sizes, train = tuple(map(len, requests)), config.data.train
    weights = exact_weights(list(train.values())) if isinstance(train, dict) else None
    training = TrainingPrompts([request for each in requests for request in each], PromptOrder(sizes, weights))
    say_shares(config, sizes, report)
    report.content |= {"prompts": sum(sizes), "fingerprint": _fingerprint(training)}
    return RunPrompts(training, prepared.held_out, report)


def encode_prompts(
    config: Config, prepared: PreparedPrompts, tokenizer: Tokenizer, max_positions: int, report: DataReport
) -> list[list[Request]]:
    """Returns the training prompts as requests, per file; applies `data.over_long` above `data.max_prompt_tokens`.

    Raises:
        ValueError: all prompts of a weighted file, or of all files, are too long; or a prompt is too long and
            `data.over_long=refuse`, cannot be cut, leaves no room for a response, or lacks a field of `teacher.prompt`.
    """
    limit, longest, number = config.data.max_prompt_tokens, 0, 0
    files = config.data.train_files
    requests: list[list[Request]] = [[] for _ in files]
    own_prompts = zip(requests, files, prepared.files, strict=True)
    for own, file, prompt in ((own, file, prompt) for own, file, prompts in own_prompts for prompt in prompts):
        where = f"data.train={file}: prompt {prompt.index}"
        try:
            ids = tokenizer.encode_prompt(prompt.messages, prompt.tools)
            if limit is not None and len(ids) > limit:
                number, longest = number + 1, max(longest, len(ids))
                if config.data.over_long == "drop":
                    continue
                prompt, ids = _over_long(config, prompt, tokenizer, len(ids))
            teacher_messages = prompt.teacher_messages(config.teacher.prompt)
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from error
        if len(ids) >= max_positions:
            raise ValueError(
                f"{where} has {len(ids)} tokens and leaves no room in the model's {max_positions} positions; set "
                "data.max_prompt_tokens"
            )
        conversation = prompt.messages, teacher_messages, prompt.tools
        own.append(Request(ids, prompt.text, prompt.data_source, prompt.answer, *conversation))
    _check_lengths(config, requests)
    encoded = [request for each in requests for request in each]
    report.lines += template_notes(tokenizer, encoded, f"data.train={files_in_words(config)}", "the student")
    if number:
        _say_over_long(config, number, sum(map(len, prepared.files)), longest, report)
    return requests


def _over_long(config: Config, prompt: Prompt, tokenizer: Tokenizer, length: int) -> tuple[Prompt, list[int]]:
    """Drops the beginning of a long prompt's problem; returns the prompt with the words that fit, and its ids.

    Raises:
        ValueError: `data.over_long=refuse`, or not even the last word fits.
    """
    limit = config.data.max_prompt_tokens
    assert limit is not None
    if config.data.over_long == "refuse":
        raise ValueError(
            f"has {length} tokens, expected at most data.max_prompt_tokens={limit}; raise it, or set "
            "data.over_long=drop to leave longer prompts out"
        )
    content = prompt.text
    starts = [found.start() for found in re.finditer(r"\S+", content)]

    def cut(word: int) -> tuple[Prompt, list[int]]:
        messages = prompt.with_text(content[starts[word] :])
        return replace(prompt, messages=messages), tokenizer.encode_prompt(messages, prompt.tools)

    low, high = 1, len(starts)  # the first word that stays is in [low, high); the number of tokens falls with it
    while low < high:
        middle = (low + high) // 2
        if len(cut(middle)[1]) <= limit:
            high = middle
        else:
            low = middle + 1
    if low < len(starts):
        return cut(low)
    raise ValueError(
        f"has {length} tokens, and without the beginning of its last message still more than data.max_prompt_tokens="
        f"{limit}; expected a last word that fits: raise it, or set data.over_long=drop"
    )


def _check_lengths(config: Config, requests: list[list[Request]]) -> None:
    limit = config.data.max_prompt_tokens
    empty = [file for file, own in zip(config.data.train_files, requests, strict=True) if not own]
    if not any(requests):
        raise ValueError(
            f"data.train={files_in_words(config)}: every prompt is longer than data.max_prompt_tokens={limit}; raise it"
        )
    if empty and isinstance(config.data.train, dict):
        raise ValueError(
            f"data.train={empty[0]} has a weight, but every prompt is longer than data.max_prompt_tokens={limit}; "
            "raise it, or remove the file"
        )


def _say_over_long(config: Config, number: int, total: int, longest: int, report: DataReport) -> None:
    action, limit = config.data.over_long, config.data.max_prompt_tokens
    report.content["over_long"] = {
        "prompts": number, "of": total, "longest": longest, "max_prompt_tokens": limit, "action": action
    }  # fmt: skip
    done = "are left out" if action == "drop" else "lost the beginning of their last message"
    report.say(
        f"data.over_long={action}: {number:,} of {total:,} prompts have more than data.max_prompt_tokens={limit} "
        f"tokens (the longest {longest:,}); they {done}"
    )


def files_in_words(config: Config) -> str:
    """Formats `data.train` for a message: the file, or all files."""
    files = config.data.train_files
    return files[0] if len(files) == 1 else f"[{','.join(files)}]"


def _fingerprint(prompts: TrainingPrompts) -> str:
    """Returns the SHA-256 (hex) of the prompts and of all that determines their order, except the seed."""
    known = hashlib.sha256(repr((prompts.order.sizes, prompts.order.weights)).encode())
    for request in prompts.requests:
        known.update(json.dumps([request.prompt_ids, request.answer]).encode())
        # fields that only the teacher's template may show
        known.update(non_text_fields(request.messages, request.tools).encode())
    return known.hexdigest()


@dataclass(frozen=True)
class TrainingData:
    """The data of a training run.

    Attributes:
        recorded: the rollouts of `rollout.replay`; None: rollouts are sampled. With recorded rollouts the other fields
            are empty.
        report: the report of the prompts' preparation; None with recorded rollouts.
        teacher_inputs: per teacher, the object that adds the teacher's sequences to rollouts, or None if the teacher
            reads the student's ids.
        evaluator: None if the run does not evaluate.
    """

    recorded: list[Rollout] | None
    prompts: TrainingPrompts
    report: DataReport | None
    teacher_inputs: list[TeacherInputs | None]
    evaluator: Evaluator | None


def read_training_data(run: RunSpec, files: RunFiles, *, evaluates: bool = True) -> TrainingData:
    """Reads and encodes the data of a training run; `evaluates`: with `evaluation.every`, its validation sets, too.

    Raises:
        ValueError: a file is missing or malformed, or does not fit the models.
    """
    config = run.config
    recorded = recorded_rollouts(config, run.models)
    if recorded is not None:
        return TrainingData(recorded, NO_PROMPTS, None, [], None)
    prompts, teacher_inputs = read_prompts(config, files, run.models.routing)
    student = files.student
    evaluator = None
    if evaluates and config.evaluation.every:
        evaluator = Evaluator(config, student.tokenizer, student.spec.max_positions, prompts.held_out)
        said = prompts.report.lines
        said += [line for line in evaluator.notes if line not in said]
    return TrainingData(None, prompts.training, prompts.report, teacher_inputs, evaluator)


def read_prompts(config: Config, files: RunFiles, routing: Routing) -> tuple[RunPrompts, list[TeacherInputs | None]]:
    """Returns (the encoded prompts, `TrainingData.teacher_inputs`).

    Raises:
        ValueError: prompts are missing or do not fit models or teachers, or a tokenizer does not fit its model.
    """
    check_prompts_given(config)
    files.student.check_vocabulary()
    teacher_inputs = [_teacher_inputs(config, files, number) for number in range(len(files.teachers))]
    prompts = read_run_prompts(config, files.student.tokenizer, files.student.spec.max_positions)
    sources = [request.data_source for request in prompts.training.requests]
    routing.check(sources, f"data.train={files_in_words(config)}")
    check_teacher_prompts(routing, teacher_inputs, prompts.training.requests)
    taught_by = routing.teachers_of(sources)
    for number, inputs in enumerate(teacher_inputs):
        if inputs is not None:
            taught = [r for r, teacher in zip(prompts.training.requests, taught_by, strict=True) if teacher == number]
            name = f"teacher {config.teachers[number].label}" if config.teachers else "the teacher"
            prompts.report.lines += template_notes(inputs.teacher, taught, f"data.train={files_in_words(config)}", name)
    return prompts, teacher_inputs


def recorded_rollouts(config: Config, models: RunModels) -> list[Rollout] | None:
    """Returns the rollouts of `rollout.replay`, checked against the models; None if it is not set.

    Raises:
        ValueError: `read_rollouts` refuses the file, or a rollout's data source has no teacher.
    """
    if config.rollout.replay is None:
        return None
    student, teachers = models.student.spec, models.teacher_specs
    vocabulary = min(teacher.vocab_size for teacher in teachers)
    positions = min(teacher.max_positions for teacher in teachers)
    owns = [own_sequences(config, number) for number in range(len(models.teachers))]
    limits = TeacherLimits(vocabulary, positions, tuple(owns), models.routing)
    rollouts = read_rollouts(
        config.rollout.replay,
        models.vocab_limit,
        student.max_positions,
        limits,
        needs_logprobs=config.rollout.correction != "off",
        student=student,
        needs_routes=config.student.router_replay,
    )
    # few rollouts may not cover all
    models.routing.check([r.data_source for r in rollouts], config.rollout.replay, all_used=False)
    return rollouts


def _teacher_inputs(config: Config, files: RunFiles, number: int) -> TeacherInputs | None:
    student, teacher = files.student.tokenizer, files.teachers[number]
    settings, positions = config.alignment, teacher.spec.max_positions
    if config.teacher.reads == "text":
        return TextInputs(student, teacher.tokenizer, positions, settings.exact, settings.min_coverage)
    if not teacher.tokenizer.reads_ids_of(student):
        raise ValueError(
            f"the tokenizers of {student.path} and {teacher.directory} differ: the teacher would read other text than "
            "the student wrote; expected the same tokenizer, or one that knows more tokens: set teacher.reads=text "
            "(with a bridge), or choose another teacher"
        )
    if teacher.tokenizer.fingerprint() != student.fingerprint():
        teacher.check_vocabulary()  # it knows more tokens, all of which its model must have
    return PromptInputs(teacher.tokenizer, positions) if config.has_own_prompt(number) else None


def check_teacher_prompts(
    routing: Routing, teacher_inputs: list[TeacherInputs | None], requests: list[Request]
) -> None:
    """Raises ValueError if a prompt, as its teacher reads it, leaves no room for a response."""
    taught_by = routing.teachers_of([request.data_source for request in requests])
    for request, number in zip(requests, taught_by, strict=True):
        inputs = teacher_inputs[number]
        if inputs is None:
            continue
        length = len(inputs.teacher.encode_prompt(request.teacher_messages, request.tools))
        if length >= inputs.max_positions:
            raise ValueError(
                f"data.train: the teacher reads {length} tokens for the prompt {str(request.prompt)[:60]!r}, which "
                f"leaves no room for a response in its {inputs.max_positions} positions; expected fewer: shorten "
                "teacher.prompt or the hint, or teacher.system_prompt, or set data.max_prompt_tokens"
            )


def check_bridge_tokenizers(objective: Objective, files: RunFiles) -> None:
    """Raises ValueError if a bridge was fitted with tokenizers other than the models'."""
    student = files.student.tokenizer
    for match, files_of_teacher in zip(objective.teachers, files.teachers, strict=True):
        if match.bridge is None:
            continue
        teacher = files_of_teacher.tokenizer
        for identity, tokenizer in ((match.bridge.student, student), (match.bridge.teacher, teacher)):
            if identity.tokenizer is not None and identity.tokenizer != tokenizer.fingerprint():
                raise ValueError(
                    f"bridge.path: the bridge was made with another tokenizer than that of {tokenizer.path}; expected "
                    "the same: fit a bridge with these models"
                )
