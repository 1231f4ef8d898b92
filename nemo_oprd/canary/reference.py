"""Transformers' hidden states of the canary, computed in a process of its own on the CPU.

The process (`layer_by_layer.py`) frees its memory when it ends, needs no accelerator, and cannot disturb the engine: it
has none of the patches that let Megatron-core run without CUDA. It returns the states as a safetensors file.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from importlib import metadata
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from safetensors.torch import load_file

import nemo_oprd

MODULE = "nemo_oprd.canary.layer_by_layer"
STATES, REPORT = "states.safetensors", "report.json"
DTYPES = ("float32", "bfloat16", "float64")
# the number of rows at the end of a prompt whose logits are computed
HEAD_ROWS = 64
# more threads gain little on a few hundred tokens, and the engine's own processes may be starting meanwhile
_MOST_THREADS = 8
# the first version whose loader can load the tensors of one layer alone
_FIRST_TRANSFORMERS = 5


@dataclass(frozen=True)
class ReferenceStates:
    """Results of transformers for the prompts of a canary, in `dtype`; all tensors are float32 [T, D] on the CPU.

    Attributes:
        layers: layer (1-based) -> a tensor per prompt: for the last layer the state after the final norm, for the
            others the residual stream after the block.
        embeddings: the input of the first layer.
        before_norm: the residual stream after the last block.
        heads: if the head was requested, per prompt float32 [n, 2]: the log-probability of the next token and the
            entropy, for the last n rows that have a next token, at most `HEAD_ROWS` - 1.
        peak_bytes: the most bytes of parameters that were in memory at one time.
        largest_layer_bytes: bytes of the largest layer's parameters.
        total_bytes: bytes of all parameters that were loaded.
    """

    layers: dict[int, list[torch.Tensor]]
    embeddings: list[torch.Tensor]
    before_norm: list[torch.Tensor]
    dtype: str
    peak_bytes: int
    largest_layer_bytes: int
    total_bytes: int
    heads: list[torch.Tensor] = field(default_factory=list)

    @property
    def depth(self) -> int:
        """The number of layers."""
        return len(self.layers)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Returns all states by unique names; `from_tensors` reads them."""
        named = {f"{layer}.{i}": rows for layer, states in self.layers.items() for i, rows in enumerate(states)}
        named |= {f"embeddings.{i}": rows for i, rows in enumerate(self.embeddings)}
        named |= {f"head.{i}": rows for i, rows in enumerate(self.heads)}
        return named | {f"before_norm.{i}": rows for i, rows in enumerate(self.before_norm)}

    def without_norm(self) -> ReferenceStates:
        """Returns the same states, with the last layer's taken before the final norm."""
        return replace(self, layers={**self.layers, self.depth: self.before_norm})

    @staticmethod
    def from_tensors(tensors: Mapping[str, torch.Tensor], report: Mapping[str, int | str]) -> ReferenceStates:
        """Rebuilds the states from the names in `tensors`, and the other attributes from `report`."""
        states: dict[str, dict[int, torch.Tensor]] = {}
        for name, rows in tensors.items():
            part, _, prompt = name.partition(".")
            states.setdefault(part, {})[int(prompt)] = rows
        lists = {part: [rows for _, rows in sorted(found.items())] for part, found in states.items()}
        embeddings, before_norm, heads = lists.pop("embeddings"), lists.pop("before_norm"), lists.pop("head", [])
        layers = {int(part): rows for part, rows in sorted(lists.items(), key=lambda item: int(item[0]))}
        bytes_of = {name: int(report[name]) for name in ("peak_bytes", "largest_layer_bytes", "total_bytes")}
        return ReferenceStates(layers, embeddings, before_norm, str(report["dtype"]), **bytes_of, heads=heads)


def why_unavailable() -> str | None:
    """Returns why no reference can be computed here, whatever the model; None if one can."""
    version = metadata.version("transformers")
    if int(version.partition(".")[0]) >= _FIRST_TRANSFORMERS:
        return None
    return f"transformers {version} loads models as a whole only; expected {_FIRST_TRANSFORMERS} or later"


def reference_states(
    directory: Path, prompts: list[list[int]], dtype: str = "float32", *, head: bool = False
) -> ReferenceStates:
    """Computes transformers' states of the Hugging Face model in `directory`, one layer in memory at a time.

    Args:
        prompts: token ids; each prompt is computed by itself.
        dtype: "float32", "bfloat16" or "float64", in which transformers computes.
        head: whether to return the results of the model's own head, `heads`.

    Raises:
        ValueError: transformers cannot run the model, or the weights are not complete.
    """
    assert dtype in DTYPES, dtype
    with TemporaryDirectory(prefix="nemo_oprd_canary_") as scratch:
        folder = Path(scratch)
        asked = {"directory": str(Path(directory).absolute()), "prompts": prompts, "dtype": dtype, "head": head}
        command = [sys.executable, "-m", MODULE, str(folder)]
        done = subprocess.run(
            command, input=json.dumps(asked), env=_environment(), capture_output=True, text=True, check=False
        )
        if not (folder / REPORT).is_file():
            said = done.stderr.strip().splitlines()
            raise ValueError(
                f"{directory}: the process with transformers' reference ended with exit code {done.returncode} "
                f"({said[-1][:300] if said else 'no message'}); expected states: see whether transformers runs the "
                "model, and whether memory suffices for one of its layers"
            )
        report = json.loads((folder / REPORT).read_text())
        if "error" in report:
            raise ValueError(report["error"])
        return ReferenceStates.from_tensors(load_file(folder / STATES), report)


def _environment() -> dict[str, str]:
    """Returns the child's environment: that of this process, with fewer threads, no accelerators and no network."""
    threads = str(max(1, min(_MOST_THREADS, (os.cpu_count() or 1) // 2)))
    here = str(Path(nemo_oprd.__file__).parents[1])
    path = os.pathsep.join(filter(None, [here, os.environ.get("PYTHONPATH")]))
    return os.environ | {
        "CUDA_VISIBLE_DEVICES": "",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": threads,
        "PYTHONPATH": path,
    }
