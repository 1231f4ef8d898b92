"""The table of docs/plan.md: what the shipped recipes need on some nodes of 8 GPUs, as `nemo-oprd plan` says.

    python -m benchmarks.plan_table
    PYTHONPATH=.:tests/functional/te_stand_in .venv-nemo-bridge/bin/python -m benchmarks.plan_table --megatron-bridge

The second command is for the recipes with models of Megatron-Bridge, whose configs are read in its environment
(`scripts/setup_nemo_bridge.sh`). The shapes are those of the published models' config.json
(`tests/support/recipe_models.py`).
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from itertools import product
from pathlib import Path

from nemo_oprd.config.loading import load_config
from nemo_oprd.run.resolve import resolve
from nemo_oprd.tools.plan.estimate import Estimate, Lengths, estimate
from nemo_oprd.tools.plan.gpus import GPUS, Cluster
from tests.support.recipe_models import OF_MEGATRON_BRIDGE, RECIPES, write_models

# nodes and engines of the rows; one node is too small for 30 billion parameters, whose recipe samples with vLLM, as
# recipes do of families for which the in-process engine has no cache
ROWS = dict.fromkeys(("oprd_qwen3_30b_a3b", *OF_MEGATRON_BRIDGE), ((2, 4, 8), ("vllm",)))
NODES, ENGINES, GPUS_PER_NODE = (1, 2, 8), ("megatron", "vllm"), 8
RESPONSE, PROBLEMS = 8000, 143
# the recipes whose models this project builds
OWN = tuple(name for name in RECIPES if name not in OF_MEGATRON_BRIDGE)


def planned(recipe: str, place: Path, nodes: int, engine: str) -> Estimate:
    """The estimate of a recipe; `place` holds the models."""
    student, teacher, sizes = RECIPES[recipe]
    models = [f"student.hf_path={place / student}", f"teacher.hf_path={place / teacher}"]
    config = load_config(recipe, [*models, *sizes, f"rollout.engine={engine}"])
    return estimate(
        resolve(config, nodes * GPUS_PER_NODE),
        Cluster(nodes * GPUS_PER_NODE, GPUS["h100"]),
        Lengths(None, RESPONSE, PROBLEMS),
    )


def table(recipes: Sequence[str]) -> list[str]:
    """The lines of a table of these recipes."""
    lines = [
        "| recipe | nodes | engine | GB, reached in | seconds per step (sampling) | 500 steps | evaluation |",
        "|---|---|---|---|---|---|---|",
    ]
    with tempfile.TemporaryDirectory() as scratch:
        place = Path(scratch) / "models"
        write_models(place)
        for recipe in recipes:
            for nodes, engine in product(*ROWS.get(recipe, (NODES, ENGINES))):
                found = planned(recipe, place, nodes, engine)
                memory = found.kinds[0].memory
                hours = found.step_seconds * 500 / 3600
                evaluation = (found.evaluation_seconds or 0.0) / 60
                lines.append(
                    f"| {recipe} | {nodes} | {engine} | {memory.peak / 1e9:.1f}, {memory.fullest} | "
                    f"{found.step_seconds:.0f} ({found.seconds['sampling']:.0f}) | {hours:.1f} h | "
                    f"{evaluation:.0f} min |"
                )
    return lines


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megatron-bridge", action="store_true", help="of the recipes with Megatron-Bridge's models")
    print("\n".join(table(OF_MEGATRON_BRIDGE if parser.parse_args().megatron_bridge else OWN)))


if __name__ == "__main__":
    main()
