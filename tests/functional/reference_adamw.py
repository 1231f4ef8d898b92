"""The optimizer that training tests compare with: torch's AdamW in float64 on gradients that a test computes itself."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from golden_runs import BASE, GOLDEN
from transformers import AutoModelForCausalLM

from nemo_oprd.config.loading import load_config
from nemo_oprd.distillation.reference import reference
from nemo_oprd.rollout.replay import read_rollouts

WEIGHT_DECAY = 0.1


class ReferenceAdamW:
    """AdamW with the settings of `golden_runs.BASE`: lr 1e-2, betas 0.9 and 0.95, eps 1e-2, weight decay 0.1.

    eps is 1e-2, because with the usual 1e-8 the first update is lr * g / (|g| + eps) = +-lr even where g is nothing but
    fp32 rounding noise, and no two programs agree on the sign of noise.

    A parameter joins with its first gradient that is not zero: until then it is not decayed, and its moments and bias
    correction begin with that update. Matrices are decayed, vectors are not.

    Args:
        parameters: name -> parameter, changed in place by `step`.
    """

    def __init__(self, parameters: Mapping[str, torch.nn.Parameter]) -> None:
        self.parameters = parameters
        self.trained: set[str] = set()
        self._optimizer: torch.optim.AdamW | None = None

    def step(self, gradients: Mapping[str, torch.Tensor], clip: float | None = None) -> float:
        """One update; returns the norm of all gradients before they are clipped to `clip` (None: not clipped)."""
        self._add({name for name, gradient in gradients.items() if bool(gradient.any())} - self.trained)
        assert self._optimizer is not None, "no gradient reaches any parameter"
        for name in self.trained:
            self.parameters[name].grad = gradients[name].clone()
        limit = float("inf") if clip is None else clip
        norm = torch.nn.utils.clip_grad_norm_([self.parameters[name] for name in sorted(self.trained)], limit)
        self._optimizer.step()
        return float(norm)

    def _add(self, names: set[str]) -> None:
        """Adds parameters to the optimizer, in groups of their own."""
        found = [self.parameters[name] for name in sorted(names)]
        for decay, chosen in (
            (WEIGHT_DECAY, [p for p in found if p.dim() > 1]),
            (0.0, [p for p in found if p.dim() == 1]),
        ):
            group = {"params": chosen, "weight_decay": decay}
            if chosen and self._optimizer is None:
                self._optimizer = torch.optim.AdamW([group], lr=1e-2, betas=(0.9, 0.95), eps=1e-2)
            elif chosen and self._optimizer is not None:
                self._optimizer.add_param_group(group)
        self.trained |= names


def one_golden_step(clip: float) -> tuple[dict[str, torch.Tensor], float]:
    """Weights of the golden student after one update of `BASE` in float64, and the gradient norm before clipping."""
    config = load_config("verify", [*BASE, "output=unused"])
    gradients = reference(config, read_rollouts(GOLDEN / "rollouts.jsonl", 61))["gradients"]
    model = AutoModelForCausalLM.from_pretrained(GOLDEN / "student", dtype=torch.float64)
    norm = ReferenceAdamW(dict(model.named_parameters())).step(gradients, clip)
    return {name: p.detach() for name, p in model.named_parameters()}, norm
