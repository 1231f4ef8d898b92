"""The responses of one evaluation on disk: written during sampling, and read again after an interruption.

    generations/about.json            the sampling settings of the responses
    generations/SET.jsonl             the responses of a set, whole, in the order of (problem, sample)
    generations/.SET.part_RANK.jsonl  the responses of a rank so far, in the order of their completion

`evaluation/grading/grade_sets.py` writes the grades and the metrics.

`Generations.keep` appends to a part and flushes it to the operating system, so it outlives a killed process. A damaged
last line's response is sampled again. The other files appear whole or not at all. This module doesn't sample or grade.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from nemo_oprd.batch.types import Rollout
from nemo_oprd.evaluation.responses import (
    ABOUT,
    DIFFERENCES,
    DISAGREEMENTS,
    FACTS,
    GENERATIONS,
    GRADES,
    METRICS,
    write_lines,
)
from nemo_oprd.rollout.engine import Request
from nemo_oprd.runtime.disk import naming
from nemo_oprd.runtime.files import read_json, write_atomically

# version of the format of about.json and of the lines of SET.jsonl
FORMAT = 1
_FIX = "remove that directory, or choose another output"
_SHOWN = 120  # characters of a value in a message


def model_identity(directory: Path) -> dict[str, Any]:
    """Returns an identity of the weights of a model on disk, for `about.json`.

    It holds the directory, and the size and the modification time of its weights and of its configuration files. The
    weights themselves are not read, because that takes minutes for a large model.

    Args:
        directory: of a Hugging Face model or a Megatron checkpoint.
    """
    names = ("config.json", "hf/config.json", "common.pt", ".metadata", "metadata.json")
    files = [*directory.glob("*.safetensors"), *directory.glob("*.distcp"), *(directory / name for name in names)]
    stats = {str(file.relative_to(directory)): file.stat() for file in sorted(files) if file.is_file()}
    described = {name: f"{stat.st_size} bytes of {_time(stat.st_mtime_ns)}" for name, stat in stats.items()}
    return _named(directory, {"directory": str(directory.resolve()), "files": described})


def trained_identity(directory: Path, step: int, weights: str) -> dict[str, Any]:
    """Returns the identity of a student after `step` steps of a run.

    Args:
        directory: of the model that the run began with.
        weights: distinguishes these weights from those of the same step, repeated from an earlier checkpoint.
    """
    return _named(directory, {"directory": str(directory.resolve()), "step": step, "weights": weights})


def _time(ns: int) -> str:
    """Formats nanoseconds since the epoch. Example: 1000000001 -> "1970-01-01T00:00:01.000000001Z"."""
    return f"{datetime.fromtimestamp(ns // 10**9, UTC):%Y-%m-%dT%H:%M:%S}.{ns % 10**9:09d}Z"


def _named(directory: Path, identity: dict[str, Any]) -> dict[str, Any]:
    """Adds the short name for the lines of SET.jsonl: the directory's name, and a digest of all values."""
    return {**identity, "name": f"{directory.resolve().name}@{digest(identity)[:12]}"}


