"""Chooses the experts of a rehearsal's tokens: the router has no numbers, so `--experts-load` gives the load.

Megatron's dispatchers read on the host how many tokens each expert of this rank gets, from its own tokens and from
those of other ranks. Both are consistent over ranks: every rank chooses by the same rule, and the others of an exchange
are assumed to have as many tokens as this one.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from nemo_oprd.tools.rehearse.host_values import HostValues

# how tokens spread over the experts -> (tokens, experts, experts per token) -> the first expert of each token [N, 1]
LOADS: dict[str, Callable[[int, int, int], torch.Tensor]] = {
    # every expert has as many visits as any other
    "balanced": lambda tokens, experts, per_token: torch.arange(tokens).unsqueeze(1) * per_token % experts,
    # all tokens visit the first experts, which are on one rank
    "one-rank": lambda tokens, experts, per_token: torch.zeros(tokens, 1, dtype=torch.int64),
}


@cache
def visits(load: str, tokens: int, experts: int, per_token: int) -> torch.Tensor:
    """The visits of tokens: bool [tokens, experts], in host memory."""
    chosen = (LOADS[load](tokens, experts, per_token) + torch.arange(per_token)) % experts
    return torch.zeros(tokens, experts, dtype=torch.bool).scatter_(1, chosen, True)


def install(load: str, known: HostValues) -> None:
    """Changes the routers and the dispatchers for the whole process."""
    from megatron.core.transformer.moe import token_dispatcher

    from nemo_oprd.distillation.metrics.step_metrics import RouterMetrics
    from nemo_oprd.megatron import experts

    routing, gather = experts.Router.routing, token_dispatcher.gather_from_sequence_parallel_region

    def routed(router: Any, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        weights, where = routing(router, *args, **kwargs)
        with _disable_current_modes():
            twin = visits(load, len(where), where.shape[1], router.topk)
        known.put(where, twin)
        return weights, where

    def gathered(part: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        twin = known.get(part)
        whole: torch.Tensor = gather(part, *args, **kwargs)
        if twin is not None and len(part):
            with _disable_current_modes():
                every = twin.repeat(len(whole) // len(part), *(1 for _ in part.shape[1:]))
            known.put(whole, every)
        return whole

    # made of sums over all ranks, which no single rank knows
    RouterMetrics.from_sums = staticmethod(lambda sums, term: RouterMetrics(0.0, {}))  # type: ignore[method-assign]
    experts.Router.routing = routed  # type: ignore[method-assign,assignment]
    token_dispatcher.gather_from_sequence_parallel_region = gathered
    experts.gather_from_sequence_parallel_region = gathered  # type: ignore[attr-defined]
