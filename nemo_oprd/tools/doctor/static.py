"""All checks that need the configuration and the files alone: no forward pass, no process group."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from nemo_oprd.config.schema import Config
from nemo_oprd.config.teacher_kinds import TEACHER_KINDS
from nemo_oprd.config.weight_schedule import largest
from nemo_oprd.data.prompts import Prompt
from nemo_oprd.run.likely_mistakes import prompts_alike
from nemo_oprd.run.models import RunFiles
from nemo_oprd.run.prompt_files import training_prompts, validation_problems
from nemo_oprd.tools.doctor import files as file_checks
from nemo_oprd.tools.doctor.files import Reads, own_files, rendered
from nemo_oprd.tools.doctor.findings import Finding
from nemo_oprd.tools.doctor.layer_map import LayerMap
from nemo_oprd.tools.doctor.prompts import instructions, prompt_files, tokenized
from nemo_oprd.tools.doctor.run_settings import config_values, settings
from nemo_oprd.tools.doctor.weights import damaged_weights, layer_origins, same_weights, survey

# prompts per file in which instructions are searched; rendering takes about 0.1 ms each
RENDERED_PROMPTS = 2000


def teacher_reads(config: Config, number: int = 0) -> Reads:
    """Returns what teacher `number` of a run reads: ids, prompt or text."""
    if config.teacher.reads == "text":
        return "text"
    return "prompt" if config.has_own_prompt(number) else "ids"


def static_findings(run: Config, files: RunFiles) -> Iterator[Finding]:
    """The findings in the order of the report; those of one of several teachers name it.

    Args:
        run: the configuration of the run, whose settings are judged.

    Raises:
        ValueError: a file that every check needs is missing or malformed.
    """
    prompts, student = training_prompts(run), files.student
    yield from settings(run, student.spec.num_layers, student.spec.hidden_size)
    yield from own_files("student", student.tokenizer, run.data.chat_template_args)
    yield from rendered("student", student.tokenizer, prompts)
    surveyed = survey(student)
    yield from damaged_weights("student", surveyed)
    routing = files.models.routing
    for number, source in enumerate(run.teacher_sources):
        taught = [p for p in prompts if routing.teachers_of([p.data_source]) == [number]] or prompts
        for finding in _of_teacher(run, files, number, taught):
            yield finding.about(source.label if run.teachers else None)
        if not TEACHER_KINDS[run.teacher.weights].own_model:
            for check in ("teacher's weights", "layer map"):
                yield Finding(check, "ok", "the teacher has the student's weights, layer for layer")
        else:
            other = survey(files.teachers[number])
            layers = _layer_map(run, files, number)
            skipped = Finding("layer map", "skipped", "the run compares no hidden states, or `train` refuses the map")
            of_map = skipped if layers is None else layer_origins(surveyed, other, layers)
            for finding in (*damaged_weights("teacher", other), of_map):
                yield finding.about(source.label if run.teachers else None)
    yield from prompt_files(run)
    some = prompts[:: -(-len(prompts) // RENDERED_PROMPTS)]
    shares_ids = teacher_reads(run) != "text"
    yield from tokenized(run, student.tokenizer, files.teachers[0].tokenizer if shares_ids else None, some)
    texts_of = _rendered(run, files, some)
    for alike in filter(None, (prompts_alike(source, texts) for source, texts in texts_of.items())):
        yield Finding("prompt tokens", "warning", alike, code="prompts-alike")
    yield from instructions(texts_of)


def _of_teacher(run: Config, files: RunFiles, number: int, taught: list[Prompt]) -> Iterator[Finding]:
    student, teacher, reads = files.student, files.teachers[number], teacher_reads(run, number)
    if teacher is not student:
        variables = {} if reads == "ids" else run.conversation_of(number).chat_template_args
        yield from own_files("teacher", teacher.tokenizer, variables)
    if reads != "ids":
        yield from rendered("teacher", teacher.tokenizer, _as_taught(run, taught))
    yield file_checks.stop_ids(student.tokenizer, teacher.tokenizer, reads)
    yield file_checks.templates(student.tokenizer, teacher.tokenizer, taught[0], reads)
    yield file_checks.vocabularies(student, teacher, reads)
    yield file_checks.rope(student.spec, teacher.spec)
    yield from config_values(run, student, teacher, number=number, shares_ids=reads != "text")
    if not TEACHER_KINDS[run.teacher.weights].own_model:
        text = f"teacher.weights={run.teacher.weights}: the teacher is the student, with a prompt of its own"
        yield Finding("same weights", "skipped", text)
        return
    dtype = torch.bfloat16 if run.precision == "bf16" else torch.float32
    yield same_weights(student, teacher, dtype, reads_more=run.has_own_prompt(number))


def _as_taught(run: Config, prompts: list[Prompt]) -> list[Prompt]:
    """The prompts in the conversation of the teacher; none if one cannot be rendered, which `train` refuses."""
    try:
        return [replace(prompt, messages=prompt.teacher_messages(run.teacher.prompt)) for prompt in prompts]
    except ValueError:
        return []


def _layer_map(run: Config, files: RunFiles, number: int) -> LayerMap | None:
    """The layer map of a teacher; None if the run compares no states."""
    loss, student, teacher = run.loss.representation, files.student.spec, files.models.teachers[number]
    if not teacher.pairs or largest(loss.weight) == 0:
        return None
    depths = student.num_layers, teacher.spec.num_layers
    return LayerMap(teacher.pairs, depths, loss.final_norm, teacher.source.bridge is None)


def _rendered(run: Config, files: RunFiles, some: list[Prompt]) -> dict[str, list[str]]:
    """Prompts as the models read them, by where they come from: at most `RENDERED_PROMPTS` each, evenly spaced.

    Empty if a prompt cannot be rendered; `train` names it.
    """
    student, template = files.student.tokenizer, run.teacher.prompt
    try:
        found = {"data.train": [student.render(p.messages, True, p.tools) for p in some]}
        if teacher_reads(run) != "ids":
            teacher = files.teachers[0].tokenizer
            texts = [teacher.render(p.teacher_messages(template), True, p.tools) for p in some]
            found["data.train as the teacher reads it"] = texts
        for name, problems in validation_problems(run).items():
            first = problems[:RENDERED_PROMPTS]
            found[f"data.validation.{name}"] = [student.render(p.messages, True, p.tools) for p in first]
    except ValueError:
        return {}
    return found
