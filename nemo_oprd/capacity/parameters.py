"""How many parameters of a model one rank holds, and how many of them are trained."""

from __future__ import annotations

from dataclasses import dataclass

from nemo_oprd.layout import Layout
from nemo_oprd.models import ModelSpec


@dataclass(frozen=True)
class StageParameters:
    """Numbers of parameters on one rank of a pipeline stage: held, and trained."""

    held: int
    trained: int


def layer_parameters(spec: ModelSpec, tensor: int) -> int:
    """Parameters of one transformer layer on one of `tensor` tensor ranks."""
    d, q, kv = spec.hidden_size, spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    split = (q + 2 * kv) * d + q * d + 3 * spec.ffn_size * d
    if spec.qkv_bias:
        split += q + 2 * kv
    whole = 2 * d + (d if spec.proj_bias else 0) + (2 * spec.head_dim if spec.qk_norm else 0)
    return split // tensor + whole


def model_parameters(spec: ModelSpec) -> int:
    """Parameters of the whole model, without padding; a tied head counts once."""
    embeddings = spec.vocab_size * spec.hidden_size * (1 if spec.tied_embeddings else 2)
    return embeddings + spec.num_layers * layer_parameters(spec, 1) + spec.hidden_size


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
    """Parameters on one rank of pipeline stage `pipeline`.

    Args:
        depth: layers above this one are not built (a teacher's); None: all are.
        head: whether the LM head is built.
        trained_depth: the deepest layer that a gradient reaches; None: all layers.
        trains_norm, trains_head: whether a gradient reaches the final norm and the head.
    """
    layers = [i for i in layout.owned_layers(pipeline, spec.num_layers) if depth is None or i <= depth]
    per_layer = layer_parameters(spec, layout.tensor)
    embedding = spec.padded_vocab(layout.tensor) // layout.tensor * spec.hidden_size
    held = len(layers) * per_layer
    trained = sum(per_layer for i in layers if trained_depth is None or i <= trained_depth)
    first, last = pipeline == 0, pipeline == layout.pipeline - 1
    if first:
        held, trained = held + embedding, trained + embedding
    if last:
        held += spec.hidden_size
        trained += spec.hidden_size if trains_norm else 0
        # a tied head on the first stage is the embedding; on another stage it is a copy, which is trained with it
        own_head = head and not (spec.tied_embeddings and first)
        held += embedding if own_head else 0
        trained += embedding if own_head and (trains_head or spec.tied_embeddings) else 0
    return StageParameters(held, trained)
