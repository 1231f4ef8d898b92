"""Sums by name, and the metrics of hidden states from sums whose means are known."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.distributed as dist

from nemo_oprd.batch.token_table import PROFILE_BINS, make_rows
from nemo_oprd.batch.types import Rollout
from nemo_oprd.config.schema import LoggingConfig, OutputLossConfig
from nemo_oprd.distillation.hidden_state_loss import (
    LAYER_METRICS,
    LAYER_SUMS,
    ComparedRows,
    hidden_state_metrics,
    layer_sums,
    position_gap,
)
from nemo_oprd.distillation.metrics.step_metrics import NamedSums
from nemo_oprd.distillation.metrics.watched_metrics import WatchedMetrics
from nemo_oprd.distillation.sampling_check import drift_metrics
from nemo_oprd.losses.output_loss import Support


def test_all_sums_travel_in_one_message(monkeypatch: pytest.MonkeyPatch) -> None:
    messages = []

    def two_equal_ranks(tensor: torch.Tensor, group: None) -> None:
        messages.append(tensor.numel())
        tensor *= 2

    monkeypatch.setattr(dist, "all_reduce", two_equal_ranks)
    sums = NamedSums({"table": (2, 3), "none": (0, 3), "count": ()}, torch.device("cpu"))
    table = torch.arange(6.0).view(2, 3)
    sums.add({"table": table, "count": 1})
    sums.add({"count": torch.tensor(2.5)})
    reduced = sums.reduced(None)
    assert messages == [7]
    assert torch.equal(reduced["table"], 2 * table.double())
    assert reduced["count"].item() == 7.0 and reduced["none"].shape == (0, 3)
    with pytest.raises(KeyError):  # a name that other ranks do not have
        sums.add({"another": 1})


def test_drift_by_position() -> None:
    """Over the first k tokens of all responses; the last k has all of them."""
    rollouts = [Rollout([1], [2, 3, 4]), Rollout([1], [5])]
    table = make_rows(rollouts, positions="all", k=1, position="predicting", aggregation="token_mean")
    ratio = np.array([1.0, 2.0, 0.5, 4.0])  # tokens 0, 1, 2 of the first response, and 0 of the other one
    named = drift_metrics(np.zeros(4), np.log(ratio), table)
    for k, rows in ((1, [0, 3]), (2, [0, 1, 3]), (4, [0, 1, 2, 3])):
        w = ratio[rows]
        assert named[f"rollout/drift_kl_first_k/{k}"] == pytest.approx((w - 1 - np.log(w)).mean())
        size = w.sum() ** 2 / (len(w) * (w**2).sum())
        assert named[f"rollout/drift_effective_sample_size_first_k/{k}"] == pytest.approx(size)
    assert named["rollout/drift_kl"] == named["rollout/drift_kl_first_k/4"]
    assert named["rollout/drift_effective_sample_size"] == named["rollout/drift_effective_sample_size_first_k/4"]
    assert len(named) == 8


def test_metrics_of_hidden_states() -> None:
    table = make_rows([Rollout([1], [2, 3, 4])], positions="all", k=1, position="token", aggregation="token_mean")
    found = {
        2: {"loss": 3.0, "cosine_similarity": 1.5, "squared_error": 4.0, "squared_target": 16.0, "norm_ratio": 6.0},
        5: {"loss": 1.0, "cosine_similarity": 3.0, "squared_error": 0.0, "squared_target": 0.0, "norm_ratio": 3.0},
    }
    gradients = {2: {"squared_gradient": 9.0, "injections": 1.0}, 5: {"squared_gradient": 0.0, "injections": 1.0}}
    sums_LC = torch.tensor([[{**found[layer], **gradients[layer]}[name] for name in LAYER_SUMS] for layer in (2, 5)])
    profile = torch.zeros(2, PROFILE_BINS, dtype=torch.float64)
    profile[0, :3] = torch.tensor([0.25, 0.5, 0.75])  # tokens 1, 2 and 3 from the start
    sums = layer_sums(sums_LC, [2, 5])
    named = hidden_state_metrics(sums, profile, {2: 1.0, 5: 3.0}, table, "first_k")
    assert named == {
        "rep/loss": (3.0 + 3 * 1.0) / 4,
        "rep/cosine_similarity": (0.5 + 1.0) / 2,
        "rep/loss_layer/2": 3.0,
        "rep/loss_layer/5": 1.0,
        "rep/cosine_similarity_layer/2": 0.5,
        "rep/cosine_similarity_layer/5": 1.0,
        "rep/relative_error_layer/2": 0.5,
        "rep/relative_error_layer/5": 0.0,
        "rep/norm_ratio_layer/2": 2.0,
        "rep/norm_ratio_layer/5": 1.0,
        "rep/gradient_norm_layer/2": 3.0,
        "rep/gradient_norm_layer/5": 0.0,
        "rep/gradient_share_layer/2": 1.0,
        "rep/gradient_share_layer/5": 0.0,
        "rep/cosine_first_k/1": 0.25,
        "rep/cosine_first_k/2": 0.375,
        "rep/cosine_first_k/4": 0.5,
    }
    assert position_gap(profile, table, "first_k") == {0: 0.75, 1: 0.5, 2: 0.25}
    assert hidden_state_metrics({}, profile, {}, table, "first_k") == {}


def test_what_is_summed_per_layer() -> None:
    student_ND, teacher_ND = torch.tensor([[3.0, 4.0], [0.0, 2.0]]), torch.tensor([[3.0, 0.0], [0.0, 1.0]])
    loss, weight = torch.tensor([1.0, 2.0]), torch.tensor([0.5, 0.25])
    rows = ComparedRows(student_ND, teacher_ND, loss, weight, torch.tensor([0.6, 1.0], dtype=torch.float64))
    sums = {name: float(metric.summed(rows).sum()) for name, metric in LAYER_METRICS.items() if metric.summed}
    expected = {"loss": 1.0, "cosine_similarity": 1.6, "squared_error": 17.0, "squared_target": 10.0}
    assert sums == pytest.approx({**expected, "norm_ratio": 5 / 3 + 2})
    assert set(sums) < set(LAYER_SUMS)


@pytest.mark.parametrize("support", ["student", "teacher", "union", "intersection"])
def test_watched_metrics_measure_the_configured_support(support: Support) -> None:
    """As the metrics of an output loss with the same settings do."""
    loss, logging = OutputLossConfig(k=4, support=support), LoggingConfig(output_metrics_every=1)
    watched = WatchedMetrics.build(loss, logging, seed=0)
    assert watched is not None and watched.drawn is not None and watched.drawn.loss.support == support
