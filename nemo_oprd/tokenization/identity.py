"""What the alignment needs to know of the two models' tokenizers: which they are, and how the teacher is prompted.

Each answer is kept as long as its tokenizer: neither a hash over 200,000 tokens nor a template is for every batch.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from weakref import WeakKeyDictionary

from nemo_oprd.tokenization.tokenizer import Tokenizer

Messages = list[dict[str, str]]

# What a template must give back as it is: inner spaces, a line break, what HTML or JSON would escape, both cases.
TEMPLATE_PROBE = "So x <  2 & \"y\" = 'z',\n\\frac{A}{b}: na\u00efve"

_FINGERPRINTS: WeakKeyDictionary[Tokenizer, str] = WeakKeyDictionary()
_STOPS: WeakKeyDictionary[Tokenizer, int] = WeakKeyDictionary()


def fingerprint(tokenizer: Tokenizer) -> str:
    """`Tokenizer.fingerprint()`, computed once."""
    if tokenizer not in _FINGERPRINTS:
        _FINGERPRINTS[tokenizer] = tokenizer.fingerprint()
    return _FINGERPRINTS[tokenizer]


def check_fingerprint(tokenizer: Tokenizer, expected: str, role: str) -> None:
    """Raises ValueError where a tokenizer is not the one that an artifact or a run was made with.

    Args:
        expected: `Tokenizer.fingerprint()` of that time.
        role: "student" or "teacher", for the message.
    """
    found = fingerprint(tokenizer)
    if found != expected:
        raise ValueError(
            f"{tokenizer.path}: the {role}'s tokenizer has fingerprint {found}, expected {expected}; give the "
            f"{role} model with the tokenizer that it was aligned with, or make the artifact again with this one"
        )


def teacher_stop(teacher: Tokenizer) -> int:
    """The id that ends the teacher's turn: of its `eos_ids` the one that its template writes behind a response.

    Files list several in any order (Llama 3 has <|end_of_text|> before <|eot_id|>). Checks the template on the way.
    """
    if teacher not in _STOPS:
        messages = [{"role": "user", "content": "Q"}, {"role": "assistant", "content": TEMPLATE_PROBE}]
        text = teacher.render(messages, respond=False)
        _before, found, after = text.rpartition(TEMPLATE_PROBE)
        if not found:
            raise ValueError(
                f"{teacher.path}: the chat template changes the text of a response: {TEMPLATE_PROBE!r} becomes part of "
                f"{text!r}; expected it there unchanged, because the teacher reads the student's text as it is: use a "
                "template that writes message['content'] of the assistant as it stands"
            )
        written = {i: str(teacher.hf.convert_ids_to_tokens(i)) for i in teacher.eos_ids}
        behind = [i for i, token in written.items() if after.lstrip().startswith(token)]
        _STOPS[teacher] = (behind or list(teacher.eos_ids))[0]
    return _STOPS[teacher]


def teacher_prompts(teacher: Tokenizer, messages: Sequence[Messages]) -> list[list[int]]:
    """[B] prompts in the teacher's template; responses to one prompt share the work, not the list."""
    known: dict[str, list[int]] = {}
    keys = [json.dumps(conversation, sort_keys=True) for conversation in messages]
    for key, conversation in zip(keys, messages, strict=True):
        if key not in known:
            known[key] = teacher.encode_prompt(conversation)
    return [list(known[key]) for key in keys]
