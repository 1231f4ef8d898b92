"""Models with experts: the result does not depend on the layout, expert parallelism included.

Losses, metrics and every gradient of `verify`, the routers' included, at each layout below against plain Hugging Face
models in float64, as in test_layouts.py.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from layout_cases import Case, Workbench, read_result
from layout_grid import SMALL
from pool import Pools

from nemo_oprd.distillation.reference import agreement

TOLERANCE = 1e-5
QWEN, MIXTRAL = "qwen3_moe", "mixtral"

CASES = sorted(
    [
        Case("dp1", objective=QWEN),
        Case("dp1", objective=MIXTRAL, tokens=SMALL),
        Case("dp1", objective=QWEN, recompute="uniform 2", tokens=SMALL),
        Case("dp1", objective=MIXTRAL, recompute="selective"),
        Case("dp2", objective=MIXTRAL, tokens=SMALL),
        Case("dp2 ep2", objective=QWEN, tokens=SMALL),
        Case("dp2 ep2", objective=MIXTRAL, recompute="uniform 1"),
        Case("dp2 ep2 allgather", objective=QWEN, recompute="block 3", tokens=SMALL),
        Case("dp2 ep2", "dp2", objective=MIXTRAL, extra=("train.distributed_optimizer=false",)),
        Case("dp2", "dp2 ep2 allgather", objective=QWEN),
        Case("tp2 sp", objective=QWEN),
        Case("tp2 sp ep2", objective=MIXTRAL, tokens=SMALL),
        Case("tp2 sp ep2 allgather", "tp2 ep2", objective=QWEN, recompute="uniform 2"),
        Case("tp2 sp etp2 allgather", objective=QWEN, tokens=SMALL),
        Case("tp2 sp etp2", objective=MIXTRAL),
        Case("cp2", objective=MIXTRAL, tokens=SMALL),
        Case("cp2 ep2", "pp2", objective=QWEN),
        Case("pp2", "dp2 ep2", objective=QWEN, recompute="uniform 1"),
        Case("pp2 vpp2", "tp2", objective=QWEN, tokens=SMALL),
        Case("pp2 vpp4", "tp2 sp ep2", objective=MIXTRAL, recompute="uniform 1"),
        Case("dp2 ep2", "dp1 dedicated", objective=QWEN, tokens=SMALL),
        Case("dp1", "dp2 ep2 dedicated", objective=MIXTRAL),
        Case("dp2 pp2 ep2", objective=QWEN, tokens=SMALL),
        Case("dp2 pp2 vpp2 ep2", "tp2 pp2", objective=MIXTRAL, recompute="uniform 2", tokens=SMALL),
        Case("tp2 sp dp2 ep4", objective=QWEN),
        Case("tp2 sp dp2 ep2", "dp4 ep4", objective=MIXTRAL, tokens=SMALL),
        Case("tp2 sp dp2 ep2 etp2 allgather", objective=MIXTRAL, recompute="uniform 1"),
        Case("cp2 dp2 ep4 allgather", "tp2 pp2", objective=QWEN, tokens=SMALL),
        Case("dp4 ep2", "dp4 ep4", objective=MIXTRAL, recompute="uniform 1", tokens=SMALL),
        Case("tp2 sp pp2 ep2", "cp2 dp2 ep4", objective=QWEN, recompute="uniform 1"),
        Case("dp2 ep2", "dp2 ep2 allgather dedicated", objective=MIXTRAL, tokens=SMALL),
    ],
    key=lambda case: case.ranks,
)


# the default run takes these, `scripts/test.sh --all` takes all
DEFAULT = {
    Case("dp2 ep2", objective=QWEN, tokens=SMALL),
    Case("tp2 sp", objective=QWEN),
    Case("tp2 sp etp2 allgather", objective=QWEN, tokens=SMALL),
    Case("tp2 sp ep2 allgather", "tp2 ep2", objective=QWEN, recompute="uniform 2"),
    Case("pp2 vpp4", "tp2 sp ep2", objective=MIXTRAL, recompute="uniform 1"),
}


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[] if case in DEFAULT else pytest.mark.slow) for case in CASES], ids=str
)
def test_expert_layout(pools: Pools, workbench: Workbench, tmp_path: Path, case: Case) -> None:
    output = tmp_path / "out"
    overrides = [*workbench.settings(case.objective), *case.overrides, f"output={output}"]
    metrics = pools[case.ranks].run("layout_cases:run_verify", overrides=overrides)
    losses, gradients = read_result(output)
    right, right_metrics = workbench.expected(case.objective)
    loss = max(abs(losses[name] / right[name] - 1) for name in ("loss/total", "rep/loss"))
    # a cosine can be close to 0, where only its absolute error says something
    off = {name: abs(metrics[name] - v) / (1.0 if "cosine" in name else v) for name, v in right_metrics.items()}
    deviations = agreement(gradients, right["gradients"])
    worst = max(deviations, key=deviations.__getitem__)
    assert any(name.endswith("gate.weight") for name in deviations), "no router's gradient was compared"
    print(f"{case.ranks} ranks, {case}: {loss:.1e}  {max(off.values()):.1e}  {deviations[worst]:.1e} at {worst}")
    assert metrics.keys() == right_metrics.keys()
    assert loss < TOLERANCE and max(off.values()) < TOLERANCE and deviations[worst] < TOLERANCE, worst


def test_there_are_enough_layouts() -> None:
    assert len({(case.student, case.teacher, case.recompute) for case in CASES}) >= 24
    assert len(DEFAULT) == 5 and set(CASES) > DEFAULT
