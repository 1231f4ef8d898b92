"""Lets stock Megatron-core run on a machine without CUDA, over gloo.

Megatron-core asks for CUDA devices by name in a few modules: `device="cuda"`, `torch.cuda.current_device()`,
`tensor.type() == "torch.cuda.FloatTensor"`. `install()` replaces exactly those places. The global `torch` module is not
changed, so a device mistake in any other code, including this project's, still raises an error instead of silently
using the CPU.

Kinds of change; what has a table is listed below:
- `MODULES_ASKING_FOR_CUDA`: the module's global name `torch` is bound to a view of torch that reports the CPU where the
  module asks for a CUDA device.
- `FUNCTIONS_COMPARING_TYPE_NAMES`: CUDA type names among a function's constants become CPU type names.
- Megatron's exchange of tokens between experts gets the sizes of its parts as numpy arrays, as it would from a GPU.
- Megatron's optimizer takes torch's AdamW and its own functions on lists of tensors, even where it has found those of
  Transformer Engine or Apex, which need a driver: a login node has the packages for GPUs, but no GPU.
- Where Megatron takes `torch.optim.AdamW`, it gets a subclass that does not import the compiler.
- Megatron's linear layers add weight gradients to the gradient buffer by torch, as they do by Apex on a GPU; embeddings
  can do so, too (`add_rows_to_buffer`).
- The two functions of `megatron.core.tensor_parallel.random` through which the RNG tracker and activation checkpointing
  read and write the state of the CUDA generator use the CPU generator.

Nothing is changed where CUDA is available: `install()` raises an error there. `import_uncompiled()` only saves time:
it imports without garbage collection, and, where torch sees no GPU, without the compiler.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import inspect
import os
import types
from collections.abc import Callable
from typing import Any

import torch

from nemo_oprd.megatron import versions

MODULES_ASKING_FOR_CUDA = (
    "megatron.core.dist_checkpointing.strategies.filesystem_async",
    "megatron.core.dist_checkpointing.strategies.state_dict_saver",
    "megatron.core.distributed.param_and_grad_buffer",
    "megatron.core.models.common.embeddings.rotary_pos_embedding",
    "megatron.core.models.common.embeddings.yarn_rotary_pos_embedding",
    "megatron.core.optimizer.clip_grads",
    "megatron.core.optimizer.distrib_optimizer",
    "megatron.core.optimizer.optimizer",
    "megatron.core.pipeline_parallel.p2p_communication",
    "megatron.core.pipeline_parallel.schedules",
    "megatron.core.tensor_parallel.layers",
    "megatron.core.tensor_parallel.mappings",
    "megatron.core.tensor_parallel.random",
    "megatron.core.tensor_parallel.utils",
    "megatron.core.transformer.moe.router",
    "megatron.core.transformer.moe.token_dispatcher",
    "megatron.core.transformer.utils",
    "megatron.core.utils",
    *versions.MODULES_ASKING_FOR_CUDA,
)

# (module, qualified name) of functions that compare `tensor.type()` with CUDA names or call `.cuda()`
FUNCTIONS_COMPARING_TYPE_NAMES = (
    ("megatron.core.optimizer.clip_grads", "clip_grad_by_total_norm_fp32"),
    ("megatron.core.optimizer.distrib_optimizer", "DistributedOptimizer._build_model_and_main_param_groups"),
    ("megatron.core.optimizer.distrib_optimizer", "DistributedOptimizer.get_parameter_state_dp_zero"),
    ("megatron.core.optimizer.optimizer", "Float16OptimizerWithFloat16Params.__init__"),
    ("megatron.core.models.common.language_module.language_module", "LanguageModule.setup_embeddings_and_output_layer"),
)
CPU_TYPE_NAMES = {
    "torch.cuda.FloatTensor": "torch.FloatTensor",
    "torch.cuda.HalfTensor": "torch.HalfTensor",
    "torch.cuda.BFloat16Tensor": "torch.BFloat16Tensor",
}

# an attribute of weights, see `add_rows_to_buffer`
_MARK = "rows_into_buffer"
_FACTORIES = ("empty", "zeros", "ones", "full", "tensor")
_installed = False


class _Stream:
    """Stands in for a CUDA stream and its events: on a CPU the next operation begins when the last one has ended."""

    def wait_stream(self, _: Any) -> None:
        """Returns at once: there is nothing to wait for."""

    def record_event(self) -> _Stream:
        """Returns an event that has happened."""
        return self

    def synchronize(self) -> None:
        """Returns at once: there is nothing to wait for."""


_STREAM = _Stream()


class _CpuInPlaceOfCuda(types.ModuleType):
    """The part of `torch.cuda` that Megatron-core calls unconditionally; anything else raises AttributeError."""

    def __init__(self) -> None:
        super().__init__("torch.cuda (CPU stand-in)")
        self.OutOfMemoryError = torch.cuda.OutOfMemoryError
        self.CUDAGraph = torch.cuda.CUDAGraph

    current_device = staticmethod(lambda: torch.device("cpu"))
    is_available = staticmethod(lambda: False)
    synchronize = staticmethod(lambda *_: None)
    empty_cache = staticmethod(lambda: None)
    get_rng_state = staticmethod(lambda *_: torch.get_rng_state())
    set_rng_state = staticmethod(lambda state, *_: torch.set_rng_state(state))
    manual_seed = staticmethod(lambda seed: torch.default_generator.manual_seed(seed))
    Stream = _Stream
    current_stream = staticmethod(lambda *_: _STREAM)
    stream = staticmethod(lambda *_: contextlib.nullcontext())


class _TorchOnCpu(types.ModuleType):
    """The view of torch that a Megatron module gets: the same objects, with the CPU in place of CUDA devices."""

    def __init__(self) -> None:
        super().__init__("torch")
        self.cuda = _CpuInPlaceOfCuda()
        for name in _FACTORIES:
            setattr(self, name, _on_cpu(getattr(torch, name)))

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def _on_cpu(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def make(*args: Any, **kwargs: Any) -> torch.Tensor:
        if kwargs.get("device") == "cuda":
            kwargs["device"] = "cpu"
        return factory(*args, **kwargs)

    return make


def _replace_names(code: types.CodeType) -> types.CodeType:
    """Returns `code` with CPU type names for CUDA ones, also in nested constants, and with `.cpu()` for `.cuda()`."""

    def replace(constant: Any) -> Any:
        if isinstance(constant, tuple):
            return tuple(replace(item) for item in constant)
        if isinstance(constant, types.CodeType):
            return _replace_names(constant)
        return CPU_TYPE_NAMES.get(constant, constant) if isinstance(constant, str) else constant

    names = tuple("cpu" if name == "cuda" else name for name in code.co_names)
    return code.replace(co_consts=replace(code.co_consts), co_names=names)


def _find(module: types.ModuleType, qualified_name: str) -> Any:
    found: Any = module
    for part in qualified_name.split("."):
        found = found.__dict__[part] if isinstance(found, type) else getattr(found, part)
    return found.__func__ if isinstance(found, (classmethod, staticmethod)) else found


def _get_rng_state(device: Any = "cuda", clone: bool = False, graph_safe: bool = False) -> torch.Tensor:
    return torch.get_rng_state()


def _set_rng_state(new_state: torch.Tensor, device: int = -1, graph_safe: bool = False) -> None:
    torch.set_rng_state(new_state)


def _on_host(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    """Replaces Megatron's `maybe_move_tensor_to_cpu`, which makes numpy arrays of sizes only if they were on a GPU."""
    return tensor.numpy() if as_numpy and isinstance(tensor, torch.Tensor) else tensor


