"""The table of docs/plan.md that compares `plan` with `rehearse`: the shipped recipes, and 12 layouts of the 1.5B.

    python -m benchmarks.plan_error [NAME ...] [--json FILE]

Every rank that `nemo-oprd rehearse` chooses is rehearsed at full size, on fake tensors: no GPU, no weights; half a
minute of one core for each. The shapes are those of the published models (`tests/support/recipe_models.py`).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.recipe_models import OF_MEGATRON_BRIDGE, shipped, write_models
from tests.support.rehearsal_server import Rehearsals, Rehearsed

PROMPT, RESPONSE = 2048, 14336
PHASES = ("teacher", "update", "optimizer")
TP2, SP = "student.parallel.tensor=2", "student.parallel.sequence=true"
TEACHER_TP2, PP2 = "teacher.parallel.tensor=2", "student.parallel.pipeline=2"


@dataclass(frozen=True)
class Run:
    """A configuration on some ranks.

    Attributes:
        settings: beside the models' paths, which the configuration has.
    """

    config: str
    ranks: int
    settings: tuple[str, ...] = ()


def recipes() -> dict[str, Run]:
    """The shipped configurations for a cluster, with the sizes of their sbatch scripts.

    Without those of Megatron-Bridge's models, which `nemo-oprd rehearse --layers te` rehearses in its environment.
    """
    found = {name: Run(name, ranks, tuple(sizes)) for name, (ranks, sizes) in shipped().items()}
    return {name: run for name, run in found.items() if name not in OF_MEGATRON_BRIDGE}


# of oprd_1p5b; the names are those of the table
LAYOUTS = {
    "DP8": Run("oprd_1p5b", 8),
    "DP8, no recomputation": Run("oprd_1p5b", 8, ("student.recompute=none",)),
    "TP2 SP PP2 DP4": Run("oprd_1p5b", 16, (TP2, SP, PP2)),
    "TP2 SP DP2, selective": Run("oprd_1p5b", 4, (TP2, SP, "student.recompute=selective", "train.prompts_per_step=2")),
    "PP4 of 6, 7, 7 and 8 layers, DP2": Run(
        "oprd_1p5b",
        8,
        (
            "student.parallel.pipeline=4",
            "student.parallel.first_stage_layers=6",
            "student.parallel.last_stage_layers=8",
            "train.prompts_per_step=4",
        ),
    ),
    "PP2 with 2 chunks each, no recomputation": Run(
        "oprd_1p5b",
        4,
        (PP2, "student.parallel.virtual_pipeline=2", "student.recompute=none", "train.prompts_per_step=2"),
    ),
    "CP2 TP2 SP DP2": Run("oprd_1p5b", 8, (TP2, SP, "student.parallel.context=2", "train.prompts_per_step=2")),
    "DP4, dedicated teacher TP2 SP": Run(
        "oprd_1p5b",
        6,
        (
            "teacher.placement=dedicated",
            "teacher.ranks=2",
            TEACHER_TP2,
            "teacher.parallel.sequence=true",
            "train.prompts_per_step=4",
        ),
    ),
    "TP2, teacher PP2": Run("oprd_1p5b", 8, (TP2, "teacher.parallel.pipeline=2")),
    "DP4, teacher offloaded, groups of 1": Run(
        "oprd_1p5b", 4, ("teacher.offload=true", "teacher.resident_microbatches=1", "train.prompts_per_step=4")
    ),
    "DP4, optimizer not sharded": Run(
        "oprd_1p5b", 4, ("train.distributed_optimizer=false", "train.prompts_per_step=4")
    ),
    "PP2 DP2, full vocabulary, 2 layers at a time": Run(
        "oprd_1p5b",
        4,
        (
            PP2,
            "loss.output.kind=full_vocab",
            "loss.output.weight=1",
            "student.recompute_num_layers=2",
            "train.prompts_per_step=2",
        ),
    ),
}


def errors(rehearsed: Rehearsed) -> list[dict[str, Any]]:
    """Per kind of rank and phase, the measured bytes of the fullest tensor rank and the planned ones."""
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    for one in rehearsed.reports:
        for name in PHASES:
            phase = one["phases"].get(name)
            if phase is None or phase["planned_bytes"] is None:
                continue
            row = {"role": one["role"], "phase": name, "measured": phase["measured_bytes"]}
            row |= {"planned": phase["planned_bytes"], "seconds": one["seconds"]}
            row["error"] = row["planned"] / row["measured"] - 1
            key = one["role"], name
            if key not in rows or rows[key]["measured"] < row["measured"]:
                rows[key] = row
    return list(rows.values())


def rehearse(names: list[str]) -> list[dict[str, Any]]:
    """The errors of these runs, and what went wrong in them."""
    found = []
    with tempfile.TemporaryDirectory() as scratch, contextlib.chdir(scratch), Rehearsals() as rehearsals:
        write_models(Path("models"))
        for name in names:
            run = (recipes() | LAYOUTS)[name]
            seen = rehearsals.layout(run.config, list(run.settings), run.ranks, prompt=PROMPT, response=RESPONSE)
            said = [*(mistake["text"] for mistake in seen.mistakes), *seen.disagreements]
            memory = max(one["host_bytes"] for one in seen.found.values())
            seconds = max(one["cpu_seconds"] for one in seen.found.values())
            one = {"name": name, "ranks": run.ranks, "phases": errors(seen), "mistakes": said}
            found.append(one | {"host_bytes": memory, "cpu_seconds": seconds})
            print("\n".join(lines(found[-1])), flush=True)
    return found


def lines(one: dict[str, Any]) -> list[str]:
    """The rows of one run: its fullest rank in each phase, and its largest error."""
    shown = []
    for name in PHASES:
        rows = [row for row in one["phases"] if row["phase"] == name]
        fullest = max(rows, key=lambda row: row["measured"])
        shown.append(f"{fullest['measured'] / 1e9:.2f} / {fullest['planned'] / 1e9:.2f}")
    worst = max(one["phases"], key=lambda row: abs(row["error"]))
    where = f"{worst['error']:+.1%}, {worst['phase']}"
    rows = [f"| {one['name']} | {one['ranks']} | {' | '.join(shown)} | {where} |"]
    return rows + [f"mistake: {text}" for text in one["mistakes"]]


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="recipes and layouts (default: all)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write all numbers there")
    options = parser.parse_args()
    print("| run | ranks | teacher, GB measured / planned | update | optimizer | largest error |")
    print("|---|---|---|---|---|---|")
    found = rehearse(options.names or [*recipes(), *LAYOUTS])
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
