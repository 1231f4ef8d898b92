"""`RecordedRollouts`: the section `dataset` of a Megatron-Bridge recipe that trains on recorded rollouts.

Importing this module imports Megatron-Bridge.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from megatron.bridge.training.config import DatasetBuildContext, DatasetProvider

from nemo_oprd.config.schema import RepresentationLossConfig
from nemo_oprd.integrations.recorded_rollouts import RolloutDataset
from nemo_oprd.rollout.replay import read_rollouts


@dataclass(kw_only=True)
class RecordedRollouts(DatasetProvider):
    """Makes the training data from recorded rollouts.

    Attributes:
        file: JSONL of rollouts, such as `rollout.save=true` writes.
        seq_length: tokens to which each prompt with its response is padded; the recipe's `model.seq_length`.
        vocab_size: upper bound of the ids, exclusive.
        global_batch_size: the recipe's `train.global_batch_size`.
        loss: the hidden-state term that `OPRDForwardStep` gets; it sets the weights of the tokens.
    """

    file: str
    seq_length: int
    vocab_size: int
    global_batch_size: int
    loss: RepresentationLossConfig = field(default_factory=RepresentationLossConfig)
    # in order, because the weights of a sample belong to the update that reads it
    dataloader_type: str = "single"
    num_workers: int = 0

    def build_datasets(self, context: DatasetBuildContext) -> tuple[Any, None, None]:
        """Returns (the training data, None, None): there are no data for validation and test.

        Raises:
            ValueError: the file is missing or damaged, or as `RolloutDataset`.
        """
        rollouts, samples = read_rollouts(self.file, self.vocab_size), context.train_samples
        return RolloutDataset(rollouts, self.seq_length, self.global_batch_size, samples, self.loss), None, None