class _WeightGradients:
    """Stands in for Apex's extension that adds the gradient of a linear layer's weight to a buffer in one kernel."""

    @staticmethod
    def wgrad_gemm_accum_fp32(inputs_ND: torch.Tensor, grads_NF: torch.Tensor, buffer_FD: torch.Tensor) -> None:
        """Adds grads^T @ inputs to the float32 buffer."""
        buffer_FD.addmm_(grads_NF.t().to(buffer_FD.dtype), inputs_ND.to(buffer_FD.dtype))


def _unread_gradient(shape: list[int], dtype: torch.dtype, zero: bool = False) -> torch.Tensor:
    """Returns a CPU stand-in for a gradient that is already in the buffer; Transformer Engine's is on a GPU."""
    return torch.zeros(shape, dtype=dtype) if zero else torch.empty(shape, dtype=dtype)


class _RowsIntoBuffer(torch.autograd.Function):
    """Looks up rows of an embedding, and adds their gradients to the rows of the weight's buffer.

    Autograd gets no gradient of the weight from here, and adds those from other uses of the weight as usual.
    """

    @staticmethod
    def forward(ctx: Any, ids: torch.Tensor, weight_VD: Any) -> torch.Tensor:
        ctx.save_for_backward(ids)
        ctx.weight = weight_VD
        return torch.nn.functional.embedding(ids, weight_VD)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[None, None]:
        (ids,) = ctx.saved_tensors
        ctx.weight.main_grad.index_add_(0, ids.flatten(), grad.flatten(0, -2))
        return None, None


