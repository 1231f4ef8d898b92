"""The memory of a rehearsed rank: every storage of a fake tensor, who allocated it, and the peaks of the phases."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from nemo_oprd.tools.rehearse.places import Place, current_place

# what PyTorch's allocator rounds a block up to
BLOCK = 512
# the share of the bytes in use by which they may grow between two moments that should be alike
_TOLERATED_GROWTH = 1e-3


@dataclass
class Peak:
    """The most bytes in use in a phase.

    Attributes:
        bytes, rounded: on the device, as tensors and as blocks of PyTorch's allocator.
        at_peak: place of the allocation, and operation -> bytes.
        host: bytes in host memory, of data that a run would copy from the device or read from files.
    """

    bytes: int = 0
    rounded: int = 0
    at_peak: dict[str, int] = field(default_factory=dict)
    host: int = 0


@dataclass(frozen=True)
class _Block:
    """Memory that is in use. `number` counts all blocks."""

    size: int
    place: Place
    what: str
    number: int


class Memory:
    """The memory in use. `peak` is that of the phase that runs now; `freed` is called with the key of a storage."""

    def __init__(self, freed: Callable[[int], None]) -> None:
        self.live = self.most = self.host = 0
        self.peak = Peak()
        self._freed, self._rounded, self._count = freed, 0, 0
        self._blocks: dict[int, _Block] = {}
        self._references: dict[int, Any] = {}
        self._marks: dict[str, tuple[int, int]] = {}  # moment -> live bytes and number of blocks when it came last

    def begin(self, peak: Peak) -> None:
        """Begins a phase, or goes on with it: the memory in use counts for it."""
        self.peak = peak
        peak.bytes, peak.rounded = max(peak.bytes, self.live), max(peak.rounded, self._rounded)
        peak.host = max(peak.host, self.host)

    def track(self, tensor: torch.Tensor, operation: str) -> None:
        """Counts the memory of a tensor that an operation returned, unless it is a view of memory that is counted."""
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key in self._references:
            return
        if tensor.device.type == "cuda":
            self._allocate(storage, f"{operation}{list(tensor.shape)}")
        elif tensor.device.type == "cpu" and isinstance(tensor, FakeTensor):
            self.host += size
            self.peak.host = max(self.peak.host, self.host)
            self._references[key] = weakref.ref(storage, lambda _: self._free_host(key, size))

    def forget(self, moment: str) -> None:
        """Forgets a moment: the next `settled` at it counts as the first one."""
        self._marks.pop(moment, None)

    def settled(self, moment: str) -> dict[Place, int]:
        """If more is alive than when this moment came last: the lines that allocated what is new, and its bytes."""
        before, self._marks[moment] = self._marks.get(moment), (self.live, self._count)
        tolerated = 0.0 if before is None else _TOLERATED_GROWTH * before[0]
        if before is None or self.live - before[0] <= tolerated:
            return {}
        newer: Counter[Place] = Counter()
        for block in self._blocks.values():
            if block.number > before[1]:
                newer[block.place] += block.size
        return {place: size for place, size in newer.items() if size > tolerated}

    def allocated_at(self, tensor: torch.Tensor) -> Place:
        """The line that allocated the memory of a tensor on the device."""
        return self._blocks[tensor.untyped_storage()._cdata].place

    def _allocate(self, storage: Any, what: str) -> None:
        key, size = storage._cdata, storage.nbytes()
        rounded = -(-size // BLOCK) * BLOCK
        self._count += 1
        self._blocks[key] = _Block(size, current_place(), what, self._count)
        self._references[key] = weakref.ref(storage, lambda _: self._free(key, size, rounded))
        self.live += size
        self._rounded += rounded
        self.most = max(self.most, self.live)
        peak = self.peak
        peak.rounded = max(peak.rounded, self._rounded)
        if self.live > peak.bytes:
            # a list of all tensors is made only where the peak has grown enough to be worth it
            is_new = self.live > 1.002 * sum(peak.at_peak.values())
            peak.bytes = self.live
            if is_new:
                peak.at_peak = self._by_place()

    def _free(self, key: int, size: int, rounded: int) -> None:
        self.live -= size
        self._rounded -= rounded
        self._blocks.pop(key, None)
        self._references.pop(key, None)
        self._freed(key)

    def _free_host(self, key: int, size: int) -> None:
        self.host -= size
        self._references.pop(key, None)

    def _by_place(self) -> dict[str, int]:
        found: Counter[str] = Counter()
        for block in self._blocks.values():
            found[f"{block.place} {block.what}"] += block.size
        return dict(found)
