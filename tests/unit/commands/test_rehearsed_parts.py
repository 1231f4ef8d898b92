"""`nemo-oprd rehearse` without a rehearsal: which ranks and parts are chosen, and where ranks must agree."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from family_configs import QWEN2

from nemo_oprd.cli import main, make_parser
from nemo_oprd.commands.plan.estimate import estimate
from nemo_oprd.commands.plan.gpus import GPUS, Cluster
from nemo_oprd.commands.rehearse.agreement import disagreements
from nemo_oprd.commands.rehearse.command import PARTS, planned_bytes, ranks_of_interest, role_of
from nemo_oprd.config.loading import load_config
from nemo_oprd.setup.resolve import RunSpec, resolve

TWO_STAGES = ("student.parallel.tensor=2", "student.parallel.pipeline=2", "teacher.parallel.tensor=2")


@pytest.fixture
def run(tmp_path: Path) -> Any:
    """(Ranks, overrides) -> the run of two small models."""
    (tmp_path / "config.json").write_text(json.dumps(QWEN2))
    models = [f"{role}.hf_path={tmp_path}" for role in ("student", "teacher")]

    def resolved(ranks: int, *overrides: str) -> RunSpec:
        return resolve(load_config("oprd_1p5b", [*models, *overrides], None), ranks)

    return resolved


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ((), {0: "student stage 0, teacher stage 0"}),
        (
            (*TWO_STAGES, "teacher.parallel.pipeline=2"),
            {rank: f"student stage {rank // 4}, teacher stage {rank // 4}" for rank in (0, 1, 4, 5)},
        ),
        # the fullest tensor rank of a colocated teacher may be another one than the student's
        (("teacher.parallel.tensor=2",), dict.fromkeys((0, 1), "student stage 0, teacher stage 0")),
        (
            ("teacher.placement=dedicated", "teacher.parallel.tensor=2", "teacher.parallel.pipeline=2"),
            {
                0: "student stage 0",
                4: "teacher stage 0",
                5: "teacher stage 0",
                6: "teacher stage 1",
                7: "teacher stage 1",
            },
        ),
    ],
)
def test_the_first_and_the_fullest_rank_of_each_kind_are_of_interest(
    run: Any, overrides: tuple[str, ...], expected: dict[int, str]
) -> None:
    spec = run(8, *overrides)
    chosen = ranks_of_interest(spec, estimate(spec, Cluster(8, GPUS["h100"])))
    assert {rank: role_of(spec, rank) for rank in chosen} == expected


def test_ranks_are_chosen_in_one_way_and_parts_are_known(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["rehearse", "--config-name", "oprd_1p5b", "--ranks", "8"]
    assert make_parser().parse_args(command).phases == tuple(PARTS)
    assert make_parser().parse_args([*command, "--phases", "none"]).phases == ()
    assert make_parser().parse_args([*command, "--ranks-of-interest"]).rank is None
    for wrong, named in ((["--rank", "1", "--ranks-of-interest"], "--rank"), (["--phases", "weights,x"], "'x'")):
        with pytest.raises(SystemExit, match="2"):
            main([*command, *wrong])
        (line,) = capsys.readouterr().err.splitlines()
        assert named in line


def test_a_plan_of_building_grows_from_part_to_part(run: Any) -> None:
    spec = run(8)
    (kind,) = estimate(spec, Cluster(8, GPUS["h100"])).kinds
    sizes = [planned_bytes(kind, f"build {part}", spec) for part in ("engine", "student", "optimizer", "teachers")]
    assert sizes == sorted(sizes)
    always = kind.memory.always
    assert sizes[1] == always["rollout copy"] + always["weights"]
    assert planned_bytes(kind, "weights", spec) is None
    assert planned_bytes(kind, "generation", spec) > sum(always.values())


def test_who_gathers_has_more_tensors_than_who_gives() -> None:
    def seen(shapes: list[list[int]], dtype: str = "float32") -> dict[str, Any]:
        message = {
            "kind": "gather_",
            "ranks": [0, 1],
            "peer": None,
            "rows": None,
            "shapes": shapes,
            "dtype": dtype,
            "place": "a.py:1",
        }
        return {"phases": {"save": {"messages": [message]}}}

    first = seen([[8], [8], [8]])
    assert disagreements({0: first, 1: seen([[8]])}) == []
    assert len(disagreements({0: first, 1: seen([[4]])})) == 1
    assert len(disagreements({0: first, 1: seen([[8]], "bfloat16")})) == 1
