"""The checks that need the models' files and the prompts, and no forward pass.

Checks return a `Finding`, or yield several; docs/doctor.md lists them. Where a function takes `reads`, this is what the
teacher reads: `ids` (the student's token ids, prompt included), `prompt` (the student's response ids after the
teacher's own prompt, `teacher.prompt`) or `text`.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise, takewhile
from statistics import median
from typing import Any, Literal

import numpy as np
import torch

from nemo_oprd.data.prompts import Prompt
from nemo_oprd.data.template_use import examples, unread_fields
from nemo_oprd.data.tokenizer import Tokenizer, teacher_eos_id
from nemo_oprd.models import ModelSpec
from nemo_oprd.run.models import ModelFiles
from nemo_oprd.tools.doctor.findings import Finding
from nemo_oprd.tools.doctor.layer_map import LayerMap, origins
from nemo_oprd.tools.doctor.prompts import SPECIAL

# The checks of the models' weights in their files: one model given twice, damaged tensors, layers in another order.


_VOCABULARY = ("model.embed_tokens.", "lm_head.")
_LAYER = re.compile(r"model\.layers\.(\d+)\.(.*)")
# the matrix by which layers are recognised: every family has it, and its shape stays when feed-forward blocks shrink
_SIGNATURE = "self_attn.o_proj.weight"
SIGNATURE_ROWS = 64
# root mean squares of one matrix differ by up to 10 between the layers of real models
SCALE, ZERO_ROWS = 100.0, 0.5


@dataclass
class WeightSurvey:
    """The result of reading a model's tensors once; layers count from 1."""

    # name of a layer's matrix without its layer -> {layer: root mean square}
    scales: dict[str, dict[int, float]] = field(default_factory=lambda: defaultdict(dict))
    # layer -> some of the values of one of its matrices
    signatures: dict[int, torch.Tensor] = field(default_factory=dict)
    damage: list[tuple[str, str]] = field(default_factory=list)  # (code, what is wrong) of single tensors


