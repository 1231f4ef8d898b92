"""The gated delta rule token by token and in float64, for reference models of transformers that have delta nets.

transformers computes the rule in float32 whatever the model's precision, in chunks. In a float64 reference, that error
would be most of the difference that the canary measures.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

_RULE = "torch_chunk_gated_delta_rule"
_EPS = 1e-6  # as in transformers


@contextmanager
def exact_delta_rule(*models: Any, dtype: torch.dtype) -> Iterator[None]:
    """Replaces the rule of delta nets in transformers' `models` in this context if their weights' `dtype` is float64.

    Does nothing to models without delta nets and to those of other precisions.

    Raises:
        ValueError: this version of transformers calls the rule by another name.
    """
    layers = [layer for model in models for layer in model.modules() if type(layer).__name__.endswith("GatedDeltaNet")]
    names = {type(layer).__module__ for layer in layers if dtype == torch.float64}
    modules = [importlib.import_module(name) for name in sorted(names)]
    for module in modules:
        if not hasattr(module, _RULE):
            raise ValueError(
                f"{module.__name__} has no {_RULE}; expected the name of transformers 5.23: use that version"
            )
    theirs = [getattr(module, _RULE) for module in modules]
    try:
        for module in modules:
            setattr(module, _RULE, recurrence)
        yield
    finally:
        for module, rule in zip(modules, theirs, strict=True):
            setattr(module, _RULE, rule)


def recurrence(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    *,
    initial_state: None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Computes the rule over whole sequences by its definition, in float64: decay the state, correct it, read it.

    query, key [B, S, H, K], value [B, S, V heads, V], g, beta [B, S, V heads] -> ([B, S, V heads, V], None).
    """
    assert initial_state is None and not output_final_state
    repeats = value.shape[2] // key.shape[2]
    q, k = (part.double().repeat_interleave(repeats, dim=2) for part in (query, key))
    if use_qk_l2norm_in_kernel:
        q, k = (part / (part.square().sum(-1, keepdim=True) + _EPS).sqrt() for part in (q, k))
    v, decay, rate = value.double(), g.double().exp(), beta.double()
    state = v.new_zeros(*k.shape[:1], *k.shape[2:], v.shape[-1])  # [B, V heads, K, V]
    outputs = []
    for t in range(k.shape[1]):
        state = state * decay[:, t, :, None, None]
        answer = torch.einsum("bhk,bhkv->bhv", k[:, t], state)
        correction = rate[:, t, :, None] * (v[:, t] - answer)
        state = state + torch.einsum("bhk,bhv->bhkv", k[:, t], correction)
        outputs.append(torch.einsum("bhk,bhkv->bhv", q[:, t], state) * q.shape[-1] ** -0.5)
    return torch.stack(outputs, dim=1).to(query.dtype), None
