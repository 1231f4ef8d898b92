"""A batch as a dictionary of tensors whose first dimension is the response."""

from __future__ import annotations

from collections import UserDict
from typing import Any


class BatchedDataDict(UserDict):
    """Tensors by name."""

    @property
    def size(self) -> int:
        """Responses."""
        return len(next(iter(self.data.values())))

    def slice(self, start: int, end: int) -> BatchedDataDict:
        """Some consecutive responses."""
        return BatchedDataDict({name: values[start:end] for name, values in self.data.items()})

    def shard_by_batch_size(
        self,
        shards: int,
        batch_size: int | None = None,
        allow_uneven_shards: bool = False,
        dynamic_batching_args: Any = None,
        sequence_packing_args: Any = None,
    ) -> Any:
        """One batch per shard, with its part of every `batch_size` responses; for packing in another order.

        NeMo-RL sorts the responses into packs of similar size. Here every second response comes first.
        """
        length = batch_size or self.size
        rows: list[list[int]] = [[] for _ in range(shards)]
        for first in range(0, self.size, length):
            for shard, mine in enumerate(rows):
                own = list(range(first + shard * length // shards, first + (shard + 1) * length // shards))
                mine += own[1::2] + own[::2] if sequence_packing_args else own
        parts = [BatchedDataDict({name: values[mine] for name, values in self.data.items()}) for mine in rows]
        return (parts, []) if sequence_packing_args else parts
