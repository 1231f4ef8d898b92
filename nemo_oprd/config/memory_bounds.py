"""Memory bounds that are not configurable, shared by the code that keeps them and by `plan`, which imports no torch."""

from __future__ import annotations

from nemo_oprd.models import ModelSpec

# The most bytes of targets, of all rows, that ranks exchange at a time; one layer's may be more. All ranks use the same
# number, so that they send the same messages. More layers per message means fewer messages.
LAYERS_AT_A_TIME_BYTES = 1 << 28
# The share of a GPU's free memory that targets may take with `teacher.resident_microbatches=auto`, twice while they are
# sent; the rest is for activations and logits.
TARGET_SHARE = 0.25
# The share of a GPU's free memory that the in-process engine's KV cache takes with `rollout.max_cache_tokens=auto`. The
# rest is for decoding: activations of the prompts, logits in float64 and their sorted copies, and the copies
# of one layer's keys and values when finished sequences leave.
CACHE_SHARE = 0.7
# The number of queries per sequence whose scores are in memory at a time, in attention with soft-capped scores.
CAPPED_QUERIES = 512
# The number of tokens in a forward pass of an in-process engine without cache, with `rollout.max_cache_tokens=auto`.
UNCACHED_TOKENS = 16384


def cache_bytes_per_token(spec: ModelSpec, tensor: int, value_bytes: int) -> int:
    """Returns the bytes per token on one of `tensor` ranks, in all layers' caches that grow with the sequence.

    They hold keys and values, or for latent attention the narrow state and the rotated channels, which every rank has.
    `state_bytes` counts layers with a sliding window or a delta net.
    """
    growing = sum(not bounded for bounded in _bounded(spec))
    if spec.latent is not None:
        return growing * (spec.latent.key_rank + spec.latent.rotated) * value_bytes
    return growing * _keys_and_values(spec, tensor, value_bytes)


def state_bytes(spec: ModelSpec, tensor: int, value_bytes: int, length: int) -> int:
    """Returns the bytes of a sequence of `length` tokens in caches of fixed size on one of `tensor` tensor ranks.

    They hold the keys and values of sliding windows, and for delta nets the state in float32 and the last inputs of
    the convolution.
    """
    windows, nets = sum(spec.windowed), 0 if spec.delta is None else sum(spec.delta.layers)
    found = 0
    if windows and spec.window is not None:
        found += windows * min(spec.window, length) * _keys_and_values(spec, tensor, value_bytes)
    if nets and spec.delta is not None:
        keys, values = (
            heads // tensor * channels
            for heads, channels in (
                (spec.delta.key_heads, spec.delta.key_channels),
                (spec.delta.value_heads, spec.delta.value_channels),
            )
        )
        found += nets * (
            values * spec.delta.key_channels * 4 + (spec.delta.width - 1) * (2 * keys + values) * value_bytes
        )
    return found


def _keys_and_values(spec: ModelSpec, tensor: int, value_bytes: int) -> int:
    return spec.kv_heads_per_rank(tensor) * spec.head_dim * 2 * value_bytes


def _bounded(spec: ModelSpec) -> tuple[bool, ...]:
    """Returns for each layer whether its cache has a fixed size."""
    windowed = spec.windowed or (False,) * spec.num_layers
    nets = (False,) * spec.num_layers if spec.delta is None else spec.delta.layers
    return tuple(a or b for a, b in zip(windowed, nets, strict=True))
