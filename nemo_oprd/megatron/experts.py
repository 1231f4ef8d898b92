"""Mixture-of-experts layers: Hugging Face's routing, exchange of tokens between expert-parallel ranks, and the spec.

Megatron's `MoELayer` does the work: its router's linear layer, its dispatchers and its experts (sequential ones, or
Transformer Engine's grouped ones). This module replaces two parts of it.

- `Router` chooses experts as the HF models do: in most, softmax over all experts in float32, the K largest, and then
  perhaps the division by their sum (`route` has the others). Megatron's own order (the K largest logits first) breaks
  ties differently, because logits that differ can have equal probabilities. It also keeps each microbatch's choice, so
  that a layer that is computed again in the backward pass sends every token to the same experts: two experts of nearly
  equal probability may change places when a product is computed again in another order. For the same reason it can use
  experts that the rollout engine has recorded. Losses and metrics of the router are attached by an observer
  (`router_replay.py`).
- `PaddedAllGather` is Megatron's allgather dispatcher for ranks with different numbers of tokens, which packs have.

Shapes: N tokens of this rank, E experts, K experts per token.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.mappings import (
    gather_from_sequence_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.moe.experts import SequentialMLP, TEGroupedMLP
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.token_dispatcher import MoEAllGatherTokenDispatcher
from megatron.core.transformer.spec_utils import ModuleSpec

from nemo_oprd.megatron.router_replay import Routes
from nemo_oprd.models.architecture import Experts

# added to the sum by which DeepSeek-V3 and GLM 4.5 divide weights
_TINY = 1e-20


def probabilities(logits: torch.Tensor) -> torch.Tensor:
    """Returns the router's probabilities of logits [N, E] in float32, or in float64 where the logits are."""
    return torch.softmax(logits, dim=-1, dtype=torch.float64 if logits.dtype == torch.float64 else torch.float)


