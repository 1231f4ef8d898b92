"""Recorded rollouts as a data set of single responses, for training loops that cut global batches themselves.

A loop that reads a data set in order takes samples [n * G, (n + 1) * G) for update n, whatever its layout, with G its
global batch size. So the sample's number gives a token's weight, which contains 1 / counts of its update, and a run
that resumes after any number of samples gets the same weights.

S is the padded length.
"""

from __future__ import annotations

from functools import lru_cache

import torch

from nemo_oprd.batch.types import Rollout
from nemo_oprd.config.schema import RepresentationLossConfig
from nemo_oprd.integrations.hidden_states import row_weights


class RolloutDataset(torch.utils.data.Dataset):
    """Sample i is response i modulo the number of responses: {"tokens": int64 [S], "weight": float32 [S]}.

    Read it in order, without shuffling: Megatron-Bridge's `dataloader_type="single"`.
    """

    def __init__(
        self,
        rollouts: list[Rollout],
        length: int,
        global_batch_size: int,
        samples: int,
        loss: RepresentationLossConfig | None = None,
    ) -> None:
        """Checks the responses, and computes the weights of the first update.

        Args:
            length: S, to which responses with their prompts are padded with id 0.
            global_batch_size: samples of an update over all data-parallel ranks.
            samples: number of samples in the whole training.
            loss: says which tokens are supervised and how they are weighted.

        Raises:
            ValueError: there are no responses, one is too long, the updates are not whole, or as `row_weights`.
        """
        if not rollouts:
            raise ValueError("no rollouts; expected at least one response: record some with rollout.save=true")
        if samples % global_batch_size:
            raise ValueError(
                f"{samples} samples are no multiple of global_batch_size={global_batch_size}; expected whole updates: "
                "set train.train_iters, without a ramp-up of the batch size"
            )
        longest = max(range(len(rollouts)), key=lambda i: rollouts[i].length)
        if rollouts[longest].length > length:
            raise ValueError(
                f"response {longest} has {rollouts[longest].length} tokens with its prompt; expected at most "
                f"seq_length={length}: raise it, or leave out longer responses"
            )
        self._rollouts, self._length, self._batch_size, self._samples = rollouts, length, global_batch_size, samples
        self._loss = RepresentationLossConfig() if loss is None else loss
        self._weights = lru_cache(maxsize=4)(self._weights_of_update)
        self._weights(0)

    def _weights_of_update(self, update: int) -> torch.Tensor:
        """Computes the weights of one update, float32 [G, S]."""
        first = update * self._batch_size
        batch = [self._rollouts[i % len(self._rollouts)] for i in range(first, first + self._batch_size)]
        return row_weights(batch, self._length, self._loss)

    def __len__(self) -> int:
        return self._samples

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        rollout = self._rollouts[index % len(self._rollouts)]
        tokens_S = torch.zeros(self._length, dtype=torch.int64)
        tokens_S[: rollout.length] = torch.from_numpy(rollout.ids)
        update, place = divmod(index, self._batch_size)
        return {"tokens": tokens_S, "weight": self._weights(update)[place]}
