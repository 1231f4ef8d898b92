"""Rollouts as JSONL files: written with `rollout.save=true`, read with `rollout.replay=FILE`."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np

from nemo_oprd.batch import types
from nemo_oprd.batch.types import Rollout
from nemo_oprd.config.schema import Config
from nemo_oprd.config.teacher_routing import Routing
from nemo_oprd.megatron.weights.hf import TensorReader
from nemo_oprd.models import ModelSpec
from nemo_oprd.rollout.engine import Generates, GenerationHandle, Request, SamplingParams, Weights, WeightStream
from nemo_oprd.rollout.expert_routes import check_routes, parse_routes
from nemo_oprd.runtime.files import parse_json, replacing, why_no_file

Own: TypeAlias = Literal["nothing", "prompt", "response"]

_FIELDS = {f.name for f in dataclasses.fields(Rollout)}
# how far rounding in an engine may lift the logarithm of a probability above 0
_LOGPROB_ROUNDING = 1e-3
# rollouts hold float32, in which no log-probability may become infinite
_LARGEST = float(np.finfo(np.float32).max)
_TEACHER_FIELDS = ("teacher_prompt_ids", "teacher_response_ids", "teacher_index")


def write_rollouts(path: Path, rollouts: list[Rollout], **columns: list) -> None:
    """Writes one JSON object per rollout, without fields that are None; `columns`: more fields, a value per rollout."""

    def records() -> Iterator[dict[str, Any]]:  # one at a time: recorded routes are long lists
        for i, rollout in enumerate(rollouts):
            record = {name: _plain(value) for name, value in vars(rollout).items() if value is not None}
            if rollout.weight_versions is not None:
                record |= types.as_json(rollout.weight_versions)
            yield record | {name: values[i] for name, values in columns.items()}

    write_json_lines(path, records())


def _plain(value: Any) -> Any:
    """Converts a field to JSON types: lists of numbers, a mask as 0 and 1."""
    if not isinstance(value, np.ndarray):
        return value
    return (value.view(np.uint8) if value.dtype == np.bool_ else value).tolist()


def write_json_lines(path: Path, records: Iterable[dict[str, Any]]) -> None:
    """Writes one JSON object per line, and creates the directory."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # not flushed to disk, because every step writes a file; a resumed run samples again if a file is damaged
    with replacing(path, durable=False) as partial, partial.open("w", encoding="utf-8") as file:
        for record in records:
            file.write(json.dumps(record, ensure_ascii=False) + "\n")


@dataclass(frozen=True)
class TeacherLimits:
    """Smallest limits on ids and positions over the teachers of recorded rollouts, and each teacher's own sequences.

    `own`, per teacher: "response": prompt and response in the tokens of the teacher's tokenizer (`teacher.reads=text`).
    "prompt": a prompt of its own, such as `teacher.prompt` makes. "nothing": the teacher reads the student's ids.
    `routing` names the teacher of a rollout; needed if the teachers differ.
    """

    vocab_size: int
    max_positions: int
    own: tuple[Own, ...] = ("response",)
    routing: Routing | None = None

    def own_of(self, record: Mapping[str, Any], where: str) -> Own:
        """Returns which sequences of a line are the teacher's own; ValueError for a data source without a teacher."""
        if len(set(self.own)) == 1 or self.routing is None:
            return self.own[0]
        try:
            return self.own[self.routing.teachers_of([record.get("data_source")])[0]]
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from error


def own_sequences(config: Config, number: int) -> Own:
    """Returns which sequences are teacher `number`'s own, see `TeacherLimits.own`."""
    if config.teacher.reads == "text":
        return "response"
    return "prompt" if config.has_own_prompt(number) else "nothing"


