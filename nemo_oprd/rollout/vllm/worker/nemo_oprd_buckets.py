"""The bytes of some weight tensors in a row, a digest that both sides of a transfer compute from them, and the group.

The trainer and vLLM's workers both import this module, so it needs torch alone.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import socket
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist

# every tensor starts at a multiple of this many bytes, so that its part of the bucket is aligned for any dtype
ALIGNMENT = 64
# words per step of a digest: on a CPU what a step makes fits into the cache, elsewhere few kernels are started
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
    """Some tensors one after the other in `data`, uint8 [bytes]; the padding between them is zero."""

    entries: list[Entry]
    data: torch.Tensor

    @property
    def used(self) -> int:
        """Bytes up to the end of the last tensor's padding."""
        return self.entries[-1].start + self.entries[-1].padded if self.entries else 0

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Copies a tensor behind the last one, and clears its padding; `data` must have room for it."""
        entry = Entry(name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape), self.used)
        part = self.data[entry.start : entry.start + entry.size]
        part.copy_(tensor.detach().contiguous().reshape(-1).view(torch.uint8))
        self.data[entry.start + entry.size : entry.start + entry.padded].zero_()
        self.entries.append(entry)

    def trimmed(self) -> Bucket:
        """Without the room that is left."""
        return Bucket(self.entries, self.data[: self.used])

    def describe(self) -> list[dict[str, Any]]:
        """The entries as JSON."""
        return [asdict(entry) for entry in self.entries]

    @staticmethod
    def of(entries: list[dict[str, Any]], data: torch.Tensor) -> Bucket:
        """The bucket of described entries."""
        return Bucket([Entry(**entry) for entry in entries], data)

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(HF name, view of the bucket's bytes)."""
        for entry in self.entries:
            part = self.data[entry.start : entry.start + entry.size]
            yield entry.name, part.view(getattr(torch, entry.dtype)).view(entry.shape)


def padded_bytes(tensor: torch.Tensor) -> int:
    """Bytes that a tensor takes in a bucket."""
    return -(-tensor.numel() * tensor.element_size() // ALIGNMENT) * ALIGNMENT


class Digest:
    """A digest of tensors that is independent of their order and of the buckets they travel in.

    Of each tensor it holds name, dtype, shape and two sums modulo 2^64 over its 32-bit words w_i, zero-padded: sum w_i
    and sum (i + 1) w_i, which sees words that are exchanged. The sums are exact on any device.
    """

    def __init__(self) -> None:
        self.tensors: dict[str, tuple] = {}

    def add(self, bucket: Bucket) -> None:
        """Adds the tensors of a bucket; ValueError if one was added before."""
        for entry in bucket.entries:
            if entry.name in self.tensors:
                raise ValueError(f"the tensor {entry.name} came twice")
            words = bucket.data[entry.start : entry.start + entry.padded].view(torch.int32)
            self.tensors[entry.name] = (entry.dtype, tuple(entry.shape), *_sums(words))

    def value(self) -> str:
        """32 hexadecimal digits."""
        text = repr(sorted(self.tensors.items()))
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _sums(words: torch.Tensor) -> tuple[int, int]:
    plain = torch.zeros((), dtype=torch.int64, device=words.device)
    weighted = torch.zeros_like(plain)
    step = _DIGEST_WORDS_CPU if words.device.type == "cpu" else _DIGEST_WORDS
    for start in range(0, len(words), step):
        part = words[start : start + step].long()
        plain += part.sum()
        weighted += (part * torch.arange(start + 1, start + 1 + len(part), device=words.device)).sum()
    return int(plain), int(weighted)


def open_group(store: Any, prefix: str, rank: int, size: int, backend: str, timeout_s: float) -> Any:
    """The process group of the weights; every member calls this. Independent of the default group of the process."""
    timeout, host, store = datetime.timedelta(seconds=timeout_s), store.host, dist.PrefixStore(prefix, store)
    if backend == "gloo":
        return dist.ProcessGroupGloo(store, rank, size, gloo_options(host, timeout))
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    return dist.ProcessGroupNCCL(store, rank, size, options)


def address_towards(host: str) -> str:
    """The address of this machine from which `host` is reached; nothing is sent. OSError if there is no such host."""
    family, kind, protocol, _, place = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(place)
        return str(probe.getsockname()[0])


def gloo_options(host: str, timeout: datetime.timedelta) -> Any:
    """Of a gloo group whose store is at `host`: this member listens at the one address from which it reaches that."""
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=address_towards(host))]
    options._timeout = timeout
    return options


def send(group: Any, bucket: Bucket | None, device: torch.device) -> None:
    """Broadcasts from the first rank: lengths of description and data, the description, the data. None is the end."""
    text = b"" if bucket is None else json.dumps(bucket.describe()).encode()
    _broadcast(group, torch.tensor([len(text), 0 if bucket is None else len(bucket.data)]).to(device))
    if bucket is not None:
        _broadcast(group, torch.frombuffer(bytearray(text), dtype=torch.uint8).to(device))
        _broadcast(group, bucket.data.to(device))


def receive(group: Any, device: torch.device) -> Bucket | None:
    """The bucket of the first rank's `send`; None at the end."""
    text, size = _broadcast(group, torch.zeros(2, dtype=torch.int64, device=device)).tolist()
    if not text:
        return None
    description = _broadcast(group, torch.empty(text, dtype=torch.uint8, device=device))
    data = _broadcast(group, torch.empty(size, dtype=torch.uint8, device=device))
    return Bucket.of(json.loads(bytes(description.tolist())), data)


def _broadcast(group: Any, tensor: torch.Tensor) -> torch.Tensor:
    """The first rank's `tensor`, in place on all ranks."""
    options = dist.BroadcastOptions()
    options.rootRank, options.rootTensor = 0, 0
    group.broadcast([tensor], options).wait()
    return tensor
