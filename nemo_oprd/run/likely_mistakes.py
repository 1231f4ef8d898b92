"""Finds likely mistakes before the first step, from the data that a run reads anyway. `train` and `doctor` show them.

These are warnings: a user may distil a model into a larger one, or train on one prompt, on purpose.
`evaluation/teacher_lead.py` judges the evaluations before the first step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from nemo_oprd.config.schema import Config
from nemo_oprd.config.teacher_kinds import TEACHER_KINDS
from nemo_oprd.megatron.weights.megatron_checkpoint import mapped_shapes
from nemo_oprd.models import ModelSpec
from nemo_oprd.run.data import TrainingData
from nemo_oprd.run.models import RunPlan
from nemo_oprd.run.preflight import samples_teacher
from nemo_oprd.run.resolve import RunModels

# the share of a source's prompts that must render alike for a warning; the characters of their text in it
NEARLY_ALL, SHOWN = 0.9, 60
# a teacher's own prompts are rendered again, so only a few of them are checked, evenly spaced
TEACHER_PROMPTS = 200

T = TypeVar("T")


def likely_mistakes(plan: RunPlan, data: TrainingData) -> Iterator[str]:
    """Yields a line per likely mistake: swapped models, a teacher evaluated in another conversation, equal prompts."""
    run, student = plan.spec, plan.files.student
    for teacher in run.models.teachers:
        if TEACHER_KINDS[run.config.teacher.weights].own_model:
            smaller = smaller_teacher(student.spec, teacher.spec)
            if smaller is not None:
                yield f"{teacher.model.key}: {smaller}" if run.config.teachers else smaller
    evaluates_teacher = samples_teacher(run.config) and data.recorded is None
    if evaluates_teacher and run.config.conversation_of(0).is_set:
        yield (
            "evaluation.teacher=true: the teacher is evaluated after the student's prompts, not in the conversation of "
            "teacher.system_prompt, teacher.chat_template and teacher.chat_template_args, in which it may solve more; "
            "`nemo-oprd evaluate` with data.chat_template_args shows that"
        )
    if data.recorded is not None:  # a replay reads no tokenizer
        return
    requests = data.prompts.requests
    sources = {"data.train": [request.prompt_ids for request in requests]}
    if data.evaluator is not None:
        sources |= {f"data.validation.{name}": ids for name, ids in data.evaluator.ids.items()}
    found = [prompts_alike(name, ids, student.tokenizer.decode) for name, ids in sources.items()]
    some = requests[:: -(-len(requests) // TEACHER_PROMPTS) or 1]
    for number, inputs in enumerate(data.teacher_inputs):
        if inputs is not None:
            taught_by = run.models.routing.teachers_of([request.data_source for request in some])
            own = [request for request, teacher in zip(some, taught_by, strict=True) if teacher == number]
            texts = [inputs.teacher.render(request.teacher_messages, True, request.tools) for request in own]
            found.append(prompts_alike(as_read_by(run.config, run.models, number), texts))
    yield from filter(None, found)


def as_read_by(config: Config, models: RunModels, number: int) -> str:
    """Returns the name of the training prompts as teacher `number` reads them."""
    name = models.teachers[number].model.key if config.teachers else "the teacher"
    return f"data.train as {name} reads it"


def prompts_alike(source: str, prompts: Sequence[T], show: Callable[[T], str] = str) -> str | None:
    """Returns a line if a model reads nearly all prompts of a source as the same one; None if they differ.

    Args:
        prompts: each as the model reads it, after its chat template.
        show: returns the text of a prompt.
    """
    prompt, lead = None, 0
    for each in prompts:  # Boyer and Moore's vote: only this one can be more than half of them
        prompt = each if lead == 0 else prompt
        lead += 1 if each == prompt else -1
    count = sum(each == prompt for each in prompts)
    if prompt is None or count < max(2, NEARLY_ALL * len(prompts)):
        return None
    which = f"all {count:,} prompts" if count == len(prompts) else f"{count:,} of {len(prompts):,} prompts"
    return (
        f"{source}: {which} render alike, to {show(prompt)[-SHOWN:]!r} at their end; expected different ones; fix: a "
        "chat template that writes the messages (data.chat_template), or a file with different prompts"
    )


def smaller_teacher(student: ModelSpec, teacher: ModelSpec) -> str | None:
    """Returns a line if a teacher's layers have fewer weights than the student's; None otherwise, and for servers."""
    if not teacher.ffn_size:  # `read_served_spec` does not read it
        return None
    ours, theirs = layer_weights(student), layer_weights(teacher)
    if theirs >= ours:
        return None
    return (
        f"the teacher has {theirs:.3g} weights in its layers and the student {ours:.3g}; expected a teacher of the "
        "same size or a larger one; fix: exchange the two paths, unless it is meant"
    )


def layer_weights(spec: ModelSpec) -> float:
    """Counts the weights in the layers of a model, without routers, biases and norms, by the shapes of its mappings."""
    of_layers = [(name, shape) for mapping, name, shape in mapped_shapes(spec) if mapping.layer is not None]
    return float(sum(math.prod(shape) for name, shape in of_layers if len(shape) > 1 and "router" not in name))