def digest(value: Any) -> str:
    """Returns sha256 (hex) of a value's JSON."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True)
class SetKey:
    """The values common to all lines of a set.

    Attributes:
        name: of the set.
        samples: responses per problem; response i is sample i % samples of problem i // samples.
        key: of the sampling; response i draws from (*key, i).
        model: name of the model's identity.
        facts: per problem, the fields that grading needs; its lines hold them, too.
    """

    name: str
    samples: int
    key: tuple[int, ...]
    model: str
    facts: Sequence[Mapping[str, str]] = ()

    def record(self, index: int, rollout: Rollout, text: str) -> dict[str, Any]:
        """Returns the line of response `index`."""
        problem, sample = divmod(index, self.samples)
        record = {
            "problem": problem,
            "sample": sample,
            "prompt_ids": rollout.prompt_ids.tolist(),
            "response_ids": rollout.response_ids.tolist(),
            "response": text,
            "finish_reason": rollout.finish_reason,
            "seed": [*self.key, index],
            "model": self.model,
            **(self.facts[problem] if self.facts else {}),
        }
        return record if rollout.logprobs is None else {**record, "logprobs": rollout.logprobs.tolist()}

    def index_of(self, record: dict[str, Any]) -> int:
        """Returns the index of a line, the inverse of `record`."""
        return int(record["problem"]) * self.samples + int(record["sample"])


class Generations:
    """The directory of one evaluation. Every rank has one; the first rank writes everything but the other ranks' parts.

    Args:
        directory: holds `generations/`, `grades/` and `evaluation.json`.
        about: the sampling settings: plain values that JSON returns unchanged, "model" with a "name".
    """

    def __init__(self, directory: Path, about: dict[str, Any]) -> None:
        self.directory, self._responses = directory, directory / GENERATIONS
        self.about = {"format": FORMAT, **json.loads(json.dumps(about))}

    def difference(self) -> str | None:
        """Returns a line about the difference if the directory holds responses of another evaluation; else None."""
        file = self._responses / ABOUT
        if not file.exists():
            kept = self._responses.exists() and any(self._responses.glob("*.jsonl"))
            return f"{file}: no such file, expected how the responses beside it were sampled; {_FIX}" if kept else None
        try:
            existing = read_json(file, "how these responses were sampled", _FIX)
        except ValueError as error:
            return str(error)
        old, new = _flat(existing), _flat(self.about)
        for name in [*new, *(name for name in old if name not in new)]:
            if old.get(name) != new.get(name):
                dated = " (a chat template that writes the date makes other prompts every day)"
                return (
                    f"{self._responses} holds responses with {name}={_shown(old.get(name))}, expected "
                    f"{_shown(new.get(name))}{dated if name.endswith('.prompts') else ''}; {_FIX}"
                )
        return None

    def check(self) -> None:
        """Raises ValueError if the directory holds responses of another evaluation; writes nothing."""
        difference = self.difference()
        if difference is not None:
            raise ValueError(difference)

    def begin(self, *, afresh: bool) -> None:
        """Creates the directory on the first rank, before any rank writes responses.

        Args:
            afresh: whether to remove all results in the directory, including those of this evaluation.
        """
        if afresh:
            # first, so that a killed process leaves no description of partly removed responses
            (self._responses / ABOUT).unlink(missing_ok=True)
            for directory in (self._responses, self.directory / GRADES, self.directory / DISAGREEMENTS):
                shutil.rmtree(directory, ignore_errors=True)
            for name in (METRICS, DIFFERENCES):
                (self.directory / name).unlink(missing_ok=True)
        for directory in (self._responses, self.directory / GRADES):
            with naming(directory):
                directory.mkdir(parents=True, exist_ok=True)
        write_atomically(self._responses / ABOUT, json.dumps(self.about, indent=1) + "\n")

    def keep(self, of: SetKey, rank: int, responses: Iterable[tuple[int, Rollout, str]]) -> None:
        """Appends responses, each with its index and text, to the part of `rank`.

        Raises:
            OSError: the disk is full or the file can't be written; the error names the file.
        """
        path = self._part(of.name, rank)
        lines = [json.dumps(of.record(*each), ensure_ascii=False) + "\n" for each in responses]
        with naming(path), path.open("a+b") as file:
            # a process killed during a write left half a line, to which the next one must not be appended
            if file.seek(0, 2):
                file.seek(-1, 2)
                file.write(b"" if file.read() == b"\n" else b"\n")
            file.write("".join(lines).encode())

    def kept(self, of: SetKey, requests: Sequence[Request]) -> dict[int, Rollout]:
        """Returns the responses on disk by the index of their request; a later line replaces an earlier one."""
        found: dict[int, Rollout] = {}
        for path in (self._whole(of.name), *self._parts(of.name)):
            if path.exists():
                found |= dict(_read(path, of, requests))
        return found

    def has_parts(self, name: str) -> bool:
        """Returns whether a set has parts, which `finish` would merge."""
        return bool(self._parts(name))

    def is_current(self, of: SetKey) -> bool:
        """Returns whether the whole SET.jsonl exists, and its lines hold the facts of `of`, e.g. reference answers."""
        if not self._whole(of.name).exists():  # its parts may be on other machines, and not visible here yet
            return False
        with self._whole(of.name).open("rb") as file:
            for line in file:
                record = json.loads(line)
                now = dict(of.facts[int(record["problem"])]) if of.facts else {}
                if {name: record[name] for name in (*FACTS, "grader") if name in record} != now:
                    return False
        return True

    def finish(self, of: SetKey, rollouts: Sequence[Rollout], texts: Sequence[str]) -> None:
        """Writes the whole SET.jsonl on the first rank, and removes the parts; no rank may call `keep` afterwards.

        Raises:
            OSError: as `keep`.
        """
        indexed = zip(range(len(rollouts)), rollouts, texts, strict=True)
        write_lines(self._whole(of.name), (of.record(*each) for each in indexed))
        for part in self._parts(of.name):
            part.unlink()

    def _whole(self, name: str) -> Path:
        return self._responses / f"{name}.jsonl"

    def _part(self, name: str, rank: int) -> Path:
        return self._responses / f".{name}.part_{rank}.jsonl"

    def _parts(self, name: str) -> list[Path]:
        """Returns the parts of all ranks, including those of an earlier start with more ranks."""
        pattern = re.compile(rf"\.{re.escape(name)}\.part_\d+\.jsonl")
        return sorted(path for path in self._responses.glob(".*.jsonl") if pattern.fullmatch(path.name))


def _read(path: Path, of: SetKey, requests: Sequence[Request]) -> Iterable[tuple[int, Rollout]]:
    """Yields (index, rollout) of each line that is undamaged and answers its request."""
    with path.open("rb") as file:
        for line in file:
            try:
                record = json.loads(line)
                index = of.index_of(record)
                request, ids, finish = requests[index], record["response_ids"], record["finish_reason"]
                if index < 0 or record["prompt_ids"] != request.prompt_ids or not isinstance(ids, list):
                    continue
                fields = {"answer": request.answer, "finish_reason": finish, "logprobs": record.get("logprobs")}
                rollout = Rollout(np.array(request.prompt_ids), np.array(ids), **fields)
            except (ValueError, TypeError, KeyError, IndexError):  # damaged; its response is sampled again
                continue
            yield index, rollout


def _flat(value: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flattens nested objects to one, with keys joined by dots."""
    flat: dict[str, Any] = {}
    for name, item in value.items():
        flat |= _flat(item, f"{prefix}{name}.") if isinstance(item, dict) else {prefix + name: item}
    return flat


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
