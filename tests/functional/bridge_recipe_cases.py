"""Cases of test_bridge_recipes.py, which `megatron_bridge_environment.run` runs in Megatron-Bridge's environment."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.plan_table import planned, table
from nemo_oprd.megatron.megatron_bridge.family import bridge_family
from nemo_oprd.models import read_hf_config, read_model_spec
from nemo_oprd.tools.plan.parameters import model_parameters
from tests.support.recipe_models import OF_MEGATRON_BRIDGE, RECIPES, write_models

ROOT = Path(__file__).parents[2]


def fits(directory: str) -> None:
    """Two to eight nodes hold every recipe, with less on a GPU where there are more."""
    write_models(Path(directory))
    for recipe in OF_MEGATRON_BRIDGE:
        peaks = []
        for nodes in (2, 4, 8):
            found = planned(recipe, Path(directory), nodes, "vllm")
            assert not found.problems, (recipe, nodes, found.problems)
            peaks.append(found.kinds[0].memory.peak)
        assert peaks == sorted(peaks, reverse=True), (recipe, peaks)


def parameters(directory: str) -> None:
    """Those that `plan` counts are those of transformers' model: of the published shapes, without the towers."""
    write_models(Path(directory))
    for name in {name for recipe in OF_MEGATRON_BRIDGE for name in RECIPES[recipe][:2]}:
        path = Path(directory) / name
        spec = read_model_spec(path, bridge_family(path))
        with torch.device("meta"):
            theirs = AutoModelForCausalLM.from_config(AutoConfig.for_model(**read_hf_config(path)))
        assert model_parameters(spec) == sum(each.numel() for each in theirs.parameters()), name


def page() -> None:
    """docs/plan.md has the rows of today."""
    rows = table(OF_MEGATRON_BRIDGE)
    said = "run `python -m benchmarks.plan_table --megatron-bridge` there and copy its rows"
    assert "\n".join(rows[2:]) in (ROOT / "docs" / "plan.md").read_text(), said


if __name__ == "__main__":
    cases: dict[str, Any] = {case.__name__: case for case in (fits, parameters, page)}
    cases[sys.argv[1]](**json.loads(sys.argv[2]))
