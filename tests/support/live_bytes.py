"""Counts the live bytes of what a computation allocates.

Storages are counted as operations create and free them, so the figures are exact and the same on every machine.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class LiveBytes(TorchDispatchMode):
    """Counts the live bytes of storages that operations create: `now`, and the maximum so far, `peak`."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._known: dict[int, weakref.ref[Any]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs the operation and counts the storages of its results."""
        known = {id(a.untyped_storage()) for a in args if isinstance(a, torch.Tensor)}
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else [out]:
            if isinstance(tensor, torch.Tensor):
                self._track(tensor.untyped_storage(), known)
        return out

    def _track(self, storage: Any, known: set[int]) -> None:
        if id(storage) in self._known or id(storage) in known:
            return
        size, key = storage.nbytes(), id(storage)

        def freed(_: Any) -> None:
            self.now -= size
            del self._known[key]

        self._known[key] = weakref.ref(storage, freed)
        self.now += size
        self.peak = max(self.peak, self.now)
