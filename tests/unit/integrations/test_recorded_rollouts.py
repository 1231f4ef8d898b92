"""`RolloutDataset`: the samples and weights that a training loop of another program reads in order."""

from __future__ import annotations

import pytest
import torch

from nemo_oprd.batch.types import Rollout
from nemo_oprd.integrations.hidden_states import RepresentationLossConfig, row_weights
from nemo_oprd.integrations.recorded_rollouts import RolloutDataset

ROLLOUTS = [Rollout([1] * (1 + i), [2 + i] * (3 - i), data_source="x", finish_reason="stop") for i in range(3)]


def test_samples_and_weights() -> None:
    """Update 1 has the responses 2 and 0: weights are of the update's own batch, whichever sample is read first."""
    loss = RepresentationLossConfig(kind="mse", k=2)
    dataset = RolloutDataset(ROLLOUTS, 6, 2, 12, loss)
    assert len(dataset) == 12
    for update in (5, 1, 0):
        batch = [ROLLOUTS[i % 3] for i in (2 * update, 2 * update + 1)]
        samples = [dataset[2 * update + i] for i in range(2)]
        weight = torch.stack([sample["weight"] for sample in samples])
        assert torch.equal(weight, row_weights(batch, 6, loss))
        assert float(weight.sum()) == pytest.approx(1.0)
        for sample, rollout in zip(samples, batch, strict=True):
            ids = rollout.ids.tolist()
            assert sample["tokens"].tolist() == ids + [0] * (6 - len(ids))


def test_refusals() -> None:
    with pytest.raises(ValueError, match="no rollouts; expected at least one"):
        RolloutDataset([], 6, 2, 12)
    with pytest.raises(ValueError, match="11 samples are no multiple of global_batch_size=2"):
        RolloutDataset(ROLLOUTS, 6, 2, 11)
    with pytest.raises(ValueError, match="response 0 has 4 tokens with its prompt; expected at most seq_length=3"):
        RolloutDataset(ROLLOUTS, 3, 2, 12)
