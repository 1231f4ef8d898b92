"""The shipped recipes whose models Megatron-Bridge builds, in its environment: planned, counted, rehearsed.

test_rehearsal_recipes.py has the others.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest
from megatron_bridge_environment import PYTHON, ROOT, run

from nemo_oprd.commands.rehearse.command import TOLERANCE
from nemo_oprd.commands.rehearse.shim import COMPILERS
from tests.support.recipe_models import OF_MEGATRON_BRIDGE, shipped, write_models

CASES = "bridge_recipe_cases.py"
# one group of three layers with a delta net and one with attention, or of two windows and two layers without
LAYERS, PROMPT, RESPONSE = 4, 512, 3584
NEEDS_COMPILER = pytest.mark.skipif(
    not any(map(shutil.which, COMPILERS)), reason=f"no C++ compiler ({', '.join(COMPILERS)}) is on PATH"
)


@pytest.mark.nemo
@pytest.mark.parametrize("case", ["fits", "parameters"])
def test_plan(megatron_bridge: dict[str, str], tmp_path: Path, case: str) -> None:
    run(megatron_bridge, 0, CASES, case, directory=str(tmp_path / "models"))


@pytest.mark.nemo
def test_the_page_has_the_rows_of_today(megatron_bridge: dict[str, str]) -> None:
    run(megatron_bridge, 0, CASES, "page")


@pytest.mark.slow
@pytest.mark.recipes
@NEEDS_COMPILER
@pytest.mark.parametrize("name", OF_MEGATRON_BRIDGE)
def test_a_recipe_is_rehearsed(megatron_bridge: dict[str, str], tmp_path: Path, name: str) -> None:
    """The first and the last tensor rank, which hold both models: no mistake, they agree, and memory is the plan's."""
    fetched = subprocess.run(["bash", "scripts/setup_te_files.sh"], cwd=ROOT, capture_output=True, text=True)
    if fetched.returncode:
        pytest.skip(f"scripts/setup_te_files.sh failed: {fetched.stderr.strip().splitlines()[-1:]}")
    write_models(tmp_path / "models", LAYERS)
    ranks, sizes = shipped()[name]
    settings = [*sizes, f"rollout.max_new_tokens={RESPONSE}", "train.prompts_per_step=8"]
    lengths = ["--prompt-tokens", str(PROMPT), "--response-tokens", str(RESPONSE)]
    command = [str(PYTHON), "-m", "nemo_oprd", "rehearse", "--config-name", name, "--ranks", str(ranks), *settings]
    environment = {**megatron_bridge, "PYTHONPATH": str(ROOT)}  # not the stand-in for Transformer Engine: its own files
    ended = subprocess.run(
        [*command, *lengths, "--layers", "te", "--phases", "none", "--json", "found.json"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert ended.returncode == 0, f"{ended.stdout[-3000:]}\n{ended.stderr[-3000:]}"
    found = json.loads((tmp_path / "found.json").read_text())
    assert [one["rank"] for one in found["ranks"]] == [0, 1]
    for one in found["ranks"]:
        for phase in ("teacher", "update", "optimizer"):
            seen = one["phases"][phase]
            error = seen["planned_bytes"] / seen["measured_bytes"] - 1
            assert abs(error) < TOLERANCE, (one["rank"], phase, error)