class _Functional(types.ModuleType):
    """The view of torch.nn.functional that Megatron's embedding gets."""

    def __init__(self) -> None:
        super().__init__("torch.nn.functional")

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.nn.functional, name)

    @staticmethod
    def embedding(ids: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Looks up the rows of `ids`: [...] -> [..., D]."""
        trained = torch.is_grad_enabled() and weight.requires_grad
        rows = _RowsIntoBuffer.apply if trained and hasattr(weight, _MARK) else torch.nn.functional.embedding
        return rows(ids, weight)


class AdamW(torch.optim.AdamW):
    """PyTorch's AdamW without the wrappers that keep the compiler away from its methods.

    Nothing is compiled here, and the wrappers import the compiler, which takes a sixth of a process's start.
    """

    __module__ = torch.optim.AdamW.__module__
    step = torch.no_grad()(inspect.unwrap(torch.optim.AdamW.step))
    add_param_group = inspect.unwrap(torch.optim.AdamW.add_param_group)
    zero_grad = inspect.unwrap(torch.optim.AdamW.zero_grad)
    state_dict = inspect.unwrap(torch.optim.AdamW.state_dict)
    load_state_dict = inspect.unwrap(torch.optim.AdamW.load_state_dict)


class _Optimizers(types.ModuleType):
    """The view of torch.optim that Megatron's choice of an optimizer gets."""

    AdamW = AdamW

    def __init__(self) -> None:
        super().__init__("torch.optim")

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.optim, name)


def add_rows_to_buffer(chunk: torch.nn.Module) -> None:
    """Makes the embeddings of a chunk in Megatron's DDP add gradients to the rows of DDP's buffer that tokens use.

    Otherwise autograd would make a gradient of the whole vocabulary for each microbatch and add it to the buffer. DDP
    must not overlap the reduction with the backward pass: it would expect a gradient from autograd. Nothing changes
    unless `install` has patched this process and the buffer has the weights' dtype (float32 models).
    """
    for module in chunk.modules() if _installed else ():
        if isinstance(module, importlib.import_module("megatron.core.tensor_parallel.layers").VocabParallelEmbedding):
            buffer = getattr(module.weight, "main_grad", None)
            if buffer is not None and buffer.dtype == module.weight.dtype:
                setattr(module.weight, _MARK, True)


