"""The golden cases: losses and every gradient of `verify` against numbers computed in float64 by a program that knows
nothing of this project (tests/golden/README.md)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from pool import Pools
from safetensors.torch import load_file

from nemo_oprd.verification.reference import agreement

GOLDEN = Path(__file__).parent.parent / "golden"
EXPECTED = json.loads((GOLDEN / "expected.json").read_text())
CASES = list(EXPECTED)
# the golden program's names -> ours; the others are those of loss.representation
NAMES = {
    "w_rep": "loss.representation.weight",
    "w_out": "loss.output.weight",
    "out": "loss.output.kind",
    "topk": "loss.output.k",
}
LAYOUTS = {
    "TP1": (1, []),
    "TP2": (2, ["student.parallel.tensor=2"]),
    "PP2": (2, ["student.parallel.pipeline=2"]),
    "DP2": (2, []),
    "TP2xPP2": (4, ["student.parallel.tensor=2", "student.parallel.pipeline=2"]),
}
# fp32 against float64; the golden README asks for 1e-5 in both
TOLERANCE = 1e-5


def check(output: Path, case: str) -> None:
    """Compares a verify result with a golden case."""
    expected = EXPECTED[case]
    losses = json.loads((output / "losses.json").read_text())
    assert ("output/loss" in losses) == ("output/loss" in expected)
    for name in {"loss/total", "rep/loss", "output/loss"} & set(losses):
        assert losses[name] == pytest.approx(expected[name], rel=TOLERANCE)
    per_layer = losses["rep/loss_per_layer"]
    assert per_layer == pytest.approx(expected["rep/loss_per_layer"], rel=TOLERANCE)
    deviations = agreement(load_file(output / "grads.safetensors"), load_file(GOLDEN / f"grads_{case}.safetensors"))
    worst = max(deviations, key=deviations.__getitem__)
    assert deviations[worst] < TOLERANCE, f"{worst}: {deviations[worst]:.1e}"


def overrides(case: str, output: Path) -> list[str]:
    """A golden case as configuration overrides."""
    options = [
        f"{NAMES.get(name, f'loss.representation.{name}')}={value}".replace(" ", "")
        for name, value in EXPECTED[case]["options"].items()
    ]
    if case.startswith("bridge_"):
        options.append(f"bridge.path={GOLDEN}")
    return [
        f"student.hf_path={GOLDEN / 'student'}",
        f"teacher.hf_path={GOLDEN / EXPECTED[case]['teacher']}",
        f"rollout.replay={GOLDEN / 'rollouts.jsonl'}",
        f"output={output}",
        *options,
    ]


# layout by layout: a pool of another size is another set of processes
@pytest.mark.parametrize(("layout", "case"), [(layout, case) for layout in LAYOUTS for case in CASES])
def test_golden(pools: Pools, tmp_path: Path, layout: str, case: str) -> None:
    ranks, sizes = LAYOUTS[layout]
    output = tmp_path / "out"
    pools[ranks].run("cases:run_verify", overrides=overrides(case, output) + sizes)
    check(output, case)


def test_there_are_golden_cases() -> None:
    assert len(CASES) == 19
