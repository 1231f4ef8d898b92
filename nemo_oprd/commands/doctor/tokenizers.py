"""The checks of one model's own tokenizer files: its stop ids, and its chat template."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from nemo_oprd.commands.doctor.findings import Finding
from nemo_oprd.data.prompts import Prompt
from nemo_oprd.data.tokenization.template_use import examples, unread_fields
from nemo_oprd.data.tokenization.tokenizer import Tokenizer

# no template shortens, escapes or trims this
QUESTION, RESPONSE = "Which sum is seventeen?", "Nine and eight."


def own_files(role: str, tokenizer: Tokenizer, variables: Mapping[str, Any]) -> Iterator[Finding]:
    """What is wrong with a model's stop ids and chat template, whatever the other model has; nothing if all is well.

    Args:
        role: "student" or "teacher".
        variables: `data.chat_template_args`.
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
    """A prompt of each data source as the model reads it, and findings about what its template leaves out or adds."""
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
