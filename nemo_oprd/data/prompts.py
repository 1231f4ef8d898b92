"""Reads prompts from parquet or JSONL files.

It reads files whole: prompt sets are tens of megabytes. Chat templates and token ids are handled elsewhere, because
they belong to a tokenizer and two tokenizers may read one prompt.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

from nemo_oprd.data import conversation
from nemo_oprd.data.conversation import SHAPES, TOOL_ROLES, UNREAD, Message, Tool, refused
from nemo_oprd.runtime.files import half_of_a_character, parse_json, refuse_lfs_pointer, why_no_file

# the name of the validation set that `data.held_out` makes
HELD_OUT = "held_out"
# fields for the subject and the difficulty of a problem; the first existing one counts
SUBJECT_FIELDS, LEVEL_FIELDS = ("subject", "type"), ("level", "difficulty")
OTHER_FIELDS = ("answer", "hint", "data_source", "agent_ref", "reward_model", "extra_info", "id")
FIELDS = (*conversation.FIELDS, *SUBJECT_FIELDS, *LEVEL_FIELDS, *OTHER_FIELDS)


@dataclass(frozen=True)
class Prompt:
    """One problem to respond to.

    Attributes:
        messages: the conversation so far, each message `{"role": ..., "content": ...}` with all further fields of the
            file, such as `tool_calls`.
        answer: the reference answer, not a worked solution; None if the file has none.
        data_source: the name of the data set that the problem comes from, as the file gives it; by default the name of
            the agent in NeMo Gym's `agent_ref`, else the file's name without its extension.
        index: position in the file, from 0, not counting blank lines.
        hint: privileged information for the teacher only, such as a worked solution; None if the file has none.
        subject, level: the problem's subject and difficulty, for tables; None if the file has none.
        tools: JSON schemas of the functions that the model may call, for the chat templates.

    Example: `Prompt(({"role": "user", "content": "What is 2+3?"},), "5", "toy", 0)`.
    """

    messages: tuple[Message, ...]
    answer: str | None
    data_source: str
    index: int
    hint: str | None = None
    subject: str | None = None
    level: str | None = None
    tools: tuple[Tool, ...] = ()

    @property
    def asked(self) -> int:
        """Returns the index of the message with the problem: the last, or the user's last before results of calls."""
        last = len(self.messages) - 1
        if self.messages[last]["role"] not in TOOL_ROLES:
            return last
        return next((i for i in range(last, -1, -1) if self.messages[i]["role"] == "user"), last)

    @property
    def text(self) -> str:
        """Returns the problem: the content of message `asked`."""
        return str(self.messages[self.asked]["content"])

    def with_text(self, text: str) -> tuple[Message, ...]:
        """Returns the conversation with `text` in place of the problem."""
        at = self.asked
        return (*self.messages[:at], {**self.messages[at], "content": text}, *self.messages[at + 1 :])

    def teacher_messages(self, template: str | None) -> tuple[Message, ...]:
        """Returns the conversation that the teacher reads: `template` (`teacher.prompt`) with the problem inserted.

        {prompt}, {answer} and {hint} are replaced; other braces, as in formulas, are kept. Without a template the
        conversation is unchanged.

        Raises:
            ValueError: the template contains {answer} or {hint}, but this prompt has none.
        """
        if template is None:
            return self.messages
        known = {"prompt": self.text, "answer": self.answer, "hint": self.hint}
        missing = [name for name, value in known.items() if value is None and f"{{{name}}}" in template]
        if missing:
            raise ValueError(
                f"no {missing[0]}, but teacher.prompt contains {{{missing[0]}}}; expected a field {missing[0]!r}: "
                "add it, remove the prompt, or change teacher.prompt"
            )
        return self.with_text(re.sub(r"\{(prompt|answer|hint)\}", lambda found: str(known[found[1]]), template))


def load_prompts(path: str | Path) -> list[Prompt]:
    """Reads all prompts of a `.parquet` or `.jsonl` file, in file order.

    A row holds a conversation (`conversation.py`), or a plain text that becomes one user message. The answer is
    `reward_model.ground_truth`, otherwise `answer`; `reward_model` may be the JSON text of an object. Numbers are
    converted to text, and a blank or missing answer, or one that is a list or an object, is None. `subject` (or `type`)
    and `level` (or `difficulty`), in the row or in `extra_info`, describe the problem; ids of MATH hold its subject.
    Other fields, outside `UNREAD`, are ignored.

    Raises:
        ValueError: the file is missing, empty, unreadable or has an unknown extension, or a row has none of the known
            shapes, or content in `UNREAD`; the message names file, line (from 1) or parquet row (from 0), and fix.
    """
    path = Path(path)
    if not path.is_file():
        raise ValueError(
            f"{path}: {why_no_file(path, '.parquet', '.jsonl')}; expected a .parquet or .jsonl file with prompts: "
            "give its path"
        )
    readers = {".parquet": _parquet_rows, ".jsonl": _jsonl_rows}
    if path.suffix not in readers:
        raise ValueError(f"{path}: extension {path.suffix!r}, expected .parquet or .jsonl; convert or rename the file")
    prompts = [_prompt(row, where, path.stem, index) for index, (where, row) in enumerate(readers[path.suffix](path))]
    if not prompts:
        raise ValueError(f"{path}: holds no prompts, expected at least one row; check how the file was written")
    return prompts


