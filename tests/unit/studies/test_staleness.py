"""The bias of lagged samples: its claims on fresh models, gradients against autograd, the tables in the documents."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from studies import staleness
from studies.staleness import LAG, LOSSES, TOKENS, Gradients, Policy

PAGE = Path(__file__).parents[3] / "docs" / "results_rollouts.md"


@pytest.fixture(scope="module", params=[100])
def case(request: pytest.FixtureRequest) -> tuple[list[torch.Tensor], torch.Tensor, Gradients, Policy, Policy]:
    """Weights, those of the teacher, gradients at the last weights, and the policies now and `LAG` updates ago."""
    trail, teacher = staleness.pair(request.param, updates=LAG + 1)
    return trail, teacher, Gradients(trail[-1], teacher), Policy.of(trail[-1]), Policy.of(trail[-1 - LAG])


def test_exact_means_are_the_gradient_of_the_objective(case) -> None:
    trail, teacher, *_ = case
    for name in ("reverse KL", "sampled token"):
        found, own = Gradients(trail[0], teacher), Policy.of(trail[0])
        parts = [staleness.mean(found.of(name, t, own), t, own, own) for t in range(1, TOKENS + 1)]
        torch.testing.assert_close(sum(parts) / TOKENS, (trail[0] - trail[1]) / staleness.RATE, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("position", range(1, TOKENS + 1))
def test_gradients_of_states_equal_autograd(case, position: int) -> None:
    trail, teacher, found, _, mu = case
    for name, at in (("mse, token", position), ("mse, predicting", position - 1)):
        weights = trail[-1].clone().requires_grad_()
        gaps_n = (staleness.outputs(weights)[0][at] - staleness.outputs(teacher)[0][at]).square().mean(-1)
        (expected,) = torch.autograd.grad(mu.prefixes[at] @ gaps_n, weights)
        torch.testing.assert_close(staleness.mean(found.of(name, position, mu), position, mu, mu), expected)


def test_given_the_prefix_only_states_at_the_token_and_plain_samples_are_biased(case) -> None:
    *_, found, pi, mu = case
    for name in LOSSES:
        rows = staleness.measure(found, name, pi, mu)
        token = max(part / exact for part, exact in zip(rows["token"], rows["exact"], strict=True))
        if name in ("mse, token", "sampled token"):
            assert token > 1e-3, name
        elif name != "sampled token, truncated at 2":
            assert token < 1e-6, name
        assert rows["prefix"][0] < 1e-12 < min(rows["prefix"][1:])
        if rows["bound"] is not None:
            assert rows["whole"] <= rows["bound"]


def test_a_range_that_a_ratio_leaves_brings_bias_back(case) -> None:
    *_, found, pi, _ = case
    far = Policy.of(staleness.random_weights(7))
    token = staleness.measure(found, "sampled token, truncated at 2", pi, far)["token"]
    assert min(token) > 1e-3 > 1e-6 > max(staleness.measure(found, "sampled token, corrected", pi, far)["token"])


def test_weights(case) -> None:
    *_, found, pi, mu = case
    assert staleness.weighted_by_products(found, pi, mu) < 1e-6
    assert staleness.weighted_predicting(found, pi, mu) < 1e-12


def test_bias_vanishes_with_the_residual(case) -> None:
    trail, teacher, _, pi, mu = case
    for name in LOSSES:
        sizes = [
            staleness.measure(Gradients(trail[-1], trail[-1] + part * (teacher - trail[-1])), name, pi, mu)["whole"]
            for part in (1e-2, 1e-3)
        ]
        assert sizes[1] / sizes[0] == pytest.approx(0.1, rel=0.2), name


def test_policies_differ_more_the_longer_the_response(case) -> None:
    *_, pi, mu = case
    distances = [staleness.variation(pi, mu, length) for length in range(TOKENS + 1)]
    assert distances[0] == 0 and distances == sorted(distances)


def test_the_documents_have_the_tables_of_the_result() -> None:
    for table in staleness.tables(json.loads(staleness.RESULT.read_text())).split("\n\n"):
        assert table in PAGE.read_text(), f"docs/results_rollouts.md lacks a table of `studies.staleness`:\n{table}"
