"""The keys of `evaluation` and `logging`: what is measured beside the losses, and where metrics go."""

from __future__ import annotations

from dataclasses import field
from typing import Literal

from pydantic.dataclasses import dataclass

from nemo_oprd.config.types import STRICT, NonNegativeFloat, NonNegativeInt, PositiveInt, ProbabilityMass


@dataclass(config=STRICT)
class EvaluationConfig:
    """Sampling on the validation sets; also before the first and after the last step (docs/evaluation.md)."""

    every: NonNegativeInt = 0
    """steps between evaluations; 0: none"""
    samples: PositiveInt = 4
    """responses per problem"""
    temperature: NonNegativeFloat = 0.7
    """of sampling"""
    top_p: ProbabilityMass = 1.0
    """of sampling"""
    max_new_tokens: PositiveInt | None = None
    """most tokens of a response; null: `rollout.max_new_tokens`"""
    limit: PositiveInt | None = None
    """problems per set; null: all"""
    teacher: bool = False
    """evaluate the teacher once, before training"""
    graders: dict[str, str] = field(default_factory=dict)
    """set: its grader, a name or MODULE:FUNCTION (docs/evaluation.md); others: by data source or form of answers"""
    judge: Literal["math_verify", "text"] = "math_verify"
    """what compares answers that differ as text: math-verify, or `text`: nothing, they differ"""


@dataclass(config=STRICT)
class LoggingConfig:
    """Metrics besides those of metrics.jsonl and the progress line, and where they go."""

    tensorboard: bool = True
    """write TensorBoard files"""
    wandb: str | None = None
    """name of a W&B project; null: none"""
    every: PositiveInt = 1
    """steps between progress lines"""
    spike_factor: NonNegativeFloat = 10.0
    """report a term above so many times its median; 0: never

    The median is that of the term's latest values. The rollouts of that step are kept.
    """
    output_metrics_every: NonNegativeInt = 0
    """updates between measurements of the output space; 0: none

    Entropies, top-k overlap and KL, with the temperature, k and chunk_tokens of loss.output, in the first update, too.
    Without an output-space term they are measured on rows that are drawn anew each time; the teacher then has all of
    its layers, and the student holds a copy of the teacher's head. With `sampled_token` they are measured on all
    response tokens, for which the teacher sends its final hidden states instead of log-probabilities. The other kinds
    measure them in every update.
    """
    output_metrics_rows: PositiveInt = 1024
    """response tokens of such a measurement

    Drawn anew for each update, the same ones in every layout. With an output-space term other than top_k, the top sets
    of `val-topk/*` are searched in so many tokens of each update; the other metrics are those of all tokens.
    """
    gradient_noise_every: NonNegativeInt = 0
    """updates between measurements of the gradient's noise; 0: none

    Before the first update, too, by one more pass over the batch, in halves. Copies of the gradients of both halves are
    in memory meanwhile.
    """
    token_metrics: NonNegativeInt = 0
    """responses per logged step whose values are kept token by token; 0: none

    In rollouts/token_metrics_*.jsonl for the report to colour: of the first step, of every step with a progress line
    and of the last one.
    """

    def keeps_token_metrics(self, step: int | None, steps: int) -> bool:
        """Whether values per token are kept in the update after `step` others of a run of `steps` updates."""
        return step is not None and (step == 0 or (step + 1) % self.every == 0 or step + 1 == steps)
