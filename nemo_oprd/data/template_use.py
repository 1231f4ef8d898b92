"""Examines a chat template on the conversations of a prompt file: unread fields, the date, an example.

A template reads some fields of a message and not others, and its output does not show which. This module therefore
removes each field from conversations that have it: a field whose absence changes no rendering is unread.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

from nemo_oprd.data.conversation import NO_CONTENT, Message, Tool
from nemo_oprd.data.tokenizer import Tokenizer

# A template may use a field in some turns only, such as reasoning after the last question, so several are tried.
TRIED = 20
TOOLS = "tools"


class HasMessages(Protocol):
    """A prompt or a request: its fields that a chat template reads."""

    @property
    def messages(self) -> tuple[Message, ...]: ...

    @property
    def tools(self) -> tuple[Tool, ...]: ...


def unread_fields(tokenizer: Tokenizer, asked: Sequence[HasMessages]) -> dict[str, int]:
    """Returns fields that the template does not read -> number of conversations with them; `TOOLS` for the tools.

    Raises:
        ValueError: the template fails on one of the conversations that are tried.
    """
    having: dict[str, list[HasMessages]] = {}
    for each in asked:
        for name in _fields(each):
            having.setdefault(name, []).append(each)
    return {name: len(found) for name, found in having.items() if not _is_read(tokenizer, name, found)}


def template_notes(tokenizer: Tokenizer, asked: Sequence[HasMessages], source: str, reader: str) -> list[str]:
    """Returns log lines about fields that the chat template does not read, and about a template that writes the date.

    `source` and `reader` name the prompts and the model in the lines. Raises ValueError as `unread_fields`.
    """
    lines = []
    left_out = [f"{name} (of {count:,})" for name, count in unread_fields(tokenizer, asked).items()]
    if left_out:
        lines.append(
            f"{source}: the chat template of {tokenizer.path} leaves out {', '.join(left_out)}, which {reader} "
            "therefore does not read"
        )
    if asked and tokenizer.reads_clock(asked[0].messages, asked[0].tools):
        lines.append(
            f"{source}: the chat template of {tokenizer.path} writes today's date, so prompts change from day to day "
            "and a start on another day does not go on with what was sampled; set the template's variable for it, such "
            "as data.chat_template_args.date_string, to a fixed date"
        )
    return lines


def examples(tokenizer: Tokenizer, prompts: Sequence[Any], most: int = 8) -> Iterator[tuple[str, str]]:
    """Yields (data source, its first prompt as the model reads it), of at most `most` sources; `prompts` are `Prompt`s.

    Raises:
        ValueError: the template fails on one of them.
    """
    first = {prompt.data_source: prompt for prompt in reversed(prompts)}
    for source in list(dict.fromkeys(prompt.data_source for prompt in prompts))[:most]:
        yield source, tokenizer.render(first[source].messages, True, first[source].tools)


def _fields(asked: HasMessages) -> list[str]:
    """Returns the fields of a conversation besides roles and texts, each once, in their order."""
    found = (name for message in asked.messages for name, value in message.items() if value not in NO_CONTENT)
    return [
        *dict.fromkeys(name for name in found if name not in ("role", "content")),
        *([TOOLS] if asked.tools else []),
    ]


def _is_read(tokenizer: Tokenizer, name: str, having: Sequence[HasMessages]) -> bool:
    """Returns whether the template renders any of at most `TRIED` conversations differently without field `name`."""
    for each in having[:: -(-len(having) // TRIED)]:
        whole = tokenizer.render(each.messages, True, each.tools)
        messages = [{key: value for key, value in message.items() if key != name} for message in each.messages]
        try:
            less = tokenizer.render(messages, True, () if name == TOOLS else each.tools)
        except ValueError:  # the template cannot do without it
            return True
        if less != whole:
            return True
    return False
