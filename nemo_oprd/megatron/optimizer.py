"""DDP, optimizer and learning rate of the student. DDP and optimizer exclude the parameters that no loss reaches."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import (
    OptimizerConfig,
    clip_grads,
    get_megatron_optimizer,
    get_standard_config_overrides,
)
from megatron.core.optimizer.optimizer_config import ParamKey
from megatron.core.utils import local_multi_tensor_l2_norm

from nemo_oprd.config.schema import TrainConfig
from nemo_oprd.megatron import cpu_patches
from nemo_oprd.megatron.model import DistillingModel
from nemo_oprd.megatron.observed_layer import ObservedLayer
from nemo_oprd.megatron.parallel import Role, device
from nemo_oprd.megatron.partial_training import GROUP_KEY, MARK


def freeze_unreached(chunks: list[DistillingModel], depth: int, *, final_norm: bool, head: bool) -> None:
    """Turns off gradients of parameters that no loss reaches: they are not decayed and have no optimizer state.

    A loss reaches layers up to `depth`, and perhaps the final norm and the head.
    """
    for module in _unreached(chunks, depth, final_norm=final_norm, head=head):
        module.requires_grad_(False)


def mark_partial(chunks: list[DistillingModel], depth: int, *, final_norm: bool, head: bool) -> None:
    """Marks, for `make_optimizer`, the parameters that losses reach in some steps only (see `partial_training`)."""
    for module in _unreached(chunks, depth, final_norm=final_norm, head=head):
        for parameter in module.parameters():
            setattr(parameter, MARK, True)


def _unreached(chunks: list[DistillingModel], depth: int, *, final_norm: bool, head: bool) -> Iterator[torch.nn.Module]:
    """Yields the modules that no loss reaches. A tied head is always trained, through the embedding."""
    for chunk in chunks:
        for layer in chunk.decoder.layers:
            if isinstance(layer, ObservedLayer) and layer.layer_number > depth:
                yield layer
        if chunk.post_process:
            if not final_norm:
                yield chunk.decoder.final_layernorm
            if not head and not chunk.share_embeddings_and_output_weights:
                yield chunk.output_layer


def main_gradient(parameter: torch.nn.Parameter) -> torch.Tensor:
    """Returns a parameter's float32 gradient in the buffer of Megatron's DDP, of the parameter's shape."""
    return parameter.main_grad  # type: ignore[attr-defined, no-any-return]


def wrap_ddp(chunks: list[DistillingModel], role: Role, *, distributed_optimizer: bool) -> list[Any]:
    """Wraps each chunk in Megatron's DDP; gradients are accumulated and reduced in float32."""
    ddp_config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        use_distributed_optimizer=distributed_optimizer,
        overlap_grad_reduce=False,
        average_in_collective=False,
        check_for_nan_in_grad=False,
    )
    # Without overlap a buffer is one bucket, unless it has a shared embedding. disable_bucketing, usual for later
    # chunks, would also put the buckets of all dtypes into one group, whose parameters are gathered together; gloo then
    # mixes up the bytes of float32 projectors and bfloat16 weights.
    wrapped = [DistributedDataParallel(chunk.config, ddp_config, chunk, pg_collection=role.groups) for chunk in chunks]
    for ddp in wrapped:
        cpu_patches.add_rows_to_buffer(ddp)
        for buffer in ddp.buffers:
            _count_inner_padding(buffer)
    return wrapped


def _count_inner_padding(buffer: Any) -> None:
    """Makes Megatron's distributed optimizer save the padding between a buffer's buckets.

    The optimizer omits the padding of each bucket but finds parameters by their offsets in the padded buffer.
    Parameters in later buckets (a shared embedding has its own bucket) would be saved and loaded with a shift. With
    this change only the last bucket's padding is omitted.
    """
    for bucket in buffer.buckets[:-1]:
        bucket.numel_unpadded = bucket.grad_data.numel()
    buffer.numel_unpadded = sum(bucket.numel_unpadded for bucket in buffer.buckets)


