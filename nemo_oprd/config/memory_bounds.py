"""Bounds of memory that are no keys, for the code that keeps them and for `plan`, which imports no torch."""

from __future__ import annotations

from nemo_oprd.models import ModelSpec

# Bytes of all rows of the layers whose targets are exchanged at the same time. Every rank knows this number, so that
# all of them make the same messages; more layers to a message means fewer messages.
LAYERS_AT_A_TIME_BYTES = 1 << 28
# The share of a GPU's free memory that targets may take with `teacher.resident_microbatches=auto`, twice while they are
# sent; the rest is for activations and logits.
TARGET_SHARE = 0.25
# The share of a GPU's free memory of the in-process engine's KV cache with `rollout.max_cache_tokens=auto`. The rest is
# for what decoding needs besides: activations of the prompts, logits in float64 and their sorted copies, and the copies
# of one layer's keys and values when finished sequences leave.
CACHE_SHARE = 0.7


def cache_bytes_per_token(spec: ModelSpec, tensor: int, value_bytes: int) -> int:
    """Bytes of the keys and values of one token, in all layers of one of `tensor` tensor ranks."""
    return spec.num_layers * (spec.num_kv_heads // tensor) * spec.head_dim * 2 * value_bytes