def survey(model: ModelFiles) -> WeightSurvey:
    """Reads all tensors of a model once, but only the first expert of each layer."""
    read, result = model.open(), WeightSurvey()
    for name in tensor_names(model):
        expert = re.search(r"\.experts\.(\d+)\.", name)
        if expert is not None and expert[1] != "0":
            continue
        tensor = read(name)
        sizes = torch.linalg.vector_norm(tensor.reshape(len(tensor), -1).float(), dim=1)
        scale = float(sizes.square().mean().sqrt()) / (tensor[0].numel() ** 0.5)
        layer, is_bias = _LAYER.fullmatch(name), name.endswith(".bias")
        zero_rows = float((sizes == 0).float().mean())
        if not np.isfinite(scale):
            result.damage.append(("weights-not-finite", f"{name} holds NaN or infinity"))
        elif scale == 0 and not is_bias:
            result.damage.append(("weights-zero", f"{name} is zero"))
        elif zero_rows > ZERO_ROWS and tensor.ndim > 1 and layer is not None:
            result.damage.append(("weights-zero", f"{zero_rows:.0%} of the rows of {name} are zero"))
        elif layer is not None and tensor.ndim > 1:
            result.scales[layer[2]][int(layer[1]) + 1] = scale
        if layer is not None and layer[2] == _SIGNATURE:
            rows = tensor[:: max(1, len(tensor) // SIGNATURE_ROWS)]
            result.signatures[int(layer[1]) + 1] = rows.reshape(-1).float()
    return result


def damaged_weights(role: str, found: WeightSurvey) -> Iterator[Finding]:
    """Checks for zero, non-finite, badly scaled and repeated tensors, with which a model teaches without an error."""
    check, damage = f"{role}'s weights", list(found.damage)
    for name, scales in found.scales.items():
        for layer, scale in scales.items():
            others = [value for other, value in scales.items() if other != layer]
            if others and not 1 / SCALE < scale / median(others) < SCALE:
                text = f"{name} of layer {layer} has values of {scale:.1e}, in the other layers {median(others):.1e}"
                damage.append(("weights-scale", text))
    layers = sorted(found.signatures)
    for one, other in pairwise(layers):
        if torch.equal(found.signatures[one], found.signatures[other]) and found.signatures[one].any():
            damage.append(("layers-repeated", f"layers {one} and {other} have the same {_SIGNATURE}"))
    for code in dict.fromkeys(code for code, _ in damage):
        texts = [text for of, text in damage if of == code]
        more = f" (and {len(texts) - 1} more)" if len(texts) > 1 else ""
        whole = code == "weights-not-finite" or any(text.endswith(" is zero") for text in texts)
        text = f"{texts[0]}{more}; expected weights as training leaves them; fix: the files of the model's source"
        yield Finding(check, "wrong" if whole else "warning", text, {"tensors": texts}, code=code)
    if not damage:
        yield Finding(check, "ok", f"no tensor of the {role} is zero, infinite, or of another size than its like")


def layer_origins(student: WeightSurvey, teacher: WeightSurvey, layers: LayerMap) -> Finding:
    """Runs the check of the layer map that needs no forward pass (`layer_map.origins`)."""
    cosines = np.zeros(layers.depths)
    for i, ours in student.signatures.items():
        for j, theirs in teacher.signatures.items():
            if ours.shape == theirs.shape:
                cosines[i - 1, j - 1] = float(torch.nn.functional.cosine_similarity(ours, theirs, dim=0))
    return origins(np.nan_to_num(cosines), layers)


def same_weights(student: ModelFiles, teacher: ModelFiles, dtype: torch.dtype, *, reads_more: bool) -> Finding:
    """Checks whether student and teacher are the same model.

    A path given twice, or a copy under another name, gives a loss of 0 and a run that learns nothing. Measured tensor
    by tensor in the run's precision, up to the first difference; the vocabularies may be padded differently. Equal
    weights are wrong unless the teacher reads more than the student (`reads_more`: there is a `teacher.prompt`).
    """
    check, one, other = "same weights", tensor_names(student), tensor_names(teacher)
    if one != other or student.spec.hidden_size != teacher.spec.hidden_size:
        return Finding(check, "ok", "student and teacher have different architectures")
    read_student, read_teacher = student.open(), teacher.open()
    for number, name in enumerate(one):
        ours, theirs = read_student(name).to(dtype), read_teacher(name).to(dtype)
        if ours.shape[1:] == theirs.shape[1:] and name.startswith(_VOCABULARY):
            rows = min(len(ours), len(theirs))
            ours, theirs = ours[:rows], theirs[:rows]
        if ours.shape != theirs.shape or not torch.equal(ours, theirs):
            numbers = {"equal_tensors": number}
            if number and name.startswith(_VOCABULARY):
                text = f"the models differ in {name} alone, and all layers are equal; expected trained layers; fix: "
                text += "correct teacher.hf_path or student.hf_path"
                return Finding(check, "warning", text, numbers, code="same-layers")
            return Finding(check, "ok", f"the models differ, first in {name}", numbers)
    numbers = {"equal_tensors": len(one)}
    if reads_more:
        text = "student and teacher are the same model, but the teacher reads more than the student (teacher.prompt)"
        return Finding(check, "ok", text, numbers)
    text = f"{student.weights_directory} and {teacher.weights_directory} hold the same weights in all {len(one)} "
    text += "tensors, so the loss is 0 and nothing is learned; expected another model; fix: correct teacher.hf_path or "
    text += "student.hf_path, or give the teacher privileged information with teacher.prompt"
    return Finding(check, "wrong", text, numbers, code="same-weights")


def tensor_names(model: ModelFiles) -> list[str]:
    """Returns a model's HF tensor names, those of the vocabulary last: they are large, and often untrained."""
    mappings = model.spec.family.param_mappings(model.spec)
    names = [name for mapping in mappings for name in mapping.hf]
    return sorted(names, key=lambda name: name.startswith(_VOCABULARY))


# The checks of a single model's tokenizer files: its stop ids and its chat template.


# no template shortens, escapes or trims this
QUESTION, RESPONSE = "Which sum is seventeen?", "Nine and eight."


def own_files(role: str, tokenizer: Tokenizer, variables: Mapping[str, Any]) -> Iterator[Finding]:
    """Checks a model's stop ids and chat template, whatever the other model has; yields nothing if all is well.

    Args:
        role: "student" or "teacher".
        variables: the chat template's arguments from the configuration.
    """
    yield from _stop_ids(role, tokenizer)
    try:
        asked = [{"role": "user", "content": QUESTION}]
        whole = tokenizer.render([*asked, {"role": "assistant", "content": RESPONSE}], add_generation_prompt=False)
        plain, prompt = (tokenizer.render(asked, add_generation_prompt=more) for more in (False, True))
    except ValueError:  # no template, or one that needs more: the other checks of templates say so
        return
    count = prompt.count(QUESTION)
    if count != 1:
        text = f"the {role}'s chat template writes a user's message {count} times; expected once, as it is; fix: the "
        text += "template of the model's source"
        yield Finding("templates", "wrong", text, {"rendered": prompt}, code="template-changes-message")
        return
    header = whole.partition(QUESTION)[2].partition(RESPONSE)[0]
    tail = prompt.partition(QUESTION)[2]
    if prompt == plain and len(header.strip()) > len(tail.strip()) and RESPONSE in whole:
        text = f"the {role}'s chat template ends a prompt with {tail!r}, and a response begins after {header!r}; "
        text += "expected that at the end of a prompt, where add_generation_prompt asks for it; fix: the model's own "
        text += "template"
        yield Finding("templates", "warning", text, {"rendered": prompt}, code="template-without-generation-prompt")
    unused = sorted(name for name in variables if name not in str(tokenizer.hf.chat_template))
    if unused:
        text = f"data.chat_template_args.{unused[0]}={variables[unused[0]]!r}: the {role}'s chat template has no such "
        text += "variable; expected one that it reads; fix: correct its name, or remove it"
        yield Finding("templates", "warning", text, code="template-variable-unused")


def rendered(role: str, tokenizer: Tokenizer, prompts: Sequence[Prompt]) -> Iterator[Finding]:
    """Shows a prompt of each data source as the model reads it, and checks what its template leaves out or adds."""
    try:
        for source, text in examples(tokenizer, prompts):
            yield Finding("templates", "ok", f"{source}, as the {role} reads it: {text!r}", {"rendered": text})
        left_out = unread_fields(tokenizer, prompts)
        dated = bool(prompts) and tokenizer.reads_clock(prompts[0].messages, prompts[0].tools)
    except ValueError:
        return  # `train` refuses it, and says why
    if left_out:
        names = ", ".join(f"{name} (of {count:,} prompts)" for name, count in left_out.items())
        text = f"the {role}'s chat template leaves out {names}; expected all that the rows hold; fix: a template that "
        yield Finding("templates", "warning", f"{text}writes it, or rows without", left_out, "template-leaves-out")
    if dated:
        text = f"the {role}'s chat template writes today's date: a run that goes on tomorrow reads other prompts; "
        text += "expected the same every day; fix: the template's variable for it, such as "
        text += "data.chat_template_args.date_string"
        yield Finding("templates", "warning", text, code="template-writes-date")


def _stop_ids(role: str, tokenizer: Tokenizer) -> Iterator[Finding]:
    own, special = tokenizer.hf.eos_token_id, {*tokenizer.hf.all_special_ids, *tokenizer.hf.added_tokens_decoder}
    ordinary = [i for i in tokenizer.eos_ids if i not in special]
    name = f"{tokenizer.path}/generation_config.json"
    if ordinary:
        token = tokenizer.hf.convert_ids_to_tokens(ordinary[0])
        text = f"the {role} stops at {ordinary[0]}, which is the ordinary token {token!r}; expected a special token; "
        yield Finding("stop ids", "wrong", f"{text}fix: eos_token_id in {name}", code="stop-id-ordinary")
    elif own is not None and own not in tokenizer.eos_ids:
        text = f"the {role} stops at {list(tokenizer.eos_ids)}, and its tokenizer's end of a sequence is {own}; "
        text += f"expected {own} among them; fix: eos_token_id in {name}"
        yield Finding("stop ids", "warning", text, code="stop-ids-of-files-differ")


Reads = Literal["ids", "prompt", "text"]

# a conversation without a system message: a template that adds one shows it here
PROBE = Prompt(({"role": "user", "content": "What is 2 + 3?"},), None, "", 0)
EXCERPT_BEFORE, EXCERPT_AFTER = 16, 44


def stop_ids(student: Tokenizer, teacher: Tokenizer, reads: Reads) -> Finding:
    """Checks whether the student's sampling stops where the teacher would end its turn.

    A teacher gives the student's stop id no probability if it ends its turn with another id. The student learns to
    write that other id, at which its sampling does not stop, and responses grow to their limit. With a teacher that
    reads text, the alignment pairs the ends of both turns, whatever their ids.
    """
    ours, theirs = list(student.eos_ids), list(teacher.eos_ids)
    numbers: dict[str, Any] = {"student": ours, "teacher": theirs}
    if reads == "text":
        return Finding("stop ids", "ok", f"the alignment pairs the ends: student {ours}, teacher {theirs}", numbers)
    try:
        end = teacher_eos_id(teacher)
    except ValueError:  # no template, or one that changes responses
        end = theirs[0]
    numbers["teacher_ends_with"] = end
    if set(ours) == set(theirs):
        return Finding("stop ids", "ok", f"both models stop at {ours}", numbers)
    both = f"the student stops at {_named(student, ours)}, the teacher at {_named(teacher, theirs)}"
    fix = f"fix: set eos_token_id to {sorted({*ours, *theirs})} in {student.path}/generation_config.json"
    if end not in ours:
        why = f"the teacher ends its turn with {end}, at which sampling would go on, so responses grow to their limit"
        text = f"{both}: {why}; expected {end} among the student's; {fix}"
        return Finding("stop ids", "wrong", text, numbers, code="stop-id-not-sampled")
    why = f"both end a turn with {end}, but where one of the other ids is written, only one of them stops"
    text = f"{both}: {why}; expected the same ids; {fix}"
    return Finding("stop ids", "warning", text, numbers, code="stop-ids-differ")


def _named(tokenizer: Tokenizer, ids: list[int]) -> str:
    return "[" + ", ".join(f"{i} {tokenizer.hf.convert_ids_to_tokens(i)}" for i in ids) + "]"


def templates(student: Tokenizer, teacher: Tokenizer, prompt: Prompt, reads: Reads) -> Finding:
    """Checks whether both chat templates render the same conversation to the same text.

    A teacher that reads the student's ids reads them in the student's template. If the teacher's own template differs,
    it reads a conversation unlike those that it was trained on. Its states and distribution are then worse than in an
    evaluation in its own template, but nothing in a run shows this. Any difference is a warning only, because the
    authors of some recipes accept it.
    """
    if reads != "ids":
        return Finding("templates", "ok", "the teacher reads prompts in its own template")
    for name, asked in (("a short conversation", PROBE), ("the first training prompt", prompt)):
        ours = student.render(asked.messages, True, asked.tools)
        try:
            theirs = teacher.render(asked.messages, True, asked.tools)
        except ValueError as error:  # training does not need the teacher's template
            return Finding("templates", "skipped", f"there is nothing to compare with: {error}")
        if ours == theirs:
            continue
        at = _common_start(ours, theirs)
        shown = [repr(text[max(0, at - EXCERPT_BEFORE) : at + EXCERPT_AFTER]) for text in (ours, theirs)]
        leads = [text.partition(asked.text)[0] for text in (ours, theirs)]
        added = [_inserted(leads[i], leads[1 - i]) for i in (0, 1)]
        where = f"{name} differs at character {at}: {shown[0]} for the student, {shown[1]} for the teacher"
        code = "templates-differ"
        for role, text in zip(("student", "teacher"), added, strict=True):
            if len(text.split()) > 1:
                code = "template-adds-system-prompt"
                where = f"only the {role}'s template adds a system prompt, {text[:60]!r}; {where}"
        text = f"{where}; expected the same text, because the teacher reads the student's; fix: use one "
        text += "chat_template.jinja for both, or give the teacher its own with teacher.prompt='{prompt}'"
        return Finding("templates", "warning", text, {"character": at, "student": ours, "teacher": theirs}, code=code)
    return Finding("templates", "ok", "both templates render the same text, without and with a training prompt")


def _common_start(one: str, other: str) -> int:
    """Returns the number of characters that both texts have in common at their start."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


def _inserted(longer: str, shorter: str) -> str:
    """Returns the part of `longer` between the common start and the common end of both texts."""
    start = _common_start(longer, shorter)
    rest, other = longer[start:], shorter[start:]
    end = _common_start(rest[::-1], other[::-1])
    return re.sub(SPECIAL, " ", rest[: len(rest) - end]).strip()


def vocabularies(student: ModelFiles, teacher: ModelFiles, reads: Reads) -> Finding:
    """Checks whether each model has rows for its tokenizer's ids, and the student's ids mean the same to the teacher.

    Models of one family pad their vocabularies to different sizes, which only masks a few ids, and a teacher may know
    more tokens. If ids mean other tokens, the teacher scores another text than the student wrote, with plausible
    states; one such id is wrong, because the run would teach it.
    """
    check = "vocabularies"
    for role, model in (("student", student), ("teacher", teacher)):
        tokens, rows = model.tokenizer.vocab_size, model.spec.vocab_size
        largest = max(tokens - 1, *model.tokenizer.eos_ids)
        if largest >= rows:
            text = f"the {role}'s tokenizer knows ids up to {largest}, its model has {rows} rows: expected ids below "
            text += f"{rows}; fix: copy the tokenizer of this model to {model.directory}"
            return Finding(check, "wrong", text, code="tokenizer-beyond-model")
    sizes = {"student_rows": student.spec.vocab_size, "teacher_rows": teacher.spec.vocab_size}
    sizes |= {"student_tokens": student.tokenizer.vocab_size, "teacher_tokens": teacher.tokenizer.vocab_size}
    padding = f"{sizes['student_rows']} rows for {sizes['student_tokens']} tokens (student), {sizes['teacher_rows']} "
    padding += f"for {sizes['teacher_tokens']} (teacher)"
    if reads == "text":
        return Finding(check, "ok", f"the teacher reads text, no ids are shared: {padding}", sizes)
    vocabularies_of = (model.tokenizer.hf.get_vocab() for model in (student, teacher))
    ours, theirs = ({i: token for token, i in vocabulary.items()} for vocabulary in vocabularies_of)
    other = sorted(i for i in ours if ours[i] != theirs.get(i))
    sampled = student.tokenizer.ids(min(sizes["student_rows"], sizes["teacher_rows"]))
    sizes |= {"ids_with_another_meaning": len(other), "sampled_ids": len(sampled)}
    if other:
        first = other[0]
        text = f"{len(other)} ids mean other tokens to the teacher, the first one is {first}: {ours.get(first)!r} for "
        text += f"the student, {theirs.get(first)!r} for the teacher; expected the same tokenizer; fix: set "
        text += "teacher.reads=text (with a bridge), or choose another teacher"
        return Finding(check, "wrong", text, sizes, code="tokenizers-differ")
    more = len(theirs.keys() - ours.keys())
    agree = (
        f"the student's tokens mean the same to the teacher, which knows {more} more" if more else "all tokens agree"
    )
    text = f"{padding}; {agree}, and only the ids {sampled} are sampled"
    return Finding(check, "ok", text, sizes)


def rope(student: ModelSpec, teacher: ModelSpec) -> Finding:
    """Checks whether both models rotate positions as in their training.

    YaRN covers `factor` times `original_max_position_embeddings` tokens. Where max_position_embeddings is lower,
    responses end there; where it is higher, YaRN does not cover the positions beyond. If two models of one family and
    base scale their positions differently, one of them probably lacks a setting: all their states differ, and training
    would have to undo that.
    """
    said = [f"{role} {_rope(spec)}" for role, spec in (("student", student), ("teacher", teacher))]
    numbers: dict[str, Any] = {"student": student.max_positions, "teacher": teacher.max_positions}
    for role, spec in (("student", student), ("teacher", teacher)):
        reach = spec.rope.reach
        if spec.rope.kind == "yarn" and reach is not None and reach != spec.max_positions:
            text = f"the {role}'s YaRN is made for {reach:g} tokens (factor * original_max_position_embeddings), its "
            text += f"max_position_embeddings is {spec.max_positions}; expected the same number; fix: correct either "
            return Finding("RoPE", "warning", f"{text}in the {role}'s config.json", numbers, code="yarn-length")
    alike = student.model_type == teacher.model_type and student.rope.theta == teacher.rope.theta
    if alike and (student.rope.kind, student.rope.settings) != (teacher.rope.kind, teacher.rope.settings):
        text = f"the models' positions are scaled differently: {', '.join(said)}; expected the same for two models of "
        text += "one family and base; fix: rope_scaling in the config.json of one of them, unless both were trained so"
        return Finding("RoPE", "warning", text, numbers, code="rope-scaling-differs")
    return Finding("RoPE", "ok", ", ".join(said), numbers)


def _rope(spec: ModelSpec) -> str:
    factor = spec.rope.get("factor")
    return f"{spec.rope.kind}{'' if factor is None else f' (factor {factor:g})'} of {spec.max_positions} positions"
