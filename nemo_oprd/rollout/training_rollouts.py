"""The rollouts of each training step: prompts -> sampled responses -> the sequences that the teachers read."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
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
    rollout = config.rollout
    key = (config.seed, TRAINING_STREAM, step)
    record_routes = config.student.router_replay
    return SamplingParams(rollout.temperature, rollout.top_p, rollout.max_new_tokens, key, record_routes)


class RolloutSampler:
    """Samples the rollouts of each step; they depend on the configuration, the step and the weights only.

    Args:
        prompts: the training prompts; none if the engine replays recorded rollouts.
        teacher_inputs: per teacher, the object that adds the teacher's sequences to rollouts, or None if the teacher
            reads the student's ids. Empty if recorded rollouts already have the sequences.
        cache: keeps the rollouts of the current step, for a run that is interrupted.
        first_step: the step for which the cache may hold rollouts.
        should_cancel: whether the run was asked to stop; the sampling of a step is then cancelled.
        stop: called on every rank after that, with the step, the completed responses and the requests; saves and
            raises `Stopped`.
    """

    def __init__(
        self,
        config: Config,
        routing: Routing,
        engine: RolloutEngine,
        prompts: TrainingPrompts,
        teacher_inputs: list[TeacherInputs | None],
        cache: ResumeCache,
        first_step: int,
        should_cancel: Callable[[], bool],
        stop: Callable[[int, int, int], NoReturn],
    ) -> None:
        self._config, self._engine, self._prompts = config, engine, prompts
        self._teacher_inputs, self._cache = teacher_inputs, cache
        self._routing = routing
        self._first_step = first_step
        self._should_cancel, self._stop = should_cancel, stop

    def rollouts(self, step: int) -> list[Rollout]:
        """The rollouts of a step with their teachers' sequences, the same on every rank. Every rank calls this.

        Raises:
            Stopped: a signal asked the run to stop before all responses were complete.
        """
        count = self._config.train.prompts_per_step
        requests = training_requests(self._prompts, self._config, step * count, count) if self._prompts.requests else []
        rollouts = self._sampled(step, requests)
        taught_by = self._routing.teachers_of(rollout.data_source for rollout in rollouts)
        return add_teacher_inputs(self._teacher_inputs, taught_by, rollouts, requests)

    def _sampled(self, step: int, requests: list[Request]) -> list[Rollout]:
        """The rollouts of a step; those that the interrupted run had sampled come from the cache."""
        sampling = training_sampling(self._config, step)
        if not self._prompts.requests:
            return self._engine.generate(requests, sampling)
        cached = self._cache.take(step, requests, sampling) if step == self._first_step else {}
        if cached:
            number = f"the {len(cached)}" if len(cached) == len(requests) else f"{len(cached)} of {len(requests)}"
            logger.info(f"step {step + 1} resumes with {number} rollouts sampled before the interruption")
        if len(cached) == len(requests):
            return [cached[i] for i in range(len(requests))]
        try:
            rollouts = self._engine.generate(requests, sampling, self._should_cancel, cached)
        except GenerationCancelled as cancelled:
            if cancelled.completed:
                self._cache.put(step, cancelled.completed, sampling, len(requests))
            self._stop(step, len(cancelled.completed), len(requests))
        self._cache.put(step, dict(enumerate(rollouts)), sampling, len(requests))
        return rollouts
