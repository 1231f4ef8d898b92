"""Collectives with gradients, and the names that Megatron-core imports."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist


class CudaRNGStatesTracker:
    """Megatron derives a class from it."""

    def __init__(self) -> None:
        raise NotImplementedError("the stand-in has no CUDA generator")


def checkpoint(*args: object, **kwargs: object) -> None:
    """Megatron uses it only with FP8."""
    raise NotImplementedError("the stand-in has no FP8")


activation_recompute_forward = checkpoint


def _sum(tensor: torch.Tensor, group: Any) -> torch.Tensor:
    total = tensor.contiguous().clone()
    dist.all_reduce(total, group=group)
    return total


def _all(tensor: torch.Tensor, group: Any) -> torch.Tensor:
    parts = [torch.empty_like(tensor, memory_format=torch.contiguous_format) for _ in range(group.size())]
    dist.all_gather(parts, tensor.contiguous(), group=group)
    return torch.cat(parts)


def _mine(tensor: torch.Tensor, group: Any) -> torch.Tensor:
    return tensor.chunk(group.size())[group.rank()].clone()


class Copy(torch.autograd.Function):
    """The same input on every rank; backward adds up what the ranks made of it."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group = group
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _sum(grad, ctx.group), None


class Reduce(torch.autograd.Function):
    """The sum over ranks, the same on each."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: Any) -> torch.Tensor:
        return _sum(tensor, group)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad, None


class Gather(torch.autograd.Function):
    """All ranks' parts of the first dimension; backward adds up and hands each rank its part."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group = group
        return _all(tensor, group)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _mine(_sum(grad, ctx.group), ctx.group), None


class ReduceScatter(torch.autograd.Function):
    """This rank's part of the sum over ranks."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group = group
        return _mine(_sum(tensor, group), group)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _all(grad, ctx.group), None
