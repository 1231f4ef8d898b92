"""The data of a run: prompts and recorded rollouts, checked and encoded before any model is loaded."""

from __future__ import annotations

from dataclasses import dataclass

from nemo_oprd.batch.types import Rollout
from nemo_oprd.config.schema import Config
from nemo_oprd.config.teacher_routing import Routing
from nemo_oprd.data.preparation import DataReport
from nemo_oprd.data.tokenization.template_use import template_notes
from nemo_oprd.distillation.objective import Objective
from nemo_oprd.evaluation.evaluator import Evaluator
from nemo_oprd.rollout.engine import Request
from nemo_oprd.rollout.replay import TeacherLimits, own_sequences, read_rollouts
from nemo_oprd.rollout.schedule import NO_PROMPTS, TrainingPrompts
from nemo_oprd.rollout.teacher_inputs import PromptInputs, TeacherInputs, TextInputs
from nemo_oprd.setup.checks import check_prompts_given, check_same_architecture
from nemo_oprd.setup.models import RunFiles
from nemo_oprd.setup.prompts import RunPrompts, files_in_words, read_run_prompts
from nemo_oprd.setup.resolve import RunModels, RunSpec


@dataclass(frozen=True)
class TrainingData:
    """The data of a training run.

    Attributes:
        recorded: the rollouts of `rollout.replay`; None: rollouts are sampled. With recorded rollouts the other fields
            are empty.
        report: what was done to the prompts; None with recorded rollouts.
        teacher_inputs: per teacher, the object that adds the teacher's sequences to rollouts, or None if the teacher
            reads the student's ids.
        evaluator: None if the run does not evaluate.
    """

    recorded: list[Rollout] | None
    prompts: TrainingPrompts
    report: DataReport | None
    teacher_inputs: list[TeacherInputs | None]
    evaluator: Evaluator | None


def read_training_data(run: RunSpec, files: RunFiles) -> TrainingData:
    """Reads and encodes the data of a training run.

    Raises:
        ValueError: a file is missing or malformed, or does not fit the models.
    """
    config = run.config
    recorded = recorded_rollouts(config, run.models)
    if recorded is not None:
        return TrainingData(recorded, NO_PROMPTS, None, [], None)
    prompts, teacher_inputs = read_prompts(config, files, run.models.routing)
    student = files.student
    if config.evaluation.teacher:
        check_same_architecture(student.spec, files.teachers[0].spec)
    evaluator = None
    if config.evaluation.every:
        evaluator = Evaluator(config, student.tokenizer, student.spec.max_positions, prompts.held_out)
        said = prompts.report.lines
        said += [line for line in evaluator.notes if line not in said]
    return TrainingData(None, prompts.training, prompts.report, teacher_inputs, evaluator)


def read_prompts(config: Config, files: RunFiles, routing: Routing) -> tuple[RunPrompts, list[TeacherInputs | None]]:
    """(The prompts; `TrainingData.teacher_inputs`).

    Raises:
        ValueError: there are no prompts, prompts do not fit the models, or a tokenizer does not fit its model.
    """
    check_prompts_given(config)
    files.student.check_vocabulary()
    teacher_inputs = [_teacher_inputs(config, files, number) for number in range(len(files.teachers))]
    prompts = read_run_prompts(config, files.student.tokenizer, files.student.spec.max_positions)
    sources = (request.data_source for request in prompts.training.requests)
    routing.check(sources, f"data.train={files_in_words(config)}")
    check_teacher_prompts(routing, teacher_inputs, prompts.training.requests)
    taught_by = routing.teachers_of(request.data_source for request in prompts.training.requests)
    for number, inputs in enumerate(teacher_inputs):
        if inputs is not None:
            taught = [r for r, teacher in zip(prompts.training.requests, taught_by, strict=True) if teacher == number]
            name = f"teacher {config.teachers[number].label}" if config.teachers else "the teacher"
            prompts.report.lines += template_notes(inputs.teacher, taught, f"data.train={files_in_words(config)}", name)
    return prompts, teacher_inputs


def recorded_rollouts(config: Config, models: RunModels) -> list[Rollout] | None:
    """The rollouts of `rollout.replay`, checked against the models; None if it is not set.

    Raises:
        ValueError: as `read_rollouts`.
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
    models.routing.check((r.data_source for r in rollouts), config.rollout.replay, all_used=False)
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
    taught_by = routing.teachers_of(request.data_source for request in requests)
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
    """Raises ValueError if a bridge was fitted with other tokenizers than those of the models."""
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
