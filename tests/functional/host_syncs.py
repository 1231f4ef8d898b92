"""Where a program waits for the device: operations whose result, or whose shape, the host must know.

On a CPU nothing waits, so the operations themselves are counted: `.item()` and what calls it (`int()`, `bool()`, `if`),
`.tolist()`, `.numpy()`, `.cpu()`, `nonzero` and what needs it (boolean indexing, `masked_select`, `unique`).
"""

from __future__ import annotations

import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

ROOT = Path(__file__).parent.parent.parent
OPERATIONS = (
    "aten._local_scalar_dense",
    "aten.nonzero",
    "aten.masked_select",
    "aten.unique",
    "aten._unique2",
    "aten.equal",
    "aten.is_nonzero",
)
INDEXING = ("aten.index.", "aten.index_put", "aten._unsafe_index", "aten._index_put_impl")
METHODS = {torch.Tensor.tolist: "tolist", torch.Tensor.numpy: "numpy", torch.Tensor.cpu: "cpu"}


def place() -> str:
    """The innermost line of this project, or of Megatron, that is being executed."""
    for frame in reversed(traceback.extract_stack()[:-2]):
        path = Path(frame.filename)
        if path.is_relative_to(ROOT / "nemo_oprd") or "megatron" in path.parts:
            return f"{path.name}:{frame.lineno} {frame.line}"
    return "elsewhere"


class _Operations(TorchDispatchMode):
    def __init__(self, counts: Counter[str]) -> None:
        super().__init__()
        self.counts = counts

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func)
        if name.startswith(OPERATIONS) or (name.startswith(INDEXING) and _has_mask(args)):
            self.counts[f"{name} at {place()}"] += 1
        return func(*args, **(kwargs or {}))


def _has_mask(args: Any) -> bool:
    indices = args[1] if len(args) > 1 and isinstance(args[1], list | tuple) else []
    return any(isinstance(index, torch.Tensor) and index.dtype in (torch.bool, torch.uint8) for index in indices)


class _Methods(TorchFunctionMode):
    def __init__(self, counts: Counter[str]) -> None:
        super().__init__()
        self.counts = counts

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in METHODS:
            self.counts[f"{METHODS[func]} at {place()}"] += 1
        return func(*args, **(kwargs or {}))


class HostSyncs:
    """Counts, by operation and place, what is executed inside `with HostSyncs() as syncs`: `syncs.counts`."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()

    def __enter__(self) -> HostSyncs:
        self._modes = [_Operations(self.counts), _Methods(self.counts)]
        for mode in self._modes:
            mode.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        for mode in reversed(self._modes):
            mode.__exit__(*error)


@contextmanager
def plain_causal_masks() -> Iterator[None]:
    """Context-parallel attention with masks in place of torch's `CausalBias`, which no dispatch mode can follow."""

    def mask(queries: int, keys: int) -> torch.Tensor:
        return torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)

    with mock.patch("torch.nn.attention.bias.causal_lower_right", mask):
        yield


def syncs_of_a_step(overrides: list[str]) -> dict[str, int]:
    """Of the teacher's pass, the update and the optimizer step on recorded rollouts, on rank 0."""
    from nemo_oprd.config.loading import load_config
    from nemo_oprd.rollout.replay import read_rollouts
    from nemo_oprd.run.models import distiller_for

    config = load_config("verify", overrides)
    distiller = distiller_for(config)
    student = distiller.student
    rollouts = read_rollouts(str(config.rollout.replay), student.spec.vocab_size)
    with plain_causal_masks(), HostSyncs() as syncs:
        batch = distiller.batch(rollouts, distiller.objective_of(0))
        accumulation = distiller.start(batch)
        for group in batch.groups:
            accumulation.forward_backward(group, distiller.targets(batch, group))
        student.optimizer_step(0, batch.objective, accumulation.finish())
    return dict(syncs.counts)


def syncs_of_sampling(hf_path: str, prompts: list[list[int]], new_tokens: int, top_p: float) -> dict[str, int]:
    """Of sampling one response of `new_tokens` tokens to each prompt, in one batch, on rank 0."""
    from nemo_oprd.batch.layout import Layout
    from nemo_oprd.config.loading import load_config
    from nemo_oprd.megatron.parallel import init_distributed
    from nemo_oprd.megatron.weights.hf import HFCheckpoint
    from nemo_oprd.models import read_model_spec
    from nemo_oprd.rollout.engine import Request, SamplingParams
    from nemo_oprd.rollout.in_process_engine import MegatronEngine

    init_distributed()
    config = load_config("verify", [f"student.hf_path={hf_path}", f"teacher.hf_path={hf_path}", "output=unused"])
    engine = MegatronEngine(config.rollout, read_model_spec(hf_path), Layout(), eos_ids=(), precision=config.precision)
    engine.load(HFCheckpoint(hf_path).__getitem__, hf_path)
    with HostSyncs() as syncs:
        engine.generate([Request(prompt) for prompt in prompts], SamplingParams(1.0, top_p, new_tokens, (0,)))
    return dict(syncs.counts)