def take_torch_optimizer() -> None:
    """Makes Megatron's optimizer behave as without Transformer Engine and Apex.

    A name that this version of Megatron-core does not have stays absent.
    """
    utils = importlib.import_module("megatron.core.utils")
    lists = {
        "multi_tensor_applier": utils.local_multi_tensor_applier,
        "l2_norm_impl": utils.local_multi_tensor_l2_norm,
        "multi_tensor_scale_impl": utils.local_multi_tensor_scale,
        "multi_tensor_scale_tensor_impl": None,
    }
    chosen: dict[str, dict[str, Any]] = {
        "": {"Adam": torch.optim.AdamW, "SGD": torch.optim.SGD, "USING_PYTORCH_OPTIMIZER": True},
        ".clip_grads": lists,
        ".optimizer": lists,
        ".distrib_optimizer": {
            "Adam": torch.optim.Adam,
            **dict.fromkeys(("HAVE_APEX_OR_TE", "USING_TE_OPTIMIZER", "USING_APEX_OPTIMIZER"), False),
        },
    }
    for name, values in chosen.items():
        module = importlib.import_module(f"megatron.core.optimizer{name}")
        for key in values.keys() & vars(module).keys():
            setattr(module, key, values[key])


def import_uncompiled() -> None:
    """Imports Megatron-core without garbage collection, and, if torch can see no GPU, without torch's compiler.

    Megatron decorates its fused functions, which this project does not use, with `torch.compile`. The decorator imports
    the compiler, which takes a quarter of a process's start-up time, so it is replaced by the identity meanwhile.

    Later collections skip what is alive after the import. These are mostly imported modules, which never become
    garbage; otherwise every full collection, even one between two updates, would look through them.
    """
    compile_, collects = torch.compile, gc.isenabled()
    if not _may_have_gpu():
        torch.compile = lambda function: function  # type: ignore[assignment]
    gc.disable()
    try:
        importlib.import_module("megatron.core")
    finally:
        torch.compile = compile_  # type: ignore[assignment]
        gc.freeze()
        if collects:
            gc.enable()


def _may_have_gpu() -> bool:
    """Returns whether torch may see a GPU. Does not initialise the driver, because the process could not fork then."""
    if torch.version.cuda is None:
        return torch.version.hip is not None
    name = "PYTORCH_NVML_BASED_CUDA_CHECK"  # asks the management library
    given = os.environ.get(name)
    os.environ[name] = "1"
    try:
        return torch.cuda.is_available()
    finally:
        if given is None:
            del os.environ[name]
        else:
            os.environ[name] = given


def installed() -> bool:
    """Returns whether Megatron-core is patched in this process."""
    return _installed


def install() -> None:
    """Patches Megatron-core for a process without CUDA; calling it again changes nothing.

    Raises:
        RuntimeError: CUDA is available. Megatron-core needs no patches there, and patches would hide mistakes.
    """
    global _installed
    if torch.cuda.is_available():
        raise RuntimeError("nemo_oprd.megatron.cpu_patches.install() is for machines without CUDA; this one has CUDA")
    if _installed:
        return
    view = _TorchOnCpu()
    for name in MODULES_ASKING_FOR_CUDA:
        importlib.import_module(name).torch = view  # type: ignore[attr-defined]
    for module_name, qualified_name in FUNCTIONS_COMPARING_TYPE_NAMES:
        function = _find(importlib.import_module(module_name), qualified_name)
        function.__code__ = _replace_names(function.__code__)
    rng = importlib.import_module("megatron.core.tensor_parallel.random")
    rng._get_cuda_rng_state = _get_rng_state  # type: ignore[attr-defined]
    rng._set_cuda_rng_state = _set_rng_state  # type: ignore[attr-defined]
    take_torch_optimizer()
    chosen_from = _TorchOnCpu()
    chosen_from.optim = _Optimizers()  # type: ignore[attr-defined]
    importlib.import_module("megatron.core.optimizer").torch = chosen_from  # type: ignore[attr-defined]
    dispatcher = importlib.import_module("megatron.core.transformer.moe.token_dispatcher")
    dispatcher.maybe_move_tensor_to_cpu = _on_host  # type: ignore[attr-defined]
    layers = importlib.import_module("megatron.core.tensor_parallel.layers")
    layers.fused_weight_gradient_mlp_cuda = _WeightGradients  # type: ignore[attr-defined]
    layers.get_dummy_wgrad = _unread_gradient  # type: ignore[attr-defined]
    layers.F = _Functional()  # type: ignore[attr-defined]
    _installed = True
