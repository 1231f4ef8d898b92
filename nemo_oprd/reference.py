"""The paper's equations on plain Hugging Face models in one process, for checking an installation.

Shares nothing with the Megatron path but the configuration and the file of rollouts: no packing, no layouts, no row
table; sequences go through one by one. Slow on purpose, and meant to be read against the paper.
"""

from __future__ import annotations

from typing import Any

import torch

from nemo_oprd.config import Config, RepresentationLossConfig
from nemo_oprd.types import Rollout


def reference(config: Config, rollouts: list[Rollout], dtype: torch.dtype = torch.float64) -> dict[str, Any]:
    """Losses and gradients of the representation objective.

    Returns:
        {"loss/total": float, "rep/loss": float, "rep/loss_per_layer": {layer: float},
         "gradients": {HF name: tensor}}; parameters that no loss reaches are absent.
    """
    student, teacher = (_load(str(model.hf_path), dtype) for model in (config.student, config.teacher))
    loss = config.loss.representation
    layers = _layers(loss.layers, student.config.num_hidden_layers)
    supervised = [_tokens(rollout, loss) for rollout in rollouts]
    active = sum(1 for tokens in supervised if tokens)
    rows = sum(map(len, supervised))
    per_layer = dict.fromkeys(layers, 0.0)
    for rollout, tokens in zip(rollouts, supervised, strict=True):
        if not tokens:
            continue
        shift = 1 if loss.position == "predicting" else 0
        where = torch.tensor([len(rollout.prompt_ids) + t - shift for t in tokens])
        weight = 1 / rows if loss.aggregation == "token_mean" else 1 / (active * len(tokens))
        ours = _hidden_states(student, rollout, final_norm=loss.final_norm)
        with torch.no_grad():
            theirs = _hidden_states(teacher, rollout, final_norm=loss.final_norm)
        total = torch.zeros((), dtype=dtype)
        for layer in layers:
            term = weight * _distance(ours[layer][where], theirs[layer][where], loss).sum()
            per_layer[layer] += float(term.detach())
            total = total + loss.weight * term / len(layers)
        total.backward()
    gradients = {name: p.grad for name, p in student.named_parameters() if p.grad is not None}
    rep_loss = sum(per_layer.values()) / len(layers)
    return {
        "loss/total": loss.weight * rep_loss,
        "rep/loss": rep_loss,
        "rep/loss_per_layer": per_layer,
        "gradients": gradients,
    }


def agreement(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> dict[str, float]:
    """Per parameter ||g - g_ref|| / max(||g_ref||, 1e-3 ||all g_ref||).

    Raises:
        ValueError: the two have gradients of different parameters.
    """
    if set(ours) != set(theirs):
        raise ValueError(f"gradients exist on one side only for {sorted(set(ours) ^ set(theirs))}")
    everything = torch.stack([g.double().norm() for g in theirs.values()]).norm()
    return {
        name: float((ours[name].double() - g.double()).norm() / torch.maximum(g.double().norm(), 1e-3 * everything))
        for name, g in theirs.items()
    }


def _load(path: str, dtype: torch.dtype) -> Any:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, attn_implementation="eager", local_files_only=True)
    return model.eval()


def _hidden_states(model: Any, rollout: Rollout, *, final_norm: bool) -> dict[int, torch.Tensor]:
    """Layer (1-based) -> [prompt + response, H]."""
    before_norm: list[torch.Tensor] = []
    hook = model.model.norm.register_forward_pre_hook(lambda _, inputs: before_norm.append(inputs[0]))
    ids = torch.tensor([rollout.prompt_ids + rollout.response_ids])
    out = model.model(input_ids=ids, output_hidden_states=True, use_cache=False)
    hook.remove()
    states = {layer: state[0] for layer, state in enumerate(out.hidden_states) if layer > 0}
    if not final_norm:
        states[len(states)] = before_norm[0][0]
    return states


def _tokens(rollout: Rollout, loss: RepresentationLossConfig) -> list[int]:
    masked_in = [t for t, m in enumerate(rollout.mask) if m]
    return {"all": masked_in, "last_k": masked_in[-loss.k :], "first_k": masked_in[: loss.k]}[loss.positions]


def _layers(layers: Any, depth: int) -> list[int]:
    if isinstance(layers, list):
        return sorted(layers)
    return {
        "all": list(range(1, depth + 1)),
        "last": [depth],
        "even": list(range(2, depth + 1, 2)),
        "odd": list(range(1, depth + 1, 2)),
    }[layers]


def _distance(ours: torch.Tensor, theirs: torch.Tensor, loss: RepresentationLossConfig) -> torch.Tensor:
    """[n, H] x 2 -> [n]."""
    if loss.kind == "cosine":
        return 1 - (ours * theirs).sum(-1) / (ours.norm(dim=-1) * theirs.norm(dim=-1))
    if loss.kind == "normalized_mse":
        ours, theirs = ours / ours.norm(dim=-1, keepdim=True), theirs / theirs.norm(dim=-1, keepdim=True)
    squares = (ours - theirs) ** 2
    return squares.sum(-1) if loss.dim_reduction == "sum" else squares.mean(-1)
