"""Rollouts as JSONL: written when `rollout.save` is set, read back with `rollout.replay=FILE`."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from nemo_oprd.batch.types import Rollout
from nemo_oprd.config.schema import TeacherConfig
from nemo_oprd.fault_tolerance.files import parse_json, replacing
from nemo_oprd.rollout.engine import Request, SamplingParams
from nemo_oprd.weights.hf import TensorReader

_FIELDS = {f.name for f in dataclasses.fields(Rollout)}
_TEACHER_FIELDS = ("teacher_prompt_ids", "teacher_response_ids", "teacher_index")


def write_rollouts(path: Path, rollouts: list[Rollout], **columns: list) -> None:
    """One JSON object per line; absent fields are left out. `columns` are further fields, a value per rollout."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # not flushed, because this is written in every step; a resumed run samples again what a loss of power damaged
    with replacing(path, durable=False) as partial, partial.open("w", encoding="utf-8") as file:
        for i, rollout in enumerate(rollouts):
            record = {name: value for name, value in dataclasses.asdict(rollout).items() if value is not None}
            record.update({name: values[i] for name, values in columns.items()})
            file.write(json.dumps(record, ensure_ascii=False) + "\n")


@dataclass(frozen=True)
class TeacherLimits:
    """Ids that the teacher knows, its positions, and what it reads of its own.

    "response" is another tokenizer's (teacher.reads=text, prompt included), "prompt" one made by teacher.prompt.
    """

    vocab_size: int
    max_positions: int
    own: Literal["nothing", "prompt", "response"] = "response"


def own_sequences(teacher: TeacherConfig) -> Literal["nothing", "prompt", "response"]:
    """What the teacher reads of its own, see `TeacherLimits`."""
    if teacher.reads == "text":
        return "response"
    return "nothing" if teacher.prompt is None else "prompt"


def read_rollouts(
    path: str | Path, vocab_size: int, max_positions: int | None = None, teacher: TeacherLimits | None = None
) -> list[Rollout]:
    """Reads a rollout file; unknown fields are ignored.

    Args:
        teacher: says which sequences of the teacher's own every line must have; None: none.

    Raises:
        ValueError: no such file, malformed JSON, a missing field, a mask of another length, an id outside the
            vocabulary, or more tokens than `max_positions`; file and line are named.
    """
    file = Path(path)
    if not file.is_file():
        raise ValueError(
            f"rollout.replay={path}: no such file; expected a JSONL of rollouts (rollout.save writes them)"
        )
    rollouts = []
    for number, line in enumerate(file.read_bytes().split(b"\n"), start=1):
        if line.strip():
            rollouts.append(_parse(line, f"{path}:{number}", vocab_size, teacher))
            if max_positions is not None and rollouts[-1].length > max_positions:
                raise ValueError(
                    f"{path}:{number}: {rollouts[-1].length} tokens of prompt and response, but the model has "
                    f"{max_positions} positions; expected no more: remove the line, or take the model that wrote it"
                )
    if not rollouts:
        raise ValueError(f"rollout.replay={path}: the file holds no rollouts; expected one JSON object per line")
    if not any(any(rollout.mask) for rollout in rollouts):
        raise ValueError(
            f"rollout.replay={path}: none of the {len(rollouts)} responses has a supervised token; expected at least "
            "one response token whose mask is 1: check response_ids and response_mask"
        )
    return rollouts


def _parse(line: bytes, where: str, vocab_size: int, teacher: TeacherLimits | None) -> Rollout:
    record = parse_json(line, where, "a rollout", "write one UTF-8 JSON object per line")
    if not isinstance(record, dict):
        raise ValueError(f"{where}: found {str(record)[:60]}, expected a JSON object with prompt_ids and response_ids")
    for name in ("prompt_ids", "response_ids"):
        _check_ids(record, name, where, 0, vocab_size)
    if not record["prompt_ids"] and not record["response_ids"]:
        raise ValueError(f"{where}: prompt_ids and response_ids are both empty; expected a token: remove the line")
    mask = record.get("response_mask")
    if mask is not None and not (isinstance(mask, list) and all(type(i) is int and i in (0, 1) for i in mask)):
        raise ValueError(f"{where}: response_mask={str(mask)[:60]}; expected a list of 0 and 1, or leave it out")
    if mask is not None and len(mask) != len(record["response_ids"]):
        raise ValueError(
            f"{where}: response_mask has {len(mask)} entries for {len(record['response_ids'])} response tokens; "
            "expected one 0 or 1 per response token"
        )
    _check_teacher(record, where, teacher)
    return Rollout(**{name: value for name, value in record.items() if name in _FIELDS})


