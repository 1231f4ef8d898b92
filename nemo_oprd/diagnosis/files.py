"""The checks that need the models' files and the prompts, and no forward pass.

Each function is one check and returns one `Finding`; docs/doctor.md lists them. Where a function takes `reads`, this is
what the teacher reads: `ids` (the student's token ids, prompt included), `prompt` (the student's response ids after a
prompt of its own, `teacher.prompt`) or `text`.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from itertools import takewhile
from typing import Any, Literal

import torch

from nemo_oprd.diagnosis.findings import Finding
from nemo_oprd.models import FAMILIES, ModelSpec
from nemo_oprd.setup.models import ModelFiles
from nemo_oprd.tokenization.identity import teacher_eos_id
from nemo_oprd.tokenization.tokenizer import Tokenizer

Reads = Literal["ids", "prompt", "text"]
Messages = Sequence[dict[str, str]]

# a conversation without a system message: a template that adds one shows it here
PROBE = ({"role": "user", "content": "What is 2 + 3?"},)
EXCERPT_BEFORE, EXCERPT_AFTER = 16, 44
# shorter repetitions ("Find the value.") occur in problems; instructions are longer
SENTENCE_WORDS = 5
# A problem may repeat a sentence of its own. An instruction is repeated in all prompts of a file, so in 1 % of them at
# least, whatever the mixture of files.
REPEATED_SHARE = 0.01
BOX = "\\boxed{}"
TWO_BOXES = f"two sentences ask for the answer in {BOX}"


def stop_ids(student: Tokenizer, teacher: Tokenizer, reads: Reads) -> Finding:
    """Whether the student's sampling stops where the teacher would end its turn.

    A teacher gives the student's stop id no probability if it ends its turn with another id. The student learns to
    write that other id, at which its sampling does not stop, and responses grow to their limit. Measured on the stop
    ids of both models' files and on the id that the teacher's template writes after a response. Any id at which only
    one of the two stops is a difference; it is wrong if it is the one that ends the teacher's turn, else a warning.
    With a teacher that reads text, the alignment pairs the ends of both turns, whatever their ids.
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
        return Finding("stop ids", "wrong", f"{both}: {why}; expected {end} among the student's; {fix}", numbers)
    why = f"both end a turn with {end}, but where one of the other ids is written, only one of them stops"
    return Finding("stop ids", "warning", f"{both}: {why}; expected the same ids; {fix}", numbers)


def _named(tokenizer: Tokenizer, ids: list[int]) -> str:
    return "[" + ", ".join(f"{i} {tokenizer.hf.convert_ids_to_tokens(i)}" for i in ids) + "]"


def templates(student: Tokenizer, teacher: Tokenizer, prompt: Messages, reads: Reads) -> Finding:
    """Whether both chat templates render the same conversation to the same text.

    A teacher that reads the student's ids reads them in the student's template. If its own one differs, it reads a
    conversation unlike those that it was trained on, and its states and distribution are worse than in an evaluation in
    its own template, which nothing in a run shows. Measured on a training prompt and on a short conversation without a
    system message, in which an added system prompt shows. Any difference is a warning only, because the authors of some
    recipes accept it. A teacher with a prompt of its own, or that reads text, reads its own template.
    """
    if reads != "ids":
        return Finding("templates", "ok", "the teacher reads prompts in its own template")
    for name, messages in (("a short conversation", PROBE), ("the first training prompt", prompt)):
        ours = student.render(list(messages), True)
        try:
            theirs = teacher.render(list(messages), True)
        except ValueError as error:  # training does not need the teacher's template
            return Finding("templates", "skipped", f"there is nothing to compare with: {error}")
        if ours == theirs:
            continue
        at = _common_start(ours, theirs)
        shown = [_excerpt(text, at) for text in (ours, theirs)]
        content = messages[-1]["content"]
        leads = [text.partition(content)[0] for text in (ours, theirs)]
        added = [_inserted(leads[i], leads[1 - i]) for i in (0, 1)]
        where = f"{name} differs at character {at}: {shown[0]} for the student, {shown[1]} for the teacher"
        for role, text in zip(("student", "teacher"), added, strict=True):
            if len(text.split()) > 1:
                where = f"only the {role}'s template adds a system prompt, {text[:60]!r}; {where}"
        return Finding(
            "templates",
            "warning",
            f"{where}; expected the same text, because the teacher reads the student's; fix: use one "
            f"chat_template.jinja for both, or give the teacher its own with teacher.prompt='{{prompt}}'",
            {"character": at, "student": ours, "teacher": theirs},
        )
    return Finding("templates", "ok", "both templates render the same text, without and with a training prompt")


def _excerpt(text: str, at: int) -> str:
    return repr(text[max(0, at - EXCERPT_BEFORE) : at + EXCERPT_AFTER])


