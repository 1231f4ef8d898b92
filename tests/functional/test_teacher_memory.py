"""What the teacher keeps in memory: its targets a few microbatches at a time, its weights only while it reads."""

from __future__ import annotations

from pathlib import Path

import pytest
from pool import Pools

GOLDEN = Path(__file__).parent.parent / "golden"
BASE = [
    f"student.hf_path={GOLDEN / 'student'}",
    f"teacher.hf_path={GOLDEN / 'teacher'}",
    f"rollout.replay={GOLDEN / 'rollouts.jsonl'}",
    "loss.representation.positions=all",
    "train.tokens_per_microbatch=1",  # a microbatch per response
    "output=unused",
]


def test_resident_targets_are_bounded(pools: Pools) -> None:
    """With n microbatches at a time: the n longest responses, layers x width x 4 bytes a token."""
    import json

    masks = [json.loads(line) for line in (GOLDEN / "rollouts.jsonl").read_text().splitlines()]
    tokens = [sum(r.get("response_mask") or [1] * len(r["response_ids"])) for r in masks]
    row = 3 * 32 * 4
    held = {n: pools[1].run("cases:held_targets", overrides=[*BASE, *bound(n)]) for n in (1, 2, None)}
    assert held[None] == sum(tokens) * row
    assert held[1] == max(tokens) * row
    assert held[1] < held[2] < held[None]


def test_auto_takes_what_is_free(pools: Pools) -> None:
    """As many microbatches as fit into the free bytes, at least one, and the same number on every rank."""
    settings = [*BASE, "teacher.resident_microbatches=auto"]
    one, two, every = (pools[1].run("cases:held_targets", overrides=[*BASE, *bound(n)]) for n in (1, 2, None))

    def held(free: int | None) -> int:
        return pools[1].run("cases:held_targets", overrides=settings, free=free)

    assert held(None) == every
    assert held(2 * one) == two
    assert held(2 * one - 1) == held(1) == one
    layout = ["student.parallel.pipeline=2", "teacher.resident_microbatches=auto"]
    assert pools[2].run("cases:held_targets", overrides=[*BASE, *layout], free=1) <= one


def bound(microbatches: int | None) -> list[str]:
    """The setting."""
    return [f"teacher.resident_microbatches={'null' if microbatches is None else microbatches}"]


@pytest.mark.parametrize("layout", [[], ["teacher.parallel.pipeline=2"]], ids=["DP2", "PP2"])
def test_offloaded_weights_are_only_there_while_the_teacher_reads(pools: Pools, layout: list[str]) -> None:
    resident = pools[2].run("cases:teacher_weight_bytes", overrides=[*BASE, *layout])
    assert resident["during"] == resident["before"] == resident["after"] > 0
    away = pools[2].run("cases:teacher_weight_bytes", overrides=[*BASE, *layout, "teacher.offload=true"])
    assert away == {"before": 0, "during": resident["during"], "after": 0}


def test_weight_files_are_closed_when_models_are_built(pools: Pools, tmp_path: Path) -> None:
    """An open file stays mapped, and counts against the memory limit of a job."""
    run = [*BASE[:-1], f"output={tmp_path / 'run'}", "logging.tensorboard=false"]
    assert pools[1].run("cases:open_weight_readers", overrides=run) == 0
