"""A teacher behind vLLM servers gives the gradients that the teacher in the trainer gives; servers are stand-ins."""

from __future__ import annotations

from pathlib import Path

import pytest
from layout_cases import Case, Workbench, read_result
from layout_grid import SMALL
from pool import Pools
from served_teachers import ServedTeachers

from nemo_oprd.distillation.reference.hugging_face import agreement

TOLERANCE = 1e-5

LAYOUTS = [
    Case("dp1", tokens=SMALL),
    Case("tp2 sp", tokens=SMALL),
    Case("pp2 vpp2", tokens=SMALL, extra=("teacher.resident_microbatches=2",)),
    Case("cp2", objective="qwen3-sparse"),
    Case("dp2", objective="qwen2-tied", tokens=SMALL),
    Case("pp2", objective="pruned", tokens=SMALL),
]


@pytest.mark.parametrize("case", LAYOUTS, ids=str)
def test_layers_at_a_layout(
    pools: Pools, workbench: Workbench, served_teachers: ServedTeachers, tmp_path: Path, case: Case
) -> None:
    """Losses and gradients of the hidden states against float64 Hugging Face models."""
    output = tmp_path / "out"
    overrides = [*workbench.settings(case.objective), *case.overrides, f"output={output}", *served_teachers.settings()]
    pools[case.ranks].run("layout_cases:run_verify", overrides=overrides)
    losses, gradients = read_result(output)
    expected, _ = workbench.expected(case.objective)
    assert losses["loss/total"] == pytest.approx(expected["loss/total"], rel=TOLERANCE)
    deviations = agreement(gradients, expected["gradients"])
    worst = max(deviations, key=deviations.__getitem__)
    print(f"{case}: largest gradient deviation {deviations[worst]:.1e} at {worst}")
    assert deviations[worst] < TOLERANCE, worst