def _jsonl_rows(path: Path) -> Iterator[tuple[str, Any]]:
    """Yields (where, row) for each line that is not blank."""
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            where = f"{path}, line {number}"
            if not line.strip():
                continue
            yield where, parse_json(line, where, "a prompt", "write one UTF-8 JSON object per line", encodes=True)


def _parquet_rows(path: Path) -> Iterator[tuple[str, Any]]:
    """Yields (where, row) with the known columns; raises ValueError if a column in `UNREAD` has content."""
    import pyarrow as pa  # imported only for parquet files, because the import takes some 100 ms
    import pyarrow.parquet as pq

    refuse_lfs_pointer(path)
    try:
        with pq.ParquetFile(path) as file:
            names = [name for name in file.schema_arrow.names if name in FIELDS]
            _refuse_unread(path, file, [name for name in names if name in UNREAD])
            columns = [name for name in names if name not in UNREAD]
            rows = file.read(columns=columns).to_pylist(maps_as_pydicts="strict")
    except (pa.ArrowInvalid, KeyError, OSError, UnicodeDecodeError) as error:  # KeyError: a map has a key twice
        raise ValueError(f"{path}: not a readable parquet file ({error}); download or write it again") from error
    for number, row in enumerate(rows):
        yield f"{path}, row {number}", conversation.without_nulls(row)


def _refuse_unread(path: Path, file: Any, names: list[str]) -> None:
    """Raises ValueError if a row has content in one of the columns `names`: a value not in `NO_CONTENT`.

    Reads batch by batch, because a column of images may not fit into memory.
    """
    for name in names:
        before = 0
        for batch in file.iter_batches(batch_size=64, columns=[name]):
            for number, value in enumerate(batch.column(0)):
                filled = value.is_valid and (not hasattr(value, "__len__") or len(value) > 0)
                if filled and (plain := value.as_py()) not in conversation.NO_CONTENT:
                    raise conversation.unread(f"{path}, row {before + number}", name, plain, UNREAD[name])
            before += batch.num_rows


def _prompt(row: Any, where: str, default_source: str, index: int) -> Prompt:
    if not isinstance(row, dict):
        raise refused(where, row, f"an object of the shape {SHAPES}")
    agent = row.get("agent_ref")  # of NeMo Gym, which uses it to choose a response's teacher
    source = _text(row, "data_source", where, "the name of the data set")
    if not source and isinstance(agent, dict):
        source = _text(agent, "name", f"{where}: agent_ref", "the agent's name")
    hint = _text(row, "hint", where, "what the teacher may know")
    messages, tools = conversation.read_conversation(row, where)
    return Prompt(
        messages,
        _answer(row, where),
        data_source=source or default_source,
        index=index,
        hint=hint.strip() or None,
        subject=_label(row, SUBJECT_FIELDS) or _subject_of_math(row.get("id")),
        level=_label(row, LEVEL_FIELDS),
        tools=tools,
    )


def _text(row: dict[str, Any], name: str, where: str, meaning: str) -> str:
    value = row.get(name)
    if value is not None and not isinstance(value, str):
        raise refused(f"{where}: {name}", value, f"text; write {meaning}, or omit the field")
    return value or ""


def _label(row: dict[str, Any], names: tuple[str, ...]) -> str | None:
    """Returns the first of these fields, of the row or of its `extra_info`, that is a text or a whole number."""
    extra = row.get("extra_info")
    for fields in (row, extra if isinstance(extra, dict) else {}):
        for name in names:
            value = fields.get(name)
            if isinstance(value, str | int) and not isinstance(value, bool) and str(value).strip():
                return str(value).strip()
    return None


def _subject_of_math(identity: Any) -> str | None:
    """Returns the subject in an id of the MATH data set: `test/precalculus/807.json` -> `precalculus`."""
    found = re.fullmatch(r"(?:test|train)/(\w+)/\d+\.json", identity) if isinstance(identity, str) else None
    return found[1] if found else None


def _reward_model(value: Any, where: str) -> Any:
    """Returns `reward_model`, read from JSON text where it is given as such; another text stays as it is."""
    if not isinstance(value, str):
        return value
    try:
        found = json.loads(value)
    except (ValueError, RecursionError):
        return value
    if (half := half_of_a_character(found)) is not None:
        raise refused(f"{where}: reward_model", half, "whole characters: this one is half of one; correct the text")
    return found


def _answer(row: dict[str, Any], where: str) -> str | None:
    """Returns the reference answer; None if it is missing, or neither text nor a number. Training needs no answers."""
    reward = _reward_model(row.get("reward_model"), where)
    for value in (reward.get("ground_truth") if isinstance(reward, dict) else None, row.get("answer")):
        if isinstance(value, Decimal):  # a parquet column of decimals
            value = format(value, "f")
        is_given = isinstance(value, str | int | float) and not isinstance(value, bool) and value == value  # no nan
        if is_given and (text := str(value).strip()):
            return text
    return None
