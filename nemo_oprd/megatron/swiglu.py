"""The gated feed-forward block, whose activation keeps only the first matrix's output for the backward pass.

Autograd would also keep the gate's SiLU and, because Megatron adds an offset of zero to the value, a copy of the value.
That makes 5 F numbers per token, with both halves of the output and the second matrix's input; 3 F are enough.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer.mlp import MLP
from torch.nn.functional import silu


class SwiGLU(torch.autograd.Function):
    """SiLU(gate) * value [..., F] of gate and value [..., 2 F]; the backward pass computes the SiLU again.

    Values and gradients are bit for bit those of autograd.
    """

    @staticmethod
    def forward(ctx: Any, both: torch.Tensor) -> torch.Tensor:
        """Returns the product; keeps only its input for the backward pass."""
        ctx.save_for_backward(both)
        gate, value = both.chunk(2, -1)
        return silu(gate) * value

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        """Returns the gradient of both halves; nothing else of their size is allocated."""
        (both,) = ctx.saved_tensors
        gate, value = both.chunk(2, -1)
        result = torch.empty_like(both)
        of_gate, of_value = result.chunk(2, -1)
        torch.mul(grad, value, out=of_gate)
        torch.ops.aten.silu_backward.grad_input(of_gate, gate, grad_input=of_gate)
        torch.ops.aten.silu.out(gate, out=of_value)
        of_value.mul_(grad)
        return result


class SwiGLUBlock(MLP):
    """Megatron's MLP with `SwiGLU` as its activation."""

    def forward(self, hidden_states: torch.Tensor, per_token_scale: None = None, **_: Any) -> tuple[torch.Tensor, Any]:
        """Returns the output for [S, B, D], and the second matrix's bias or None. Only experts have a scale."""
        assert per_token_scale is None
        both, bias = self.linear_fc1(hidden_states)
        return self.linear_fc2(SwiGLU.apply(both if bias is None else both + bias))


def use_swiglu(chunk: torch.nn.Module) -> None:
    """Turns the MLPs of a built model that all tokens visit into `SwiGLUBlock`s, if their activation is SwiGLU."""
    for module in chunk.modules():
        block: Any = getattr(module, "mlp", None)
        if type(block) is MLP and _is_swiglu(block.config):
            block.__class__ = SwiGLUBlock


def _is_swiglu(config: Any) -> bool:
    plain = not (config.bias_activation_fusion or config.use_te_activation_func or config.glu_linear_offset)
    clamped = config.activation_func_clamp_value is not None
    return config.gated_linear_unit and config.activation_func is silu and plain and not clamped
