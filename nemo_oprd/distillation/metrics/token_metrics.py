"""Values per token of some responses of a step (`logging.token_metrics`), for `rollouts/token_metrics_*.jsonl`.

The tokens of the kept responses have slots in one flat table, which every rank derives from the rollouts alone. A rank
adds the values of its rows at their slots: its layers under pipeline parallelism, its tokens under context and sequence
parallelism, its responses under data parallelism. The table travels in the all-reduce of the step's metrics. Without
kept responses there is no table.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from nemo_oprd.batch.token_table import TokenTable
from nemo_oprd.batch.types import Rollout

# rows of the table -> the metric of the update that is measured with them: the representation loss and the cosine, then
# what a divergence of distributions gives
REPRESENTATION = {"rep_loss": "rep/loss", "cosine": "rep/cosine_similarity"}
OUTPUT = {"kl": "output/reverse_kl", "log_ratio": "output/kl_estimate"}
# metrics of `OutputRows` that OUTPUT needs per row
OUTPUT_METRICS = ("reverse_kl", "student_logprob", "teacher_logprob")


@dataclass(frozen=True)
class TokenSlots:
    """The kept responses of a batch, and the slots of their tokens."""

    responses: list[int]  # indices of the kept responses, ascending
    lengths: list[int]  # their numbers of tokens
    start: np.ndarray  # int64 [responses of the batch], the slot of each one's first token; -1 for one that is not kept

    @staticmethod
    def choose(rollouts: Sequence[Rollout], count: int) -> TokenSlots | None:
        """Returns slots for `count` responses, or all if there are fewer, evenly spread over the batch; None for 0.

        Evenly spread, because the responses to one prompt stand next to each other. The choice depends on the numbers
        of responses alone, so a step keeps the same responses in every layout.
        """
        count = min(count, len(rollouts))
        if not count:
            return None
        chosen = [i * len(rollouts) // count for i in range(count)]
        lengths = [len(rollouts[i].response_ids) for i in chosen]
        start = np.full(len(rollouts), -1, dtype=np.int64)
        start[chosen] = np.cumsum([0, *lengths[:-1]])
        return TokenSlots(chosen, lengths, start)

    @property
    def count(self) -> int:
        """The number of slots."""
        return sum(self.lengths)

    def of_rows(self, table: TokenTable) -> np.ndarray:
        """Returns the slot of each row, int64 [N]; `count`, one past the last slot, for responses that are not kept."""
        start = self.start[table.response]
        return np.where(start < 0, self.count, start + table.token)

    def covered(self, table: TokenTable | None) -> np.ndarray:
        """Returns which slots have a row in the table, bool [count]."""
        found = np.zeros(self.count + 1, dtype=bool)
        if table is not None:
            found[self.of_rows(table)] = True
        return found[:-1]

    def per_response(self, values: np.ndarray) -> list[np.ndarray]:
        """Splits values [count] into one array [tokens] per kept response."""
        return np.split(values, np.cumsum(self.lengths)[:-1])


@dataclass(frozen=True)
class LayerTokens:
    """The slots of the values of one layer's n rows, and the share of this layer in a token's values."""

    slots: torch.Tensor  # int64 [n], see `TokenSlots.of_rows`
    count: int  # number of slots
    shares: torch.Tensor  # float64 [2], the layer's weight as a share of all layers' weights, and 1 / number of layers

    @property
    def shape(self) -> tuple[int, int]:
        """The shape of the sums of `REPRESENTATION`, whose last column takes rows that are not kept."""
        return len(REPRESENTATION), self.count + 1

    def add_(self, sums: torch.Tensor, chunk: slice, losses: torch.Tensor, cosine: torch.Tensor) -> None:
        """Adds the losses and cosines [c] of some rows to `sums`, float64 of `shape`."""
        sums.index_add_(1, self.slots[chunk], self.shares[:, None] * torch.stack([losses.double(), cosine.double()]))


@dataclass(frozen=True)
class TokenMetrics:
    """Values per response token of the kept responses; the same on every rank of the student.

    Attributes:
        values: per response, name -> one value per response token. None where a token has no row. A name is absent if
            the update did not measure it. The names:
            rep_loss: sum_l w_l loss_l / sum_l w_l of the token over the supervised layers l.
            cosine: cosine similarity of student and teacher, mean over the supervised layers.
            kl: KL(student, teacher) of the next-token distributions that predict the token, in nats.
            log_ratio: log p - log q of the token itself; its expectation over the student's tokens is `kl`.
    """

    responses: list[int]  # indices of the responses in the step's rollouts
    values: list[dict[str, list[float | None]]]

    @staticmethod
    def from_sums(
        sums: Mapping[str, torch.Tensor],
        slots: TokenSlots,
        hidden: TokenTable,
        output: TokenTable | None,
        metrics: Mapping[str, float],
    ) -> TokenMetrics:
        """Returns the values, from the sums of all ranks: "rep_tokens" and "output_tokens", [2, count + 1] each.

        `hidden` and `output` are the rows of the batch, `metrics` those of the update.
        """
        values: list[dict[str, list[float | None]]] = [{} for _ in slots.responses]
        for kind, table, names in (("rep", hidden, REPRESENTATION), ("output", output, OUTPUT)):
            known = slots.per_response(slots.covered(table))
            for (name, metric), row in zip(names.items(), sums[f"{kind}_tokens"].numpy()[:, :-1], strict=True):
                for found, part, has in zip(values, slots.per_response(row), known, strict=True):
                    if metric in metrics:
                        found[name] = [float(value) if there else None for value, there in zip(part, has, strict=True)]
        return TokenMetrics(slots.responses, values)


def output_values(kept: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Returns a name of `OUTPUT` -> [n] for the rows of one microbatch, from their metrics `OUTPUT_METRICS`.

    `kl` is absent if the teacher sent no distribution.
    """
    values = {"log_ratio": kept["student_logprob"] - kept["teacher_logprob"]}
    return {**values, "kl": kept["reverse_kl"]} if "reverse_kl" in kept else values
