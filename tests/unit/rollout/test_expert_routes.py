"""Recorded experts of rollouts: files, refusals, replay in a router; what the routers' metrics refuse."""

from __future__ import annotations

import types
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from family_configs import QWEN3_MOE

from nemo_oprd.batch.types import Rollout
from nemo_oprd.distillation.metrics.injection_counts import CaptureError
from nemo_oprd.distillation.metrics.step_metrics import RouterMetrics
from nemo_oprd.distillation.router_losses import RouterLosses, RouterTerm
from nemo_oprd.megatron.experts import Router, route
from nemo_oprd.megatron.router_replay import Routes
from nemo_oprd.models import parse_model_spec
from nemo_oprd.models.architecture import Experts
from nemo_oprd.rollout import resume_cache
from nemo_oprd.rollout.engine import Request, SamplingParams
from nemo_oprd.rollout.replay import read_rollouts, write_rollouts
from nemo_oprd.rollout.resume_cache import ResumeCache

# 4 experts, 2 per token
SPEC = parse_model_spec({**QWEN3_MOE, "num_hidden_layers": 3, "mlp_only_layers": []})
GOOD = np.array([[[0, 1], [2, 3], [3, 0]]] * 4, dtype=np.int16)  # 4 tokens, 3 layers


def read(tmp_path: Path, routes: np.ndarray | None, *, needed: bool = True) -> Rollout:
    write_rollouts(tmp_path / "a.jsonl", [Rollout([1, 2], [3, 4], expert_routes=routes)])
    return read_rollouts(tmp_path / "a.jsonl", 10, student=SPEC, needs_routes=needed)[0]


def test_routes_in_files(tmp_path: Path) -> None:
    for routes in (GOOD, GOOD[:3]):  # the last token may be missing
        got = read(tmp_path, routes).expert_routes
        assert got is not None and got.dtype == np.int16 and np.array_equal(got, routes)
    assert read(tmp_path, None, needed=False).expert_routes is None


