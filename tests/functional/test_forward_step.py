"""`OPRDForwardStep` in Megatron's own schedules, on stock models: losses and gradients against the golden cases.

test_nemo_bridge.py runs it in Megatron-Bridge itself, where that is installed.
"""

from __future__ import annotations

from typing import Any

import pytest
from adopted_golden import check
from golden_runs import EXPECTED
from pool import Pools, WorkerError

from nemo_oprd.integrations.forward_step import OPRDForwardStep

# layout -> (ranks, sizes, responses per microbatch, case)
LAYOUTS: dict[str, tuple[int, dict[str, Any], int, str]] = {
    "one rank": (1, {}, 3, "normalized_sum"),
    "PP2": (2, {"pipeline": 2}, 1, "mse_all_last_k"),
    "PP2, no final norm": (2, {"pipeline": 2}, 2, "no_final_norm"),
    "DP2": (2, {"data": 2}, 1, "predicting"),
    "TP2": (2, {"tensor": 2}, 2, "mse_even"),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_golden(pools: Pools, name: str) -> None:
    ranks, sizes, size, case = LAYOUTS[name]
    arguments = {"options": EXPECTED[case]["options"], "layout": sizes, "size": size}
    check(case, pools[ranks].run("forward_step_cases:golden_gradients", **arguments))


def test_a_dropped_injection_stops_the_update(pools: Pools) -> None:
    arguments = {"options": EXPECTED["no_final_norm"]["options"], "layout": {"pipeline": 2}, "size": 2}
    with pytest.raises(WorkerError, match="CaptureError: layer 3 of the adopted student received its loss gradient 0"):
        pools[2].run("forward_step_cases:golden_gradients", fault="unobserved", **arguments)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("evaluation", "the loop evaluates, and OPRDForwardStep has no loss for that; .*set train.eval_iters=0"),
        ("another_provider", "the student's provider has built no teacher; .*config.model"),
    ],
)
def test_refused_in_the_loop(pools: Pools, function: str, message: str) -> None:
    with pytest.raises(WorkerError, match=message):
        pools[1].run(f"forward_step_cases:{function}")


class Provider:
    """Has what the constructor asks for."""

    def __init__(self, stages: int | None = None) -> None:
        self.virtual_pipeline_model_parallel_size = stages

    def provide_distributed_model(self) -> None:
        """Never called."""

    def register_pre_wrap_hook(self, hook: Any) -> None:
        """Never called back."""


def test_refused_before_anything_is_built() -> None:
    student, teacher = Provider(), Provider()
    with pytest.raises(ValueError, match="the teacher is a str; expected a model provider of Megatron-Bridge"):
        OPRDForwardStep(student, "Qwen/Qwen3-4B")
    with pytest.raises(ValueError, match="student and teacher are the same provider; expected two"):
        OPRDForwardStep(student, student)
    with pytest.raises(ValueError, match="virtual_pipeline_model_parallel_size=2: .*set it to None"):
        OPRDForwardStep(Provider(2), teacher)
    with pytest.raises(ValueError, match=r"return_schedule_plan=True .*overlap_moe_expert_parallel_comm=False"):
        OPRDForwardStep(student, teacher)(None, iter([]), None, return_schedule_plan=True)
