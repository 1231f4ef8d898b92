"""Metrics of whole distributions in steps that do not train on them (`logging.output_metrics_every`).

A run without an output loss computes no distributions, and with `sampled_token` the teacher sends only two numbers per
token. In a watched step, entropies, top-k overlap and divergences are measured nevertheless. Without an output loss
they are measured on randomly drawn rows, new ones in each step. With `sampled_token` they are measured on all rows
(the top sets on drawn ones, as in every output loss): the teacher sends its final hidden states, from which the student
rank computes the same loss.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from nemo_oprd.config.schema import LoggingConfig, OutputLossConfig
from nemo_oprd.distillation.objective import Objective, OutputTerm, StepObjective
from nemo_oprd.losses.output_loss import OutputLoss


@dataclass(frozen=True)
class WatchedMetrics:
    """The choice of the watched steps, and of the divergences that are measured in them."""

    every: int  # `logging.output_metrics_every`
    drawn: OutputTerm | None  # what is measured in a run without an output loss; None in one with `sampled_token`

    @staticmethod
    def build(config: OutputLossConfig, logging: LoggingConfig, seed: int) -> WatchedMetrics | None:
        """Returns None if nothing is watched, or if the output loss measures whole distributions in every update."""
        if not logging.output_metrics_every or config.needs_distribution:
            return None
        drawn = None
        if config.is_off:
            loss = OutputLoss("full_vocab", config.k, config.temperature, support=config.support)
            rows = logging.output_metrics_rows
            drawn = OutputTerm(loss, 0.0, "token_mean", config.chunk_tokens, True, drawn_rows=rows, draw_key=(seed,))
        return WatchedMetrics(logging.output_metrics_every, drawn)

    def is_due(self, step: int) -> bool:
        """Returns whether the step after `step` others is watched: the first one, and every `every`-th."""
        return step == 0 or (step + 1) % self.every == 0

    def add_to(self, objective: StepObjective, step: int | None) -> StepObjective:
        """Adds the measured divergence if `step` is due; None: the gradient check, which tries drawn rows."""
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
    """The computations that the models of a run must support for some of its updates."""

    output: OutputTerm | None  # the output loss, or the divergence that is only measured
    teacher_states: bool  # whether a teacher sends final hidden states, so that the student's last stage needs its head
    teacher_logprobs: bool  # whether a teacher computes log-probabilities of sampled tokens, so that it needs its head

    @staticmethod
    def build(objective: Objective, watched: WatchedMetrics | None) -> ModelNeeds:
        """Returns the needs of a run's objective and of its watched steps."""
        output = objective.output or (watched.drawn if watched is not None else None)
        sends_states = output is not None and output.sends_states
        return ModelNeeds(output, sends_states or watched is not None, output is not None and not sends_states)

    def teacher_depth(self, objective: Objective, number: int) -> int:
        """Returns the deepest layer of a teacher that any update needs."""
        match = objective.teachers[number]
        return match.spec.num_layers if self.output else max(match.layers.values())