def _common_start(one: str, other: str) -> int:
    """The number of characters that both texts have in common at their start."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


def _inserted(longer: str, shorter: str) -> str:
    """What `longer` has between the common start and the common end of both texts."""
    start = _common_start(longer, shorter)
    rest, other = longer[start:], shorter[start:]
    end = _common_start(rest[::-1], other[::-1])
    return re.sub(SPECIAL, " ", rest[: len(rest) - end]).strip()


def vocabularies(student: ModelFiles, teacher: ModelFiles, reads: Reads) -> Finding:
    """Whether an id that the student may sample means the same token to the teacher, padded rows included.

    Models of one family pad their vocabularies to different sizes, which only masks a few ids. If ids mean other
    tokens, the teacher scores another text than the student wrote, with plausible states. Measured by comparing the
    tokens of all ids; one id with another meaning is wrong, because the run would teach it. So is a tokenizer with ids
    beyond the model's rows.
    """
    check = "vocabularies"
    for role, model in (("student", student), ("teacher", teacher)):
        tokens, rows = model.tokenizer.vocab_size, model.spec.vocab_size
        largest = max(tokens - 1, *model.tokenizer.eos_ids)
        if largest >= rows:
            text = f"the {role}'s tokenizer knows ids up to {largest}, its model has {rows} rows: expected ids below "
            return Finding(check, "wrong", f"{text}{rows}; fix: copy the tokenizer of this model to {model.directory}")
    sizes = {"student_rows": student.spec.vocab_size, "teacher_rows": teacher.spec.vocab_size}
    sizes |= {"student_tokens": student.tokenizer.vocab_size, "teacher_tokens": teacher.tokenizer.vocab_size}
    padding = (
        f"{sizes['student_rows']} rows for {sizes['student_tokens']} tokens (student), {sizes['teacher_rows']} for "
    )
    padding += f"{sizes['teacher_tokens']} (teacher)"
    if reads == "text":
        return Finding(check, "ok", f"the teacher reads text, no ids are shared: {padding}", sizes)
    ours, theirs = _tokens(student.tokenizer), _tokens(teacher.tokenizer)
    other = sorted(i for i in ours.keys() | theirs.keys() if ours.get(i) != theirs.get(i))
    sizes |= {"ids_with_another_meaning": len(other), "sampled_ids": min(sizes["student_rows"], sizes["teacher_rows"])}
    if other:
        first = other[0]
        text = f"{len(other)} ids mean other tokens to the teacher, the first one is {first}: {ours.get(first)!r} for "
        text += f"the student, {theirs.get(first)!r} for the teacher; expected the same tokenizer; fix: set "
        return Finding(check, "wrong", f"{text}teacher.reads=text (with a bridge), or choose another teacher", sizes)
    text = f"{padding}; all tokens agree, and only ids below {sizes['sampled_ids']} are sampled"
    return Finding(check, "ok", text, sizes)


def _tokens(tokenizer: Tokenizer) -> dict[int, str]:
    return {i: token for token, i in tokenizer.hf.get_vocab().items()}


def rope(student: ModelSpec, teacher: ModelSpec) -> Finding:
    """Whether both models rotate positions as they were made to.

    YaRN is made for `factor` times `original_max_position_embeddings` tokens; where max_position_embeddings is lower,
    responses end there, and where it is higher, positions beyond were never meant. Of two models of one family and
    base, of which one is scaled and the other not, one lacks a setting: all their states differ, which training
    would have to undo. Measured on both models' config.json.
    """
    said = [f"{role} {_rope(spec)}" for role, spec in (("student", student), ("teacher", teacher))]
    numbers: dict[str, Any] = {"student": student.max_positions, "teacher": teacher.max_positions}
    for role, spec in (("student", student), ("teacher", teacher)):
        reach = spec.rope.reach
        if spec.rope.kind == "yarn" and reach is not None and reach != spec.max_positions:
            text = f"the {role}'s YaRN is made for {reach:g} tokens (factor * original_max_position_embeddings), its "
            text += (
                f"max_position_embeddings is {spec.max_positions}; expected the same number; fix: correct either in "
            )
            return Finding("RoPE", "warning", f"{text}the {role}'s config.json", numbers)
    alike = student.model_type == teacher.model_type and student.rope.theta == teacher.rope.theta
    if alike and (student.rope.kind, student.rope.settings) != (teacher.rope.kind, teacher.rope.settings):
        text = f"the models' positions are scaled differently: {', '.join(said)}; expected the same for two models of "
        text += "one family and base; fix: rope_scaling in the config.json of one of them, unless both were trained so"
        return Finding("RoPE", "warning", text, numbers)
    return Finding("RoPE", "ok", ", ".join(said), numbers)


def _rope(spec: ModelSpec) -> str:
    factor = spec.rope.get("factor")
    return f"{spec.rope.kind}{'' if factor is None else f' (factor {factor:g})'} of {spec.max_positions} positions"


def same_weights(student: ModelFiles, teacher: ModelFiles, dtype: torch.dtype, *, reads_more: bool) -> Finding:
    """Whether student and teacher are the same model.

    A path given twice, or a copy under another name, gives a loss of 0 and a run that learns nothing. Measured tensor
    by tensor in the run's precision, up to the first difference; the vocabularies may be padded differently. Equal
    weights are wrong unless the teacher reads more than the student (`reads_more`: there is a `teacher.prompt`).
    """
    check, one, other = "same weights", _tensor_names(student), _tensor_names(teacher)
    if one != other or student.spec.hidden_size != teacher.spec.hidden_size:
        return Finding(check, "ok", "student and teacher have different architectures")
    read_student, read_teacher = student.open(), teacher.open()
    for number, name in enumerate(one):
        ours, theirs = read_student(name).to(dtype), read_teacher(name).to(dtype)
        if ours.shape[1:] == theirs.shape[1:] and name.startswith(_VOCABULARY):
            rows = min(len(ours), len(theirs))
            ours, theirs = ours[:rows], theirs[:rows]
        if ours.shape != theirs.shape or not torch.equal(ours, theirs):
            return Finding(check, "ok", f"the models differ, first in {name}", {"equal_tensors": number})
    numbers = {"equal_tensors": len(one)}
    if reads_more:
        text = "student and teacher are the same model, but the teacher reads more than the student (teacher.prompt)"
        return Finding(check, "ok", text, numbers)
    return Finding(
        check,
        "wrong",
        f"{student.weights_directory} and {teacher.weights_directory} hold the same weights in all {len(one)} tensors, "
        "so the loss is 0 and nothing is learned; expected another model; fix: correct teacher.hf_path or "
        "student.hf_path, or give the teacher privileged information with teacher.prompt",
        numbers,
    )


_VOCABULARY = ("model.embed_tokens.", "lm_head.")


def _tensor_names(model: ModelFiles) -> list[str]:
    """The model's HF tensors, those of the vocabulary last: they are large, and often untrained."""
    mappings = FAMILIES[model.spec.model_type].param_mappings(model.spec)
    names = [name for mapping in mappings for name in mapping.hf]
    return sorted(names, key=lambda name: name.startswith(_VOCABULARY))


