"""The study of beginnings and lagged responses on toy pairs: arms, measurements, and the tables in the documents."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from nemo_oprd.commands.toy import task
from nemo_oprd.config.engine_records import RECORDS, Records
from nemo_oprd.config.loading import load_config
from nemo_oprd.data.tokenization.token_ids import TokenIds
from nemo_oprd.rollout.in_process.sampling import SampledColumns
from nemo_oprd.rollout.response import Response
from studies import recording_engine, toy_rollout_tables, toy_rollouts
from studies.toy_rollouts import LOSSES, Arm

RESULTS = toy_rollout_tables.read_results()
PAGE = Path(__file__).parents[3] / "docs" / "results_rollouts.md"


@pytest.mark.parametrize("loss", LOSSES)
def test_settings_load(loss: str) -> None:
    arm = Arm(loss, lag=8)
    if "sampled" in loss:
        with pytest.raises(ValueError, match="records no log-probabilities"):
            load_config("quickstart", list(arm.settings))
    with mock.patch.dict(RECORDS, {"megatron": Records()}):
        config = load_config("quickstart", list(arm.settings))
    assert (config.rollout.max_lag, config.train.lr, config.rollout.stop_after) == (8, arm.rate, None)
    if config.rollout.token_correction is not None:
        weights, _ = config.rollout.token_correction.weights(torch.tensor([0.0]), torch.tensor([-0.5]))
        assert float(weights) == pytest.approx(1.0 if loss == "sampled_token" else math.exp(0.5), rel=1e-5)


def test_sampling_ends_with_the_first_tokens() -> None:
    config = load_config("quickstart", list(Arm("mse token", "first 8").settings))
    assert config.response_limit == ("loss.representation.k", 8) and Arm("mse token", "first 8").length == 8
    assert load_config("quickstart", list(Arm("mse token", "last 8").settings)).response_limit[1] == 40


def test_log_probabilities_of_sampled_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two sequences, of which the second alone is in the batch at the second token."""
    logits, chosen = torch.randn(2, 1, 2, 6), [torch.tensor([3, 1]), torch.tensor([2])]
    batch: Any = SimpleNamespace(
        columns=SampledColumns(TokenIds(5), torch.device("cpu")), sampled=torch.zeros(2, 2, dtype=torch.long)
    )
    for t, alive in enumerate((torch.tensor([0, 1]), torch.tensor([1]))):
        batch.alive, batch.model = alive, SimpleNamespace(logits=lambda last: last)
        monkeypatch.setattr(recording_engine, "_sample", lambda *_, t=t: chosen[t])
        assert recording_engine.sample(batch, logits[t][:, : len(alive)], t, 0.7, 1.0) is chosen[t]
    ids = [np.array([3], np.int32), np.array([1, 2], np.int32)]
    monkeypatch.setattr(recording_engine, "_responses", lambda _: [Response(each, finished=True) for each in ids])
    found = [each.logprobs for each in recording_engine.responses(batch)]
    log_p = (logits[:, 0, :, :5] / 0.7).log_softmax(-1)
    np.testing.assert_allclose(found[0], [log_p[0, 0, 3]], rtol=1e-5)
    np.testing.assert_allclose(found[1], [log_p[0, 1, 1], log_p[1, 0, 2]], rtol=1e-5)


def test_divergences_by_position() -> None:
    """Models of fixed distributions: both KLs at positions of the responses, and nothing behind their ends."""
    tables = torch.randn(2, task.VOCAB_SIZE, task.VOCAB_SIZE)  # a row of logits after each token

    def model(table: torch.Tensor) -> Any:
        return lambda input_ids: SimpleNamespace(logits=table[input_ids])

    problems, responses = np.array([[1234, 5678], [1111, 2222]]), [[5, 6, 7], [8, task.EOS_ID]]
    forward, reverse = toy_rollouts.divergences([model(tables[0]), model(tables[1])], problems, responses)
    log_p, log_q = (table.double().log_softmax(-1) for table in tables)
    before = [task.encode("=")[0], 5, 6]
    np.testing.assert_allclose(reverse[0], [(log_p[v].exp() * (log_p[v] - log_q[v])).sum() for v in before], rtol=1e-6)
    np.testing.assert_allclose(forward[0], [(log_q[v].exp() * (log_q[v] - log_p[v])).sum() for v in before], rtol=1e-6)
    assert np.isnan(forward[1]).tolist() == np.isnan(reverse[1]).tolist() == [False, False, True]


def test_results_are_those_of_their_arms() -> None:
    arms = {name: Arm(**result["arm"]) for name, result in RESULTS.items() if "arm" in result}
    assert arms, "studies/results/toy_rollouts holds the finished runs"
    for name, arm in arms.items():
        result = RESULTS[name]
        assert arm.name == name and list(arm.settings) == result["settings"]
        assert len(result["heldout"]["solved"]) == toy_rollouts.HELDOUT and len(json.dumps(result)) < 20_000
        assert result["training"].get("rollout/lag_mean", 0) == arm.lag  # of the second half of the updates


def test_the_documents_have_the_tables_of_the_results() -> None:
    for table in toy_rollout_tables.tables(RESULTS).split("\n\n"):
        assert table in PAGE.read_text(), (
            f"docs/results_rollouts.md lacks a table of `python -m studies.toy_rollouts table`:\n{table}"
        )
