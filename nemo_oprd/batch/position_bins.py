"""Bins of token numbers, in which cosines are counted by their place in a response (the paper's position figure).

The first bin is a response's first (last) token, bin j > 0 holds those with 2^(j-1) < number <= 2^j, so that bins 0..j
together are the first (last) 2^j tokens.
"""

from __future__ import annotations

import numpy as np

from nemo_oprd.batch.token_table import TokenTable

# 2^23 tokens are more than any response has
PROFILE_BINS = 24


def profile_bins(numbers: np.ndarray) -> np.ndarray:
    """Bins of 0-based token numbers, counted from a response's start or from its end."""
    return np.ceil(np.log2(numbers + 1)).astype(np.int64)


def row_bins(table: TokenTable, positions: str) -> np.ndarray:
    """Bin of each row, counted from the end of its response with `positions` = "last_k", else from the start."""
    return profile_bins(table.from_end if positions == "last_k" else table.from_start)
