"""Counts the operations that the in-process engine starts per sampled token, at the depth of R1-Distill-Qwen-1.5B.

    python -m benchmarks.decode_cost

The width does not matter for the count, so the models are narrow. On a GPU every operation is started by the host,
which bounds the speed of sampling as long as few sequences are sampled at a time. The norms are counted as their parts
here; CUDA has one kernel for them.
"""

from __future__ import annotations

import argparse
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from nemo_oprd.batch.layout import Layout
from nemo_oprd.config.loading import load_config
from nemo_oprd.megatron.parallel import init_distributed
from nemo_oprd.megatron.weights.hf import HFCheckpoint
from nemo_oprd.models import read_model_spec
from nemo_oprd.rollout.engine import Request, SamplingParams
from nemo_oprd.rollout.in_process_engine import MegatronEngine
from tests.support.random_pair import Shape, save_random_model

SHAPE = Shape(28, 64, 128, 4, 2, 512, 512)
FEW, MORE = 33, 65  # new tokens of the two runs whose difference is counted: 32 tokens, one question who is finished
# views, which start nothing on a GPU
VIEWS = {
    "aten.view.default", "aten.slice.Tensor", "aten.t.default", "aten.transpose.int", "aten.select.int",
    "aten.unsqueeze.default", "aten.squeeze.dim", "aten.expand.default", "aten.split.Tensor", "aten.detach.default",
    "aten.permute.default", "aten.split_with_sizes.default", "aten._unsafe_view.default", "aten.alias.default",
    "aten.unbind.int", "aten.narrow.default",
}  # fmt: skip


class Operations(TorchDispatchMode):
    """Counts the operations that are started, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs the operation and counts it."""
        self.counts[str(func)] += 1
        return func(*args, **(kwargs or {}))


def per_token(top_p: float, precision: str) -> Counter[str]:
    """Operations per token of a batch, in 32 tokens; 1/32 of what one question to the device costs is in it."""
    with tempfile.TemporaryDirectory() as place:
        source = str(Path(place) / "model")
        save_random_model(Path(source), SHAPE, seed=0, std=0.02, dtype=torch.float32)
        models = [f"student.hf_path={source}", f"teacher.hf_path={source}"]
        config = load_config("verify", [*models, f"precision={precision}", "output=unused"])
        engine = MegatronEngine(
            config.rollout, read_model_spec(source), Layout(), eos_ids=(), precision=config.precision
        )
        engine.load(HFCheckpoint(source).__getitem__, source)
        found = []
        for tokens in (FEW, MORE):
            with Operations() as operations:
                engine.generate([Request([1, 2, 3])] * 4, SamplingParams(1.0, top_p, tokens, (0,)))
            found.append(operations.counts)
    difference = found[1]
    difference.subtract(found[0])
    return Counter({name: count // (MORE - FEW) for name, count in difference.items() if count >= MORE - FEW})


def main() -> None:
    """Prints the table."""
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    init_distributed()
    print(f"operations per token at {SHAPE.num_hidden_layers} layers\n")
    print("| precision | top_p | operations | without views |\n|---|---|---|---|")
    for precision in ("fp32", "bf16"):
        for top_p in (1.0, 0.95):
            counts = per_token(top_p, precision)
            kernels = sum(count for name, count in counts.items() if name not in VIEWS)
            print(f"| {precision} | {top_p} | {counts.total():,} | {kernels:,} |")
    most = ", ".join(f"{name.removeprefix('aten.')} {count}" for name, count in counts.most_common(12))
    print(f"\nmost frequent in the last row: {most}")


if __name__ == "__main__":
    main()
