"""What the alignment needs to know about the two models' tokenizers: their fingerprints, and the teacher's prompts.

Results are cached for the lifetime of a tokenizer: a hash over 200,000 tokens should not be computed for every batch.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from weakref import WeakKeyDictionary

from nemo_oprd.data.conversation import Message, Tool
from nemo_oprd.data.tokenization.tokenizer import Tokenizer

Messages = Sequence[Message]

# Text that a template must not change: inner spaces, a line break, characters that HTML or JSON escapes, both cases.
TEMPLATE_PROBE = "So x <  2 & \"y\" = 'z',\n\\frac{A}{b}: na\u00efve"

_FINGERPRINTS: WeakKeyDictionary[Tokenizer, str] = WeakKeyDictionary()
_EOS_IDS: WeakKeyDictionary[Tokenizer, int] = WeakKeyDictionary()


def fingerprint(tokenizer: Tokenizer) -> str:
    """`Tokenizer.fingerprint()`, computed once per tokenizer."""
    if tokenizer not in _FINGERPRINTS:
        _FINGERPRINTS[tokenizer] = tokenizer.fingerprint()
    return _FINGERPRINTS[tokenizer]


def teacher_eos_id(teacher: Tokenizer) -> int:
    """The id that ends the teacher's turn: the one of `teacher.eos_ids` that its template writes after a response.

    Model files list several ids in any order (Llama 3 has <|end_of_text|> before <|eot_id|>).

    Raises:
        ValueError: the template changes the text of a response.
    """
    if teacher not in _EOS_IDS:
        messages = [{"role": "user", "content": "Q"}, {"role": "assistant", "content": TEMPLATE_PROBE}]
        text = teacher.render(messages, add_generation_prompt=False)
        _before, found, after = text.rpartition(TEMPLATE_PROBE)
        if not found:
            raise ValueError(
                f"{teacher.path}: the chat template changes the text of a response: {TEMPLATE_PROBE!r} becomes part of "
                f"{text!r}; expected it there unchanged, because the teacher reads the student's text as it is: use a "
                "template that writes message['content'] of the assistant as it stands"
            )
        written = {i: str(teacher.hf.convert_ids_to_tokens(i)) for i in teacher.eos_ids}
        found_ids = [i for i, token in written.items() if after.lstrip().startswith(token)]
        _EOS_IDS[teacher] = (found_ids or list(teacher.eos_ids))[0]
    return _EOS_IDS[teacher]


def teacher_prompts(
    teacher: Tokenizer, messages: Sequence[Messages], tools: Sequence[Sequence[Tool]] | None = None
) -> list[list[int]]:
    """[B] prompts as token ids in the teacher's chat template. Equal conversations are encoded once, then copied.

    Args:
        tools: [B] tools of each conversation; None: no conversation has any.
    """
    known: dict[str, list[int]] = {}
    conversations = list(zip(messages, [()] * len(messages) if tools is None else tools, strict=True))
    keys = [json.dumps(conversation) for conversation in conversations]  # templates may write keys in their order
    for key, conversation in zip(keys, conversations, strict=True):
        if key not in known:
            known[key] = teacher.encode_prompt(*conversation)
    return [list(known[key]) for key in keys]
