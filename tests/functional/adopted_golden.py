"""The golden cases of adopted models: which ones every layout runs, and their comparison."""

from __future__ import annotations

import pytest
import torch
from golden_runs import EXPECTED, GOLDEN, TOLERANCE
from safetensors.torch import load_file

from nemo_oprd.distillation.reference import agreement

# cases that differ in what a layout could break: rows, the state of the last layer, and the size of gradients
EVERYWHERE = ("mse_all_last_k", "no_final_norm", "normalized_sum", "predicting")


def check(case: str, found: tuple[dict[str, float], dict[str, torch.Tensor]]) -> None:
    """Compares metrics and gradients with a golden case; parameters without a gradient path must have zeros."""
    metrics, gradients = found
    expected, wanted = EXPECTED[case], load_file(GOLDEN / f"grads_{case}.safetensors")
    assert metrics["rep/loss"] == pytest.approx(expected["rep/loss"], rel=TOLERANCE)
    assert metrics["loss/total"] == pytest.approx(expected["loss/total"], rel=TOLERANCE)
    per_layer = {k.rpartition("/")[2]: v for k, v in metrics.items() if k.startswith("rep/loss_layer/")}
    assert per_layer == pytest.approx(expected["rep/loss_per_layer"], rel=TOLERANCE)
    untrained = set(gradients) - set(wanted)
    assert all(not gradients[name].any() for name in untrained), untrained
    deviations = agreement({name: gradients[name] for name in wanted}, wanted)
    worst = max(deviations, key=deviations.__getitem__)
    print(f"largest gradient deviation {deviations[worst]:.1e} at {worst}")
    assert deviations[worst] < TOLERANCE, f"{worst}: {deviations[worst]:.1e}"
