"""The doctor on the states of pruned students, which it compares with all layers of the teacher."""

from __future__ import annotations

from pathlib import Path

import pytest
from pool import Pools

from nemo_oprd.tools.doctor.findings import Finding
from tests.support.planted_models import LAYERS, make_world

KEPT = "loss.representation.layer_map={1:1,2:2,3:3,4:10}"
SHIFTED = "loss.representation.layer_map={1:4,2:5,3:6,4:10}"


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("layers") / "files"
    make_world(root)
    return root


def similar_layers(pools: Pools, world: Path, *overrides: str, ranks: int = 1, student: str = "pruned") -> Finding:
    common = [f"student.hf_path={world / student}", f"teacher.hf_path={world / 'deep'}", "data.validation={}"]
    common += [f"data.train={world / 'train.jsonl'}", "precision=fp32", "evaluation.every=0"]
    common += ["rollout.max_new_tokens=24", "train.tokens_per_microbatch=1024"]
    arguments = {"config": "oprd_1p5b", "overrides": [*common, *overrides], "prompts": 6, "problems": 8}
    _, found = pools[ranks].run("doctor_cases:diagnose", **arguments)
    (finding,) = [finding for finding in found if finding.check == "similar layers"]
    print(finding.line)
    return finding


def test_a_pruned_student(pools: Pools, world: Path) -> None:
    """The layers that it has are more alike than the paper's even ones, or others."""
    kept = similar_layers(pools, world, KEPT)
    assert kept.verdict == "ok"
    even = similar_layers(pools, world)
    assert even.code == "layer-map-poor" and f"fix: {KEPT}" in even.text
    assert even.numbers["best"] == pytest.approx(kept.numbers["similarity"], abs=1e-4)
    assert similar_layers(pools, world, SHIFTED).code == "layer-map-shifted"


@pytest.mark.slow
def test_a_pruned_student_on_two_stages(pools: Pools, world: Path) -> None:
    """The layers of another stage are seen, too."""
    one, two = (similar_layers(pools, world, *layout, ranks=ranks) for layout, ranks in (
        ([], 1), (["student.parallel.pipeline=2", "teacher.parallel.context=2"], 2),
    ))  # fmt: skip
    assert two.code == one.code == "layer-map-poor"
    assert two.numbers["best"] == pytest.approx(one.numbers["best"], abs=0.1)


def test_a_student_of_another_width(pools: Pools, world: Path) -> None:
    """CKA through an untrained bridge: nothing is alike, or no map is better; there is no alarm."""
    bridge = ["bridge.path=full_width", "bridge.train=true", f"teacher.hf_path={world / 'wide'}"]
    found = similar_layers(pools, world, *bridge, student="student")
    assert (found.verdict, found.numbers["measure"]) == ("ok", "CKA")
    assert len(found.numbers["similarities"]) == LAYERS - 1