@pytest.mark.parametrize(
    ("routes", "message"),
    [
        (None, "a.jsonl:1: no expert_routes, which student.router_replay=true needs; expected"),
        (GOOD[:2], "expert_routes has 2 entries for 4 tokens of prompt and response; expected 4, or 3 without"),
        (
            GOOD[:, :2],
            "has 2 layers and 2 experts per token, but the student has 3 layers with experts",
        ),
        (GOOD[..., :1], "has 3 layers and 1 experts per token"),
        (GOOD + 1, "holds expert 4, but a layer of the student has experts 0 to 3"),
        (GOOD // 2, "holds an expert twice for one token"),
        (GOOD - 1, "expected \\[tokens\\]\\[layers with experts\\]"),
        (GOOD[0], "expected \\[tokens\\]\\[layers with experts\\]"),
    ],
)
def test_routes_that_are_refused(tmp_path: Path, routes: np.ndarray | None, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read(tmp_path, routes)


def test_an_interrupted_step_keeps_its_routes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(resume_cache, "first_ranks", dict)
    rollout, sampling = Rollout([1, 2], [3, 4], expert_routes=GOOD), SamplingParams(1.0, 1.0, 8, (0,), True)
    without = replace(sampling, record_routes=False)
    cache = ResumeCache(tmp_path, {})
    cache.put(3, {0: rollout}, sampling, 1)
    cache.finish()
    with mock.patch.object(resume_cache, "first_ranks_rollouts", lambda rollouts: rollouts):
        taken = cache.take(3, [Request([1, 2])], sampling)
        assert cache.take(3, [Request([1, 2])], without) == {}
    assert np.array_equal(taken[0].expert_routes, GOOD)  # type: ignore[arg-type]
    # a run that replays routes does not take rollouts of a run that has recorded none
    cache.put(3, {0: replace(rollout, expert_routes=None)}, without, 1)
    cache.finish()
    with mock.patch.object(resume_cache, "first_ranks_rollouts", lambda rollouts: rollouts):
        assert cache.take(3, [Request([1, 2])], sampling) == {}
        assert len(cache.take(3, [Request([1, 2])], without)) == 1


def test_a_router_replays_what_is_recorded_and_chooses_for_itself_elsewhere() -> None:
    logits = torch.tensor([[3.0, 2.0, 1.0], [3.0, 2.0, 1.0], [0.0, 2.0, 4.0]]).view(3, 1, 3).requires_grad_()
    recorded = torch.tensor([[2, 1], [-1, -1], [2, 0]], dtype=torch.int16)
    made: Any = types.SimpleNamespace(
        rule=Experts(3, 2, 8, True, (True,)), layer_number=4, routes=Routes({4: recorded})
    )
    made.routing = types.MethodType(Router.routing, made)
    weights, where = made.routing(logits)
    assert where.tolist() == [[False, True, True], [True, True, False], [True, False, True]]
    expected = torch.softmax(logits[:, 0].masked_fill(~where, -torch.inf), -1)
    torch.testing.assert_close(weights, expected)
    ours, theirs = (torch.autograd.grad(out[0, 1], logits, retain_graph=True)[0] for out in (weights, expected))
    torch.testing.assert_close(ours, theirs)
    assert ours.abs().sum() > 0
    made.layer_number = 5  # nothing is recorded of this layer
    assert made.routing(logits)[1].tolist() == [[True, True, False]] * 2 + [[False, True, True]]


@pytest.mark.parametrize("replays", [False, True])
def test_a_router_that_visits_what_was_recorded_has_changed_no_route(replays: bool) -> None:
    """Its own choice counts, which a bias and groups of experts decide, too, and not the largest logits alone."""
    generator = torch.Generator().manual_seed(0)
    logits, bias = torch.randn(50, 8, generator=generator), torch.linspace(0, 3, 8)
    rule = Experts(8, 2, 8, True, (True,), score="sigmoid", groups=4, chosen_groups=2)
    own = route(logits, rule, bias=bias)[1]
    assert (own.sort(-1).values != logits.topk(2).indices.sort(-1).values).any(-1).sum() > 10
    recorded = {1: own.to(torch.int16)}
    recorded[1][:5] = recorded[1][:5].roll(1, -1)  # in another order: the same set
    recorded[1][5:7, 0] = torch.tensor([next(i for i in range(8) if i not in row) for row in own[5:7].tolist()])
    term = RouterTerm(8, (1,), np.array([50]), 0.0, 0.0, replay=replays)
    seen = RouterLosses(term, torch.arange(50), recorded)
    made: Any = types.SimpleNamespace(rule=rule, expert_bias=bias, layer_number=1)
    made.routes = Routes(recorded if replays else None, seen)
    types.MethodType(Router.routing, made)(logits.view(50, 1, 8))
    assert RouterMetrics.from_sums(seen.sums["routers"], term).named["moe/route_changed"] == pytest.approx(2 / 50)


def test_a_token_that_a_router_has_not_seen_ends_the_run() -> None:
    term = RouterTerm(2, (3,), np.array([4, 1]), 0.5, 0.0, replay=False)
    # visits 3 : 2, sums of probabilities 3.5 and 1.5, then tokens, entropy, z, changed, compared
    sums = torch.tensor([[3.0, 2.0, 3.5, 1.5, 5.0, 2.0, 20.0, 1.0, 4.0]], dtype=torch.float64)
    assert len(RouterLosses.SUMS) == 5
    metrics = RouterMetrics.from_sums(sums, term)
    aux = 2 * (3 / 5 * 3.5 / 5 + 2 / 5 * 1.5 / 5)
    expected = {"moe/aux_loss": aux, "moe/z_loss": 4.0, "moe/load_max": 1.2, "moe/load_min": 0.8}
    expected |= {"moe/router_entropy": 0.4, "moe/route_changed": 0.25, "moe/route_changed_layer/3": 0.25}
    assert {name: metrics.named[name] for name in expected} == pytest.approx(expected)
    assert metrics.loss == pytest.approx(0.5 * aux) and metrics.nonfinite_reason is None
    with pytest.raises(CaptureError, match="router of layer 3 saw 5 tokens in this step, expected 6"):
        RouterMetrics.from_sums(sums, replace(term, lengths=np.array([4, 2])))
    sums[0, 2] = torch.nan
    assert RouterMetrics.from_sums(sums, term).nonfinite_reason == "moe/aux_loss is nan, moe/z_loss is 4.0"
