"""`transformer_engine_torch` in a rehearsal: the functions that a bfloat16 step calls, with their shapes and dtypes.

Each makes what the compiled one returns, of the same shapes and dtypes, and computes nothing. `Functions` passes
each call to `on_call`. Any other function ends the rehearsal with its name.
"""

from __future__ import annotations

import enum
import math
import re
import types
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

# those of transformer_engine/common/include/transformer_engine/transformer_engine.h
DType = enum.IntEnum(
    "DType",
    {
        "kByte": 0,
        "kInt32": 2,
        "kFloat32": 4,
        "kFloat16": 5,
        "kBFloat16": 6,
        "kFloat8E4M3": 7,
        "kFloat8E5M2": 8,
        "kFloat4E2M1": 10,
    },
)
_TORCH = {DType.kByte: torch.uint8, DType.kInt32: torch.int32, DType.kFloat32: torch.float32}
_TORCH |= {DType.kFloat16: torch.float16, DType.kBFloat16: torch.bfloat16}
# versions that have every kernel of the layers: cuDNN 9.18 (a learned term in the softmax of packs), cuBLAS 13
CUDNN_VERSION, CUBLAS_VERSION, CUBLAS_STREAMS = 91800, 130000, 4
ATTENTION = "NVTE_F16_arbitrary_seqlen"


class NotRehearsed(Exception):  # noqa: N818 - a finding, not a fault of this program
    """Raised when the step calls a function of Transformer Engine for which there is no stand-in."""


class _Enumeration(type):
    """The class of stand-ins for enumerations of the compiled module; members get numbers when they are first read."""

    @property
    def __members__(cls) -> dict[str, int]:
        return dict(cls.__dict__["numbers"])

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        numbers: dict[str, int] = cls.__dict__["numbers"]
        numbers[name] = len(numbers)
        made: Any = enum.IntEnum(f"{cls.__name__}_{name}", {name: numbers[name]})  # type: ignore[misc]
        setattr(cls, name, made[name])
        return made[name]


