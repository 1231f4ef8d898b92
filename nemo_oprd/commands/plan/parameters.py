"""How many parameters of a model one rank holds, and how many of them are trained."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from nemo_oprd.commands.plan.attention_kinds import attention_parameters, is_delta_net
from nemo_oprd.layout import Layout
from nemo_oprd.models import ModelSpec


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
    """Parameters of one norm over the hidden size."""
    return spec.hidden_size * (2 if spec.norm_bias else 1)


def layer_parameters(spec: ModelSpec, layer: int, tensor: int = 1) -> int:
    """Parameters of transformer layer `layer` (1-based) on one of `tensor` tensor ranks, without those of experts."""
    d, attention, experts = spec.hidden_size, attention_parameters(spec, layer), spec.experts
    split = attention.split
    whole = attention.whole + (4 if spec.post_norms else 2) * norm_parameters(spec)
    if spec.is_sparse(layer):
        assert experts is not None
        whole += experts.count * (d + (1 if experts.biases else 0))  # the router
        split += 3 * experts.shared_ffn_size * d
        whole += d if experts.shared_gate else 0
    else:
        split += (3 if spec.gated else 2) * spec.ffn_size * d
    return split // tensor + whole


def expert_parameters(spec: ModelSpec, layer: int) -> int:
    """Parameters of all experts of layer `layer` (1-based)."""
    if not spec.is_sparse(layer):
        return 0
    assert spec.experts is not None
    biases = 2 * spec.experts.ffn_size + spec.hidden_size if spec.experts.biases else 0
    return spec.experts.count * (3 * spec.experts.ffn_size * spec.hidden_size + biases)


def _of_layers(spec: ModelSpec, layers: list[int], parameters: Callable[[ModelSpec, int], int]) -> int:
    """The sum of `parameters` over some layers, which are of few kinds."""
    kinds = Counter((spec.is_sparse(layer), is_delta_net(spec, layer)) for layer in layers)
    examples = {(spec.is_sparse(layer), is_delta_net(spec, layer)): layer for layer in layers}
    return sum(count * parameters(spec, examples[kind]) for kind, count in kinds.items())


def model_parameters(spec: ModelSpec) -> int:
    """Parameters of the whole model, without padding; a tied head counts once."""
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
    """Parameters on one rank of pipeline stage `pipeline`.

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
