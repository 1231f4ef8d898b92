"""What the pool's workers run for the tests of replayed routes and of routers in float32."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch


def sample(hf_path: str, tensor: int, prompts: list[list[int]], steps: int, expert: int, *overrides: str) -> list:
    """Rollouts of the in-process engine with the experts that it has recorded."""
    import cases

    from nemo_oprd.rollout.engine import Request, SamplingParams

    engine = cases._engine(hf_path, tensor, "rollout.max_batch=5", f"rollout.expert={expert}", *overrides)
    sampling = SamplingParams(0.7, 0.9, steps, (7, 1, 0), record_routes=True)
    return engine.generate([Request(prompt) for prompt in prompts], sampling)


def spied_verify(overrides: list[str]) -> list[tuple[torch.Tensor, ...]]:
    """`verify`; returns every router's (input, weight, logits, weights of the experts) in its passes on this rank."""
    import cases

    from nemo_oprd.megatron.experts import Router

    seen: list[tuple[torch.Tensor, ...]] = []
    forward = Router.forward

    def spy(router: Any, input: torch.Tensor, padding_mask: Any = None) -> Any:
        weights, where = forward(router, input, padding_mask)
        seen.append(tuple(x.detach().clone() for x in (input, router.weight, router.gating(input), weights)))
        return weights, where

    with mock.patch.object(Router, "forward", spy):
        cases.run_verify(overrides)
    return seen
