"""The guard against captures that fail silently: each breakage stops the run and names layer, stage and setting."""

from __future__ import annotations

from pathlib import Path

import pytest
from pool import Pools, WorkerError

GOLDEN = Path(__file__).parent.parent / "golden"
BASE = [
    f"student.hf_path={GOLDEN / 'student'}",
    f"rollout.replay={GOLDEN / 'rollouts.jsonl'}",
    "loss.representation.k=4",
]


@pytest.mark.parametrize(
    ("ranks", "breakage", "extra"),
    [
        (1, "skipped", []),
        (1, "detached", []),
        (1, "twice", []),
        (1, "hook in a recomputed region", ["student.recompute=full"]),
        (2, "skipped", ["student.parallel.pipeline=2"]),
    ],
)
def test_broken_captures_stop_the_run(
    pools: Pools, tmp_path: Path, ranks: int, breakage: str, extra: list[str]
) -> None:
    overrides = [*BASE, f"teacher.hf_path={GOLDEN / 'teacher'}", f"output={tmp_path / 'out'}", *extra]
    with pytest.raises(WorkerError) as error:
        pools[ranks].run("cases:run_broken_verify", overrides=overrides, breakage=breakage)
    message = str(error.value)
    assert "CaptureError" in message
    assert "layer 2 (pipeline stage 0" in message
    assert "student.recompute" in message
    assert not (tmp_path / "out").exists()


def test_a_teacher_that_is_the_student_is_no_breakage(pools: Pools, tmp_path: Path) -> None:
    """Loss and gradients are zero there, and rightly so."""
    overrides = [*BASE, f"teacher.hf_path={GOLDEN / 'student'}", f"output={tmp_path / 'out'}"]
    pools[1].run("cases:run_verify", overrides=overrides)
    assert '"rep/loss": 0.0' in (tmp_path / "out" / "losses.json").read_text()
