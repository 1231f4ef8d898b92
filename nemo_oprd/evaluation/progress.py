"""A line on the first rank every some seconds while an evaluation samples: responses done of all, and the time left."""

from __future__ import annotations

import itertools
import logging
import time
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from nemo_oprd.observability.metrics_log import hours_minutes_seconds

logger = logging.getLogger(__name__)

EVERY_S = 15.0

_numbers = itertools.count(1)


class Progress:
    """Counts the complete responses of all ranks in the job's key-value store; every rank makes one at the same time.

    The first rank logs when responses of its own are complete, so a rank that samples nothing logs nothing.

    Args:
        label: what is sampled.
        done: responses that were there at the start, of `total`.
    """

    def __init__(self, label: str, done: int, total: int) -> None:
        self._label, self._done, self._total = label, done, total
        # a connection of its own: while one waits, other users of it get no answer
        self._store: Any = _get_default_store().clone()  # type: ignore[attr-defined]
        self._key = f"nemo_oprd/evaluation/{next(_numbers)}"
        self._started = self._printed = time.monotonic()

    def add(self, count: int) -> None:
        """Adds responses of this rank, from any thread."""
        new, now = self._store.add(self._key, count), time.monotonic()
        if dist.get_rank() == 0 and new and now - self._printed >= EVERY_S:
            self._printed = now
            done = min(self._done + new, self._total)
            left = hours_minutes_seconds((now - self._started) / new * (self._total - done))
            logger.info(f"evaluating {self._label}: {done}/{self._total} responses  left {left}")

    def close(self) -> None:
        """Forgets the count, after the sampling of all ranks."""
        if dist.get_rank() == 0:
            self._store.delete_key(self._key)
