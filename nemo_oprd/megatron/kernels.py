"""The implementations of layers, norms, gradient accumulation and AdamW that this process uses."""

from __future__ import annotations

import importlib.util
from typing import Any

import torch
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear

from nemo_oprd.megatron import cpu_patches
from nemo_oprd.megatron.delta_net import delta_net_kernels

# the extension module that Apex builds for Megatron's own linear layers
APEX_ACCUMULATION = "fused_weight_gradient_mlp_cuda"


def apex_accumulates(dtype: torch.dtype) -> bool:
    """Returns whether Megatron's local layers add weight gradients to the float32 buffer in the product, by Apex.

    False for float32: float32 runs on GPUs are for comparisons, and add separately whether Apex is installed or not.
    Without CUDA, `accumulate_in_products` decides.
    """
    return dtype != torch.float32 and importlib.util.find_spec(APEX_ACCUMULATION) is not None


def accumulate_in_products(chunks: list[Any]) -> None:
    """Makes the layers of a trained model add weight gradients to the buffer inside the product, where they can.

    Those of Transformer Engine can, and Megatron's own in float32 without CUDA (`cpu_patches`). Megatron's setting
    `gradient_accumulation_fusion` would do it, too, but it demands Apex for the LM head's layer, which never runs here.
    """
    for chunk in chunks:
        for module in chunk.modules():
            if hasattr(module, "fuse_wgrad_accumulation"):
                module.fuse_wgrad_accumulation = True
            elif isinstance(module, ColumnParallelLinear | RowParallelLinear) and _adds_on_cpu(module.weight):
                module.gradient_accumulation_fusion = True


def _adds_on_cpu(weight: torch.Tensor | None) -> bool:
    return cpu_patches.installed() and weight is not None and weight.dtype == torch.float32


def chosen_kernels(layers: str, dtype: torch.dtype, optimizer: Any, *, delta_net: bool = False) -> dict[str, str]:
    """Returns purpose -> implementation in this process, for `layers` ("transformer_engine" or "local") of `dtype`.

    `optimizer` is torch's or a fused AdamW, the one inside Megatron's optimizer; None outside the student. `delta_net`
    says whether some of the layers have a gated delta net.
    """
    if layers == "transformer_engine":
        found = dict.fromkeys(("layers", "norm", "weight gradients"), "Transformer Engine")
    else:
        found = {
            "layers": "Megatron's local layers, torch SDPA",
            "norm": "torch.nn.functional.rms_norm",
            "weight gradients": _local_accumulation(dtype),
        }
    if delta_net:
        found["gated delta net"] = delta_net_kernels()
    if optimizer is not None:
        fused = " (fused)" if any(group.get("fused") for group in optimizer.param_groups) else ""
        found["AdamW"] = f"{type(optimizer).__module__.split('.')[0]}.{type(optimizer).__name__}{fused}"
    return found


def _local_accumulation(dtype: torch.dtype) -> str:
    if apex_accumulates(dtype):
        return "Apex"
    return "torch.addmm" if cpu_patches.installed() and dtype == torch.float32 else "a separate addition"