def read_rollouts(
    path: str | Path,
    vocab_size: int,
    max_positions: int | None = None,
    teacher: TeacherLimits | None = None,
    *,
    needs_logprobs: bool = False,
    student: ModelSpec | None = None,
    needs_routes: bool = False,
) -> list[Rollout]:
    """Reads a JSONL file of rollouts. Unknown fields are ignored.

    Args:
        vocab_size: ids must be below this number.
        max_positions: the most tokens of prompt and response together; None: no limit.
        teacher: the teachers' limits, and their own sequences that lines must have; None: all read the student's ids.
        needs_logprobs: whether every line must have `logprobs`, which `rollout.correction` reads.
        student: the model whose experts `expert_routes` must name; None: no check against a model.
        needs_routes: whether every line must have `expert_routes`, which `student.router_replay` reads.

    Raises:
        ValueError: there is no such file, it has no supervised token, or a line (the message names it) has malformed
            JSON, a missing or wrong field, a field of another length, an id outside the vocabulary, or too many tokens.
    """
    file = Path(path)
    if not file.is_file():
        raise ValueError(
            f"rollout.replay={path}: {why_no_file(path, '.jsonl')}; expected a JSONL of rollouts (rollout.save writes "
            "them): give its path"
        )
    rollouts = []
    for number, line in enumerate(file.read_bytes().split(b"\n"), start=1):
        if not line.strip():
            continue
        where = f"{path}:{number}"
        rollout = _parse(line, where, vocab_size, teacher)
        if max_positions is not None and rollout.length > max_positions:
            raise ValueError(
                f"{where}: {rollout.length} tokens of prompt and response, but the model has {max_positions} "
                "positions; expected no more: remove the line, or choose the model that wrote it"
            )
        if student is not None:
            check_routes(rollout, where, student, needed=needs_routes)
        if needs_logprobs and rollout.logprobs is None:
            raise ValueError(
                f"{where}: no logprobs, by which rollout.correction weighs the tokens; expected one log-probability "
                "per response token: record rollouts with an engine that reports them, or set rollout.correction=off"
            )
        rollouts.append(rollout)
    if not rollouts:
        raise ValueError(f"rollout.replay={path}: the file holds no rollouts; expected one JSON object per line")
    if not any(rollout.mask.any() for rollout in rollouts):
        raise ValueError(
            f"rollout.replay={path}: none of the {len(rollouts)} responses has a supervised token; expected at least "
            "one response token whose mask is 1: check response_ids and response_mask"
        )
    return rollouts


def _parse(line: bytes, where: str, vocab_size: int, teacher: TeacherLimits | None) -> Rollout:
    record = parse_json(line, where, "a rollout", "write one UTF-8 JSON object per line", encodes=True)
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
    for name in ("data_source", "finish_reason"):
        if not isinstance(record.get(name), str | None):
            raise ValueError(
                f"{where}: {name}={str(record[name])[:60]}; expected text: write a string, or leave it out"
            )
    _check_sampling(record, where)
    _check_teacher(record, where, teacher)
    parsed = {"expert_routes": parse_routes(record, where), "weight_versions": _spans(record, where)}
    return Rollout(**{name: value for name, value in record.items() if name in _FIELDS} | parsed)


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
            "expected ids of these models: record rollouts with their tokenizer"
        )


def _check_sampling(record: dict[str, Any], where: str) -> None:
    """Raises ValueError unless `logprobs` are absent or values that an engine may have recorded."""
    logprobs = record.get("logprobs")
    if logprobs is not None:
        if not isinstance(logprobs, list) or not all(type(value) in (int, float) for value in logprobs):
            raise ValueError(
                f"{where}: logprobs={str(logprobs)[:60]}; expected a list of numbers, one per response token: write "
                "such a list, or leave it out"
            )
        # NaN compares as false
        wrong = [value for value in logprobs if not -_LARGEST <= value <= _LOGPROB_ROUNDING]
        if wrong:
            raise ValueError(
                f"{where}: logprobs holds {str(wrong[0])[:60]}; expected finite numbers of at most 0, natural "
                "logarithms of probabilities: write those of the sampled tokens, or leave logprobs out"
            )
        if len(logprobs) != len(record["response_ids"]):
            raise ValueError(
                f"{where}: logprobs has {len(logprobs)} entries for {len(record['response_ids'])} response tokens; "
                "expected one per response token"
            )


