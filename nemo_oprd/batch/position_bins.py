"""Bins of token numbers, over which cosines are averaged by position in the response (the paper's position figure).

Tokens are numbered from 1, from the start (or the end) of a response. Bin 0 holds token 1, and bin j > 0 holds the
tokens with 2^(j-1) < number <= 2^j. Bins 0..j together hold the first (or last) 2^j tokens.
"""

from __future__ import annotations

import numpy as np

from nemo_oprd.batch.token_table import TokenTable

# bins 0..23 hold responses of up to 2^23 tokens
PROFILE_BINS = 24


def profile_bins(numbers: np.ndarray) -> np.ndarray:
    """Bins [N] of 0-based token numbers [N], which count from the start or from the end of a response."""
    return np.ceil(np.log2(numbers + 1)).astype(np.int64)


def sums_of_first(values: np.ndarray, numbers: np.ndarray) -> dict[int, float]:
    """k = 1, 2, 4, ... -> sum of the `values` [N] with a 0-based number below k, up to the first k that covers all."""
    sums = np.cumsum(np.bincount(profile_bins(numbers), values))
    return {1 << j: total for j, total in enumerate(sums.tolist())}


def row_bins(table: TokenTable, positions: str) -> np.ndarray:
    """Bin of each row [N]: counted from the end of its response if `positions` is "last_k", else from the start."""
    return profile_bins(table.from_end if positions == "last_k" else table.from_start)
