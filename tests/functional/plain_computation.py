"""What a case must give by the plain computation, and how large the terms are that its losses are sums of."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch

from nemo_oprd.batch.types import Rollout
from nemo_oprd.config.schema import Config
from nemo_oprd.distillation import reference as plain


def expected_result(config: Config, rollouts: list[Rollout]) -> dict[str, Any]:
    """`reference` in float64, with "scales": loss name -> the size of its terms, to which rounding is relative.

    The sampled token's loss is a weighted mean of log p - log q, which has both signs. Where the terms cancel, the
    float32 rounding of the log-probabilities is small relative to the terms and large relative to their mean: at a
    mean |log p - log q| of 0.78 and a loss of -0.0076, a plain float32 run of Hugging Face models errs by 1.1e-5 of
    the loss, which is 1.1e-7 of the terms. All other losses are sums of terms >= 0; they are their own scale.
    """
    found = plain.reference(config, rollouts)
    names = {"loss/total", "rep/loss", "output/loss"} & set(found)
    scales = {name: abs(found[name]) for name in names}
    if config.loss.output.kind == "sampled_token":
        weight = plain._first_weight(config.loss.output.weight)
        of_layers = found["loss/total"] - weight * found["output/loss"]
        scales["output/loss"] = mean_term_size(config, rollouts)
        scales["loss/total"] = abs(of_layers) + weight * scales["output/loss"]
    return {**found, "scales": scales}


def mean_term_size(config: Config, rollouts: list[Rollout]) -> float:
    """The mean of |log p - log q| over the sampled tokens, with the weights of the loss."""
    assert config.loss.output.kind == "sampled_token"
    signed = plain._OutputLoss._divergence

    def absolute(output: plain._OutputLoss, *args: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        value, differentiable = signed(output, *args)
        return value.abs(), differentiable

    with mock.patch.object(plain._OutputLoss, "_divergence", absolute):
        return float(plain.reference(config, rollouts)["output/loss"])