def route(
    logits: torch.Tensor,
    rule: Experts,
    *,
    bias: torch.Tensor | None = None,
    choose: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Routes logits [N, E] as transformers' models do; returns (weights [N, K] in their dtype, experts int64 [N, K]).

    Args:
        rule: how experts are chosen and weighed.
        bias: [E], added to the scores by which experts are chosen, not to their weights.
        choose: the K best experts int64 [N, K] -> the experts to use [N, K]; None uses the best ones.
    """
    if rule.score == "softmax_of_chosen":
        experts = torch.topk(logits, rule.per_token, dim=-1).indices
        experts = experts if choose is None else choose(experts)
        return torch.softmax(logits.gather(1, experts), dim=-1), experts
    sigmoid = rule.score == "sigmoid"
    every = logits.sigmoid() if sigmoid else probabilities(logits)
    preferred = every if bias is None else every + bias
    experts = torch.topk(_in_best_groups(preferred, rule), rule.per_token, dim=-1).indices
    experts = experts if choose is None else choose(experts)
    weights = every.gather(1, experts)
    if rule.normalized:
        total = weights.sum(-1, keepdim=True)
        weights = weights / (total + _TINY if sigmoid else total)
    if rule.scale != 1.0:
        weights = weights * rule.scale
    return weights.to(logits.dtype), experts


def _in_best_groups(preferred: torch.Tensor, rule: Experts) -> torch.Tensor:
    """Returns the scores [N, E], with -inf for experts outside the groups from which `rule` chooses."""
    if rule.groups == 1:
        return preferred
    grouped = preferred.unflatten(-1, (rule.groups, -1))
    best = grouped.topk(2, dim=-1).values.sum(-1).topk(rule.chosen_groups, dim=-1).indices
    outside = torch.ones_like(grouped[..., 0], dtype=torch.bool).scatter(1, best, False)
    return grouped.masked_fill(outside[..., None], -torch.inf).flatten(-2)


class _Float32Product(torch.autograd.Function):
    """Multiplies input [.., D] by weight [E, D] transposed, in float32; keeps both for backward in their own dtypes."""

    @staticmethod
    def forward(ctx: Any, input: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(input, weight)
        return torch.nn.functional.linear(input.float(), weight.float())

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        (gradient,) = gradients
        input, weight = ctx.saved_tensors
        rows = gradient.flatten(0, -2)
        of_weight = rows.t() @ input.flatten(0, -2).float()
        return (gradient @ weight.float()).to(input.dtype), of_weight.to(weight.dtype)


class Router(TopKRouter):
    """Megatron's router with the routing of the HF models; see the module's docstring."""

    # of the microbatch; the layer around this module sets it for each pass
    routes: Routes | None = None

    def __init__(self, *args: Any, rule: Experts, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.rule = rule

    def gating(self, input: torch.Tensor) -> torch.Tensor:
        """Computes logits [S, B, E] of [S, B, D]. Megatron's would multiply float32 in TF32 with Transformer Engine.

        With `moe_router_dtype` fp32 the product is computed in float32, and so are the weights that `routing` returns.
        """
        bias = getattr(self, "bias", None)
        if self.config.moe_router_dtype == "fp32":
            logits: torch.Tensor = _Float32Product.apply(input, self.weight)
            return logits if bias is None else logits + bias.float()
        return torch.nn.functional.linear(input, self.weight, bias)

    def routing(
        self, logits: torch.Tensor, padding_mask: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Routes logits [S, B, E]; returns (weights [N, E], 0 for experts not chosen; bool [N, E], where tokens go)."""
        logits, routes, layer = logits.view(-1, logits.shape[-1]), self.routes, self.layer_number
        observer = None if routes is None else routes.observer
        if observer is not None:
            logits = observer.at_router(layer, logits)
        own: list[torch.Tensor] = []

        def choose(best: torch.Tensor) -> torch.Tensor:
            own.append(best)
            return best if routes is None else _choice(routes, layer, best)

        weights, experts = route(logits, self.rule, bias=getattr(self, "expert_bias", None), choose=choose)
        if observer is not None:
            observer.routed(layer, logits.detach(), experts, own[0])
        where = torch.zeros_like(logits, dtype=torch.bool).scatter(1, experts, True)
        return torch.zeros_like(logits).scatter(1, experts, weights), where


def _choice(routes: Routes, layer: int, most_probable: torch.Tensor) -> torch.Tensor:
    """Returns the experts of an earlier pass over these tokens; in the first, the recorded or most probable ones."""
    last_pass = torch.is_grad_enabled()
    known = routes.take(layer) if last_pass else routes.kept(layer)
    if known is not None:
        return known
    experts = routes.replayed(layer, most_probable)
    if not last_pass:
        routes.keep(layer, experts)
    return experts


class PaddedAllGather(MoEAllGatherTokenDispatcher):
    """Gathers all tokens of the expert-parallel ranks on each of them, with padding up to the largest number of tokens.

    Megatron's dispatcher needs equal numbers; packs and sequence-parallel parts of different data ranks differ. Every
    rank knows the largest number from the plan of the batch, so no layer asks the other ranks.
    """

    # tokens of the microbatch on the rank that has most of them; the layer around this module sets it for each pass
    most_tokens: int | None = None

    def token_dispatch(self, hidden_states: torch.Tensor, probs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Gathers [N, D] and [N, E] of the group's ranks, each padded to the largest N; padding has no expert."""
        if self.tp_size * self.ep_size == 1:
            return hidden_states, probs
        self._tokens = len(hidden_states)
        assert self.most_tokens is not None and self.most_tokens >= self._tokens, (self.most_tokens, self._tokens)
        missing = self.most_tokens - self._tokens
        padded = [torch.nn.functional.pad(part, (0, 0, 0, missing)) for part in (hidden_states, probs)]
        routing_map = torch.nn.functional.pad(self.routing_map, (0, 0, 0, missing))  # type: ignore[has-type]
        with torch.no_grad():
            # gloo has no all-gather of booleans that are views
            gathered = gather_from_sequence_parallel_region(routing_map.to(torch.uint8), group=self.tp_ep_group)
            self.routing_map = gathered.bool()
        hidden_states, probs = (gather_from_sequence_parallel_region(part, group=self.tp_ep_group) for part in padded)
        return hidden_states, probs

    def token_combine(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Returns the sums of all ranks' outputs for this rank's tokens [N, D]."""
        if self.tp_size * self.ep_size == 1:
            return hidden_states
        return reduce_scatter_to_sequence_parallel_region(hidden_states, group=self.tp_ep_group)[: self._tokens]


def use_padded_all_gather(chunk: torch.nn.Module, groups: Any) -> None:
    """Replaces the dispatchers of a built model by `PaddedAllGather`."""
    for module in chunk.modules():
        if isinstance(module, MoELayer):
            module.token_dispatcher = PaddedAllGather(
                module.num_local_experts, module.local_expert_indices, module.config, groups
            )


def use_routing_of(chunk: torch.nn.Module, experts: Experts, kind: type[Router] = Router) -> None:
    """Makes the routers of a model that Megatron-Bridge has built route as a `kind` of `Router`."""
    for module in chunk.modules():
        if isinstance(module, MoELayer):
            router: Any = module.router
            router.__class__, router.rule = kind, experts


def release_weights_after_forward(chunk: torch.nn.Module) -> None:
    """Makes the dispatchers of a built model forget a pass when it ends: the experts' weights, and the tokens' places.

    Dispatchers would keep both until the next pass. Where a layer is computed again in the backward pass, the weights
    lead to its input and the input's gradient, which would then stay in memory for every layer until the next step. The
    places of tokens are two numbers per token and expert, in a teacher's layers, too.
    """
    for module in chunk.modules():  # hooks of layers, because Gemma 4's do not call their experts as a module
        if isinstance(getattr(module, "mlp", None), MoELayer):
            module.register_forward_hook(_release_weights)


def _release_weights(layer: Any, arguments: Any, output: Any) -> None:
    dispatcher = layer.mlp.token_dispatcher
    for name in ("probs", "local_probs", "routing_map", "reversed_local_input_permutation_mapping"):
        if hasattr(dispatcher, name):
            setattr(dispatcher, name, None)


def expert_block_spec(experts: Experts, backend: str) -> ModuleSpec:
    """Returns the spec of the feed-forward block of a layer with experts.

    `backend` is "transformer_engine" (grouped products) or "local" (one expert after the other).
    """
    if backend == "transformer_engine":
        # not by Megatron's `TESpecProvider`, whose methods differ between versions
        from megatron.core.extensions.transformer_engine import (
            TEColumnParallelGroupedLinear,
            TERowParallelGroupedLinear,
        )

        inner = ModuleSpec(
            module=TEGroupedMLP,
            submodules=MLPSubmodules(linear_fc1=TEColumnParallelGroupedLinear, linear_fc2=TERowParallelGroupedLinear),
        )
    else:
        inner = ModuleSpec(
            module=SequentialMLP,
            submodules=MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear),
        )
    router = functools.partial(Router, rule=experts)
    return ModuleSpec(module=MoELayer, submodules=MoESubmodules(experts=inner, router=router))


def expert_settings(experts: Experts | None, layout: Any) -> dict[str, Any]:
    """Returns the `TransformerConfig` settings for a model's experts in a layout; empty without experts."""
    if experts is None:
        return {}
    return {
        "num_moe_experts": experts.count,
        "moe_ffn_hidden_size": experts.ffn_size,
        "moe_router_topk": experts.per_token,
        "moe_router_pre_softmax": True,
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        "moe_layer_freq": 1 if all(experts.sparse) else [int(sparse) for sparse in experts.sparse],
        "moe_grouped_gemm": False,
        "expert_model_parallel_size": layout.expert,
        "expert_tensor_parallel_size": layout.expert_tensor,
    }
