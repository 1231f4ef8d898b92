"""Bytes of activations: what one layer keeps for its backward pass, and what passes through memory besides.

The terms of a layer are the tensors that autograd saves, counted for Megatron's local layers with saved-tensor hooks on
a CPU, and for Transformer Engine's in rehearsals of its Python layer. They were not yet compared with a GPU.

S tokens of this context rank, D hidden size, F feed-forward size, A heads, G key/value groups, C channels of a head,
t tensor-parallel size.
"""

from __future__ import annotations

from dataclasses import dataclass

from nemo_oprd.commands.plan.attention_kinds import capped_score_bytes, delta_net_backward_values, delta_net_values
from nemo_oprd.commands.plan.gpus import Layers
from nemo_oprd.layout import Layout
from nemo_oprd.models import ModelSpec


@dataclass(frozen=True)
class LayerBytes:
    """Bytes per token of one layer.

    Attributes:
        kept: saved for the backward pass.
        core: what selective recomputation of attention saves of `kept`; negative where it keeps more than it drops.
        input: the layer's input, all that full recomputation keeps.
        backward: gradients that are alive when the layer's backward pass begins; afterwards `kept` shrinks faster.
        norm: tensors of the backward pass of the final norm.
    """

    kept: float
    core: float
    input: float
    backward: float
    norm: float


def feed_forward_values(spec: ModelSpec, layout: Layout, kept_by: Layers = "transformer_engine") -> float:
    """Values per token that the feed-forward block of a layer makes on a rank; of the larger kind of layer.

    Both products of the first matrix, what the activation makes of them, and their product: 5 F; without a gate 3 F. In
    a layer with experts each token is in K of them, with its state before and after, if tokens spread evenly. Of these
    Megatron's local experts keep the state before, and the product with and without the token's weight.
    """
    dense = (5 if spec.gated else 3) * spec.ffn_size / layout.tensor
    if spec.experts is None:
        return dense
    # without sequence parallelism every tensor rank sends all tokens to their experts
    shared_by = layout.tensor if layout.sequence else 1
    products, states = (5, 4) if kept_by == "transformer_engine" else (6, 1)
    if spec.experts.biases:  # as rehearsed: the sum with the biases is another tensor, and its halves are clamped
        products, states = 7, 3
    sparse = spec.experts.per_token * (products * spec.experts.ffn_size + states * spec.hidden_size) / shared_by
    sparse += shared_expert_values(spec, layout) + routed_values(spec) / shared_by
    return sparse if all(spec.experts.sparse) else max(dense, sparse)


def shared_expert_values(spec: ModelSpec, layout: Layout, *, kept: bool = True) -> float:
    """Values per token of the expert that all tokens visit: its output, and what is kept for its backward pass."""
    if spec.experts is None or not spec.experts.shared_ffn_size:
        return 0.0
    output = spec.hidden_size / (layout.tensor if layout.sequence else 1)
    return output + (5 * spec.experts.shared_ffn_size / layout.tensor if kept else 0.0)


def routed_values(spec: ModelSpec) -> float:
    """Values per token, of two bytes, of the places that a token has among the visits of experts.

    Those of Transformer Engine's kernel, with which Megatron-Bridge's models move tokens: two integers of four bytes
    per expert.
    """
    return 0.0 if spec.experts is None or spec.family.own else 2.0 * (2 * spec.experts.count + 1)


def attention_widths(spec: ModelSpec, tensor: int) -> tuple[float, float]:
    """Channels of the queries, and of keys or values, on one of `tensor` ranks; of latent attention for every head."""
    if spec.latent is not None:
        return (spec.num_heads * (spec.latent.plain + spec.latent.rotated) / tensor,) * 2
    return spec.num_heads * spec.head_dim / tensor, spec.num_kv_heads * spec.head_dim / tensor


