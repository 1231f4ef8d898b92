"""The rollouts of each training step: prompts -> sampled responses -> the sequences that the teachers read."""

from __future__ import annotations

from collections.abc import Callable

from nemo_oprd.batch.types import Rollout
from nemo_oprd.config.schema import Config
from nemo_oprd.data.prompts import prompt_order
from nemo_oprd.distillation.teacher_routing import Routing
from nemo_oprd.rollout.engine import TRAINING_STREAM, Request, RolloutEngine, SamplingParams
from nemo_oprd.rollout.resume_cache import ResumeCache
from nemo_oprd.rollout.teacher_inputs import TeacherInputs, add_teacher_inputs


def training_requests(prompts: list[Request], config: Config, first: int, count: int) -> list[Request]:
    """`count` prompts from index `first` in the run's order of prompts, each `rollout.per_prompt` times."""
    chosen = prompt_order(len(prompts), config.seed, first, count)
    return [prompts[index] for index in chosen for _ in range(config.rollout.per_prompt)]


def training_sampling(config: Config, step: int) -> SamplingParams:
    """The sampling parameters of a training step (0-based)."""
    rollout = config.rollout
    key = (config.seed, TRAINING_STREAM, step)
    return SamplingParams(rollout.temperature, rollout.top_p, rollout.max_new_tokens, key)


class RolloutSampler:
    """Samples the rollouts of each step; they depend on the configuration, the step and the weights only.

    Args:
        prompts: the training prompts; empty if the engine replays recorded rollouts.
        teacher_inputs: per teacher, the object that adds the teacher's sequences to rollouts, or None if the teacher
            reads the student's ids. Empty if recorded rollouts already have the sequences.
        cache: keeps the rollouts of the current step, for a run that is interrupted.
        first_step: the step for which the cache may hold rollouts.
        say: shows a line to the user.
    """

    def __init__(
        self,
        config: Config,
        engine: RolloutEngine,
        prompts: list[Request],
        teacher_inputs: list[TeacherInputs | None],
        cache: ResumeCache,
        first_step: int,
        say: Callable[[str], None],
    ) -> None:
        self._config, self._engine, self._prompts = config, engine, prompts
        self._teacher_inputs, self._cache = teacher_inputs, cache
        self._routing = Routing(tuple(config.teacher_sources))
        self._first_step, self._say = first_step, say

    def rollouts(self, step: int) -> list[Rollout]:
        """The rollouts of a step with their teachers' sequences, the same on every rank. Every rank calls this."""
        count = self._config.train.prompts_per_step
        requests = training_requests(self._prompts, self._config, step * count, count) if self._prompts else []
        rollouts = self._sampled(step, requests)
        taught_by = self._routing.teachers_of(rollout.data_source for rollout in rollouts)
        return add_teacher_inputs(self._teacher_inputs, taught_by, rollouts, requests)

    def _sampled(self, step: int, requests: list[Request]) -> list[Rollout]:
        """The rollouts of a step: from the cache if the interrupted run had sampled them, else sampled now."""
        sampling = training_sampling(self._config, step)
        if not self._prompts:
            return self._engine.generate(requests, sampling)
        if step == self._first_step:
            cached = self._cache.take(step, requests, sampling)
            if cached is not None:
                self._say(f"step {step + 1} resumes with the {len(cached)} rollouts sampled before the interruption")
                return cached
        rollouts = self._engine.generate(requests, sampling)
        self._cache.put(step, rollouts, sampling)
        return rollouts
