"""The canary on Megatron models: right at every layout, and planted errors named with their layer and row."""

from __future__ import annotations

from pathlib import Path

import pytest
from layout_cases import Case, Workbench
from pool import Pools

CASES = [
    Case("dp1", objective="qwen2-tied"),
    Case("tp2 sp", "pp2", tokens=120, recompute="uniform 1"),
    Case("cp2", "tp2", extra=("teacher.offload=true",)),
    Case("pp2 vpp3", "dp2", objective="pruned"),
    Case("tp2 sp ep2", "dp2 ep2", objective="qwen3_moe"),
    Case("dp1", "dp1 dedicated", extra=("precision=bf16",)),
]


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Workbench:
    return Workbench(tmp_path_factory.mktemp("canary"))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_own_families_pass_at_every_layout_and_are_not_asked_again(
    pools: Pools, bench: Workbench, tmp_path: Path, case: Case
) -> None:
    overrides = [*bench.settings(case.objective), *case.overrides, f"output={tmp_path / 'out'}"]
    arguments = {"overrides": overrides, "cache": str(tmp_path / "cache")}
    found = pools[case.ranks].run("canary_cases:proofs", **arguments)
    assert [(key, refused) for key, refused, _, _ in found] == [("student", False), ("teacher", False)], found
    for _, _, line, worst in found:
        assert "equal transformers' in" in line
        assert list(worst) == list(range(1, 1 + len(worst))) and len(worst) in (6, 8)
        assert max(worst.values()) < (1e-5 if "precision=bf16" not in case.extra else 0.1)
    again = pools[case.ranks].run("canary_cases:proofs", **arguments)
    assert [line for _, _, line, _ in again] == [f"{line} (known from an earlier start)" for _, _, line, _ in found]


# layout, what is planted -> the first wrong layer and row, and the hint
PLANTED = {
    "rotary_base": ("tp2 sp", 1, 1, "rotation (base"),
    "heads_permuted": ("tp2 sp", 2, 1, "head order"),
    "rank_stale": ("tp2", 3, 0, "of its rows are wrong, from row 0 on: a weight of this layer is another one"),
    "norm_less_one": ("pp2", 8, 0, "same factor per channel"),
    "layers_exchanged": ("dp1", 3, 0, "transformers' state of layer 4, so layers are counted off by one"),
}


@pytest.mark.parametrize("plant", PLANTED)
def test_planted_errors_are_named(pools: Pools, bench: Workbench, tmp_path: Path, plant: str) -> None:
    layout, layer, row, hint = PLANTED[plant]
    case = Case(layout)
    overrides = [*bench.settings("qwen3"), *case.overrides, f"output={tmp_path / 'out'}"]
    arguments = {"overrides": overrides, "cache": str(tmp_path / "cache"), "plant": plant}
    for _ in range(2):  # what was refused is not kept
        (_, refused, line, _), (_, teacher_refused, *_) = pools[case.ranks].run("canary_cases:proofs", **arguments)
        assert refused and not teacher_refused
        assert line.startswith(f"canary of qwen3: layer {layer} of 8, prompt ") and f", row {row} is" in line, line
        assert hint in line and "\n" not in line


def test_training_starts_only_with_proven_states_of_models_of_another_program(
    pools: Pools, bench: Workbench, tmp_path: Path
) -> None:
    overrides = [*bench.settings("qwen3"), *Case("tp2").overrides, "train.steps=1", f"output={tmp_path / 'out'}"]
    arguments = {"overrides": overrides, "cache": str(tmp_path / "cache")}
    error, _ = pools[2].run("canary_cases:train", **arguments, rotated_otherwise=True)
    assert error.startswith("student.provider: canary of qwen3: layer 1 of 8, prompt 0, row 1 is the first wrong one")
    assert "\n" not in error and not (tmp_path / "out" / "metrics.jsonl").exists()
    error, logged = pools[2].run("canary_cases:train", **arguments, rotated_otherwise=False)
    said = [line for line in logged if "equal transformers'" in line]
    assert error == "" and [line.partition(":")[0] for line in said] == ["student", "teacher"]
    assert (tmp_path / "out" / "metrics.jsonl").exists()
