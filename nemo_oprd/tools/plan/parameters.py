"""Costs of attention of each kind, and the parameters of a model that one rank holds and trains.

These are formulas: `plan` imports no torch, and only Megatron-Bridge has the shapes of some families' tensors. Tests
compare them with the shapes of the weight mappings (`mapped_shapes`) and with transformers' models.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from nemo_oprd.batch.layout import Layout
from nemo_oprd.config.memory_bounds import CAPPED_QUERIES
from nemo_oprd.models import ModelSpec

# The cost of each kind of attention: ordinary, with a gate, latent, in windows, and the gated delta net. No torch.
#
# D hidden size, A heads, G key/value groups, C channels of a head; of a delta net H key heads of K channels and U value
# heads of V.


# tokens whose corrections a delta net's kernels solve for together
_CHUNK = 64


@dataclass(frozen=True)
class AttentionParameters:
    """Parameters of a layer: split over tensor ranks, and whole on each; `products` of both are in matrix products."""

    split: int
    whole: int
    products: int


def is_delta_net(spec: ModelSpec, layer: int) -> bool:
    """Returns whether layer `layer` (1-based) has a gated delta net."""
    return spec.delta is not None and spec.delta.layers[layer - 1]


def attention_parameters(spec: ModelSpec, layer: int) -> AttentionParameters:
    """Returns the parameters of the attention of layer `layer` (1-based), without the norm before it."""
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
        up = (latent.query_rank or d) * (latent.plain + latent.rotated) + latent.key_rank * (
            latent.plain + latent.value
        )
        split = spec.num_heads * (up + latent.value * d)
        return AttentionParameters(split, down + latent.query_rank + latent.key_rank, split + down)
    heads = spec.heads(layer)
    q, k = spec.num_heads * heads.channels, heads.kv * heads.channels
    # the rows of tied values are there, and nothing reads them
    v = 0 if heads.tied else heads.kv * heads.value_channels
    products = (q * (2 if spec.output_gate else 1) + k + v + spec.num_heads * heads.value_channels) * d
    # of layers with heads of their own, those with windows have the term in the softmax
    sinks = spec.sinks and (not spec.layer_heads or spec.windowed[layer - 1])
    split = products + (q + k + v if spec.qkv_bias else 0) + (spec.num_heads if sinks else 0)
    norms = 0 if not spec.qk_norm else q + k if spec.whole_qk_norm else 2 * heads.channels
    return AttentionParameters(split, norms + (d if spec.proj_bias else 0), products)


def attention_flops(spec: ModelSpec, layer: int, length: float, *, causal: bool = True) -> float:
    """Returns forward operations per token of attention in layer `layer` (1-based), over `length` tokens, no weights.

    Args:
        causal: count what a kernel for causal attention computes; False counts the whole square.
    """
    if is_delta_net(spec, layer):
        delta = spec.delta
        assert delta is not None
        state = 6.0 * delta.key_channels * delta.value_channels  # read twice and corrected
        within = 4.0 * _CHUNK * (delta.key_channels + delta.value_channels)
        return delta.value_heads * (state + within)
    heads = spec.heads(layer)
    channels = heads.channels + heads.value_channels
    if spec.latent is not None:
        channels = spec.rotary_dim + spec.latent.plain + spec.latent.value
    seen = length * (0.5 if causal else 1.0)
    if spec.windowed and spec.windowed[layer - 1] and spec.window is not None and spec.window < length and causal:
        seen = spec.window * (1.0 - 0.5 * spec.window / length)
    return 2.0 * spec.num_heads * channels * seen


def all_attention_flops(spec: ModelSpec, depth: int, length: float, *, causal: bool = True) -> float:
    """Returns the sum of `attention_flops` over layers 1 to `depth`."""
    return sum(attention_flops(spec, layer, length, causal=causal) for layer in range(1, depth + 1))


def delta_net_values(spec: ModelSpec) -> float:
    """Returns the values per token, of two bytes, that a delta net keeps for its backward pass, over all tensor ranks.

    The product of the input, the queries and keys after their norm and again for every value head, the values, the
    rule's output and its corrections within a chunk, that output with its norm and with its gate, the gate and its SiLU
    in float32, and numbers per head. As rehearsed with FLA's kernels, and without torch.compile, which would keep less.
    0 without a delta net.
    """
    if spec.delta is None:
        return 0.0
    delta = spec.delta
    keys, values = delta.key_heads * delta.key_channels, delta.value_heads * delta.value_channels
    repeated = delta.value_heads * delta.key_channels
    return 4.0 * keys + 2.0 * repeated + 10.0 * values + delta.value_heads * (_CHUNK + 14)


def delta_net_backward_values(spec: ModelSpec) -> float:
    """Returns values per token that a delta net's backward pass adds to the kept ones at its peak; negative: it frees.

    The peak is in the delta rule: the chunks' first states, keys, values, and the gradients of all these. The
    backward passes of the output's gate and norm are done by then.
    """
    if spec.delta is None:
        return 0.0
    delta, states = spec.delta, 2.0 * spec.delta.key_channels * spec.delta.value_channels / _CHUNK
    rule = delta.value_heads * (states + 5 * delta.key_channels + 4 * delta.value_channels)
    return rule - 4.0 * delta.value_heads * delta.value_channels


def attention_weight_shapes(spec: ModelSpec) -> tuple[set[tuple[int, int]], set[tuple[int, int]]]:
    """Returns the shapes (outputs, inputs) of the weights of attention: split over tensor ranks, and whole on each."""
    d = spec.hidden_size
    if spec.latent is not None:
        latent, a = spec.latent, spec.num_heads
        whole = {(latent.key_rank + latent.rotated, d)}
        if latent.query_rank:
            whole.add((latent.query_rank, d))
        queries = (a * (latent.plain + latent.rotated), latent.query_rank or d)
        return {queries, (a * (latent.plain + latent.value), latent.key_rank), (d, a * latent.value)}, whole
    shapes = set()
    for heads in {spec.heads(layer) for layer in range(1, spec.num_layers + 1)}:
        q, channels = spec.num_heads * heads.channels, heads.channels + heads.value_channels
        shapes.add(((2 * q if spec.output_gate else q) + heads.kv * channels, d))
        shapes.add((d, spec.num_heads * heads.value_channels))
    if spec.delta is not None:
        keys, values = (
            spec.delta.key_heads * spec.delta.key_channels,
            spec.delta.value_heads * spec.delta.value_channels,
        )
        shapes |= {(2 * keys + 2 * values + 2 * spec.delta.value_heads, d), (d, values)}
    return shapes, set()


def capped_score_bytes(spec: ModelSpec, tensor: int, *, backward: bool) -> float:
    """Returns bytes per token of soft-capped scores of `CAPPED_QUERIES` queries, which no fused kernel computes.

    Per score, counted in bfloat16 on a CPU: 14.3 bytes in a forward pass, 16.3 in a backward pass, which computes them
    again.
    """
    if spec.attention_cap is None:
        return 0.0
    return CAPPED_QUERIES * spec.num_heads / tensor * (16.3 if backward else 14.3)


@dataclass(frozen=True)
class StageParameters:
    """Numbers of parameters on one rank of a pipeline stage: held, and trained; of experts, and of everything else."""

    held: int
    trained: int
    experts_held: int = 0
    experts_trained: int = 0

    @property
    def all_held(self) -> int:
        """Parameters of both kinds that the rank holds."""
        return self.held + self.experts_held

    @property
    def all_trained(self) -> int:
        """Parameters of both kinds that the rank trains."""
        return self.trained + self.experts_trained


def norm_parameters(spec: ModelSpec) -> int:
    """Returns the parameters of one norm over the hidden size."""
    return spec.hidden_size * (2 if spec.norm_bias else 1)


def layer_parameters(spec: ModelSpec, layer: int, tensor: int = 1) -> int:
    """Returns the parameters of layer `layer` (1-based) on one of `tensor` tensor ranks, without those of experts."""
    d, attention, experts = spec.hidden_size, attention_parameters(spec, layer), spec.experts
    split = attention.split
    whole = attention.whole + (4 if spec.post_norms else 2) * norm_parameters(spec)
    if spec.is_sparse(layer):
        assert experts is not None
        whole += experts.count * (d + (1 if experts.biases else 0))  # the router
        if spec.post_norms:  # Gemma 4: three more norms, factors of the router's input and of its weights, and one
            whole += 3 * norm_parameters(spec) + d + experts.count + 1
        split += 3 * experts.shared_ffn_size * d
        whole += d if experts.shared_gate else 0
    else:
        split += (3 if spec.gated else 2) * spec.ffn_size * d
    return split // tensor + whole


def expert_parameters(spec: ModelSpec, layer: int) -> int:
    """Returns the parameters of all experts of layer `layer` (1-based)."""
    if not spec.is_sparse(layer):
        return 0
    assert spec.experts is not None
    biases = 2 * spec.experts.ffn_size + spec.hidden_size if spec.experts.biases else 0
    return spec.experts.count * (3 * spec.experts.ffn_size * spec.hidden_size + biases)


def _of_layers(spec: ModelSpec, layers: list[int], parameters: Callable[[ModelSpec, int], int]) -> int:
    """Returns the sum of `parameters` over some layers; each of their few kinds is computed once."""
    kind_of = {layer: (spec.is_sparse(layer), is_delta_net(spec, layer), spec.heads(layer)) for layer in layers}
    kinds = Counter(kind_of.values())
    examples = {kind: layer for layer, kind in kind_of.items()}
    return sum(count * parameters(spec, examples[kind]) for kind, count in kinds.items())


def model_parameters(spec: ModelSpec) -> int:
    """Returns the parameters of the whole model, without padding; a tied head counts once."""
    embeddings = spec.vocab_size * spec.hidden_size * (1 if spec.tied_embeddings else 2)
    layers = range(1, spec.num_layers + 1)
    inner = sum(layer_parameters(spec, layer) + expert_parameters(spec, layer) for layer in layers)
    return embeddings + inner + norm_parameters(spec)


def stage_parameters(
    spec: ModelSpec,
    layout: Layout,
    pipeline: int,
    *,
    depth: int | None = None,
    head: bool = True,
    trained_depth: int | None = None,
    trains_norm: bool = True,
    trains_head: bool = True,
) -> StageParameters:
    """Returns the parameters on one rank of pipeline stage `pipeline`.

    Args:
        depth: layers above this one are not built (a teacher's); None: all are.
        head: whether the LM head is built.
        trained_depth: the deepest layer that a gradient reaches; None: all layers.
        trains_norm, trains_head: whether a gradient reaches the final norm and the head.
    """
    layers = [i for i in layout.owned_layers(pipeline, spec.num_layers) if depth is None or i <= depth]
    reached = [i for i in layers if trained_depth is None or i <= trained_depth]
    embedding = spec.padded_vocab(layout.tensor) // layout.tensor * spec.hidden_size
    held, trained = (
        _of_layers(spec, some, partial(layer_parameters, tensor=layout.tensor)) for some in (layers, reached)
    )
    parts = layout.expert * layout.expert_tensor
    experts_held, experts_trained = (_of_layers(spec, some, expert_parameters) // parts for some in (layers, reached))
    first, last = pipeline == 0, pipeline == layout.pipeline - 1
    if first:
        held, trained = held + embedding, trained + embedding
    if last:
        held += norm_parameters(spec)
        trained += norm_parameters(spec) if trains_norm else 0
        # a tied head on the first stage is the embedding; on another stage it is a copy, which is trained with it
        own_head = head and not (spec.tied_embeddings and first)
        held += embedding if own_head else 0
        trained += embedding if own_head and (trains_head or spec.tied_embeddings) else 0
    return StageParameters(held, trained, experts_held, experts_trained)
