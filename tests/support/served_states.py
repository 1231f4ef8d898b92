"""What a teacher's server answers, by transformers: states, projections, log-probabilities."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import torch

from nemo_oprd.vllm.worker.nemo_oprd_requests import StateRequest


@cache
def _model(directory: str, dtype: str) -> Any:
    from transformers import AutoModelForCausalLM

    made = AutoModelForCausalLM.from_pretrained(
        directory, dtype=getattr(torch, dtype), attn_implementation="eager", local_files_only=True
    )
    return made.eval()


@torch.no_grad()
def states_of(directory: str, dtype: str, ids: list[int], state_request: StateRequest) -> list[torch.Tensor]:
    """[The states [layers, rows, D], the final rows [n, D], or [n, 2] for tokens], as servers number layers."""
    model = _model(directory, dtype)
    streams: dict[int, torch.Tensor] = {}
    layers = model.model.layers
    hooks = [
        layer.register_forward_hook(
            lambda _, __, out, n=number: streams.update({n: (out[0] if isinstance(out, tuple) else out)[0]})
        )
        for number, layer in enumerate(layers, 1)
    ]
    hooks.append(model.model.register_forward_hook(lambda _, __, out: streams.update({0: out.last_hidden_state[0]})))
    try:
        all_logits = model(torch.tensor([ids]), use_cache=False).logits[0]  # its scale, bias and caps included
    finally:
        for hook in hooks:
            hook.remove()
    final = streams[len(layers) + 1] = streams.pop(0)
    states = (
        torch.stack([streams[layer][state_request.rows] for layer in state_request.layers])
        if state_request.layers
        else torch.empty(0)
    )
    rows = final[state_request.final_rows]
    if state_request.tokens is not None:
        logits = all_logits[state_request.final_rows, : state_request.vocabulary].float() / state_request.temperature
        logprobs = logits.log_softmax(-1)
        drawn = logprobs.gather(1, torch.tensor(state_request.tokens)[:, None])[:, 0]
        rows = torch.stack([drawn, -(logprobs.exp() * logprobs).sum(-1)], dim=1)
    return [states.to(getattr(torch, dtype)), rows]


def project(states: torch.Tensor, bridge: dict[str, Any]) -> torch.Tensor:
    """[maps, rows, R] of the states [maps, rows, D] by the maps in a bridge's file: a mean, and the rows of a basis."""
    numbers = torch.frombuffer(bytearray(Path(bridge["path"]).read_bytes()), dtype=torch.float32)
    maps = numbers.view(len(bridge["layers"]), 1 + bridge["rank"], bridge["width"]).double()
    return torch.stack(
        [(rows.double() - each[0]) @ each[1:].T for rows, each in zip(states, maps, strict=True)]
    ).float()