def layer_bytes(spec: ModelSpec, layout: Layout, value_bytes: int, layers: Layers) -> LayerBytes:
    """The bytes per token of a student's layer, if its loss is injected at its output."""
    t, e = layout.tensor, value_bytes
    d = spec.hidden_size / (t if layout.sequence else 1)
    q, kv = attention_widths(spec, t)
    f, heads = feed_forward_values(spec, layout, layers) / 5, spec.num_heads / t
    if layers == "transformer_engine":
        norms = 4 * d * e  # the inputs and the outputs of both norms
    elif layers == "local":
        # per norm: its input, the normed state and the linear layer's input, and a scale per token
        norms = 2 * (3 * e * d + 4)
    else:
        # the input in float32
        norms = 2 * (4 * d + 2 * e * d + 4)
        norms += e * d if e < 4 else 0  # the float32 copy is not the hidden state, which the injection keeps
    lse = 4 * heads  # a logarithm per head
    core = q * e + lse  # with the output of attention in its buckets
    qkv = (q + 2 * kv) * e
    if layout.context > 1 and layers != "transformer_engine":
        # keys and values of the whole sequence, for every query head
        qkv = q * e + (2 * layout.context + 1) * q * e
    attention = qkv + q * e  # and its output
    if spec.output_gate:
        attention += 3 * q * e  # the gate, what the sigmoid makes of it, and their product
    if spec.latent is not None:  # the narrow states before and after their norms
        attention += 2 * (spec.latent.query_rank + spec.latent.key_rank) * e
    if spec.qk_norm and spec.latent is None:
        attention += 4 * (heads + spec.num_kv_heads / t)
        if layers == "transformer_engine":  # the inputs of both norms
            attention += (q + kv) * e
        else:
            attention += (q + kv) * ((4 if layers == "cpu" else e) + e)
            # in float32 the keys before their norm are a part of the whole product, which stays
            attention += (q + kv) * e if e == 4 or layers != "cpu" else 0
    # of the larger kind of layer; a delta net saves no logarithms, and its input is the norm's output
    attention = max(attention, delta_net_values(spec) / t * e)
    mlp = 5 * f * e  # both products of the first layer, what the activation makes of them, and their product
    # selective: the inputs of attention stay, and the values among them keep the whole product they are a part of
    saved = (lse if layers == "transformer_engine" else core) - (q + kv) * e
    kept = norms + attention + (lse if layers == "transformer_engine" else core) + mlp
    norm = d * (16 if layers == "cpu" else 4 * e)
    # the MLP runs backward first; where attention is wide, its gradients come to more than what the MLP has freed
    of_attention = max(4 * q + 2 * kv, delta_net_backward_values(spec) / t)
    backward = max(spec.hidden_size + f, of_attention - 5 * f - 3 * d) * e + capped_score_bytes(spec, t, backward=True)
    return LayerBytes(kept, saved, d * e, backward, norm)


def microbatches_in_flight(layout: Layout, pipeline: int, count: int) -> float:
    """Microbatches whose activations a pipeline rank holds at the same time: 1F1B, or its interleaved form.

    With model chunks the number is in units of all chunks of the rank.
    """
    if layout.pipeline == 1:
        return 1.0
    if layout.virtual_pipeline == 1:
        return float(min(layout.pipeline - pipeline, count))
    chunks = layout.virtual_pipeline
    held = (layout.pipeline - pipeline - 1) * 2 + (chunks - 1) * layout.pipeline + 1
    return min(held, count * chunks) / chunks


def kept_bytes(layers: int, each: LayerBytes, recompute: str, method: str, group: int) -> float:
    """Bytes per token that `layers` layers of a stage keep between forward and backward."""
    if recompute == "full":
        if method == "block":
            recomputed = min(group, layers)
            return recomputed * each.input + (layers - recomputed) * each.kept
        return -(-layers // max(1, group)) * each.input
    return layers * (each.kept - (each.core if recompute == "selective" else 0.0))


def transient_bytes(layers: int, each: LayerBytes, recompute: str, method: str, group: int) -> float:
    """Bytes per token that one layer, or one recomputed group of layers, adds to `kept_bytes` in its backward pass."""
    if not layers:
        return 0.0
    again = 0.0
    if recompute == "full" and method == "uniform":
        again = min(group, layers) * each.kept
    elif recompute == "full":  # the layers that are not recomputed run backward first, and free what they kept
        again = max(0.0, each.kept - max(0, layers - group) * each.kept)
    return again + each.backward
