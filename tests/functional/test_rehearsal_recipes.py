"""Every shipped recipe is rehearsed: its own widths and settings, four layers, short responses, two kinds of ranks."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from nemo_oprd.tools.rehearse.shim import COMPILERS
from tests.support.recipe_models import OF_MEGATRON_BRIDGE, shipped, write_models
from tests.support.rehearsal_server import Rehearsals

LAYERS, PROMPT, RESPONSE = 4, 64, 448
CONF = Path(__file__).parents[2] / "conf"
# those that scripts start on a CPU, with models that they make or fetch
SMALL = {
    "quickstart": (
        2,
        [f"{role}.{key}" for role in ("student", "teacher") for key in ("checkpoint=null", "hf_path=models/toy")],
    ),
    "real_model": (2, [f"{role}.hf_path=models/SmolLM2-135M-Instruct" for role in ("student", "teacher")]),
}
RUNS = shipped() | SMALL

pytestmark = [
    pytest.mark.recipes,
    pytest.mark.skipif(
        not any(map(shutil.which, COMPILERS)), reason=f"no C++ compiler ({', '.join(COMPILERS)}) is on PATH"
    ),
]


@pytest.fixture(scope="module")
def rehearsals(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rehearsals]:
    """In a folder with the models."""
    place = tmp_path_factory.mktemp("recipes")
    write_models(place / "models", LAYERS)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        with Rehearsals() as started:
            yield started


def test_every_recipe_is_here() -> None:
    """All but verify.yaml, which has no models of its own. test_bridge_recipes.py has those of Megatron-Bridge."""
    assert set(RUNS) == {file.stem for file in CONF.glob("*.yaml")} - {"verify"}


# states and output terms, several teachers, a bridge, experts; the others differ in a term, weights and sizes
QUICK = {
    "oprd_1p5b", "oprd_opd_mu1_1p5b", "merge_two_teachers_1p5b", "bridge_phi4mini_to_qwen3_1p7b", "oprd_qwen3_30b_a3b",
    "quickstart",
}  # fmt: skip
OWN = sorted(set(RUNS) - set(OF_MEGATRON_BRIDGE))


@pytest.mark.parametrize("name", [pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow) for name in OWN])
def test_a_recipe_is_rehearsed(rehearsals: Rehearsals, name: str) -> None:
    """The first and the last of the ranks that `rehearse` chooses: no mistake, and they agree."""
    ranks, settings = RUNS[name]
    responses = min(RESPONSE, 40) if name in SMALL else RESPONSE
    found = rehearsals.layout(name, settings, ranks, prompt=PROMPT, response=responses, ends_only=True)
    assert (found.mistakes, found.disagreements) == ([], [])
    assert found.reports, "no rank was rehearsed"
