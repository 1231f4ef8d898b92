"""Stand-ins for FLA's kernels of a gated delta net: the tensors that these return, keep, and need meanwhile.

Megatron's layer takes three functions of flash-linear-attention, which are Triton. These stand-ins compute nothing:
they make the tensors that version 0.6.0 makes, of the same shapes and dtypes, and hold them as long as it does. They
do not count FLA's own waits of the host, for the lengths of a pack.

Shapes: B = 1 pack of S tokens, N sequences in it, H heads, K channels of a key, V of a value, C channels, W the width
of a convolution.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch

from nemo_oprd.megatron import versions

VERSION = "0.6.0"
# tokens whose corrections the kernels solve for together
_CHUNK = 64


def install() -> None:
    """Puts the stand-ins where Megatron's gated delta net has FLA's functions, as if FLA were installed."""
    if versions.CORE < (0, 19):  # older versions have no such layer for packed sequences
        return
    common: Any = importlib.import_module("megatron.core.ssm.gated_delta_net.common")
    layer: Any = importlib.import_module("megatron.core.ssm.gated_delta_net.gdn")
    common.HAVE_FLA, common.l2norm = True, l2norm
    layer.causal_conv1d, layer.chunk_gated_delta_rule = causal_conv1d, chunk_gated_delta_rule


def l2norm(x: torch.Tensor, *_: Any) -> torch.Tensor:
    """Stands in for the L2 norm over K: [..., K] -> an uninitialised tensor of this shape and dtype."""
    normed: torch.Tensor = _Norm.apply(x)
    return normed


def causal_conv1d(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    cu_seqlens: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Stands in for a convolution: x [B, S, C], which keeps a wider product; weight [C, W] -> ([B, S, C], None)."""
    if bias is not None:
        raise ValueError("a convolution with a bias, which no family has; expected none: remove the bias")
    return _Convolution.apply(x, weight, _chunks(x, cu_seqlens)), None


def chunk_gated_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    g: torch.Tensor,
    beta: torch.Tensor,
    cu_seqlens: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Stands in for the rule: q, k [B, S, H, K], v [B, S, H, V], g and beta [B, S, H] -> ([B, S, H, V], None)."""
    return _DeltaRule.apply(q, k, v, g, beta, _chunks(q, cu_seqlens)), None


def _chunks(x: torch.Tensor, cu_seqlens: torch.Tensor | None) -> int:
    """Returns the most chunks that all sequences can have: each of the N sequences may end with a partial chunk."""
    return x.shape[1] // _CHUNK + (1 if cu_seqlens is None else len(cu_seqlens) - 1)


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        normed = torch.empty_like(x)
        ctx.save_for_backward(normed, torch.empty(x.shape[:-1], dtype=torch.float32, device=x.device))
        return normed

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return torch.empty_like(ctx.saved_tensors[0])


class _Convolution(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, chunks: int) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.chunks = chunks
        return torch.empty_like(x, memory_format=torch.contiguous_format)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        before_silu = torch.empty_like(x, memory_format=torch.contiguous_format)
        gradient_x = torch.empty_like(x)
        of_chunks = weight.new_empty(ctx.chunks, *weight.shape, dtype=torch.float32)
        del before_silu
        return gradient_x, of_chunks.sum(0).to(weight), None


class _DeltaRule(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, chunks: int
    ) -> torch.Tensor:
        total = torch.empty_like(g)
        solved = k.new_empty(*k.shape[:3], _CHUNK)
        within = _within_chunks(k, v, chunks)
        out = torch.empty_like(v)
        del within
        ctx.save_for_backward(q, k, v, total, beta, solved)
        ctx.chunks = chunks
        return out

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        q, k, v, g, beta, _ = ctx.saved_tensors
        within = _within_chunks(k, v, ctx.chunks)
        first_v = torch.empty_like(gradient)
        of_states, of_v = _states(k, v, ctx.chunks), torch.empty_like(first_v)
        del first_v
        of_q, of_k, of_g, of_w = (torch.empty_like(each) for each in (q, k, g, k))
        second_k, second_v, second_g, of_beta = (torch.empty_like(each) for each in (k, v, g, beta))
        del of_v, within, of_states, of_w, second_k, second_g
        return of_q, of_k, second_v, torch.empty_like(of_g), of_beta, None


def _within_chunks(k: torch.Tensor, v: torch.Tensor, chunks: int) -> list[torch.Tensor]:
    """Makes the tensors of both passes: keys and values that a chunk corrects, states before each chunk, new values."""
    return [torch.empty_like(k), torch.empty_like(v), _states(k, v, chunks), torch.empty_like(v)]


def _states(k: torch.Tensor, v: torch.Tensor, chunks: int) -> torch.Tensor:
    return k.new_empty(1, chunks, k.shape[2], k.shape[3], v.shape[3])
