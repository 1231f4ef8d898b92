"""What attention of each kind costs: ordinary, with a gate, latent, in windows, and the gated delta net. No torch.

D hidden size, A heads, G key/value groups, C channels of a head; of a delta net H key heads of K channels and U value
heads of V.
"""

from __future__ import annotations

from dataclasses import dataclass

from nemo_oprd.models import ModelSpec

# tokens whose corrections a delta net's kernels solve for together
_CHUNK = 64


@dataclass(frozen=True)
class AttentionParameters:
    """Of one layer: split over tensor ranks, and on each of them; `products` of both are in matrix products."""

    split: int
    whole: int
    products: int


def is_delta_net(spec: ModelSpec, layer: int) -> bool:
    """Whether layer `layer` (1-based) has a gated delta net."""
    return spec.delta is not None and spec.delta.layers[layer - 1]


def attention_parameters(spec: ModelSpec, layer: int) -> AttentionParameters:
    """Of the attention of layer `layer` (1-based), without the norm before it."""
    d = spec.hidden_size
    if is_delta_net(spec, layer):
        delta = spec.delta
        assert delta is not None
        keys, values = delta.key_heads * delta.key_channels, delta.value_heads * delta.value_channels
        products = d * (2 * keys + 2 * values + 2 * delta.value_heads) + values * d
        return AttentionParameters(
            products + (2 * keys + values) * delta.width + 2 * delta.value_heads, delta.value_channels, products
        )
    if spec.latent is not None:
        latent = spec.latent
        down = d * (latent.query_rank + latent.key_rank + latent.rotated)
        up = latent.query_rank * (latent.plain + latent.rotated) + latent.key_rank * (latent.plain + latent.value)
        split = spec.num_heads * (up + latent.value * d)
        return AttentionParameters(split, down + latent.query_rank + latent.key_rank, split + down)
    q, kv = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    products = (q * (3 if spec.output_gate else 2) + 2 * kv) * d
    split = products + (q + 2 * kv if spec.qkv_bias else 0) + (spec.num_heads if spec.sinks else 0)
    norms = 0 if not spec.qk_norm else q + kv if spec.whole_qk_norm else 2 * spec.head_dim
    return AttentionParameters(split, norms + (d if spec.proj_bias else 0), products)


def attention_flops(spec: ModelSpec, layer: int, length: float, *, causal: bool = True) -> float:
    """Operations per token of layer `layer` (1-based) between tokens, in a sequence of `length` tokens, forward.

    Args:
        causal: count what a kernel for causal attention computes; False counts the whole square.
    """
    if is_delta_net(spec, layer):
        delta = spec.delta
        assert delta is not None
        state = 6.0 * delta.key_channels * delta.value_channels  # read twice and corrected
        within = 4.0 * _CHUNK * (delta.key_channels + delta.value_channels)
        return delta.value_heads * (state + within)
    channels = 2 * spec.head_dim if spec.latent is None else spec.rotary_dim + spec.latent.plain + spec.latent.value
    seen = length * (0.5 if causal else 1.0)
    if spec.windowed and spec.windowed[layer - 1] and spec.window is not None and spec.window < length and causal:
        seen = spec.window * (1.0 - 0.5 * spec.window / length)
    return 2.0 * spec.num_heads * channels * seen


def all_attention_flops(spec: ModelSpec, depth: int, length: float, *, causal: bool = True) -> float:
    """As `attention_flops`, of layers 1 to `depth`."""
    return sum(attention_flops(spec, layer, length, causal=causal) for layer in range(1, depth + 1))


def delta_net_values(spec: ModelSpec) -> float:
    """Values per token that a delta net keeps for its backward pass, over all tensor ranks; 0 without one.

    The projections before and after the convolution, queries and keys for every value head, the net's output, and that
    with its norm and gate. Counted from Megatron's layer; not yet compared with a GPU.
    """
    if spec.delta is None:
        return 0.0
    delta = spec.delta
    keys, values = delta.key_heads * delta.key_channels, delta.value_heads * delta.value_channels
    return 2.0 * (2 * keys + values) + values + 2.0 * delta.value_heads * delta.key_channels + 3.0 * values
