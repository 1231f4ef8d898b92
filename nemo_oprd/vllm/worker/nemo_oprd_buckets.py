"""Buckets of weight tensors, the digest that both sides of a transfer compute, and their broadcast in a process group.

The trainer and vLLM's workers both import this module, so it needs torch alone.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch

# every tensor starts at a multiple of this many bytes, so that its part of the bucket is aligned for any dtype
ALIGNMENT = 64
# words per step of a digest: on a CPU a step's temporaries fit into the cache, elsewhere few kernels are started
_DIGEST_WORDS, _DIGEST_WORDS_CPU = 1 << 20, 1 << 16


@dataclass(frozen=True)
class Entry:
    """One tensor of a bucket: HF name, dtype such as "bfloat16", shape, first byte in the bucket."""

    name: str
    dtype: str
    shape: list[int]
    start: int

    @property
    def size(self) -> int:
        """Bytes of the tensor."""
        return torch.Size(self.shape).numel() * getattr(torch, self.dtype).itemsize

    @property
    def padded(self) -> int:
        """Bytes up to the next tensor."""
        return -(-self.size // ALIGNMENT) * ALIGNMENT


@dataclass
class Bucket:
    """Weight tensors in a row in `data`, uint8 [bytes]; the padding between them is zero."""

    entries: list[Entry]
    data: torch.Tensor

    @property
    def used(self) -> int:
        """Bytes up to the end of the last tensor's padding."""
        return self.entries[-1].start + self.entries[-1].padded if self.entries else 0

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Copies a tensor behind the last one, and zeroes its padding; `data` must have room for it."""
        entry = Entry(name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape), self.used)
        part = self.data[entry.start : entry.start + entry.size]
        part.copy_(tensor.detach().contiguous().reshape(-1).view(torch.uint8))
        self.data[entry.start + entry.size : entry.start + entry.padded].zero_()
        self.entries.append(entry)

    def trimmed(self) -> Bucket:
        """Returns the bucket without its unused room."""
        return Bucket(self.entries, self.data[: self.used])

    def describe(self) -> list[dict[str, Any]]:
        """Returns the entries as JSON types."""
        return [asdict(entry) for entry in self.entries]

    @staticmethod
    def of(entries: list[dict[str, Any]], data: torch.Tensor) -> Bucket:
        """Rebuilds the bucket of described entries."""
        return Bucket([Entry(**entry) for entry in entries], data)

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields (HF name, view of the bucket's bytes)."""
        for entry in self.entries:
            part = self.data[entry.start : entry.start + entry.size]
            yield entry.name, part.view(getattr(torch, entry.dtype)).view(entry.shape)


def padded_bytes(tensor: torch.Tensor) -> int:
    """Returns the bytes that a tensor takes in a bucket."""
    return -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT


class Digest:
    """A digest of tensors that is independent of their order and of the buckets they travel in.

    Of each tensor it holds name, dtype, shape and two sums modulo 2^64 over its 32-bit words w_i, zero-padded: sum w_i
    and sum (i + 1) w_i, which detects swapped words. The sums are exact on any device.
    """

    def __init__(self) -> None:
        self.tensors: dict[str, tuple] = {}

    def add(self, bucket: Bucket) -> None:
        """Adds the tensors of a bucket; ValueError if one of them was added before."""
        sums = []
        for entry in bucket.entries:
            if entry.name in self.tensors:
                raise ValueError(f"the tensor {entry.name} came twice")
            self.tensors[entry.name] = ()
            sums.append(_sums(bucket.data[entry.start : entry.start + entry.padded].view(torch.int32)))
        # one read of all sums: the host waits for a GPU once per bucket
        for entry, both in zip(bucket.entries, torch.stack(sums).tolist() if sums else [], strict=True):
            self.tensors[entry.name] = (entry.dtype, tuple(entry.shape), *both)

    def value(self) -> str:
        """Returns the digest as 32 hexadecimal digits."""
        text = repr(sorted(self.tensors.items()))
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _sums(words: torch.Tensor) -> torch.Tensor:
    """Computes both sums of `Digest`, int64 [2] on the device of the words."""
    plain = torch.zeros((), dtype=torch.int64, device=words.device)
    weighted = torch.zeros_like(plain)
    step = _DIGEST_WORDS_CPU if words.device.type == "cpu" else _DIGEST_WORDS
    for start in range(0, len(words), step):
        part = words[start : start + step].long()
        plain += part.sum()
        weighted += (part * torch.arange(start + 1, start + 1 + len(part), device=words.device)).sum()
    return torch.stack([plain, weighted])


def send(group: Any, bucket: Bucket | None) -> None:
    """Broadcasts from the first member: lengths of description and data, the description, the data. None is the end.

    `group`: a `Group` of nemo_oprd_group.py, whose errors this raises.
    """
    text = b"" if bucket is None else json.dumps(bucket.describe()).encode()
    group.broadcast(torch.tensor([len(text), 0 if bucket is None else len(bucket.data)]).to(group.device))
    if bucket is not None:
        group.broadcast(torch.frombuffer(bytearray(text), dtype=torch.uint8).to(group.device))
        group.broadcast(bucket.data.to(group.device))


def receive_all(group: Any, load: Callable[[Bucket], None]) -> None:
    """Receives every bucket of the first member and calls `load`, up to the end. An error ends the transfer for all."""
    loading = False
    try:
        while (bucket := _receive(group)) is not None:
            loading = True
            load(bucket)
            loading = False
    except BaseException as error:
        group.end(f"{type(error).__name__}: {' '.join(str(error).split())}", own=loading)
        raise


def _receive(group: Any) -> Bucket | None:
    text, size = group.broadcast(torch.zeros(2, dtype=torch.int64, device=group.device)).tolist()
    if not text:
        return None
    description = group.broadcast(torch.empty(text, dtype=torch.uint8, device=group.device))
    data = group.broadcast(torch.empty(size, dtype=torch.uint8, device=group.device))
    return Bucket.of(json.loads(bytes(description.tolist())), data)
