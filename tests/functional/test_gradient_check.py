"""The gradient check against captures that fail silently: each breakage stops the run with layer, stage, setting."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
from pool import Pools, WorkerError

from nemo_oprd.megatron.model import DistillingModel
from nemo_oprd.megatron.pipeline_schedule import refuse_layer_bypasses

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


@pytest.mark.parametrize(
    ("setting", "value"),
    [("cuda_graph_impl", "local"), ("external_cuda_graph", True), ("overlap_moe_expert_parallel_comm", True)],
)
def test_settings_that_bypass_a_layers_forward_are_refused(setting: str, value: object) -> None:
    """A Megatron config of one's own is caught where the schedule starts."""
    config = SimpleNamespace(**{"cuda_graph_impl": "none", setting: value})
    with pytest.raises(ValueError, match=f"{setting}={value}.*expected {setting}="):
        refuse_layer_bypasses(config)
    refuse_layer_bypasses(SimpleNamespace(cuda_graph_impl="none", overlap_moe_expert_parallel_comm=False))


def test_the_step_asks_for_such_settings(pools: Pools, tmp_path: Path) -> None:
    with pytest.raises(WorkerError, match="cuda_graph_impl=local: layers would run without their forward"):
        pools[1].run("cases:run_with_cuda_graphs", overrides=[*BASE, f"teacher.hf_path={GOLDEN / 'teacher'}"])
    with pytest.raises(ValueError, match="expected overlap_moe_expert_parallel_comm=False"):
        DistillingModel.build_schedule_plan(None)  # type: ignore[arg-type]


def test_training_looks_before_it_samples(pools: Pools, tmp_path: Path) -> None:
    """A broken capture stops `train` before the first rollout; a whole one is said to be whole."""
    overrides = [*BASE, f"teacher.hf_path={GOLDEN / 'teacher'}", "train.steps=1", f"output={tmp_path / 'run'}"]
    with pytest.raises(WorkerError, match="layer 2 .pipeline stage 0"):
        pools[1].run("cases:run_broken_train", overrides=overrides, breakage="skipped")
    assert not (tmp_path / "run" / "metrics.jsonl").exists()
    said = pools[1].run("cases:check_gradients", overrides=overrides)
    assert said == "gradient check: each of the 3 supervised layers received its gradient once, on its own stage"
    overrides[len(BASE)] = f"teacher.hf_path={GOLDEN / 'student'}"
    assert "identical at 3 of the 3" in pools[1].run("cases:check_gradients", overrides=overrides)