def _check_ids(record: dict[str, Any], name: str, where: str, low: int, high: int) -> None:
    ids = record.get(name)
    if not isinstance(ids, list) or not all(type(i) is int for i in ids):
        raise ValueError(f"{where}: {name}={str(ids)[:60]}; expected a list of integers: write token ids, not text")
    outside = [i for i in ids if not low <= i < high]
    if outside and name == "teacher_index":
        raise ValueError(
            f"{where}: {name} holds {outside[0]}, but the teacher's response has {high} tokens; expected {low} to "
            f"{high - 1}: write these rollouts anew with rollout.save=true"
        )
    if outside:
        raise ValueError(
            f"{where}: {name} holds id {outside[0]}, but the models know ids {low}..{high - 1}; "
            "were these rollouts made with another tokenizer?"
        )


def _check_teacher(record: dict[str, Any], where: str, teacher: TeacherLimits | None) -> None:
    """What the teacher reads: there where it reads sequences of its own, and only there."""
    there = [name for name in _TEACHER_FIELDS if record.get(name) is not None]
    own = "nothing" if teacher is None else teacher.own
    if own == "nothing" and there:
        raise ValueError(
            f"{where}: {there[0]} is a sequence of the teacher's own, but with teacher.reads=ids and no teacher.prompt "
            "it reads the student's; expected teacher.reads=text or a teacher.prompt: set it, or leave the field out"
        )
    if teacher is None or own == "nothing":
        return
    needed = _TEACHER_FIELDS[:1] if own == "prompt" and len(there) == 1 else _TEACHER_FIELDS
    missing = [name for name in needed if name not in there]
    if missing:
        setting = "teacher.reads=text" if own == "response" else "teacher.prompt"
        raise ValueError(
            f"{where}: no {missing[0]}, expected what the teacher reads, because of {setting}; record rollouts with "
            f"{setting} and rollout.save=true, or leave {setting} out"
        )
    if len(there) == 1:
        record = {**record, "teacher_response_ids": record["response_ids"]}
        record["teacher_index"] = list(range(len(record["response_ids"])))
    for name in _TEACHER_FIELDS[:2]:
        _check_ids(record, name, where, 0, teacher.vocab_size)
    _check_ids(record, "teacher_index", where, -1, len(record["teacher_response_ids"]))
    length = len(record["teacher_prompt_ids"]) + len(record["teacher_response_ids"])
    if length > teacher.max_positions:
        raise ValueError(
            f"{where}: {length} tokens for the teacher, which has {teacher.max_positions} positions; expected no more: "
            "remove the line, or take the teacher that read it"
        )
    if len(record["teacher_index"]) != len(record["response_ids"]):
        raise ValueError(
            f"{where}: teacher_index has {len(record['teacher_index'])} entries for {len(record['response_ids'])} "
            "response tokens; expected one per response token, -1 for none"
        )


class ReplayEngine:
    """A rollout engine that gives the same recorded batch at every step, whatever is asked for."""

    def __init__(self, rollouts: list[Rollout]) -> None:
        """`rollouts` from `read_rollouts`."""
        self.rollouts = rollouts

    def generate(
        self, requests: list[Request], sampling: SamplingParams, should_cancel: Callable[[], bool] | None = None
    ) -> list[Rollout]:
        """The whole file, at once."""
        return self.rollouts

    def update_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Recorded rollouts don't change, so the stream is not even begun (on any rank)."""

    def load(self, read: TensorReader, source: str) -> None:
        """Recorded rollouts don't change."""
