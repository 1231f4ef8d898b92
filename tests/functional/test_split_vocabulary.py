"""Output losses on a vocabulary split over 2 and 4 ranks, with padding, against the whole vocabulary on one."""

from __future__ import annotations

from typing import Any

import pytest
from pool import Pools

from nemo_oprd.losses.output_loss import OutputLoss

LOSSES = [
    OutputLoss("sampled_token", temperature=0.7),
    OutputLoss("sampled_token", k=5),
    OutputLoss("full_vocab", k=4),
    OutputLoss("forward_kl"),
    OutputLoss("jsd", jsd_beta=0.2, temperature=1.4),
    OutputLoss("top_k", 4),
    OutputLoss("top_k", 4, support="teacher", support_weight="teacher"),
    OutputLoss("top_k", 4, support="union", normalizer="full"),
    OutputLoss("top_k", 4, support="intersection", normalizer="full", support_weight="teacher"),
    OutputLoss("top_k", 40, support="union"),
    OutputLoss("top_k", 3, support="intersection"),
]


def test_no_rows(pools: Pools) -> None:
    """A microbatch without rows on every rank of the group."""
    arguments = {"losses": LOSSES[4:6], "size": 32, "rows": 0, "dtype": "float32", "integers": False}
    report = pools[2].run("split_vocabulary_cases:split_against_whole", **arguments)
    assert all(value == 0 for found in report.values() for value in found.values())


@pytest.mark.parametrize(
    ("ranks", "size", "dtype", "integers", "gaps", "tolerance"),
    [
        # 61 real ids as Megatron pads them: every rank but the first holds padding alone
        (2, 128, "float64", False, (), 1e-12),
        (2, 32, "float32", True, (), 2e-5),
        # one run of ids that are left out lies on two ranks
        (4, 16, "float64", True, ((0, 1), (10, 20), (48, 60)), 1e-12),
    ],
)
def test_split_vocabulary(
    pools: Pools, ranks: int, size: int, dtype: str, integers: bool, gaps: Any, tolerance: float
) -> None:
    arguments = {"losses": LOSSES, "size": size, "rows": 6, "dtype": dtype, "integers": integers, "gaps": gaps}
    report = pools[ranks].run("split_vocabulary_cases:split_against_whole", **arguments)
    assert len(report) == len(LOSSES)
    deviations = {(loss, name): value for loss, found in report.items() for name, value in found.items()}
    worst = max(deviations, key=deviations.__getitem__)
    assert deviations[worst] < tolerance, f"{worst}: {deviations[worst]:.1e}"
