"""Metrics of whole distributions in updates that don't train on them (`logging.output_metrics_every`).

A run on hidden states alone computes no distributions, and with `sampled_token` the teacher sends two numbers per
token. In the updates that are watched, entropies, top-k overlap and divergences are measured all the same: without an
output term on rows drawn anew for each update; with `sampled_token` on all rows, where the teacher then sends its final
hidden states, from which the same loss follows.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from nemo_oprd.config.schema import LoggingConfig, OutputLossConfig
from nemo_oprd.distillation.objective import Objective, OutputTerm, StepObjective
from nemo_oprd.losses.divergences import OutputLoss


@dataclass(frozen=True)
class WatchedMetrics:
    """Which updates are watched, and what is measured in them.

    `drawn` is measured in runs without an output term; None where there is one, which then is `sampled_token`.
    """

    every: int
    drawn: OutputTerm | None

    @staticmethod
    def build(config: OutputLossConfig, logging: LoggingConfig, seed: int) -> WatchedMetrics | None:
        """None where nothing is to be watched, or the term of every update measures it anyway."""
        if not logging.output_metrics_every or config.kind not in ("none", "sampled_token"):
            return None
        drawn = None
        if config.kind == "none":
            loss = OutputLoss("full_vocab", config.k, config.temperature)
            rows = logging.output_metrics_rows
            drawn = OutputTerm(loss, 0.0, "token_mean", config.chunk_tokens, True, drawn_rows=rows, draw_key=(seed,))
        return WatchedMetrics(logging.output_metrics_every, drawn)

    def is_due(self, step: int) -> bool:
        """Whether the update after `step` others is watched: the first one, and every `every`-th."""
        return step == 0 or (step + 1) % self.every == 0

    def add_to(self, objective: StepObjective, step: int | None) -> StepObjective:
        """The objective of the update after `step` others, with what is watched in it.

        None stands for no update: the gradient check before the first one, which tries the drawn rows, too.
        """
        if step is None:
            return objective if self.drawn is None else replace(objective, output=self.drawn)
        if not self.is_due(step):
            return objective
        if self.drawn is not None:
            return replace(objective, output=replace(self.drawn, draw_key=(*self.drawn.draw_key, step)))
        assert objective.output is not None
        return replace(objective, output=replace(objective.output, sends_states=True))


@dataclass(frozen=True)
class ModelNeeds:
    """What the models of a run must be able to compute, in whichever of its updates."""

    output: OutputTerm | None  # a term of the loss, or one that is only watched
    teacher_states: bool  # in some updates the teacher sends final hidden states, which take its head to make use of
    teacher_logprobs: bool  # in some updates the teacher computes log-probabilities of sampled tokens

    @staticmethod
    def build(objective: Objective, watched: WatchedMetrics | None) -> ModelNeeds:
        """Of a run's objective, and of what is watched beside it."""
        output = objective.output or (watched.drawn if watched is not None else None)
        sends_states = output is not None and output.sends_states
        return ModelNeeds(output, sends_states or watched is not None, output is not None and not sends_states)

    def teacher_depth(self, objective: Objective, number: int) -> int:
        """The deepest layer of a teacher that any update needs."""
        match = objective.teachers[number]
        return match.spec.num_layers if self.output else max(match.layers.values())