# marks of chat templates, which stand between the sentences of a rendered prompt; DeepSeek's have a wide |
SPECIAL = re.compile(r"<[|\uff5c][^<>]{1,40}[|\uff5c]>|\[/?INST\]|</?s>|<</?SYS>>")


def repeated_instruction(prompts: dict[str, list[str]]) -> Finding:
    """Whether prompts hold an instruction twice, as the models read them.

    Prompt files often end with the instruction that somebody adds once more: by a template's system prompt, by
    `teacher.prompt`, or in the file itself. The student then trains on prompts that no evaluation has. Measured on the
    rendered prompts: a sentence of five words or more that occurs twice, or two sentences that ask for the answer in
    an empty box. A warning if the same one is twice in 1 % of a source's prompts, and in two prompts at least: single
    problems repeat sentences of their own.

    Args:
        prompts: where they come from -> prompts as a model reads them.
    """
    numbers = {}
    worst: tuple[float, str, str, int] | None = None
    for source, texts in prompts.items():
        counts = Counter(sentence for text in texts for sentence in repeated_sentences(text))
        sentence, count = max(counts.items(), key=lambda item: (item[1], item[0]), default=("", 0))
        share = count / len(texts) if texts else 0.0
        numbers[source] = {"prompts": len(texts), "share": share, "sentence": sentence}
        if count and count >= min(2, len(texts)) and share >= REPEATED_SHARE and (worst is None or share > worst[0]):
            worst = share, source, sentence, len(texts)
    if worst is None:
        read = ", ".join(f"{len(texts)} of {source}" for source, texts in prompts.items())
        return Finding("suffix", "ok", f"no instruction stands twice in the prompts as they are read ({read})", numbers)
    share, source, sentence, count = worst
    return Finding(
        "suffix",
        "warning",
        f"{share:.0%} of {count} prompts of {source} hold an instruction twice: {sentence[:90]!r}; expected it once; "
        "fix: remove it from the prompt file, from teacher.prompt, or from the chat template's system prompt",
        numbers,
    )


def repeated_sentences(text: str) -> set[str]:
    """The sentences of five or more words that occur twice in a prompt; `TWO_BOXES` if two ask for an empty box."""
    parts = re.split(r"(?<=[.!?])\s+|\n+", re.sub(SPECIAL, "\n", text))
    sentences = Counter(" ".join(part.lower().split()) for part in parts if len(part.split()) >= SENTENCE_WORDS)
    found = {sentence for sentence, count in sentences.items() if count > 1}
    boxed = [sentence for sentence in sentences if BOX in sentence]
    return found | ({TWO_BOXES} if len(boxed) > 1 else set())
