"""Prompts from parquet or JSONL files, and the order in which training visits them.

Files are read whole: prompt sets are tens of megabytes. Chat templates and token ids are left out, because they belong
to a tokenizer and one prompt may be read by two; the visiting order is a pure function of (seed, position), so there is
no iterator whose state a checkpoint would have to save.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from nemo_oprd.fault_tolerance.files import parse_json

PROMPT_FIELDS = ("prompt", "problem", "question")
FIELDS = (*PROMPT_FIELDS, "answer", "hint", "data_source", "reward_model")
SHAPES = (
    "{prompt: [{role, content}], data_source, reward_model: {ground_truth}} or {prompt|problem|question: text, answer}"
)


@dataclass(frozen=True)
class Prompt:
    """One problem to respond to.

    Attributes:
        messages: the conversation so far, each message `{"role": ..., "content": ...}`.
        answer: the reference answer, not a worked solution; None if the file has none.
        data_source: the name that the file gives the problem's origin, else the file's name without its ending.
        index: position in the file, from 0, not counting blank lines.
        hint: privileged information for the teacher alone, such as a worked solution; None if the file has none.

    Example: `Prompt(({"role": "user", "content": "What is 2+3?"},), "5", "toy", 0)`.
    """

    messages: tuple[dict[str, str], ...]
    answer: str | None
    data_source: str
    index: int
    hint: str | None = None

    def told(self, template: str | None) -> tuple[dict[str, str], ...]:
        """The conversation with its last message put into `template` (`teacher.prompt`); as it is without one.

        {prompt}, {answer} and {hint} are replaced; other braces stay, as formulas have them.

        Raises:
            ValueError: the template asks for what this prompt doesn't have.
        """
        if template is None:
            return self.messages
        last = self.messages[-1]
        known = {"prompt": last["content"], "answer": self.answer, "hint": self.hint}
        missing = [name for name, value in known.items() if value is None and f"{{{name}}}" in template]
        if missing:
            raise ValueError(
                f"no {missing[0]}, but teacher.prompt tells the teacher {{{missing[0]}}}; expected a field "
                f"{missing[0]!r}: add it, leave the prompt out, or change teacher.prompt"
            )
        content = re.sub(r"\{(prompt|answer|hint)\}", lambda found: str(known[found[1]]), template)
        return (*self.messages[:-1], {**last, "content": content})


def load_prompts(path: str | Path) -> list[Prompt]:
    """Reads all prompts of a `.parquet` or `.jsonl` file, in file order.

    A row holds a conversation or a plain text, which becomes one user message. The answer is
    `reward_model.ground_truth`, else `answer`; numbers are turned into text, and a blank or missing answer is None.
    Other fields are ignored.

    Raises:
        ValueError: the file is missing, empty, unreadable or of an unknown ending, or a row has none of the known
            shapes; the message names the file, the line (JSONL, from 1) or row (parquet, from 0) and the fix.
    """
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"{path}: there is no such file; give the path of a .parquet or .jsonl file with prompts")
    readers = {".parquet": _parquet_rows, ".jsonl": _jsonl_rows}
    if path.suffix not in readers:
        raise ValueError(f"{path}: ending {path.suffix!r}, expected .parquet or .jsonl; convert or rename the file")
    prompts = [_prompt(row, where, path.stem, index) for index, (where, row) in enumerate(readers[path.suffix](path))]
    if not prompts:
        raise ValueError(f"{path}: holds no prompts, expected at least one row; check how the file was written")
    return prompts


def prompt_order(num_prompts: int, seed: int, start: int, count: int) -> list[int]:
    """The prompts at positions start, ..., start+count-1 of an endless order in which every epoch is a new permutation.

    A pure function, so a run that resumes at position `start` sees what an uninterrupted run would have seen, whatever
    the sizes of the requests before.

    Example: `prompt_order(3, 0, 0, 4) == prompt_order(3, 0, 0, 2) + prompt_order(3, 0, 2, 2)`.

    Raises:
        ValueError: `num_prompts` is not positive, or `seed`, `start` or `count` is negative.
    """
    if num_prompts < 1:
        raise ValueError(f"num_prompts is {num_prompts}, expected at least 1; check the training data file")
    for name, value in (("seed", seed), ("start", start), ("count", count)):
        if value < 0:
            raise ValueError(f"{name} is {value}, expected 0 or more; pass a non-negative integer")
    order: list[int] = []
    while len(order) < count:
        epoch, offset = divmod(start + len(order), num_prompts)
        order += _permutation(num_prompts, seed, epoch)[offset : offset + count - len(order)].tolist()
    return order


def _permutation(size: int, seed: int, epoch: int) -> np.ndarray:
    """int64 [size]. Sorts raw draws of the bit generator: numpy keeps those equal between its versions, unlike the
    methods of `Generator`, and a run may resume in another environment. 64-bit ties are settled by the stable sort."""
    draws = np.random.Generator(np.random.PCG64([seed, epoch])).bit_generator.random_raw(size)
    return np.argsort(draws, kind="stable")


def _jsonl_rows(path: Path) -> Iterator[tuple[str, Any]]:
    """Yields (where, row) for each line that is not blank."""
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            where = f"{path}, line {number}"
            if not line.strip():
                continue
            yield where, parse_json(line, where, "a prompt", "write one UTF-8 JSON object per line")


def _parquet_rows(path: Path) -> Iterator[tuple[str, Any]]:
    """Yields (where, row), reading only the columns that may be needed."""
    import pyarrow as pa  # here, because it costs every command some 100 ms and only parquet files need it
    import pyarrow.parquet as pq

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
    source = row.get("data_source")
    if source is not None and not isinstance(source, str):
        raise _refused(f"{where}: data_source", source, "text; write the name of the set, or leave it out")
    hint = row.get("hint")
    if hint is not None and not isinstance(hint, str):
        raise _refused(f"{where}: hint", hint, "text; write what the teacher shall know, or leave it out")
    messages = _messages(row[field], f"{where}: {field}")
    return Prompt(messages, _answer(row, where), source or default_source, index, (hint or "").strip() or None)


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
