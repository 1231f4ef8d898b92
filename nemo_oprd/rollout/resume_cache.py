"""The rollouts of the current step on disk, so that an interrupted step does not have to sample them again.

Sampling is the longest part of a step, so the trainer writes rollouts as soon as they are complete. A run that resumes
from its last checkpoint uses them, if that checkpoint's weights sampled them for the same prompts.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import zlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist
from safetensors import SafetensorError, safe_open

from nemo_oprd.batch.types import TOKEN_FIELDS, Rollout
from nemo_oprd.megatron.parallel import first_ranks
from nemo_oprd.rollout.engine import Request, SamplingParams
from nemo_oprd.rollout.exchange import first_ranks_rollouts
from nemo_oprd.rollout.schedule import WeightDigests
from nemo_oprd.runtime.background import BackgroundWriter
from nemo_oprd.runtime.digests import DigestedFile
from nemo_oprd.runtime.files import replacing

logger = logging.getLogger(__name__)


def _size(kind: str) -> int:
    return int(kind[1:]) // 8


# the arrays of a rollout and the type of their concatenation, by safetensors' names; a mask is stored in packed bits
_STORED = {name: {np.int32: "I32", np.float32: "F32", np.bool_: "U8"}[dtype] for name, dtype in TOKEN_FIELDS.items()}
_STORED |= {"weight_versions": "I32", "expert_routes": "I16"}
_STORED = dict(sorted(_STORED.items(), key=lambda item: -_size(item[1])))  # so that every field is aligned
# fields that come from the prompt file, which may have changed
_OF_REQUEST = ("prompt", "data_source", "answer")
# the format of files of earlier versions
_STALE = ("pending.jsonl", "pending.json")


class ResumeCache:
    """`pending.safetensors`: the rollouts of one step, with the number of the step and the sampling settings.

    For a step that a signal cancelled, the file holds rollouts of some requests only.

    The step identifies the weights that sampled the rollouts, given the settings of the schedule, which the file
    therefore names. The file also has the known digests of these weights. A run uses only rollouts of the
    step that it samples next. Every step removes the file before it writes its own, so a run that resumes from an
    earlier checkpoint uses no rollouts of the abandoned steps.

    A background writer writes the file under another name, flushes it and renames it. The next call raises its errors.
    """

    def __init__(self, directory: Path, weights: dict[str, str]) -> None:
        """Sets the path; `weights` names the initial weights, precision and schedule, which a file must match."""
        self.path = directory / "pending.safetensors"
        self.weights, self.digests = weights, WeightDigests()
        self._writer = BackgroundWriter("the rollouts for a resume")

    def put(self, step: int, rollouts: dict[int, Rollout], sampling: SamplingParams, count: int) -> None:
        """Writes rollouts, by the index of their request, in place of the previous step's, on the world's first rank.

        Some of the step's `count` rollouts may be missing. Returns before the file is complete, see `finish`.
        """
        if dist.get_rank() != 0:
            return
        self._writer.finish()
        for path in (self.path, *(self.path.with_name(name) for name in _STALE)):
            path.unlink(missing_ok=True)
        about, kept = self._what(step, rollouts, sampling, count)
        self._writer.start(lambda: _write(self.path, about, kept))

    def write(self, path: Path, step: int, rollouts: dict[int, Rollout], sampling: SamplingParams, count: int) -> str:
        """Writes rollouts of a step to another file, for `take`, with the arguments of `put`; returns its SHA-256."""
        return _write(path, *self._what(step, rollouts, sampling, count))

    def check(self) -> None:
        """Raises OSError if rollouts could not be written; does not wait."""
        self._writer.check()

    def finish(self, *, failed: bool = False) -> None:
        """Waits until the rollouts are on the disk. With `failed` it does not wait: the caller raises another error."""
        (self._writer.abandon if failed else self._writer.finish)()

    def take(
        self, step: int, requests: list[Request], sampling: SamplingParams, path: Path | None = None
    ) -> dict[int, Rollout]:
        """Reads the rollouts of this step, if the file has any, by the index of their request; the same on every rank.

        `path`: a file of `write`; None: the file of `put`.

        Raises:
            ValueError: the weights that sampled them have another digest than the known one; raised on every rank.
        """
        is_first, path = dist.get_rank() == 0, path or self.path
        found, digests = self._read(path, step, requests, sampling) if is_first else ({}, {})
        for steps, digest in first_ranks(digests).items():
            self.digests.note(int(steps), digest, str(path))
        return first_ranks_rollouts(found)

    def _read(
        self, path: Path, step: int, requests: list[Request], sampling: SamplingParams
    ) -> tuple[dict[int, Rollout], dict[str, str]]:
        """Returns (the rollouts by the index of their request, the digests of the weights that sampled them)."""
        try:
            about, rollouts = _load(path)
            indices, digests = about.pop("requests"), dict[str, str](about.pop("digests", {}))
            if about != json.loads(json.dumps(self._about(step, sampling, len(requests)))):
                return {}, {}
            kept = [requests[i] for i in indices]
            prompts = [rollout.prompt_ids.tolist() for rollout in rollouts]
            if prompts != [list(told.prompt_ids) for told in kept]:
                return {}, {}
        except FileNotFoundError:
            return {}, {}
        # the file is damaged, for instance by a loss of power, or of another kind
        except (SafetensorError, ValueError, TypeError, LookupError, AttributeError) as error:
            logger.info(f"{path} can't be used ({' '.join(str(error).split())}): its responses are sampled again")
            return {}, {}
        told_anew = ({name: getattr(told, name) for name in _OF_REQUEST} for told in kept)
        taken = zip(indices, rollouts, told_anew, strict=True)
        return {i: dataclasses.replace(rollout, **told) for i, rollout, told in taken}, digests

    def _what(
        self, step: int, rollouts: dict[int, Rollout], sampling: SamplingParams, count: int
    ) -> tuple[dict[str, Any], list[Rollout]]:
        """Returns the arguments of `_write`: the file's metadata and the rollouts to store."""
        about = {**self._about(step, sampling, count), "requests": list(rollouts)}
        return about | {"digests": self.digests.of(rollouts.values())}, [*rollouts.values()]

    def _about(self, step: int, sampling: SamplingParams, count: int) -> dict[str, Any]:
        return {"step": step, "responses": count, "sampling": dataclasses.asdict(sampling), **self.weights}


