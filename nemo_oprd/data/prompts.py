"""Prompts from parquet or JSONL files.

Files are read whole: prompt sets are tens of megabytes. Chat templates and token ids are not handled here, because they
belong to a tokenizer and two tokenizers may read one prompt.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nemo_oprd.runtime.files import parse_json, refuse_lfs_pointer, why_no_file

# the name of the validation set that `data.held_out` makes
HELD_OUT = "held_out"
PROMPT_FIELDS = ("prompt", "problem", "question")
# where a file may say what a problem is about and how hard it is; the first that is there counts
SUBJECT_FIELDS, LEVEL_FIELDS = ("subject", "type"), ("level", "difficulty")
OTHER_FIELDS = ("answer", "hint", "data_source", "reward_model", "extra_info", "id")
FIELDS = (*PROMPT_FIELDS, *SUBJECT_FIELDS, *LEVEL_FIELDS, *OTHER_FIELDS)
SHAPES = (
    "{prompt: [{role, content}], data_source, reward_model: {ground_truth}} or {prompt|problem|question: text, answer}"
)


@dataclass(frozen=True)
class Prompt:
    """One problem to respond to.

    Attributes:
        messages: the conversation so far, each message `{"role": ..., "content": ...}`.
        answer: the reference answer, not a worked solution; None if the file has none.
        data_source: the name of the data set that the problem comes from, as the file gives it; by default the file's
            name without its extension.
        index: position in the file, from 0, not counting blank lines.
        hint: privileged information for the teacher only, such as a worked solution; None if the file has none.
        subject, level: what the problem is about and how hard it is, for tables; None if the file does not say.

    Example: `Prompt(({"role": "user", "content": "What is 2+3?"},), "5", "toy", 0)`.
    """

    messages: tuple[dict[str, str], ...]
    answer: str | None
    data_source: str
    index: int
    hint: str | None = None
    subject: str | None = None
    level: str | None = None

    def teacher_messages(self, template: str | None) -> tuple[dict[str, str], ...]:
        """The conversation that the teacher reads: the last message is inserted into `template` (`teacher.prompt`).

        {prompt}, {answer} and {hint} are replaced; other braces, as in formulas, are kept. Without a template the
        conversation is unchanged.

        Raises:
            ValueError: the template contains {answer} or {hint}, but this prompt has none.
        """
        if template is None:
            return self.messages
        last = self.messages[-1]
        known = {"prompt": last["content"], "answer": self.answer, "hint": self.hint}
        missing = [name for name, value in known.items() if value is None and f"{{{name}}}" in template]
        if missing:
            raise ValueError(
                f"no {missing[0]}, but teacher.prompt contains {{{missing[0]}}}; expected a field {missing[0]!r}: "
                "add it, remove the prompt, or change teacher.prompt"
            )
        content = re.sub(r"\{(prompt|answer|hint)\}", lambda found: str(known[found[1]]), template)
        return (*self.messages[:-1], {**last, "content": content})


def load_prompts(path: str | Path) -> list[Prompt]:
    """Reads all prompts of a `.parquet` or `.jsonl` file, in file order.

    A row holds a conversation, or a plain text that becomes one user message. The answer is
    `reward_model.ground_truth`, otherwise `answer`; numbers are converted to text, and a blank or missing answer is
    None. `subject` (or `type`) and `level` (or `difficulty`), in the row or in `extra_info`, describe the problem;
    ids of the MATH data set hold its subject. Other fields are ignored.

    Raises:
        ValueError: the file is missing, empty, unreadable or has an unknown extension, or a row has none of the known
            shapes; the message names the file, the line (JSONL, from 1) or row (parquet, from 0) and the fix.
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
            yield where, parse_json(line, where, "a prompt", "write one UTF-8 JSON object per line")


