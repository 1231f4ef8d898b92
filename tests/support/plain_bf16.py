"""Gradients of a plain Hugging Face run in bfloat16, to which the project's own bfloat16 error is compared.

Used by the layout tests on the CPU and by `gpu_check` on a GPU. The computation is that of
`nemo_oprd.distillation.reference`, but it runs on another device and adds gradients in float32.
"""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from nemo_oprd.batch.types import Rollout
from nemo_oprd.config.schema import Config, RepresentationLossConfig
from nemo_oprd.distillation import reference
from nemo_oprd.losses.representation import RowLoss


def plain_bf16_gradients(
    config: Config, rollouts: list[Rollout], device: torch.device | str = "cpu"
) -> dict[str, torch.Tensor]:
    """HF name -> float32 gradient on the CPU: models in bfloat16 on `device`, the loss in float32.

    The gradients of the responses are added in float32. A plain run would add in bfloat16, with a larger error.
    """
    row_loss, load, output_loss = reference.row_loss, reference._load, reference._OutputLoss
    sums: dict[str, torch.Tensor] = {}

    def in_float32(loss: RepresentationLossConfig) -> RowLoss:
        distance = row_loss(loss)
        return lambda ours, theirs, dim_reduction: distance(ours.float(), theirs.float(), dim_reduction)

    class OutputLossInFloat32(output_loss):  # type: ignore[valid-type, misc]
        def _log_probabilities(self, model: Any, *arguments: Any) -> torch.Tensor:
            return super()._log_probabilities(functools.partial(with_float32_logits, model), *arguments)

    def with_float32_logits(model: Any, **inputs: Any) -> SimpleNamespace:
        return SimpleNamespace(logits=model(**inputs).logits.float())

    def load_on_device(path: str, dtype: torch.dtype) -> Any:
        model = load(path, dtype).to(device)
        model.model.register_forward_pre_hook(ids_to_device, with_kwargs=True)
        if path == str(config.student.hf_path):
            for name, parameter in model.named_parameters():
                parameter.register_post_accumulate_grad_hook(functools.partial(move, name))
        return model

    def ids_to_device(_: Any, inputs: tuple, named: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        return inputs, {**named, "input_ids": named["input_ids"].to(device)}

    def move(name: str, parameter: torch.nn.Parameter) -> None:
        assert parameter.grad is not None and parameter.grad.dtype == torch.bfloat16
        sums[name] = sums.get(name, 0) + parameter.grad.float()
        parameter.grad = None

    with mock.patch.multiple(reference, row_loss=in_float32, _load=load_on_device, _OutputLoss=OutputLossInFloat32):
        reference.reference(config, rollouts, torch.bfloat16)
    return {name: total.cpu() for name, total in sums.items()}
