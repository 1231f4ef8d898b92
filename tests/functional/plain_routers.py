"""What the routers of a plain Hugging Face model do: the metrics of the student's routers, in float64, one by one."""

from __future__ import annotations

import math
from typing import Any

import torch

from nemo_oprd.batch.types import Rollout
from nemo_oprd.config.schema import Config


def computed_tokens(config: Config, rollout: Rollout) -> int:
    """How many tokens of a rollout an update of the representation loss alone computes."""
    loss = config.loss.representation
    assert loss.positions in ("last_k", "all")  # so that the last supervised token is the last one with mask 1
    supervised = [t for t, m in enumerate(rollout.mask) if m]
    return len(rollout.prompt_ids) + supervised[-1] + (loss.position != "predicting") if supervised else 0


def routed(config: Config, rollouts: list[Rollout]) -> dict[int, tuple[torch.Tensor, ...]]:
    """Layer (1-based) -> (logits [T, E] of all tokens that the update computes, their experts [T, K])."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        config.student.hf_path, dtype=torch.float64, attn_implementation="eager"
    )
    model.set_experts_implementation("eager")
    gates = {i + 1: layer.mlp.gate for i, layer in enumerate(model.model.layers) if hasattr(layer.mlp, "gate")}
    found: dict[int, list[Any]] = {layer: [] for layer in gates}
    for layer, gate in gates.items():
        gate.register_forward_hook(lambda _, inputs, out, layer=layer: found[layer].append((out[0], out[2])))
    for rollout in rollouts:
        if length := computed_tokens(config, rollout):
            with torch.no_grad():
                model.model(torch.tensor([rollout.ids[:length].tolist()]), use_cache=False)
    return {
        layer: (torch.cat([a for a, _ in parts]), torch.cat([b for _, b in parts])) for layer, parts in found.items()
    }


def router_metrics(config: Config, rollouts: list[Rollout]) -> dict[str, float]:
    """The metrics `moe/...` of an update; empty for a model without experts."""
    from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

    per_layer: dict[str, dict[int, float]] = {}
    for layer, (logits, experts) in routed(config, rollouts).items():
        (tokens, count), per_token = logits.shape, experts.shape[1]
        share = [int((experts == e).sum()) / (tokens * per_token) for e in range(count)]
        p = logits.softmax(-1)
        values = {
            "load_max": max(share) * count,
            "load_min": min(share) * count,
            "load_entropy": -sum(s * math.log(s) for s in share if s) / math.log(count),
            "router_entropy": float(-(p * p.log()).sum(-1).mean()),
            "aux_loss": float(load_balancing_loss_func((logits,), count, per_token)),
            "z_loss": float((logits.logsumexp(-1) ** 2).mean()),
        }
        for name, value in values.items():
            per_layer.setdefault(name, {})[layer] = value
    means = {"load_max": max, "load_min": min}
    named = {}
    for name, layers in per_layer.items():
        over = means.get(name, lambda values: sum(values) / len(values))
        named[f"moe/{name}"] = over(list(layers.values()))
        if not name.endswith("_loss"):
            named |= {f"moe/{name}_layer/{layer}": value for layer, value in layers.items()}
    return named
