"""How far a round is, while it goes on: which responses the controllers have, and whether these are enough.

The controllers tell the job's key-value store, the world's first rank reads there, and says when all ranks may go on.
So a rank that waits takes part in no collective, and nothing is asked of the machines that sample.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from nemo_oprd.models.megatron.parallel import first_ranks
from nemo_oprd.rollout.vllm.client_process import Round

# how often a rank that waits looks
LOOK_S = 0.05


@dataclass(frozen=True)
class Seen:
    """What a rank has of a round that goes on: the complete responses; whether its part is over, and went wrong."""

    complete: frozenset[int] = frozenset()
    is_over: bool = True
    has_failed: bool = False

    @staticmethod
    def of(mine: Round, *, is_over: bool) -> Seen:
        """Of a controller; what it samples in the meantime does not count."""
        return Seen(frozenset(list(mine.sampled)), is_over, is_over and mine.error is not None)

    def packed(self) -> bytes:
        """As the store holds it."""
        flags = np.array([self.is_over, self.has_failed], np.int32)
        return np.concatenate([flags, np.array(sorted(self.complete), np.int32)]).tobytes()

    @staticmethod
    def unpacked(data: bytes) -> Seen:
        """The inverse of `packed`."""
        over, failed, *complete = np.frombuffer(data, np.int32).tolist()
        return Seen(frozenset(complete), bool(over), bool(failed))

    @staticmethod
    def joined(parts: Iterable[Seen]) -> Seen:
        """Of several ranks together: over if all are, failed if one has."""
        parts = [*parts]
        complete = frozenset[int]().union(*(part.complete for part in parts))
        return Seen(complete, all(part.is_over for part in parts), any(part.has_failed for part in parts))


class Progress:
    """Every rank has one and calls it alike. `controllers`: the ranks that bring responses home."""

    def __init__(self, controllers: Iterable[int]) -> None:
        self._controllers = sorted(controllers)
        self._wait = 0
        self._judged: Seen | None = None  # what was not enough
        self._prefix = f"nemo_oprd/vllm/progress/{first_ranks(time.time_ns())}"  # of no earlier engine of this job
        self._store: Any = _get_default_store().clone()  # type: ignore[attr-defined]

    def wait(
        self, look: Callable[[], Seen] | None, enough: Callable[[AbstractSet[int]], bool], should_go: Callable[[], bool]
    ) -> None:
        """Returns on every rank when enough responses are complete, the round is over, or failed on one of them.

        Args:
            look: what this controller has; None on other ranks.
            enough: see `RolloutEngine.gather`; the first rank asks it.
            should_go: called repeatedly on every rank; True ends the wait of all of them.
        """
        self._wait += 1
        self._judged = None
        go, told = self._key("go"), None
        while not self._store.check([go]):
            seen = None if look is None else look()
            if seen is not None and seen != told:
                self._store.set(self._key(dist.get_rank()), seen.packed())
                told = seen
            if should_go() or (dist.get_rank() == 0 and self._is_due(enough)):
                self._store.set(go, "yes")
                break
            time.sleep(LOOK_S)

    def forget(self) -> None:
        """Removes what the last wait has left in the store, after all ranks have seen its end."""
        if dist.get_rank() == 0:
            for key in (self._key("go"), *map(self._key, self._controllers)):
                self._store.delete_key(key)

    def _is_due(self, enough: Callable[[AbstractSet[int]], bool]) -> bool:
        keys = [self._key(rank) for rank in self._controllers]
        parts = [Seen.unpacked(self._store.get(key)) if self._store.check([key]) else None for key in keys]
        seen = Seen.joined(Seen(is_over=False) if part is None else part for part in parts)
        if seen == self._judged:
            return False
        self._judged = seen
        return seen.is_over or seen.has_failed or enough(seen.complete)

    def _key(self, name: str | int) -> str:
        return f"{self._prefix}/{self._wait}/{name}"
