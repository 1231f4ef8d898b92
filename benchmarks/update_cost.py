"""Counts what the loss adds to an update: floating-point operations and live bytes, against a pass without any loss.

    python -m benchmarks.update_cost [--json FILE]

The floor is a forward and backward pass of the student's own schedule over the same packed microbatches, without an
observer. An update is `GradientAccumulation.forward_backward` of the training step, with the teacher's targets already
there; their bytes have a column of their own. Operations are torch's count of matrix products; bytes are those of all
storages that operations create, so both are exact and the same on every machine. CPU seconds are the median of three
passes, one thread, and depend on the machine.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from nemo_oprd.config.loading import load_config
from nemo_oprd.distillation.distiller import Distiller
from nemo_oprd.distillation.step_batch import StepBatch
from nemo_oprd.megatron.pipeline_schedule import make_microbatch, run_schedule
from nemo_oprd.rollout.replay import read_rollouts
from nemo_oprd.run.models import distiller_for
from tests.support.live_bytes import LiveBytes
from tests.support.operations import count_operations
from tests.support.random_pair import Shape, save_random_model, save_random_rollouts

SHAPE = Shape(8, 512, 1408, 8, 2, 32768, 2048)
PROMPT, RESPONSES = 64, [960, 960]
# name -> settings of the objective
OBJECTIVES = {
    "hidden states, last 250": ["loss.representation.k=250"],
    "hidden states, all tokens": ["loss.representation.positions=all"],
    "sampled token": ["loss.output.kind=sampled_token"],
    "top-16": ["loss.output.kind=top_k", "loss.output.chunk_tokens=256"],
    "full vocabulary": ["loss.output.kind=full_vocab", "loss.output.chunk_tokens=256"],
}
PASSES = 3


def measure(run: Callable[[], Any], prepare: Callable[[], Any] = lambda: None) -> dict[str, float]:
    """Operations, live bytes at the peak and CPU seconds of `run`; `prepare` is called before each pass."""
    prepare()
    with count_operations() as flops:
        run()
    prepare()
    with LiveBytes() as live:
        run()
    seconds = []
    for _ in range(PASSES):
        prepare()
        start = time.process_time()
        run()
        seconds.append(time.process_time() - start)
    return {
        "flops": float(flops.get_total_flops()),
        "peak_bytes": float(live.peak),
        "cpu_seconds": statistics.median(seconds),
    }


def floor_of(distiller: Distiller, batch: StepBatch) -> dict[str, float]:
    """A forward and backward pass over the batch without any loss."""
    student = distiller.student

    def run() -> None:
        packs = batch.plan.hidden.packs[0]
        microbatches = [make_microbatch(pack, batch.rollouts, student.role, None, None) for pack in packs]
        run_schedule(student.ddp, student.role, microbatches, forward_only=False)

    return measure(run, student.zero_gradients)


def update_of(distiller: Distiller, batch: StepBatch) -> dict[str, float]:
    """The update's forward and backward passes, losses and gradients included."""
    targets = distiller.targets(batch, batch.plan)
    held = sum(each.bytes_held for each in targets.values())
    started: list[Any] = []

    def prepare() -> None:
        started[:] = [distiller.start(batch)]

    found = measure(lambda: started[0].forward_backward(batch.plan, targets), prepare)
    return {**found, "target_bytes": float(held)}


def cost(scratch: Path, settings: list[str]) -> dict[str, dict[str, float]]:
    """{"floor": ..., "update": ...} of one objective."""
    output = any(setting.startswith("loss.output") for setting in settings)
    alone = ["loss.output.weight=1", "loss.representation.layers=none"] if output else []
    config = load_config(
        "verify",
        [
            f"student.hf_path={scratch / 'student'}",
            f"teacher.hf_path={scratch / 'teacher'}",
            f"rollout.replay={scratch / 'rollouts.jsonl'}",
            "train.tokens_per_microbatch=1024",
            "output=unused",
            *settings,
            *alone,
        ],
    )
    distiller = distiller_for(config)
    batch = distiller.batch(
        read_rollouts(str(config.rollout.replay), SHAPE.vocab_size), distiller.objective_of(0, watch=False)
    )
    return {"floor": floor_of(distiller, batch), "update": update_of(distiller, batch)}


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", metavar="FILE", help="also write the counts there")
    options = parser.parse_args()
    found = {}
    print("| objective | operations | live bytes | CPU time | targets, MB |\n|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as place:
        scratch = Path(place)
        for seed, role in enumerate(("student", "teacher")):
            save_random_model(scratch / role, SHAPE, seed=seed, std=0.02, dtype=torch.float32)
        save_random_rollouts(scratch / "rollouts.jsonl", SHAPE, prompt=PROMPT, responses=RESPONSES)
        for name, settings in OBJECTIVES.items():
            found[name] = cost(scratch, settings)
            ratios = [found[name]["update"][key] / found[name]["floor"][key] for key in found[name]["floor"]]
            held = found[name]["update"]["peak_bytes"] / 1e6
            cells = f"{ratios[0]:.4f}x | {ratios[1]:.3f}x ({held:.0f} MB) | {ratios[2]:.2f}x"
            print(f"| {name} | {cells} | {found[name]['update']['target_bytes'] / 1e6:.1f} |", flush=True)
    if options.json:
        Path(options.json).write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
