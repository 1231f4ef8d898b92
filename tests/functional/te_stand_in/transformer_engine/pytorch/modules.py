"""Linear, LayerNormLinear and norms in plain PyTorch; only what Megatron's GPT layers ask for."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import linear

from .distributed import Copy, Gather, Reduce, ReduceScatter


def require(**settings: tuple[Any, Any]) -> None:
    """Refuses what the stand-in doesn't compute: settings are (given, what it must be)."""
    for name, (given, expected) in settings.items():
        if given != expected:
            raise NotImplementedError(f"the stand-in computes only {name}={expected!r}, not {given!r}")


def rms_norm(hidden: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """In float32 inside, rounded once."""
    wide = hidden.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight.float()).to(hidden.dtype)


def layer_norm(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float) -> torch.Tensor:
    """In float32 inside, rounded once."""
    wide = hidden.float()
    centered = wide - wide.mean(-1, keepdim=True)
    normed = centered * torch.rsqrt(centered.square().mean(-1, keepdim=True) + eps)
    return (normed * weight.float() + bias.float()).to(hidden.dtype)


class WithExtraState(torch.nn.Module):
    """Every module of the real package has an extra state in its state dict; without FP8 it is empty."""

    def get_extra_state(self) -> torch.Tensor:
        return torch.empty(0, dtype=torch.uint8)

    def set_extra_state(self, state: torch.Tensor | None) -> None:
        if state is not None and state.numel():
            raise NotImplementedError("the stand-in has no FP8")


