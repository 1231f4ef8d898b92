"""The part `device`: rates of this GPU, and which attention kernel takes each of this project's calls."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.gpu_parts.measure import is_cuda, median_seconds, place
from benchmarks.gpu_parts.outcome import GB, Outcome, Settings
from nemo_oprd.megatron import attention
from nemo_oprd.megatron.attention import SDPAttention

# float32 accumulation of a bfloat16 product, against float64
PRODUCT_LIMIT = 1e-5
BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "math": SDPBackend.MATH,
}
HEADS, GROUPS, CHANNELS = 12, 2, 128
# above this many keys the math kernel's score matrix takes gigabytes
LONG = 4096


@dataclass(frozen=True)
class Call:
    """A call of attention: `queries` and `keys` tokens of `sequences` sequences; one query is a decoded token."""

    name: str
    sequences: int
    queries: int
    keys: int
    dtype: torch.dtype
    needs_gradient: bool = True


def calls(*, quick: bool) -> list[Call]:
    """The shapes of training, of prompts and of decoded tokens."""
    long, half, whole = (64 if quick else 16384), torch.bfloat16, torch.float32
    return [
        Call("packed 16k bf16", 1, long, long, half),
        Call("bucket 8 x 2k bf16", 8, long // 8, long // 8, half),
        Call("packed 16k fp32", 1, long, long, whole),
        Call("context parallel 8k of 16k bf16", 1, long // 2, long, half),
        Call("context parallel 8k of 16k fp32", 1, long // 2, long, whole),
        Call("prompts 4 x 16k bf16", 4, long, long, half, needs_gradient=False),
        Call("token 64 x 384 bf16", 64, 1, min(long, 384), half, needs_gradient=False),
        Call("token 4 x 16k bf16", 4, 1, long, half, needs_gradient=False),
        Call("token 4 x 16k fp32", 4, 1, long, whole, needs_gradient=False),
    ]


def device(settings: Settings, outcome: Outcome) -> None:
    """Rates of products and copies, and the kernels of attention."""
    outcome.require(is_cuda() or settings.quick, "torch sees no CUDA device; use --quick to check on a CPU")
    if is_cuda():
        properties = torch.cuda.get_device_properties(0)
        free = torch.cuda.mem_get_info()[0]
        outcome.numbers |= {
            "gpu": properties.name,
            "memory_gb": properties.total_memory / GB,
            "free_gb": free / GB,
            "capability": f"{properties.major}.{properties.minor}",
            "nccl": ".".join(map(str, torch.cuda.nccl.version())),
            "cudnn": torch.backends.cudnn.version(),
        }
        outcome.lines.append(f"{properties.name}: {properties.total_memory / GB:.1f} GB, {free / GB:.1f} free")
    elif not settings.quick:
        return
    _rates(settings, outcome)
    torch.backends.cuda.enable_cudnn_sdp(False)  # as `init_distributed` does
    for call in calls(quick=settings.quick):
        attention_kernel(outcome, call)


def _rates(settings: Settings, outcome: Outcome) -> None:
    size, where = 256 if settings.quick else 8192, place()
    one, other = (torch.randn(size, size, device=where, dtype=torch.bfloat16) for _ in range(2))
    rates = {"bf16_tflops": 2 * size**3 / median_seconds(lambda: one @ other) / 1e12}
    if is_cuda():
        seconds = median_seconds(lambda: torch.mm(one, other, out_dtype=torch.float32))
        rates["bf16_out_fp32_tflops"] = 2 * size**3 / seconds / 1e12
        expected = one[:64].double() @ other.double()
        found = torch.mm(one, other, out_dtype=torch.float32)[:64].double()
        error = float((found - expected).norm() / expected.norm())
        outcome.numbers["out_fp32_error"] = error
        outcome.require(error <= PRODUCT_LIMIT, f"torch.mm(out_dtype=float32) deviates by {error:.1e} from float64")
    big = torch.empty((1 << 20) if settings.quick else (1 << 30), dtype=torch.bfloat16, device=where)
    target = torch.empty_like(big)
    rates["copy_gb_s"] = 2 * big.nbytes / median_seconds(lambda: target.copy_(big)) / GB
    if is_cuda():
        host = torch.empty(1 << 27, dtype=torch.bfloat16, pin_memory=True)
        part = big[: host.numel()]
        rates["pinned_to_device_gb_s"] = host.nbytes / median_seconds(lambda: part.copy_(host, non_blocking=True)) / GB
        rates["device_to_pinned_gb_s"] = host.nbytes / median_seconds(lambda: host.copy_(part, non_blocking=True)) / GB
    outcome.numbers |= rates
    outcome.lines.append(", ".join(f"{name} {rate:.3g}" for name, rate in rates.items()))
    outcome.save()


def attention_kernel(outcome: Outcome, call: Call) -> None:
    """Adds which kernel torch takes for a call of `SDPAttention`, and its milliseconds; the others', where they can.

    On a GPU the math kernel, which makes the whole score matrix, is a problem for long sequences.
    """
    run, choice = project_call(call)
    found: dict[str, Any] = {"chosen": choice, "ms": 1e3 * median_seconds(run)}
    if is_cuda():
        for name, backend in BACKENDS.items():
            if name != "math" or call.keys < LONG:
                found[name] = _milliseconds(run, backend)
        outcome.require(
            choice != "math" or call.keys < LONG,
            f"{call.name}: attention takes the math kernel, whose score matrix grows with the square of the length",
        )
    outcome.numbers.setdefault("attention", {})[call.name] = found
    others = [f"{name} {found[name]:.2f} ms" for name in BACKENDS if found.get(name) is not None]
    outcome.lines.append(f"attention, {call.name}: {choice}, {found['ms']:.2f} ms ({', '.join(others) or 'CPU'})")
    outcome.row(f"{call.name}: {choice}", seconds=found["ms"] / 1e3)


def _milliseconds(run: Callable[[], Any], backend: SDPBackend) -> float | None:
    """Of a kernel; None if it refuses the call."""
    try:
        with sdpa_kernel(backend), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return 1e3 * median_seconds(run)
    except RuntimeError:
        return None


def project_call(call: Call) -> tuple[Callable[[], Any], str]:
    """(The project's attention on random tensors of a call's shape, the kernel that torch chooses for it)."""
    shapes = (HEADS, call.queries), (GROUPS, call.keys), (GROUPS, call.keys)
    q, k, v = (
        torch.randn(
            call.sequences, heads, tokens, CHANNELS, device=place(), dtype=call.dtype,
            requires_grad=call.needs_gradient,
        )
        for heads, tokens in shapes
    )  # fmt: skip
    core = SDPAttention.__new__(SDPAttention)
    torch.nn.Module.__init__(core)
    core.scale = None
    if call.queries == 1:
        mask = torch.zeros(call.sequences, 1, 1, call.keys, device=place(), dtype=call.dtype)
        cache: Any = SimpleNamespace(mask=mask, update=lambda layer, key, value: (k, v))
        core.layer_number = 1
        query, key, value = (tensor[:, :, :1].permute(2, 0, 1, 3) for tensor in (q, k, v))
        run = lambda: core._decode(query, key, value, cache)  # noqa: E731
    elif call.queries < call.keys:
        run = lambda: core._attend_last(q, k, v)  # noqa: E731
    else:
        run = lambda: core._attend(q, k, v)  # noqa: E731
    return run, chosen_kernel(run)


def chosen_kernel(run: Callable[[], Any]) -> str:
    """The kernel that torch chooses for the only call of attention in `run`."""
    chosen: list[str] = []
    call = attention.scaled_dot_product_attention

    def note(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **options: Any) -> torch.Tensor:
        chosen.append(_choice(query, key, value, **options))
        return call(query, key, value, **options)

    attention.scaled_dot_product_attention = note  # type: ignore[assignment]
    try:
        run()
    finally:
        attention.scaled_dot_product_attention = call
    (kernel,) = chosen
    return kernel


def _choice(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, attn_mask: Any = None, is_causal: bool = False,
    scale: float | None = None, enable_gqa: bool = False,
) -> str:  # fmt: skip
    if attn_mask is not None and type(attn_mask) is not torch.Tensor:
        # a causal bias decides by itself, on a GPU between flash and memory-efficient attention
        if not is_cuda():
            return "a mask"
        params = torch.backends.cuda.SDPAParams(query, key, value, None, 0.0, True, enable_gqa)
        if torch.backends.cuda.can_use_flash_attention(params):
            return "flash"
        return "efficient" if torch.backends.cuda.can_use_efficient_attention(params) else "math"
    number = torch._fused_sdp_choice(
        query, key, value, attn_mask=attn_mask, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa
    )
    return next((name for name, backend in BACKENDS.items() if backend.value == number), str(number))