def make_optimizer(
    ddp_chunks: list[Any], role: Role, train: TrainConfig, dtype: torch.dtype, *, distributed: bool
) -> Any:
    """Makes Megatron's AdamW over the parameters that have gradients; 1-D parameters are not decayed.

    `distributed`: whether its state is divided over the data-parallel ranks, as in `wrap_ddp`.
    """
    config = OptimizerConfig(
        optimizer="adam",
        lr=train.lr,
        min_lr=train.min_lr,
        weight_decay=train.weight_decay,
        adam_beta1=train.betas[0],
        adam_beta2=train.betas[1],
        adam_eps=train.adam_eps,
        clip_grad=train.clip_grad,
        bf16=dtype == torch.bfloat16,
        params_dtype=dtype,
        use_distributed_optimizer=distributed,
    )
    overrides = {**get_standard_config_overrides(config), ParamKey(attr=MARK): {GROUP_KEY: True}}
    optimizer = get_megatron_optimizer(
        config, ddp_chunks, overrides, use_gloo_process_groups=False, pg_collection=role.groups
    )
    _index_mixed_groups(optimizer)
    if clip_grads.l2_norm_impl is local_multi_tensor_l2_norm:  # neither Transformer Engine nor Apex is installed
        clip_grads.l2_norm_impl = norm_of_all
    for part in optimizer.chained_optimizers:
        if isinstance(part.optimizer, torch.optim.AdamW):
            # one pass over weights, gradients and moments, where the default makes about ten
            for group in part.optimizer.param_groups:
                group["fused"] = True
        # the distributed optimizer is gathered over it to be saved
        experts = any(group.get("is_expert_parallel") for group in part.param_groups)
        part.data_parallel_group_gloo = role.expert_host_group if experts else role.host_group
    return optimizer


def step_clipped(optimizer: Any, norm: float, largest: float) -> None:
    """Takes a step with the gradients that `prepare_grads` has prepared, scaled down to a norm of at most `largest`.

    Megatron's own `step` measures the norm once more. PyTorch's fused AdamW scales a gradient where it reads it; for
    the other implementations the gradients are scaled in place first.

    Args:
        norm: the norm of all gradients, over all ranks.
        largest: 0 sets no limit.
    """
    coefficient = largest / (norm + 1e-6) if largest else 1.0  # as Megatron clips
    parts = [part for part in optimizer.chained_optimizers if coefficient < 1 and part.get_parameters()]
    scaling: list[Any] = [part.optimizer for part in parts if isinstance(part.optimizer, torch.optim.AdamW)]
    for part in parts:
        if part.optimizer not in scaling:
            clip_grads.clip_grad_by_total_norm_fp32(part.get_parameters(), largest, norm)
    for adam in scaling:
        adam.grad_scale = torch.full((), 1 / coefficient, device=device())
    try:
        optimizer.step_with_ready_grads()
    finally:
        for adam in scaling:
            adam.grad_scale = None


def norm_of_all(chunk: int, overflow: Any, lists: list[list[torch.Tensor]], *_: Any) -> tuple[torch.Tensor, None]:
    """Returns the norm [1] of all tensors of `lists[0]`, float32; the same number as Megatron's own.

    Megatron's `local_multi_tensor_l2_norm` reads the norm of every tensor on the host, one wait for the device each.
    """
    return torch.linalg.vector_norm(torch.stack(torch._foreach_norm(lists[0]))).reshape(1), None


def _index_mixed_groups(optimizer: Any) -> None:
    """Corrects which state of Megatron's distributed optimizer belongs to which parameter.

    A parameter group holds float32 parameters (trained projectors) before those of lower precision, but the optimizer
    numbers parameters in the order of the gradient buffers, and would save one parameter's state as another's.
    """
    for part in optimizer.chained_optimizers:
        if hasattr(part, "model_param_group_index_map"):
            for group, parameters in enumerate(zip(part.model_fp32_groups, part.model_float16_groups, strict=True)):
                for order, parameter in enumerate(chain(*parameters)):
                    part.model_param_group_index_map[parameter] = (group, order)


def join_optimizer_creation() -> None:
    """Takes part in the collectives of `make_optimizer` on a rank outside the role.

    Megatron aligns parameter groups over the whole world, once for dense and once for expert parameters. If a rank
    without parameters does not take part in both exchanges, the other ranks wait forever.
    """
    for _ in ("dense", "expert"):
        dist.all_gather_object([None] * dist.get_world_size(), [])


def learning_rate(step: int, train: TrainConfig) -> float:
    """Returns the learning rate of update `step` (0-based): linear warm-up over warmup_fraction of the steps, then
    constant or cosine.

    The first update has the peak rate / warm-up steps, not 0. The rate is a pure function of the step, so a resumed run
    needs no scheduler state.
    """
    warmup = math.ceil(train.warmup_fraction * train.steps)
    if step < warmup:
        return train.lr * (step + 1) / warmup
    if train.schedule == "constant":
        return train.lr
    progress = (step - warmup) / max(1, train.steps - warmup)
    return train.min_lr + 0.5 * (train.lr - train.min_lr) * (1.0 + math.cos(math.pi * progress))


def set_learning_rate(optimizer: Any, rate: float, weight_decay: float) -> None:
    """Sets the learning rate and the weight decay of every parameter group, with its `lr_mult` and `wd_mult`."""
    for group in optimizer.param_groups:
        group["lr"] = rate * group.get("lr_mult", 1.0)
        group["weight_decay"] = weight_decay * group.get("wd_mult", 1.0)
