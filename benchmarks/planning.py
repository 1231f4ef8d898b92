"""Seconds that one rank needs to plan a step: rows, packing, transfers, and the counts of the gradient check.

    python -m benchmarks.planning [--json FILE]

Everything that `train` computes in Python and numpy before and between the models' passes is called as in a step, for
the rank in the middle of the world: the table of supervised rows, both roles' plans, this rank's rows and messages, and
the number of injections that the gradient check expects. Nothing is communicated. Student at TP2 + SP, PP2; teacher at
TP4; the rest of the ranks are data parallel. The best of three passes on one core.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import numpy as np

from nemo_oprd.batch.layout import Layout
from nemo_oprd.batch.plan import StepPlan
from nemo_oprd.batch.token_table import make_rows
from nemo_oprd.batch.types import Rollout
from nemo_oprd.distillation.target_transfer import plan_transfers

PROMPT, RESPONSE, LAST_K, BUDGET, DEPTH = 128, (2000, 6000), 2000, 16384, 28
ROLLOUTS, WORLDS = (128, 512, 1024), (16, 64, 256, 1024)
PASSES = 3


def sample(count: int) -> list[Rollout]:
    """Rollouts of different lengths; each has `LAST_K` supervised rows."""
    lengths = np.random.default_rng(0).integers(*RESPONSE, count)
    return [Rollout(np.full(PROMPT, 1), np.full(length, 2)) for length in lengths.tolist()]


def plan_step(rollouts: list[Rollout], student: Layout, teacher: Layout, rank: int) -> int:
    """All planning of one step on one rank; returns the number of rows."""
    count = len(rollouts)
    table = make_rows(rollouts, positions="last_k", k=LAST_K, position="token", aggregation="sequence_mean")
    plan = StepPlan.build(table, None, count, student, BUDGET)
    layers = {layer: layer for layer in range(1, DEPTH + 1)}
    for group in plan.microbatch_groups(None):
        of_teacher = group.of_teacher(0)
        assert of_teacher is not None
        teacher_plan = of_teacher.for_teacher(teacher, count, BUDGET)
        plan_transfers(teacher_plan.hidden, of_teacher.hidden, layers, DEPTH, DEPTH, rank)
        teacher_plan.hidden.local_rows(teacher.coordinates(rank))
        group.hidden.owned_rows(student.coordinates(rank))
        group.hidden.local_rows(student.coordinates(rank))
        group.hidden.held_microbatches()
    return len(table)


def measure(count: int, world: int) -> dict[str, float]:
    """One row of the table."""
    rollouts = sample(count)
    student = Layout(tensor=2, sequence=True, pipeline=2, data=world // 4)
    teacher = Layout(tensor=4, data=world // 4)
    seconds = []
    for _ in range(PASSES):
        start = time.perf_counter()
        rows = plan_step(rollouts, student, teacher, world // 2)
        seconds.append(time.perf_counter() - start)
    return {"rollouts": count, "rows": rows, "world": world, "seconds": min(seconds)}


def exponents(found: list[dict[str, float]]) -> tuple[float, float]:
    """(Exponent in rows, exponent in ranks) of the power law that fits the seconds best."""
    logs = np.log([[row["rows"], row["world"], row["seconds"]] for row in found])
    design = np.column_stack([logs[:, :2], np.ones(len(logs))])
    of_rows, of_world, _ = np.linalg.lstsq(design, logs[:, 2], rcond=None)[0]
    return float(of_rows), float(of_world)


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", metavar="FILE", help="also write the rows of the table there")
    options = parser.parse_args()
    found = []
    print("seconds per step and rank\n\n| rollouts (rows) | " + " | ".join(f"{world} ranks" for world in WORLDS) + " |")
    print("|---" * (len(WORLDS) + 1) + "|")
    for count in ROLLOUTS:
        rows = [measure(count, world) for world in WORLDS]
        found += rows
        print(f"| {count:,} ({rows[0]['rows']:,}) | " + " | ".join(f"{row['seconds']:.3f}" for row in rows) + " |")
    of_rows, of_world = exponents(found)
    print(f"\nseconds ~ rows^{of_rows:.2f} * ranks^{of_world:.2f}")
    if options.json:
        Path(options.json).write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
