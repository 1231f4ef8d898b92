"""The layouts of both roles under which losses, metrics and gradients are compared (test_layouts.py)."""

from __future__ import annotations

import pytest
from layout_cases import Case
from served_teachers import DEDICATED, SERVED

SMALL = 120
# targets of two microbatches at a time, the teacher's weights away in between
WAVES = ("teacher.resident_microbatches=2", "teacher.offload=true")

CASES = sorted(
    [
        # one rank
        Case("dp1"),
        Case("dp1", tokens=SMALL),
        Case("dp1", recompute="selective"),
        Case("dp1", recompute="uniform 1", tokens=SMALL, extra=WAVES),
        Case("dp1", recompute="uniform 2"),
        Case("dp1", recompute="block 3", tokens=SMALL),
        Case("dp1", objective="qwen3-sparse", recompute="uniform 2"),
        Case("dp1", objective="qwen2-tied", tokens=SMALL),
        # two ranks
        Case("tp2 sp", "pp2", objective="pruned", tokens=SMALL),
        Case("pp2 vpp3", "tp2", objective="pruned", recompute="uniform 2", tokens=SMALL),
        Case("cp2", "pp2", objective="pruned", tokens=SMALL),
        Case("tp2", tokens=SMALL),
        Case("tp2", recompute="selective"),
        Case("tp2 sp"),
        Case("tp2 sp", recompute="uniform 1", tokens=SMALL),
        Case("cp2", tokens=SMALL, extra=WAVES),
        Case("cp2", recompute="uniform 2"),
        Case("pp2", objective="qwen3-first", recompute="block 1"),
        Case("dp2", tokens=SMALL),
        Case("dp2", extra=("train.distributed_optimizer=false",)),
        Case("dp2", tokens=SMALL, extra=("train.distributed_optimizer=false", *WAVES)),
        Case("pp2"),
        Case("pp2", recompute="selective", tokens=SMALL),
        Case("pp2 vpp2", tokens=SMALL),
        Case("pp2 vpp4"),
        Case("pp2 vpp2", "pp2 vpp4", recompute="uniform 2", tokens=SMALL),
        Case("pp2 vpp4", "tp2 sp", recompute="block 1", tokens=SMALL),
        Case("pp2 first3", "pp2 last1", tokens=SMALL),
        Case("pp2 last2", "tp2", recompute="uniform 2"),
        Case("pp2 first6 vpp2", "cp2"),
        Case("tp2", "pp2 vpp2", tokens=SMALL),
        Case("cp2", "tp2", tokens=SMALL),
        Case("dp1", "dp1 dedicated", tokens=SMALL),
        Case("pp2 vpp2", objective="qwen3-sparse", recompute="uniform 2", tokens=SMALL),
        Case("tp2 sp", "pp2", objective="qwen3-sparse", recompute="block 5"),
        Case("pp2", "tp2", objective="qwen2-tied", tokens=SMALL),
        Case("tp2 sp", objective="qwen2-tied", recompute="uniform 1"),
        # three ranks
        Case("pp3", "pp3", objective="qwen3-first", tokens=SMALL),
        Case("pp3 vpp2 first2 last2", "dp3", tokens=SMALL),
        Case("pp3 first1 last4", "dp3", recompute="block 2"),
        Case("dp3", "pp3 first2 last2"),
        Case("cp3", "pp3", tokens=SMALL),
        Case("tp2 sp", "dp1 dedicated", tokens=SMALL),
        Case("dp1", "tp2 dedicated"),
        Case("pp2 vpp2", "dp1 dedicated"),
        # four ranks
        Case("tp2 pp2", tokens=SMALL),
        Case("tp2 sp pp2 vpp2", tokens=SMALL),
        Case("tp2 sp pp2 vpp4", "tp2 cp2", recompute="uniform 1"),
        Case("tp2 sp cp2", "tp2 pp2 vpp2", recompute="uniform 2", tokens=SMALL),
        Case("tp2 cp2", "pp4"),
        Case("tp2 dp2", "pp2 dp2 vpp2", tokens=SMALL),
        Case("tp2 sp dp2", recompute="selective"),
        Case("cp2 pp2", "tp2 sp dp2", tokens=SMALL),
        Case("cp2 pp2 vpp2", recompute="uniform 1", tokens=SMALL),
        Case("cp2 dp2", "cp4"),
        Case("cp4", "tp2 sp pp2"),
        Case("dp4", "tp2 sp cp2", tokens=SMALL),
        Case("pp2 dp2 vpp2", tokens=SMALL, extra=WAVES),
        Case("pp2 dp2 first5", recompute="block 2"),
        Case("pp4", "tp2 dp2", tokens=SMALL),
        # more tensor ranks than the two key/value heads
        Case("tp4", "tp2 pp2", tokens=SMALL),
        Case("tp4 sp", "tp4 sp", recompute="uniform 2", tokens=SMALL),
        Case("tp4 sp", "cp2 pp2", objective="qwen2-tied", recompute="selective"),
        Case("tp2 sp dp2", "tp4", tokens=SMALL),
        Case("pp4 vpp2", "pp4 first1 last3", recompute="uniform 1"),
        Case("pp4 first3 last1", "pp4 vpp2", tokens=SMALL, extra=WAVES),
        Case("tp2", "tp2 sp dedicated", tokens=SMALL),
        Case("tp2 sp", "pp2 vpp2 dedicated", recompute="uniform 2", tokens=SMALL, extra=WAVES),
        Case("pp2 vpp2", "tp2 dedicated", tokens=SMALL),
        Case("cp2", "dp2 dedicated"),
        Case("dp2", "cp2 dedicated", tokens=SMALL),
        Case("pp3 first2 last4", "dp1 dedicated", tokens=SMALL),
        Case("pp4 vpp2", objective="qwen3-sparse", tokens=SMALL),
        Case("pp4 vpp2", "tp2 pp2", objective="qwen3-sparse", recompute="uniform 1"),
        Case("tp2 sp pp2", objective="qwen2-tied", tokens=SMALL),
        Case("pp4", objective="qwen2-tied"),
        Case("pp2 dp2 vpp2", "cp2 dp2", objective="qwen2-tied", recompute="uniform 1", tokens=SMALL),
        Case("cp2 tp2", objective="qwen2-tied"),
        # eight ranks
        Case("tp4 sp pp2", "tp4 cp2", recompute="uniform 1", tokens=SMALL),
        Case("tp4 cp2", "tp2 pp4", objective="qwen2-tied"),
    ],
    key=lambda case: case.ranks,
)

# a teacher behind servers; each case runs by itself, because it shares no setting of the teacher with the others
SERVED_CASES = [
    pytest.param(Case("tp2 sp", tokens=SMALL, extra=DEDICATED), marks=pytest.mark.slow),
    pytest.param(Case("tp2 sp", tokens=SMALL, extra=SERVED), marks=pytest.mark.slow),
    Case("pp2 vpp2", tokens=SMALL, extra=(*SERVED, "teacher.resident_microbatches=2")),
    pytest.param(Case("cp2", objective="qwen3-sparse", extra=SERVED), marks=pytest.mark.full),
    pytest.param(Case("pp2", objective="pruned", tokens=SMALL, extra=SERVED), marks=pytest.mark.slow),
    pytest.param(Case("dp2", objective="qwen2-tied", tokens=SMALL, extra=SERVED), marks=pytest.mark.slow),
    pytest.param(Case("tp2 cp2", objective="qwen2-tied", extra=SERVED), marks=pytest.mark.slow),
]
