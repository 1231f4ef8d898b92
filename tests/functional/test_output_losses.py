"""Output losses on a vocabulary split over 2 and 4 ranks, with padding, against the whole vocabulary on one."""

from __future__ import annotations

import pytest
from pool import Pools

from nemo_oprd.losses.output import OutputLoss

LOSSES = [
    OutputLoss("sampled_token", temperature=0.7),
    OutputLoss("sampled_token", k=5),
    OutputLoss("full_vocab", k=4),
    OutputLoss("forward_kl"),
    OutputLoss("jsd", jsd_beta=0.2, temperature=1.4),
    *[
        OutputLoss("top_k", k, support=support, normalizer=normalizer, support_weight=weight)
        for k in (4, 40)
        for support in ("student", "teacher", "union", "intersection")
        for normalizer, weight in (("renormalized", "student"), ("full", "teacher"), ("full", "student"))
    ],
]


@pytest.mark.parametrize(
    ("ranks", "size"),
    # 61 real ids; as Megatron pads them (128 columns a rank: all ranks but the first hold padding alone), and split
    [(2, 128), (2, 32), (4, 16), (4, 128)],
)
@pytest.mark.parametrize(("dtype", "integers", "tolerance"), [("float64", False, 1e-12), ("float32", True, 2e-5)])
def test_split_vocabulary(pools: Pools, ranks: int, size: int, dtype: str, integers: bool, tolerance: float) -> None:
    arguments = {"losses": LOSSES, "size": size, "rows": 10, "dtype": dtype, "integers": integers}
    report = pools[ranks].run("output_cases:split_against_whole", **arguments)
    assert len(report) == len(LOSSES)
    deviations = {(loss, name): value for loss, found in report.items() for name, value in found.items()}
    worst = max(deviations, key=deviations.__getitem__)
    assert deviations[worst] < tolerance, f"{worst}: {deviations[worst]:.1e}"


def test_no_rows(pools: Pools) -> None:
    """A microbatch without rows on every rank of the group."""
    arguments = {"losses": LOSSES[:6], "size": 32, "rows": 0, "dtype": "float32", "integers": False}
    report = pools[2].run("output_cases:split_against_whole", **arguments)
    assert all(value == 0 for found in report.values() for value in found.values())
