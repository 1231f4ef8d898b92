"""The rollouts of each training step: prompts -> sampled responses -> the sequences that the teachers read."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NoReturn

from nemo_oprd.batch.types import Rollout
from nemo_oprd.config.schema import Config
from nemo_oprd.config.teacher_routing import Routing
from nemo_oprd.data.order import PromptOrder
from nemo_oprd.rollout.engine import TRAINING_STREAM, GenerationCancelled, Request, RolloutEngine, SamplingParams
from nemo_oprd.rollout.resume_cache import ResumeCache
from nemo_oprd.rollout.teacher_inputs import TeacherInputs, add_teacher_inputs

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class TrainingPrompts:
    """The encoded training prompts, file by file, and the order in which training visits them."""

    requests: list[Request]
    order: PromptOrder


NO_PROMPTS = TrainingPrompts([], PromptOrder(()))


def training_requests(prompts: TrainingPrompts, config: Config, first: int, count: int) -> list[Request]:
    """`count` prompts from index `first` in the run's order of prompts, each `rollout.per_prompt` times."""
    chosen = prompts.order.indices(config.seed, first, count)
    return [prompts.requests[index] for index in chosen for _ in range(config.rollout.per_prompt)]


def training_sampling(config: Config, step: int) -> SamplingParams:
    """The sampling parameters of a training step (0-based)."""
    rollout, key = config.rollout, (config.seed, TRAINING_STREAM, step)
    limits = rollout.temperature, rollout.top_p, config.response_limit[1]
    return SamplingParams(*limits, key, record_routes=config.student.router_replay)


def ended_on_purpose(rollouts: list[Rollout], config: Config) -> list[Rollout]:
    """Names the end of responses that `rollout.stop_after` ended: engines know a limit ("length"), not its reason."""
    key, limit = config.response_limit
    if key == "rollout.max_new_tokens":
        return rollouts
    return [
        replace(rollout, finish_reason="prefix")
        if rollout.finish_reason == "length" and len(rollout.response_ids) == limit
        else rollout
        for rollout in rollouts
    ]


@dataclass(frozen=True)
class RolloutSampler:
    """Samples the rollouts of each step; they depend on the configuration, the step and the weights only.

    Attributes:
        prompts: none if the engine replays recorded rollouts.
        teacher_inputs: per teacher, what adds its sequences to rollouts; None if it reads the student's ids. Empty if
            recorded rollouts already have the sequences.
        cache: keeps the rollouts of the current step, for a run that is interrupted.
        first_step: the step for which the cache may hold rollouts.
        should_cancel: whether the run was asked to stop; the sampling of a step is then cancelled.
        stop: called on every rank after that, with the step, the completed responses and the requests; saves and
            raises `Stopped`.
    """

    config: Config
    routing: Routing
    engine: RolloutEngine
    prompts: TrainingPrompts
    teacher_inputs: list[TeacherInputs | None]
    cache: ResumeCache
    first_step: int
    should_cancel: Callable[[], bool]
    stop: Callable[[int, int, int], NoReturn]

    def rollouts(self, step: int) -> list[Rollout]:
        """The rollouts of a step with their teachers' sequences, the same on every rank. Every rank calls this.

        Raises:
            Stopped: a signal asked the run to stop before all responses were complete.
        """
        count = self.config.train.prompts_per_step
        requests = training_requests(self.prompts, self.config, step * count, count) if self.prompts.requests else []
        rollouts = ended_on_purpose(self._sampled(step, requests), self.config)
        taught_by = self.routing.teachers_of(rollout.data_source for rollout in rollouts)
        return add_teacher_inputs(self.teacher_inputs, taught_by, rollouts, requests)

    def _sampled(self, step: int, requests: list[Request]) -> list[Rollout]:
        """The rollouts of a step; those that the interrupted run had sampled come from the cache."""
        sampling = training_sampling(self.config, step)
        if not self.prompts.requests:
            return self.engine.generate(requests, sampling)
        self.cache.check()
        cached = self.cache.take(step, requests, sampling) if step == self.first_step else {}
        if cached:
            number = f"the {len(cached)}" if len(cached) == len(requests) else f"{len(cached)} of {len(requests)}"
            logger.info(f"step {step + 1} resumes with {number} rollouts sampled before the interruption")
        if len(cached) == len(requests):
            self.engine.rest()
            return [cached[i] for i in range(len(requests))]
        try:
            rollouts = self.engine.generate(requests, sampling, self.should_cancel, cached, last=True)
        except GenerationCancelled as cancelled:
            if cancelled.completed:
                self.cache.put(step, cancelled.completed, sampling, len(requests))
                self.cache.finish()  # before the message says that they are kept
            self.stop(step, len(cancelled.completed), len(requests))
        self.cache.put(step, dict(enumerate(rollouts)), sampling, len(requests))
        return rollouts
