"""Sets of token ids: the ids that an engine may sample, and the ids that two models share.

A model has rows for `vocab_size` ids, often more than its tokenizer has tokens: the embedding is padded, and added
tokens may leave gaps. A row without a token is never trained, so an engine must not sample it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class TokenIds:
    """The ids below `limit`, except those in `gaps`.

    Attributes:
        gaps: (first id, end) of each run of ids below `limit` that are left out, ascending. Id `limit` - 1 is in
            none of them.

    >>> TokenIds.of([0, 1, 2, 6, 7], 10)
    TokenIds(limit=8, gaps=((3, 6),))
    """

    limit: int
    gaps: tuple[tuple[int, int], ...] = ()

    @staticmethod
    def of(ids: Iterable[int], limit: int) -> TokenIds:
        """Returns the set of the `ids` below `limit`; `ids` may be in any order.

        Raises:
            ValueError: no id is below `limit`.
        """
        mask = np.zeros(limit, dtype=bool)
        given = np.fromiter(ids, np.int64)
        mask[given[given < limit]] = True
        return TokenIds._where(mask)

    @staticmethod
    def _where(mask: np.ndarray) -> TokenIds:
        found = np.flatnonzero(mask)
        if not len(found):
            raise ValueError(f"no id below {len(mask)} has a token; expected some: copy the tokenizer of this model")
        starts = np.flatnonzero(np.diff(found, prepend=-1) > 1)
        gaps = [(int(found[at - 1]) + 1 if at else 0, int(found[at])) for at in starts.tolist()]
        return TokenIds(int(found[-1]) + 1, tuple(gaps))

    @property
    def mask(self) -> np.ndarray:
        """Returns bool [limit]: true for the ids in the set."""
        mask = np.ones(self.limit, dtype=bool)
        for start, end in self.gaps:
            mask[start:end] = False
        return mask

    def outside(self, ids: np.ndarray | Sequence[int]) -> list[int]:
        """Returns those `ids` that are not in the set, in their order."""
        given = np.asarray(ids, np.int64)
        inside = (given >= 0) & (given < self.limit)
        if self.gaps:
            inside &= self.mask[np.where(inside, given, 0)]
        return given[~inside].tolist()  # type: ignore[no-any-return]

    def missing_below(self, limit: int) -> tuple[tuple[int, int], ...]:
        """Returns (first id, end) of each run of ids below `limit` (at least the set's own) that are not in the set."""
        return self.gaps if limit == self.limit else (*self.gaps, (self.limit, limit))

    def __len__(self) -> int:
        return self.limit - sum(end - start for start, end in self.gaps)

    def __contains__(self, i: int) -> bool:
        return 0 <= i < self.limit and not any(start <= i < end for start, end in self.gaps)

    def __and__(self, other: TokenIds) -> TokenIds:
        limit = min(self.limit, other.limit)
        return TokenIds._where(self.mask[:limit] & other.mask[:limit])

    def __str__(self) -> str:
        without = ", ".join(f"{start}..{end - 1}" if end - start > 1 else f"{start}" for start, end in self.gaps[:3])
        more = ", ..." if len(self.gaps) > 3 else ""
        return f"0..{self.limit - 1}" + (f" without {without}{more}" if without else "")
