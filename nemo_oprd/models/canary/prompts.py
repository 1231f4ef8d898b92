"""The prompts on which states are compared: the same ids for every engine and at every start."""

from __future__ import annotations

import random
from typing import Any

from nemo_oprd.models.complete_config import text_config

# of the short prompts: one token, which attends to itself only, and lengths that no power of two divides
LENGTHS = (7, 33, 1, 64, 18)
# how far the longest prompt goes beyond the window and the chunk; without either it has as many tokens in all
BEYOND = 37
_SHORTEST_LONG = 129


def canary_prompts(vocab_size: int, window: int | None, chunk: int, limit: int | None = None) -> list[list[int]]:
    """A ragged batch of token ids, drawn from the whole vocabulary.

    Args:
        window: the model's largest sliding window in tokens; None if it has none.
        chunk: tokens that the engine computes at a time; 0 if it computes sequences whole.
        limit: the largest number of tokens of a prompt, for models with fewer positions than window and chunk.

    Returns:
        Prompts of 1 token to `max(window, chunk) + 37` tokens; the longest one is the second.

    Raises:
        ValueError: `limit` leaves no row beyond the window.
    """
    longest = max(_SHORTEST_LONG, (window or 0) + BEYOND, chunk + BEYOND if chunk else 0)
    if limit is not None:
        longest = min(longest, limit)
        if window is not None and longest <= window:
            raise ValueError(
                f"a canary of at most {limit} tokens does not exceed the sliding window of {window} tokens; expected "
                f"room for {window + 1}: raise the engine's longest sequence"
            )
    draw = random.Random(20)
    lengths = [LENGTHS[0], longest, *LENGTHS[1:]]
    return [[draw.randrange(vocab_size) for _ in range(min(length, limit or length))] for length in lengths]


def sliding_window(hf_config: dict[str, Any]) -> int | None:
    """The sliding window of a model by its config.json in tokens; None if no sequence of the model exceeds one."""
    text = text_config(hf_config)
    window = text.get("sliding_window")
    kinds = text.get("layer_types")
    used = text.get("use_sliding_window", True) and (kinds is None or "sliding_attention" in kinds)
    most = text.get("max_position_embeddings")
    return window if used and window and (most is None or window < most) else None