class _Norm(WithExtraState):
    """What both norms share; with `zero_centered_gamma` the stored weight is that of the formula minus one."""

    def __init__(
        self,
        normalized_shape: Any = None,
        eps: float = 1e-5,
        sequence_parallel: bool | None = None,
        params_dtype: torch.dtype | None = None,
        zero_centered_gamma: bool = False,
        hidden_size: int | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__()
        if (normalized_shape is None) == (hidden_size is None):
            raise RuntimeError("exactly one of normalized_shape and hidden_size")
        require(others=(set(kwargs) - {"device"}, set()))
        self.size = hidden_size if normalized_shape is None else normalized_shape
        self.eps, self.zero_centered_gamma = eps, zero_centered_gamma
        self.options = {"dtype": params_dtype, "device": kwargs["device"]}
        self.weight = torch.nn.Parameter(torch.full((self.size,), 1.0 - zero_centered_gamma, **self.options))
        self._mark(self.weight, sequence_parallel)

    def _mark(self, parameter: torch.nn.Parameter, sequence_parallel: bool | None) -> None:
        if sequence_parallel is not None:
            parameter.sequence_parallel = sequence_parallel  # type: ignore[attr-defined]

    def _norm(self, hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    def forward(self, input: torch.Tensor, *extra_inputs: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        require(extra_inputs=(extra_inputs, ()), kwargs=(kwargs, {}))
        return self._norm(input, self.weight.float() + 1 if self.zero_centered_gamma else self.weight)


class RMSNorm(_Norm):
    def _norm(self, hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return rms_norm(hidden, weight, self.eps)


class LayerNorm(_Norm):
    def __init__(self, *args: Any, sequence_parallel: bool | None = None, **kwargs: Any) -> None:
        super().__init__(*args, sequence_parallel=sequence_parallel, **kwargs)
        self.bias = torch.nn.Parameter(torch.zeros(self.size, **self.options))
        self._mark(self.bias, sequence_parallel)

    def _norm(self, hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return layer_norm(hidden, weight, self.bias, self.eps)


class _Parallel(WithExtraState):
    """What both linear layers share: the shard of the weight, its marks, and the communication around the product."""

    def _build(
        self,
        in_features: int,
        out_features: int,
        sequence_parallel: bool,
        tp_group: Any,
        tp_size: int,
        init_method: Any,
        bias: bool,
        return_bias: bool,
        params_dtype: torch.dtype | None,
        parallel_mode: str | None,
        device: Any,
    ) -> None:
        self.tp_group = tp_group
        self.tp_size = tp_size if tp_group is None else tp_group.size()
        self.in_features = in_features // (self.tp_size if parallel_mode == "row" else 1)
        self.out_features = out_features // (self.tp_size if parallel_mode == "column" else 1)
        self.parallel_mode = parallel_mode
        self.sequence_parallel = self.tp_size > 1 and sequence_parallel
        self.fuse_wgrad_accumulation = False
        self.use_bias, self.return_bias, self.apply_bias = bias, return_bias, bias and not return_bias
        options: dict[str, Any] = {"dtype": params_dtype, "device": device}
        self.weight = torch.nn.Parameter(torch.empty(self.out_features, self.in_features, **options))
        if init_method is not None:
            init_method(self.weight.data)
        _mark(self.weight, 1 if parallel_mode == "row" else 0)
        if not bias:
            self.bias = torch.empty(0, **options)
            return
        self.bias = torch.nn.Parameter(torch.zeros(self.out_features, **options))
        if parallel_mode == "row":
            self.bias.sequence_parallel = self.sequence_parallel
        elif parallel_mode == "column":
            _mark(self.bias, 0)

    def _product(self, inp: torch.Tensor) -> Any:
        if self.tp_size > 1 and self.parallel_mode == "column":
            inp = (Gather if self.sequence_parallel else Copy).apply(inp, self.tp_group)
        fused = self.fuse_wgrad_accumulation and torch.is_grad_enabled() and self.weight.requires_grad
        out = _AccumulatingLinear.apply(inp, self.weight) if fused else linear(inp, self.weight)
        if self.tp_size > 1 and self.parallel_mode == "row":
            out = (ReduceScatter if self.sequence_parallel else Reduce).apply(out, self.tp_group)
        if self.apply_bias:
            out = out + self.bias
        return (out, self.bias) if self.return_bias else out


class _AccumulatingLinear(torch.autograd.Function):
    """The product whose backward adds the weight's gradient to `weight.main_grad`, as with fuse_wgrad_accumulation."""

    products = 0  # backward passes, for tests

    @staticmethod
    def forward(ctx: Any, inp: torch.Tensor, weight: torch.nn.Parameter) -> torch.Tensor:
        ctx.save_for_backward(inp, weight)
        ctx.parameter = weight
        return linear(inp, weight)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]
        inp, weight = ctx.saved_tensors
        main_grad = ctx.parameter.main_grad
        main_grad += grad.flatten(0, -2).to(main_grad.dtype).T @ inp.flatten(0, -2).to(main_grad.dtype)
        ctx.parameter.grad_added_to_main_grad = True
        _AccumulatingLinear.products += 1
        # the hook of data parallelism needs a gradient, and ignores its values
        return grad @ weight, torch.empty_like(weight)


def _mark(parameter: torch.nn.Parameter, axis: int) -> None:
    for name, value in (("tensor_model_parallel", True), ("partition_dim", axis), ("partition_stride", 1)):
        assert not hasattr(parameter, name)
        setattr(parameter, name, value)


class Linear(_Parallel):
    def __init__(
        self,
        in_features: int,
        out_features: int,
        sequence_parallel: bool = False,
        fuse_wgrad_accumulation: bool = False,
        tp_group: Any = None,
        tp_size: int = 1,
        get_rng_state_tracker: Any = None,
        rng_tracker_name: str | None = None,
        init_method: Any = None,
        bias: bool = True,
        return_bias: bool = False,
        params_dtype: torch.dtype | None = None,
        parallel_mode: str | None = None,
        parameters_split: Any = None,
        device: Any = "cuda",
        ub_overlap_ag: bool = False,
        ub_overlap_rs: bool = False,
        ub_overlap_rs_dgrad: bool = False,
        ub_bulk_dgrad: bool = False,
        ub_bulk_wgrad: bool = False,
        ub_name: str | None = None,
        delay_wgrad_compute: bool = False,
        symmetric_ar_type: str | None = None,
        save_original_input: bool = False,
        name: str | None = None,
    ) -> None:
        super().__init__()
        require(
            fuse_wgrad_accumulation=(fuse_wgrad_accumulation, False),
            parameters_split=(parameters_split, None),
            delay_wgrad_compute=(delay_wgrad_compute, False),
        )
        self._build(
            in_features,
            out_features,
            sequence_parallel,
            tp_group,
            tp_size,
            init_method,
            bias,
            return_bias,
            params_dtype,
            parallel_mode,
            device,
        )

    def forward(
        self,
        inp: torch.Tensor,
        is_first_microbatch: bool | None = None,
        fp8_output: bool | None = False,
        fp8_grad: bool | None = False,
    ) -> Any:
        return self._product(inp)


class LayerNormLinear(_Parallel):
    def __init__(
        self,
        in_features: int,
        out_features: int,
        eps: float = 1e-5,
        sequence_parallel: bool = False,
        fuse_wgrad_accumulation: bool = False,
        tp_group: Any = None,
        tp_size: int = 1,
        get_rng_state_tracker: Any = None,
        init_method: Any = None,
        bias: bool = True,
        normalization: str = "LayerNorm",
        return_bias: bool = False,
        params_dtype: torch.dtype | None = None,
        parallel_mode: str | None = None,
        return_layernorm_output: bool = False,
        return_layernorm_output_gathered: bool = False,
        parameters_split: Any = None,
        zero_centered_gamma: bool = False,
        device: Any = "cuda",
        ub_overlap_ag: bool = False,
        ub_overlap_rs: bool = False,
        ub_overlap_rs_dgrad: bool = False,
        ub_bulk_wgrad: bool = False,
        ub_bulk_dgrad: bool = False,
        ub_name: str | None = None,
        delay_wgrad_compute: bool = False,
        symmetric_ar_type: str | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__()
        require(
            fuse_wgrad_accumulation=(fuse_wgrad_accumulation, False),
            return_layernorm_output=(return_layernorm_output, False),
            return_layernorm_output_gathered=(return_layernorm_output_gathered, False),
            parameters_split=(parameters_split, None),
            delay_wgrad_compute=(delay_wgrad_compute, False),
        )
        self.eps, self.zero_centered_gamma = eps, zero_centered_gamma
        options: dict[str, Any] = {"dtype": params_dtype, "device": device}
        self.layer_norm_weight = torch.nn.Parameter(torch.full((in_features,), 1.0 - zero_centered_gamma, **options))
        self.layer_norm_bias = None
        if normalization == "LayerNorm":
            self.layer_norm_bias = torch.nn.Parameter(torch.zeros(in_features, **options))
        elif normalization != "RMSNorm":
            raise AssertionError("Unsupported normalization type!")
        self._build(
            in_features,
            out_features,
            sequence_parallel,
            tp_group,
            tp_size,
            init_method,
            bias,
            return_bias,
            params_dtype,
            parallel_mode,
            device,
        )
        for parameter in (self.layer_norm_weight, self.layer_norm_bias):
            if parameter is not None:
                parameter.sequence_parallel = self.sequence_parallel  # type: ignore[attr-defined]

    def forward(
        self,
        inp: torch.Tensor,
        is_first_microbatch: bool | None = None,
        fp8_output: bool | None = False,
        fp8_grad: bool | None = False,
    ) -> Any:
        weight = self.layer_norm_weight.float() + 1 if self.zero_centered_gamma else self.layer_norm_weight
        if self.layer_norm_bias is None:
            return self._product(rms_norm(inp, weight, self.eps))
        return self._product(layer_norm(inp, weight, self.layer_norm_bias, self.eps))