def _spans(record: dict[str, Any], where: str) -> np.ndarray | None:
    """Reads the field `weight_versions`, or the `weight_version` of earlier files, as spans; None without either."""
    given, version, tokens = record.get("weight_versions"), record.get("weight_version"), len(record["response_ids"])
    if given is None and version is None:
        return None
    if given is None:
        if type(version) is not int or not 0 <= version < 2**31:
            raise ValueError(
                f"{where}: weight_version={str(version)[:60]}; expected a whole number of at least 0, the optimizer "
                "steps behind the weights that sampled: write it so, or leave it out"
            )
        return types.span(version, tokens)
    spans = types.from_json(given)
    if spans is None:
        raise ValueError(
            f"{where}: weight_versions={str(given)[:60]}; expected a list of objects with the whole numbers version, "
            "start and end: write such a list, or leave it out"
        )
    if (wrong := types.problem(spans, tokens)) is not None:
        raise ValueError(f"{where}: weight_versions holds {wrong}: write them so, or leave weight_versions out")
    return spans


def _check_teacher(record: dict[str, Any], where: str, teacher: TeacherLimits | None) -> None:
    """Raises ValueError unless the record has its teacher's own sequences exactly if the teacher needs them."""
    given = [name for name in _TEACHER_FIELDS if record.get(name) is not None]
    own = "nothing" if teacher is None else teacher.own_of(record, where)
    if own == "nothing" and given:
        raise ValueError(
            f"{where}: {given[0]} is given, but with teacher.reads=ids and no teacher.prompt (nor a system prompt or "
            "template of its own) the teacher reads the student's ids; expected teacher.reads=text or a "
            "teacher.prompt: set it, or leave the field out"
        )
    if teacher is None or own == "nothing":
        return
    needed = _TEACHER_FIELDS[:1] if own == "prompt" and len(given) == 1 else _TEACHER_FIELDS
    missing = [name for name in needed if name not in given]
    if missing:
        setting = "teacher.reads=text" if own == "response" else "teacher.prompt"
        raise ValueError(
            f"{where}: no {missing[0]}, expected what the teacher reads with {setting}; record rollouts with "
            f"{setting} and rollout.save=true, or leave {setting} out"
        )
    if len(given) == 1:
        record = {**record, "teacher_response_ids": record["response_ids"]}
        record["teacher_index"] = list(range(len(record["response_ids"])))
    for name in _TEACHER_FIELDS[:2]:
        _check_ids(record, name, where, 0, teacher.vocab_size)
    _check_ids(record, "teacher_index", where, -1, len(record["teacher_response_ids"]))
    length = len(record["teacher_prompt_ids"]) + len(record["teacher_response_ids"])
    if length > teacher.max_positions:
        raise ValueError(
            f"{where}: {length} tokens for the teacher, which has {teacher.max_positions} positions; expected no more: "
            "remove the line, or choose the teacher that read these rollouts"
        )
    if len(record["teacher_index"]) != len(record["response_ids"]):
        raise ValueError(
            f"{where}: teacher_index has {len(record['teacher_index'])} entries for {len(record['response_ids'])} "
            "response tokens; expected one per response token, -1 for none"
        )


@dataclass
class ReplayEngine(Generates):
    """A rollout engine that returns the same recorded rollouts in every step and ignores the requests."""

    rollouts: list[Rollout]
    metrics: dict[str, float] = dataclasses.field(default_factory=dict)
    weights: Weights = dataclasses.field(default=Weights(0))

    def submit(self, requests: list[Request], sampling: SamplingParams, *_: Any) -> GenerationHandle:
        """Returns a handle without sampling."""
        return GenerationHandle(requests, sampling, {}, None)

    def collect(self, *_: Any, **__: Any) -> list[Rollout]:
        """Returns all recorded rollouts."""
        return self.rollouts

    def update_weights(self, weights: WeightStream, step: int) -> None:
        """Does nothing; no rank makes the stream."""

    def load(self, read: TensorReader, source: str) -> None:
        """Does nothing."""

    def rest(self) -> None:
        """Does nothing."""

    def close(self) -> None:
        """Does nothing."""
