"""Reload of all weights of a model in vLLM's worker, including the parts that vLLM's own reload of layers leaves stale.

vLLM rebuilds a layer once its tensors have arrived through the `weight_loader` of its parameters. It misses three
things: packed copies of tied heads and of experts on a CPU, and parameters into which a model copies tensors itself, as
gpt-oss does with its experts and the learned terms of its softmax. While such a parameter is reloaded it is on the meta
device, so the copy is lost without an error, and the layer keeps its old weights.

Like the module that uses it, this one runs in vLLM's environment; it imports nothing of nemo_oprd.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from vllm.distributed import get_tensor_model_parallel_rank
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import (
    get_layerwise_info,
    is_deferred_attention_layer,
    make_online_process_loader,
)

# parameters that a model's `load_weights` copies into, by the end of their names; it copies those of `_DATA` by `.data`
_COPIED = ("experts.w13_weight", "experts.w2_weight", "experts.w13_bias", "experts.w2_bias")
_DATA = (".sinks",)
_COPYING_MODELS = ("GptOssForCausalLM",)


def begin_reload(model: torch.nn.Module) -> None:
    """Prepares the reload, in which vLLM rebuilds a layer once all of its tensors have arrived."""
    initialize_layerwise_reload(model)
    config: Any = model.config
    if getattr(config, "quantization_config", "none") is None:
        del config.quantization_config  # an override leaves it, and gpt-oss takes it for a quantised model
    if type(model).__name__ not in _COPYING_MODELS:
        return
    for module_name, module in model.named_modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and f"{module_name}.{name}".endswith(_COPIED + _DATA):
                _count_copies(module, name, parameter)


def _count_copies(module: torch.nn.Module, name: str, parameter: Any) -> None:
    """Makes `parameter.copy_` call vLLM's loader, which counts the tensor and copies it by `_copy`."""
    parameter.weight_loader = _copy
    loader = make_online_process_loader(module, name)
    parameter.weight_loader = loader
    parameter.copy_ = lambda tensor: loader(parameter, tensor)


def _copy(param: torch.Tensor, loaded_weight: torch.Tensor) -> None:
    param.__dict__.pop("copy_", None)  # the rebuilt parameter has the attributes of the one on the meta device
    param.data.copy_(loaded_weight)


def load(model: Any, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Loads some tensors; all tensors of the model must come between `begin_reload` and `finish_reload`."""
    if type(model).__name__ in _COPYING_MODELS:
        tensors = _without_copies_of_data(model, tensors)
    model.load_weights(tensors)


def _without_copies_of_data(
    model: torch.nn.Module, tensors: Iterable[tuple[str, torch.Tensor]]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Loads this rank's part, in dimension 0, of tensors that the model would copy by `.data`; yields the others."""
    parameters: dict[str, Any] = dict(model.named_parameters())
    mapper: Any = model.hf_to_vllm_mapper
    for name, tensor in tensors:
        if not name.endswith(_DATA):
            yield name, tensor
            continue
        ((mapped, tensor),) = mapper.apply([(name, tensor)])
        parameter = parameters[mapped]
        size = parameter.shape[0]
        parameter.weight_loader(parameter, tensor.narrow(0, get_tensor_model_parallel_rank() * size, size))


def not_loaded(model: torch.nn.Module) -> list[str]:
    """Lists the modules that got no tensor since `begin_reload`, and would silently keep the old weights.

    Tied weights belong to several modules and come once; attention's own parameters, scales of its cache, never come.
    """
    fresh = {_storage(parameter) for parameter in model.parameters() if not parameter.is_meta}
    waiting: dict[str, set[int]] = {}
    for name, module in model.named_modules():
        info = get_layerwise_info(module)
        if not info.can_load() or info.kernel_tensors is None:
            continue
        kept = {_storage(parameter) for parameter in info.kernel_tensors[0].values()}
        # some of its tensors have come: a padded vocabulary never gets all, and a worker may have its padding only
        if info.loaded_weights:
            fresh |= kept
        elif not is_deferred_attention_layer(module):
            waiting[name] = kept
    return [name for name, kept in waiting.items() if kept - fresh]


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def give_up_reload(model: torch.nn.Module, model_config: Any) -> None:
    """Ends a reload that lacks tensors; the model is unusable until another reload."""
    finalize_layerwise_reload(model, model_config)


def finish_reload(model: torch.nn.Module, model_config: Any) -> None:
    """Rebuilds the layers that waited, and the packed copies."""
    finalize_layerwise_reload(model, model_config)
    _pack_tied_heads(model)
    _pack_experts(model)


def _pack_tied_heads(model: torch.nn.Module) -> None:
    """Packs CPU matrices with an unpacked weight again: vLLM's reload leaves a tied head's packed copy stale."""
    for module in model.modules():
        weight: Any = getattr(module, "weight", None)
        method: Any = getattr(module, "quant_method", None)
        if hasattr(module, "cpu_linear") and isinstance(weight, torch.Tensor) and weight.dim() == 2 and weight.numel():
            method.process_weights_after_loading(module)


def _pack_experts(model: torch.nn.Module) -> None:
    """Packs experts for the CPU's kernel: vLLM does so when it makes the kernel, and not when weights are reloaded."""
    for module in model.modules():
        kernel: Any = getattr(getattr(module, "quant_method", None), "moe_kernel", None)
        if kernel is not None and module.w13_weight.device.type == "cpu":  # type: ignore[union-attr]
            kernel.fused_experts.process_weights_after_loading(module)
