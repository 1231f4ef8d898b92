"""The keys of `logging`: where metrics go, and what is measured beside the losses; see `schema.py`."""

from __future__ import annotations

from pydantic.dataclasses import dataclass

from nemo_oprd.config.types import STRICT, NonNegativeFloat, NonNegativeInt, PositiveInt


@dataclass(config=STRICT)
class LoggingConfig:
    """Where metrics go besides metrics.jsonl and the progress line. `wandb` is the name of a W&B project.

    A term of the loss that exceeds `spike_factor` times the median of its latest values is reported, and the rollouts
    of that step are kept (0: never).

    Without an output-space term, the metrics of such a term (entropies, top-k overlap, KL) are measured on
    `output_metrics_rows` response tokens, which are drawn anew in the first and in every `output_metrics_every`-th
    update (0: never). The temperature, k and chunk_tokens are those of loss.output. The teacher then has all of its
    layers, and the student holds a copy of the teacher's head. With `sampled_token` these metrics are measured in the
    same updates on all response tokens, for which the teacher sends its final hidden states instead of
    log-probabilities. The other kinds of the output-space term measure these metrics in every update.

    The signal and the noise of the gradient are measured before the first and before every `gradient_noise_every`-th
    update (0: never), by one more pass over the batch, in halves. Copies of the gradients of both halves are in memory
    meanwhile.

    Of the first step, of every step with a progress line and of the last one, the values per token of `token_metrics`
    responses are kept in rollouts/token_metrics_*.jsonl (0: none), for the report to colour.
    """

    tensorboard: bool = True
    wandb: str | None = None
    every: PositiveInt = 1
    spike_factor: NonNegativeFloat = 10.0
    output_metrics_every: NonNegativeInt = 0
    output_metrics_rows: PositiveInt = 1024
    gradient_noise_every: NonNegativeInt = 0
    token_metrics: NonNegativeInt = 0

    def keeps_token_metrics(self, step: int | None, steps: int) -> bool:
        """Whether values per token are kept in the update after `step` others of a run of `steps` updates."""
        return step is not None and (step == 0 or (step + 1) % self.every == 0 or step + 1 == steps)