def _parquet_rows(path: Path) -> Iterator[tuple[str, Any]]:
    """Yields (where, row); reads only the columns that may be needed."""
    import pyarrow as pa  # imported only for parquet files, because the import takes some 100 ms
    import pyarrow.parquet as pq

    refuse_lfs_pointer(path)
    try:
        with pq.ParquetFile(path) as file:
            columns = [name for name in file.schema_arrow.names if name in FIELDS]
            rows = file.read(columns=columns).to_pylist()
    except (pa.ArrowInvalid, OSError) as error:
        raise ValueError(f"{path}: not a readable parquet file ({error}); download or write it again") from error
    for number, row in enumerate(rows):
        yield f"{path}, row {number}", row


def _prompt(row: Any, where: str, default_source: str, index: int) -> Prompt:
    if not isinstance(row, dict):
        raise _refused(where, row, f"an object of the shape {SHAPES}")
    field = next((name for name in PROMPT_FIELDS if row.get(name) is not None), None)
    if field is None:
        raise ValueError(f"{where}: none of the fields {', '.join(PROMPT_FIELDS)}; write rows of the shape {SHAPES}")
    source = _text(row, "data_source", where, "the name of the data set")
    hint = _text(row, "hint", where, "what the teacher may know")
    messages = _messages(row[field], f"{where}: {field}")
    return Prompt(
        messages,
        _answer(row, where),
        source or default_source,
        index,
        hint.strip() or None,
        _label(row, SUBJECT_FIELDS) or _subject_of_math(row.get("id")),
        _label(row, LEVEL_FIELDS),
    )


def _text(row: dict[str, Any], name: str, where: str, meaning: str) -> str:
    value = row.get(name)
    if value is not None and not isinstance(value, str):
        raise _refused(f"{where}: {name}", value, f"text; write {meaning}, or omit the field")
    return value or ""


def _label(row: dict[str, Any], names: tuple[str, ...]) -> str | None:
    """The first of these fields, of the row or of its `extra_info`, that is a text or a whole number."""
    extra = row.get("extra_info")
    for fields in (row, extra if isinstance(extra, dict) else {}):
        for name in names:
            value = fields.get(name)
            if isinstance(value, str | int) and not isinstance(value, bool) and str(value).strip():
                return str(value).strip()
    return None


def _subject_of_math(identity: Any) -> str | None:
    """The subject in an id of the MATH data set: `test/precalculus/807.json` -> `precalculus`."""
    found = re.fullmatch(r"(?:test|train)/(\w+)/\d+\.json", identity) if isinstance(identity, str) else None
    return found[1] if found else None


def _messages(value: Any, where: str) -> tuple[dict[str, str], ...]:
    """`where` names the file, the row and the field."""
    if isinstance(value, str):
        value = [{"role": "user", "content": value}]
    if not isinstance(value, list) or not value:
        raise _refused(where, value, "text or a non-empty list of {role, content}")
    for number, message in enumerate(value):
        role, content = (message.get("role"), message.get("content")) if isinstance(message, dict) else (None, None)
        if not (isinstance(role, str) and role and isinstance(content, str) and content.strip()):
            raise _refused(f"{where}, message {number}", message, "{role, content}, both text that is not blank")
    return tuple({"role": message["role"], "content": message["content"]} for message in value)


def _answer(row: dict[str, Any], where: str) -> str | None:
    reward = row.get("reward_model")
    if reward is not None and not isinstance(reward, dict):
        raise _refused(f"{where}: reward_model", reward, "an object with ground_truth")
    name, answer = "reward_model.ground_truth", (reward or {}).get("ground_truth")
    if answer is None:
        name, answer = "answer", row.get("answer")
    if answer is None:
        return None
    if isinstance(answer, bool) or not isinstance(answer, str | int | float):
        raise _refused(f"{where}: {name}", answer, "text or a number; write the final answer alone")
    return str(answer).strip() or None


def _refused(where: str, value: Any, expected: str) -> ValueError:
    text = repr(value)
    return ValueError(f"{where} is {text if len(text) <= 80 else text[:77] + '...'}, expected {expected}")
