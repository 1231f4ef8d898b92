"""Makes fake tensors take the kernels that CUDA would take, not those of the CPU build of torch."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.optim.optimizer import _foreach_supported_types

# These have a kernel of their own on CUDA; the CPU build composes them of smaller operations, which keep more alive.
_FUSED = ("silu_backward", "mish_backward", "_fused_rms_norm")


def install() -> None:
    """Changes torch for the whole process."""
    _have_kernels()
    _choose_attention()
    _move_modules()
    _read_scalars()
    # torch's optimizers update many tensors at a time on CUDA, if these are of a type that they know
    _foreach_supported_types.append(FakeTensor)


def _have_kernels() -> None:
    library = torch.library.Library("aten", "IMPL", "CUDA")

    def never(*_: Any, **__: Any) -> None:
        raise AssertionError("a kernel would have run")

    for name in _FUSED:
        library.impl(name, never)
    _kept.append(library)  # the registrations end with it


_kept: list[Any] = []


class CausalBias:
    """Replaces `torch.nn.attention.bias.CausalBias`, a subclass of Tensor, which fake tensors can't be."""

    def __init__(self, *_: Any) -> None: ...


def _choose_attention() -> None:
    """Chooses flash attention for bfloat16, memory-efficient attention for float32 and masks, as torch does on CUDA."""
    import torch.nn.attention.bias as bias

    from nemo_oprd.megatron import attention

    def chosen(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: Any = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        if isinstance(attn_mask, CausalBias):
            is_causal, attn_mask = True, None
        if attn_mask is None and query.dtype in (torch.bfloat16, torch.float16):
            query, key, value = (t if t.stride(-1) == 1 else t.contiguous() for t in (query, key, value))
            flash: Any = torch.ops.aten._scaled_dot_product_flash_attention
            return flash(query, key, value, dropout_p, is_causal, False, scale=scale)[0]
        if enable_gqa and key.shape[1] != query.shape[1]:
            groups = query.shape[1] // key.shape[1]
            key, value = (t.repeat_interleave(groups, dim=1) for t in (key, value))
        if attn_mask is not None:
            if attn_mask.dtype == torch.bool:
                attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill_(~attn_mask, -torch.inf)
            attn_mask = attn_mask.expand(*query.shape[:3], key.shape[2])
        efficient: Any = torch.ops.aten._scaled_dot_product_efficient_attention
        for_backward = any(tensor.requires_grad for tensor in (query, key, value))
        return efficient(query, key, value, attn_mask, for_backward, dropout_p, is_causal, scale=scale)[0]

    attention.scaled_dot_product_attention = chosen
    bias.causal_lower_right = CausalBias  # type: ignore[assignment]


def _move_modules() -> None:
    """Makes `Module.to` move tensors of other devices: torch can't swap tensors with the recorder's weak references."""
    general = torch.nn.Module.to

    def to(module: torch.nn.Module, *args: Any, **kwargs: Any) -> torch.nn.Module:
        target = args[0] if args and isinstance(args[0], torch.device) else kwargs.get("device")
        if target is None:
            return general(module, *args, **kwargs)
        for part in module.modules():
            for name, buffer in part._buffers.items():
                if buffer is not None and buffer.device.type != torch.device(target).type:
                    part._buffers[name] = buffer.to(target)
            for name, parameter in part._parameters.items():
                if parameter is not None and parameter.device.type != torch.device(target).type:
                    moved = torch.nn.Parameter(parameter.detach().to(target), requires_grad=parameter.requires_grad)
                    vars(moved).update({key: kept for key, kept in vars(parameter).items() if key not in vars(moved)})
                    part._parameters[name] = moved
        return module

    torch.nn.Module.to = to  # type: ignore[method-assign,assignment]


def _read_scalars() -> None:
    """Makes the recorder see that `torch.tensor([scalars on the device])` reads them one by one.

    `tolist` of a tensor is one copy to the host, but that of a fake tensor would read the numbers one by one.
    """
    one_by_one = FakeTensor.tolist

    def at_once(tensor: FakeTensor) -> Any:
        copied = tensor.cpu() if tensor.device.type == "cuda" else tensor
        return one_by_one(copied) if isinstance(copied, FakeTensor) else copied.tolist()

    FakeTensor.tolist = at_once  # type: ignore[method-assign,assignment]
    general = torch.tensor

    def numbers(data: Any) -> Any:
        if isinstance(data, torch.Tensor) and data.device.type == "cuda":
            return data.item() if data.ndim == 0 else data.tolist()
        return [numbers(each) for each in data] if isinstance(data, list | tuple) else data

    torch.tensor = lambda data, *args, **kwargs: general(numbers(data), *args, **kwargs)


def known_shapes() -> None:
    """Makes pipeline stages take shapes from the schedule's microbatches; those that are still sent stay unread."""
    from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator

    from nemo_oprd.megatron import pipeline_schedule

    run: Callable[..., None] = pipeline_schedule.run_schedule
    told: dict[str, Any] = {}

    def run_schedule(chunks: list[Any], role: Any, microbatches: list[Any], **options: Any) -> None:
        config, layout = chunks[0].config, role.layout
        divisor = layout.tensor if layout.sequence else 1
        told["shapes"] = [[m.input_ids.shape[1] // divisor, 1, config.hidden_size] for m in microbatches]
        told["previous"] = told["next"] = 0
        run(chunks, role, microbatches, **options)

    exchange = P2PCommunicator._communicate_shapes

    def shapes(self: Any, send_next: Any, send_previous: Any, from_previous: bool, from_next: bool) -> list[list[int]]:
        exchange(self, send_next, send_previous, from_previous, from_next)
        found = []
        for key, wanted in (("previous", from_previous), ("next", from_next)):
            found.append(told["shapes"][told[key] % len(told["shapes"])] if wanted else [0, 0, 0])
            told[key] += bool(wanted)
        return found

    P2PCommunicator._communicate_shapes = shapes
    for module in list(sys.modules.values()):
        if getattr(module, "run_schedule", None) is run:
            module.run_schedule = run_schedule  # type: ignore[attr-defined]