def _write(path: Path, about: dict[str, Any], rollouts: Sequence[Rollout]) -> str:
    """Writes a safetensors file: the arrays of all rollouts, field by field, without a copy of all of them.

    Returns the SHA-256 of the file.
    """
    arrays = {name: [getattr(rollout, name) for rollout in rollouts] for name in _STORED}
    shapes = {name: [None if one is None else one.shape for one in of] for name, of in arrays.items()}
    plain = [_plain(rollout) for rollout in rollouts]
    told = json.dumps({"about": about, "shapes": shapes, "rollouts": plain})
    header, end = {}, 0
    for name, kind in _STORED.items():
        size, start = sum(map(len, _bytes(arrays[name]))), end
        end += size
        header[name] = {"dtype": kind, "shape": [size // _size(kind)], "data_offsets": [start, end]}
    checksum = _checksum(told, (data for of in arrays.values() for data in _bytes(of)))
    text = json.dumps({"__metadata__": {"told": told, "checksum": checksum}, **header}).encode()
    text += b" " * (-len(text) % 8)
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as partial, DigestedFile(partial) as file:
        file.write(len(text).to_bytes(8, "little"))
        file.write(text)
        for of in arrays.values():
            for data in _bytes(of):
                file.write(data)
    return file.sha256


def _load(path: Path) -> tuple[dict[str, Any], list[Rollout]]:
    """Reads (metadata, rollouts without the fields of their requests); raises what `ResumeCache._read` catches."""
    with safe_open(path, framework="numpy") as file:
        metadata = file.metadata()
        flat = {name: file.get_tensor(name) for name in _STORED}
    if metadata["checksum"] != _checksum(metadata["told"], _bytes(flat.values())):
        raise ValueError(f"{path} is damaged")
    told = json.loads(metadata["told"])
    fields: list[dict[str, Any]] = told["rollouts"]
    for name, values in flat.items():
        start = 0
        for number, shape in enumerate(told["shapes"][name]):
            if shape is None:
                continue
            bits = TOKEN_FIELDS.get(name) is np.bool_
            count = -(-shape[0] // 8) if bits else int(np.prod(shape))
            part = values[start : start + count]
            fields[number][name] = np.unpackbits(part, count=shape[0]) if bits else part.reshape(shape)
            start += count
    return told["about"], [Rollout(**each) for each in fields]


def _plain(rollout: Rollout) -> dict[str, Any]:
    """Returns the fields that are neither arrays nor the request's nor None."""
    left_out = {*_STORED, *_OF_REQUEST}
    return {name: value for name, value in vars(rollout).items() if name not in left_out and value is not None}


def _bytes(arrays: Iterable[np.ndarray | None]) -> Iterator[memoryview]:
    """Yields the stored bytes of arrays: views of them, except for masks, whose bits are packed."""
    for array in arrays:
        if array is not None and array.size:
            stored = np.packbits(array) if array.dtype == np.bool_ else np.ascontiguousarray(array)
            yield stored.data.cast("B")


def _checksum(told: str, data: Iterable[memoryview]) -> str:
    found = zlib.crc32(told.encode())
    for each in data:
        found = zlib.crc32(each, found)
    return f"{found:08x}"