class Functions(types.ModuleType):
    """Stand-in for the module `transformer_engine_torch`.

    Args:
        sources: the folder of Transformer Engine's Python files, which say what the compiled module has.
        on_call: called with a function's name and its tensors before each call.
        on_mistake: called with a code and a text where a GPU would refuse a call.
    """

    def __init__(
        self,
        sources: Path,
        on_call: Callable[[str, list[torch.Tensor]], None],
        on_mistake: Callable[[str, str], None],
    ) -> None:
        super().__init__("transformer_engine_torch")
        self.DType = DType
        self._on_call, self._on_mistake = on_call, on_mistake
        for answer in (get_cublasLt_version, get_cudnn_version, get_num_cublas_streams, get_fused_attn_backend):
            setattr(self, answer.__name__, answer)
        for function in _COUNTED:
            setattr(self, function.__name__, self._counted(function))
        # `from transformer_engine_torch import *` takes what is there
        for file in (sources / "transformer_engine" / "pytorch").rglob("*.py"):
            for name in set(re.findall(r"\btex\.([A-Za-z]\w+)", file.read_text())):
                getattr(self, name)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        made: Any = _Enumeration(name, (), {"numbers": {}}) if name[0].isupper() else _not_rehearsed(name)
        setattr(self, name, made)
        return made

    def _counted(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def called(*args: Any, **kwargs: Any) -> Any:
            tensors = [each for each in _leaves([*args, *kwargs.values()]) if isinstance(each, torch.Tensor)]
            self._on_call(function.__name__, tensors)
            on_host = [tensor for tensor in tensors if tensor.ndim and tensor.device.type != "cuda"]
            if on_host:
                self._on_mistake("host-tensor", f"{function.__name__} takes a tensor of the host")
            if function in (generic_gemm, te_general_grouped_gemm):
                factors = [next(iter(_leaves([args[position]]))).dtype for position in (0, 2)]
                if factors[0] != factors[1]:
                    names = ", ".join(str(dtype).removeprefix("torch.") for dtype in factors)
                    self._on_mistake("mixed-dtypes", f"{function.__name__} multiplies {names}")
            return function(*args, **kwargs)

        return called


def _leaves(values: Iterable[Any]) -> Iterable[Any]:
    for value in values:
        if isinstance(value, list | tuple):
            yield from _leaves(value)
        else:
            yield value


def _not_rehearsed(name: str) -> Callable[..., Any]:
    def function(*_: Any, **__: Any) -> Any:
        raise NotRehearsed(f"Transformer Engine's {name} was called; expected a function that te_functions.py has")

    return function


def get_cublasLt_version() -> int:
    """Returns the version of cuBLAS."""
    return CUBLAS_VERSION


def get_cudnn_version() -> int:
    """Returns the version of cuDNN."""
    return CUDNN_VERSION


def get_num_cublas_streams() -> int:
    """Returns the number of streams for grouped products."""
    return CUBLAS_STREAMS


def get_fused_attn_backend(*args: Any) -> Any:
    """Returns cuDNN's attention for any length; since 2.20, which passes one argument, a pair with an empty message."""
    import transformer_engine_torch as functions

    chosen = getattr(functions.NVTE_Fused_Attn_Backend, ATTENTION)
    return (chosen, "") if len(args) == 1 else chosen


def generic_gemm(
    a: torch.Tensor,
    transa: bool,
    b: torch.Tensor,
    transb: bool,
    out: torch.Tensor | None,
    quantizer: Any,
    out_dtype: Any,
    bias: torch.Tensor | None,
    bias_dtype: Any,
    gelu: bool,
    gelu_in: Any,
    grad: bool,
    *_: Any,
    extra_output: Any = None,
    **__: Any,
) -> tuple[torch.Tensor, torch.Tensor | None, None, Any]:
    """Stands in for column-major products: y = b a^T (TN), b's gradient b a (NN) or the weight's b^T a (NT)."""
    rows, columns = a.shape[-1], b.shape[-1]
    if transb:
        shape, inner = (columns, rows), (a.numel() // rows, b.numel() // columns)
    elif transa:
        shape, inner = (*b.shape[:-1], a.shape[0]), (rows, columns)
    else:
        shape, inner = (*b.shape[:-1], rows), (a.numel() // rows, columns)
    if inner[0] != inner[1]:
        raise RuntimeError(f"generic_gemm can't multiply {list(b.shape)} and {list(a.shape)}")
    if out is None:
        out = torch.empty(shape, dtype=_torch_dtype(out_dtype, a.dtype), device=a.device)
    elif out.numel() != math.prod(shape):
        raise RuntimeError(f"generic_gemm can't write {list(shape)} to {list(out.shape)}")
    bias_gradient = b.new_empty(columns) if grad and bias is not None else None
    return out, bias_gradient, None, extra_output


def _torch_dtype(dtype: Any, default: torch.dtype) -> torch.dtype:
    if dtype is None or isinstance(dtype, torch.dtype):
        return dtype or default
    return _TORCH[DType(int(dtype))]


def rmsnorm_fwd(
    x: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor | None, quantizer: Any, dtype: Any, *_: Any
) -> tuple[torch.Tensor, None, torch.Tensor]:
    """Returns the normed state, no mean, and a scale per row."""
    made = torch.empty(x.shape, dtype=_torch_dtype(dtype, x.dtype), device=x.device) if out is None else out
    return made, None, torch.empty(x.numel() // x.shape[-1], dtype=torch.float32, device=x.device)


def rmsnorm_bwd(
    gradient: torch.Tensor, x: torch.Tensor, scale: torch.Tensor, weight: torch.Tensor, *_: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the gradients of the state and of the weight."""
    return torch.empty_like(x), torch.empty_like(weight)


def _queries_keys_values(args: tuple[Any, ...]) -> list[torch.Tensor]:
    """Returns the first three tensors with heads among the arguments, whose positions differ between versions."""
    return [each for each in args if isinstance(each, torch.Tensor) and each.ndim >= 3][:3]


def _learned_terms(args: tuple[Any, ...]) -> list[torch.Tensor]:
    """Returns the learned term of each head's softmax [1, heads, 1, 1], if there is one."""
    tensors = (each for each in _leaves(args) if isinstance(each, torch.Tensor) and each.ndim == 4)
    return [each for each in tensors if each.shape == (1, each.shape[1], 1, 1)][:1]


def fused_attn_fwd(*args: Any) -> list[torch.Tensor]:
    """Returns output, log-sum-exps per query and head, random generator's state, and a learned term if there is one."""
    queries, _, values = _queries_keys_values(args)
    out = queries.new_empty((*queries.shape[:-1], values.shape[-1]))
    logarithms = torch.empty(*queries.shape[:-1], 1, dtype=torch.float32, device=queries.device)
    return [out, logarithms, torch.empty(2, dtype=torch.int64, device=queries.device), *_learned_terms(args)]


def fused_attn_bwd(*args: Any) -> list[torch.Tensor | None]:
    """Returns gradients of queries, keys and values, None for the bias, and a learned term's gradient or None."""
    learned: list[torch.Tensor | None] = [*map(torch.empty_like, _learned_terms(args))]
    return [*map(torch.empty_like, _queries_keys_values(args)), None, *(learned or [None])]


def multi_tensor_l2norm(
    chunk: int, overflow: torch.Tensor, lists: list[list[torch.Tensor]], per_tensor: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the norm [1] of all tensors and, if `per_tensor`, one of each."""
    first = lists[0][0]
    each = len(lists[0]) if per_tensor else 0
    return tuple(torch.empty(size, dtype=torch.float32, device=first.device) for size in (1, each))  # type: ignore[return-value]


def multi_tensor_scale(*_: Any) -> None:
    """Stands in for scaling in place; does nothing."""


def multi_tensor_scale_tensor(*_: Any) -> None:
    """Stands in for scaling in place by a number on the device; does nothing."""


def multi_tensor_adam(*_: Any) -> None:
    """Stands in for AdamW's update in place; does nothing."""


def te_general_grouped_gemm(*args: Any) -> Any:
    """Stands in for experts' products into given tensors, left as they are; returns the biases or their gradients."""
    return args[7]


def thd_read_half_tensor(tensor: torch.Tensor, *_: Any) -> torch.Tensor:
    """Returns one of the two chunks of a context rank, of states [s, heads, channels] or [2, s, heads, channels]."""
    axis = tensor.ndim - 3
    return tensor.new_empty([size // 2 if i == axis else size for i, size in enumerate(tensor.shape)])


def thd_read_second_half_lse(lse: torch.Tensor, offsets: torch.Tensor, packed: bool, half: int) -> torch.Tensor:
    """Returns log-sum-exps of the second chunk: [heads, half] if `packed`, else [batch, heads, half]."""
    return lse.new_empty((lse.shape[0], half) if packed else (*lse.shape[:2], half))


def thd_second_half_lse_correction(*_: Any) -> None:
    """Stands in for adding a partner's keys to the log-sum-exps in place; does nothing."""


def thd_out_correction(*_: Any) -> None:
    """Stands in for adding a partner's share to the output in place; does nothing."""


def thd_grad_correction(*_: Any) -> None:
    """Stands in for adding what a partner's queries give to a gradient in place; does nothing."""


_COUNTED: tuple[Callable[..., Any], ...] = (
    generic_gemm,
    te_general_grouped_gemm,
    rmsnorm_fwd,
    rmsnorm_bwd,
    fused_attn_fwd,
    fused_attn_bwd,
    multi_tensor_l2norm,
    multi_tensor_scale,
    multi_tensor_scale_tensor,
    multi_tensor_adam,
    thd_read_half_tensor,
    thd_read_second_half_lse,
    thd_second_half_lse_correction,
    thd_out_correction,
    thd_grad_correction,
)
