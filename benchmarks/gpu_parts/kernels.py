"""Where the time of a GPU goes: its kernels by kind, and the share of the time in which it works."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.gpu_parts.measure import is_cuda, synchronize
from benchmarks.gpu_parts.outcome import Outcome

# kind -> parts of a kernel's name; the first that fits
KINDS = {
    "attention": ("flash", "fmha", "attention", "cudnn"),
    "matrix products": ("gemm", "nvjet", "cutlass", "xmma", "cublas"),
    "optimizer": ("multi_tensor", "foreach"),
    "copies": ("memcpy", "copy", "memset", "fillfunctor"),
    "gather, scatter": ("index", "gather", "scatter"),
    "top-k, sort": ("topk", "sort", "radix"),
    "norms": ("layer_norm", "rms", "rowwisemoments"),
    "reductions": ("reduce",),
    "concatenation": ("cat",),
    "softmax": ("softmax", "exp"),
    "elementwise": ("elementwise", "vectorized", "pointwise"),
}
SHOWN, KEPT = 5, 25


def kind_of(kernel: str) -> str:
    """The kind of a kernel, by its name."""
    name = kernel.lower()
    return next((kind for kind, words in KINDS.items() if any(word in name for word in words)), "other")


def kernel_profile(outcome: Outcome, run: Callable[[], Any]) -> None:
    """Adds the profile of one call; nothing without a GPU."""
    if not is_cuda():
        return
    synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        start = time.perf_counter()
        run()
        synchronize()
        wall = time.perf_counter() - start
    kinds, names, count = Counter[str](), Counter[str](), 0
    for event in profiler.key_averages():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            seconds = event.self_device_time_total / 1e6
            kinds[kind_of(event.key)] += seconds  # type: ignore[assignment]
            names[event.key[:110]] += seconds  # type: ignore[assignment]
            count += event.count
    busy = sum(kinds.values())
    outcome.numbers["profile"] = {
        "wall_seconds": wall,
        "busy_seconds": busy,
        "kernels": count,
        "kinds": dict(kinds.most_common()),
        "largest": dict(names.most_common(KEPT)),
    }
    if busy:
        shares = ", ".join(f"{kind} {seconds / busy:.0%}" for kind, seconds in kinds.most_common(8))
        outcome.lines.append(f"{count} kernels, the GPU works {busy:.3f} of {wall:.3f} s: {shares}")
        outcome.lines += [f"  {1e3 * seconds:8.1f} ms {name[:80]}" for name, seconds in names.most_common(SHOWN)]
    outcome.save()
