"""Reads the conversation of a row of a prompt file: its messages, and the tools that the model may call.

Every field of a message goes to the chat templates. A column that would change the model's input and that this module
does not read is refused by its name, because training without it would be training on another prompt. docs/data.md has
the list.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping
from typing import Any, TypeAlias

from nemo_oprd.runtime.files import half_of_a_character

Message: TypeAlias = dict[str, Any]  # "role", "content", and all other fields that a chat template reads
Tool: TypeAlias = dict[str, Any]  # a function's JSON schema, as chat templates take it

PROMPT_FIELDS = ("prompt", "problem", "question")
NEMO_GYM = "responses_create_params"
# columns whose content would change the prompt -> the fix
UNREAD = dict.fromkeys(
    ("image", "images", "video", "videos", "audio", "audios", "multi_modal_data"),
    "models read text here: leave out the rows with such content, and the column",
) | {
    "documents": "write the documents into a message",
    "functions": "name the column tools",
    "system": "write it as the first message, {role: system, content}",
    "system_prompt": "write it as the first message, {role: system, content}",
    "chat_template_kwargs": "set data.chat_template_args for all rows, or write files for different settings",
}
SHAPES = (
    "{prompt: [{role, content}], data_source, reward_model: {ground_truth}} or {prompt|problem|question: text, answer}"
)
FIELDS = (*PROMPT_FIELDS, NEMO_GYM, "tools", *UNREAD)
TEXT_PARTS = ("text", "input_text", "output_text", "summary_text", "reasoning_text")
# roles that answer a call; the problem is then in an earlier message
TOOL_ROLES = ("tool", "function", "ipython", "observation")
NO_CONTENT: tuple[Any, ...] = (None, False, "", [], {})
_PLACEHOLDER = "<image>"
_OR_MESSAGES = "text, or messages as a list of {role, content}; write them so"
# the beginning of a text that is a list of objects, or one, in JSON or as Python's `str` writes it
_OBJECTS = re.compile(r"""\s*(?:\[\s*)?\{\s*["'}]""")


def read_conversation(row: Mapping[str, Any], where: str) -> tuple[tuple[Message, ...], tuple[Tool, ...]]:
    """Returns a row's messages (at least one) and its tools.

    NeMo Gym's `responses_create_params` takes precedence over other fields, because its model server receives it.

    Args:
        where: the file and the row, for messages.

    Raises:
        ValueError: the row has no conversation, or one that is malformed, or a column that would change the prompt and
            is not read.
    """
    for name, fix in UNREAD.items():
        if row.get(name) not in NO_CONTENT:
            raise unread(where, name, row[name], fix)
    params = row.get(NEMO_GYM)
    if params not in NO_CONTENT:
        return _of_nemo_gym(_parsed(params, f"{where}: {NEMO_GYM}", dict), f"{where}: {NEMO_GYM}")
    field = next((name for name in PROMPT_FIELDS if row.get(name) is not None), None)
    if field is None:
        raise ValueError(f"{where}: none of the fields {', '.join(PROMPT_FIELDS)}; write rows of the shape {SHAPES}")
    return _messages(row[field], f"{where}: {field}"), _tools(row.get("tools"), f"{where}: tools")


def unread(where: str, name: str, value: Any, fix: str) -> ValueError:
    """Makes the error for content in field `name`, which this module does not read; `fix` ends the message."""
    return ValueError(
        f"{where}: {name} is {_shown(value)}, which would be left out of the prompt; expected none: {fix}"
    )


def refused(where: str, value: Any, expected: str) -> ValueError:
    """Makes the error for an unexpected value."""
    return ValueError(f"{where} is {_shown(value)}, expected {expected}")


def without_nulls(row: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a parquet row without the null keys in its conversation and its tools.

    Parquet unites the structs of all rows, so an absent key comes back as null. A message's `content` is kept:
    templates tell null from an absent key there.
    """
    clean = dict(row)
    for name in (*PROMPT_FIELDS, NEMO_GYM, "tools"):
        if isinstance(value := row.get(name), list | dict):
            clean[name] = _pruned(value, keep="content" if name in PROMPT_FIELDS else None)
    return clean


def _pruned(value: Any, keep: str | None = None) -> Any:
    """Returns `value` without the null keys of its objects, at any depth; the outermost objects keep key `keep`."""
    if isinstance(value, dict):
        return {name: _pruned(each) for name, each in value.items() if each is not None or name == keep}
    if isinstance(value, list):
        return [_pruned(each, keep) if isinstance(each, dict) else _pruned(each) for each in value]
    return value


def non_text_fields(messages: tuple[Message, ...], tools: tuple[Tool, ...]) -> str:
    """Returns a conversation's roles, tools and fields other than text as JSON; "" for a usual conversation.

    A usual conversation has no tools and no such fields. User and assistant take turns, and the user is last; an even
    number of messages begins with the system's.
    """
    count = len(messages)
    usual = ["user" if (count - i) % 2 else "assistant" for i in range(count)]
    if count % 2 == 0:
        usual[0] = "system"
    left_out = ("role", "content")
    others = [
        {name: value for name, value in message.items() if name not in left_out and value not in NO_CONTENT}
        for message in messages
    ]
    roles = [message["role"] for message in messages]
    if roles == usual and not any(others) and not tools:
        return ""
    return json.dumps([roles, others, tools], ensure_ascii=False, sort_keys=True, default=str)


def _messages(value: Any, where: str) -> tuple[Message, ...]:
    """Returns the messages in a value; `where` names the file, the row and the field."""
    if isinstance(value, str):
        value = _conversation_in_text(value, where)
    if not isinstance(value, list) or not value:
        raise refused(where, value, "text or a non-empty list of {role, content}")
    return tuple(
        _message(each, f"{where}, message {number}", is_last=number == len(value) - 1)
        for number, each in enumerate(value)
    )


def _conversation_in_text(text: str, where: str) -> Any:
    """Returns the messages that a text holds in JSON or Python's notation, or the text as the user's only message.

    Raises:
        ValueError: the text holds objects that are no messages, or messages in neither notation.
    """
    if _OBJECTS.match(text):
        found = _literal(text)
        objects = found if isinstance(found, list) else [found]
        if objects and all(isinstance(each, dict) for each in objects):
            if all("role" in each for each in objects):
                return objects
            raise refused(where, text, f"{_OR_MESSAGES} (JSON text as it stands is the content of a message)")
        if found is None and all(re.search(rf"""["']{name}["']\s*:""", text) for name in ("role", "content")):
            raise refused(where, text, f"{_OR_MESSAGES}: these are in neither JSON nor Python's notation")
    return [{"role": "user", "content": text}]


def _literal(text: str) -> Any:
    """Parses a text in JSON, or in the notation of Python that `str` writes; returns None if it is neither."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        pass
    try:
        return ast.literal_eval(text)
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        return None


def _message(value: Any, where: str, *, is_last: bool) -> Message:
    role = value.get("role") if isinstance(value, dict) else None
    if not (isinstance(role, str) and role.strip()):
        raise refused(where, value, "{role, content}, both text that is not blank")
    message = dict(value)
    if "content" in message:
        message["content"] = _content(message["content"], where)
    if message.get("tool_calls") not in NO_CONTENT:
        calls = _parsed(message["tool_calls"], f"{where}: tool_calls", list)
        message["tool_calls"] = [_parsed(call, f"{where}: tool_calls", dict) for call in calls]
    content = message.get("content")
    says = isinstance(content, str) and (bool(content.strip()) or role in TOOL_ROLES)
    acts = any(message.get(name) for name in ("tool_calls", "reasoning_content", "thinking"))
    if not says and (is_last or not acts or content not in (None, "")):
        raise refused(where, value, "{role, content}, both text that is not blank")
    _check_json(message, where)
    return message


def _content(value: Any, where: str) -> Any:
    """Returns a message's content as text; joins the texts of parts, as templates that take parts do."""
    if isinstance(value, list):
        texts = []
        for part in value:
            kind = "text" if isinstance(part, str) else part.get("type") if isinstance(part, dict) else None
            text = part if isinstance(part, str) else part.get("text") if isinstance(part, dict) else None
            if kind not in TEXT_PARTS or not isinstance(text, str):
                raise refused(
                    f"{where}: a part of content", part, "{type: text, text}: models read text here; leave the row out"
                )
            texts.append(text)
        value = "".join(texts)
    if isinstance(value, str) and _PLACEHOLDER in value:
        raise refused(
            where,
            value,
            f"text without {_PLACEHOLDER}, which stands for an image: models read text here; leave the row out",
        )
    return value


def _tools(value: Any, where: str) -> tuple[Tool, ...]:
    if value in NO_CONTENT:
        return ()
    tools = tuple(_parsed(tool, where, dict) for tool in _parsed(value, where, list))
    _check_json(tools, where)
    return tools


def _parsed(value: Any, where: str, kind: type) -> Any:
    """Returns a list or an object, which may be given as JSON text."""
    found = value
    if isinstance(value, str):
        try:
            found = json.loads(value)
        except (ValueError, RecursionError):
            found = None
    if not isinstance(found, kind):
        raise refused(where, value, f"{'a list of objects' if kind is list else 'an object'}, or JSON text of it")
    return found


def _check_json(value: Any, where: str) -> None:
    """Raises ValueError unless `value` consists of JSON types, in whole characters.

    Parquet files may hold dates or bytes, and JSON text inside a row may hold halves of characters.
    """
    if isinstance(value, str) and (half := half_of_a_character(value)) is not None:
        raise refused(where, half, "whole characters: this one is half of one (a lone surrogate), which is no text")
    if isinstance(value, dict):
        for name, each in value.items():
            _check_json(each, f"{where}: {name}")
    elif isinstance(value, list | tuple):
        for each in value:
            _check_json(each, where)
    elif value is not None and not isinstance(value, str | int | float | bool):
        raise refused(where, value, "text, a number, true, false or null: write it as text")


def _of_nemo_gym(params: Mapping[str, Any], where: str) -> tuple[tuple[Message, ...], tuple[Tool, ...]]:
    """Converts a request to OpenAI's Responses API to a conversation, as NeMo Gym converts it for its Chat API.

    Calls, and the reasoning before them, join the assistant's message; `strict` is no part of a tool's description.
    """
    metadata = params.get("metadata") or {}
    for name in ("chat_template_kwargs", "extra_body", "audio_path"):
        if isinstance(metadata, dict) and metadata.get(name) not in (*NO_CONTENT, "{}"):
            raise unread(where, f"metadata.{name}", metadata[name], "set data.chat_template_args, or leave the row out")
    for name in ("prompt", "previous_response_id", "conversation"):
        if params.get(name) not in NO_CONTENT:
            raise unread(where, name, params[name], "write the whole conversation into input")
    items = params.get("input")
    if isinstance(items, str):
        items = [{"role": "user", "content": items}]
    if not isinstance(items, list) or not items:
        raise refused(f"{where}.input", items, "text or a non-empty list of {role, content}")
    instructions = params.get("instructions")
    messages: list[Message] = [{"role": "system", "content": instructions}] if instructions else []
    for number, item in enumerate(items):
        _add_item(messages, item, f"{where}.input, item {number}")
    tools = []
    for tool in _tools(params.get("tools"), f"{where}.tools"):
        if tool.get("type", "function") != "function":
            raise refused(f"{where}.tools", tool, "tools of type function: leave the row out")
        own = {name: value for name, value in tool.items() if name not in ("type", "strict")}
        tools.append(tool if "function" in tool else {"type": "function", "function": own})
    return _messages(messages, f"{where}.input"), tuple(tools)


def _add_item(messages: list[Message], item: Any, where: str) -> None:
    """Adds an item of `input` to the messages: a message, or a part of the assistant's turn."""
    kind = item.get("type") or "message" if isinstance(item, dict) else None
    if kind == "message":
        message = {name: value for name, value in item.items() if name in ("role", "content")}
        message["content"] = _content(message.get("content"), where)
        before = messages[-1] if messages and messages[-1].get("role") == "assistant" else {}
        if message.get("role") == "assistant" and before.get("content") is None and before:
            before["content"] = message["content"]
        else:
            messages.append(message)
    elif kind == "function_call":
        function = {"name": item.get("name"), "arguments": item.get("arguments")}
        call = {"id": item.get("call_id"), "type": "function", "function": function}
        _assistant(messages).setdefault("tool_calls", []).append(call)
    elif kind == "reasoning":
        reasoning = _content(item.get("summary") or item.get("content") or "", where)
        messages.append({"role": "assistant", "content": None, "reasoning_content": reasoning})
    elif kind == "function_call_output":
        messages.append(
            {"role": "tool", "tool_call_id": item.get("call_id"), "content": _content(item.get("output"), where)}
        )
    else:
        raise refused(where, item, "a message, reasoning, function_call or function_call_output: leave the row out")


def _assistant(messages: list[Message]) -> Message:
    """Returns the assistant's message at the end; appends a new one if there is none."""
    if not messages or messages[-1].get("role") != "assistant":
        messages.append({"role": "assistant", "content": None})
    return messages[-1]


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
