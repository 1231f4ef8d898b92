"""The rollouts of each training step: prompts -> sampled responses -> the sequences that the teachers read."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NoReturn

from nemo_oprd.batch.types import Rollout
from nemo_oprd.config.schema import Config
from nemo_oprd.config.teacher_routing import Routing
from nemo_oprd.data.order import PromptOrder
from nemo_oprd.rollout.engine import (
    TRAINING_STREAM,
    GenerationCancelled,
    Request,
    RolloutEngine,
    SamplingParams,
    Ticket,
)
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


def lag_metrics(rollouts: list[Rollout], steps: int) -> dict[str, float]:
    """By how many optimizer steps the weights that sampled the tokens are behind those after `steps` such steps."""
    lags = [steps - rollout.weight_version for rollout in rollouts if rollout.weight_version is not None]
    tokens = [len(rollout.response_ids) for rollout in rollouts if rollout.weight_version is not None]
    if not sum(tokens):
        return {}
    mean = sum(lag * count for lag, count in zip(lags, tokens, strict=True)) / sum(tokens)
    return {"rollout/lag_mean": mean, "rollout/lag_max": float(max(lags))}


@dataclass(frozen=True)
class Sampling:
    """One step's responses while they are sampled."""

    step: int
    requests: list[Request]
    params: SamplingParams
    ticket: Ticket
    submitted: float = field(default_factory=time.time)


@dataclass
class RolloutSampler:
    """Samples the rollouts of each step; they depend on the configuration, the step and the weights only.

    With `rollout.max_lag` the responses of later steps are sampled before a step is computed: at the weights after k
    steps those of step k + max_lag (from 0), and at the run's start those of all steps up to max_lag. At most one
    step's responses are under way, and `settle` brings them home before the weights change.

    Attributes:
        prompts: none if the engine replays recorded rollouts.
        teacher_inputs: per teacher, what adds its sequences to rollouts; None if it reads the student's ids. Empty if
            recorded rollouts already have the sequences.
        cache: keeps the rollouts that were sampled last, for a run that is interrupted.
        first_step: the number of steps behind the weights with which the run begins.
        should_cancel: whether the run was asked to stop; the sampling of a step is then cancelled.
        stop: called on every rank after that, with the steps so far, the step that was sampled, the responses that were
            kept and the requests; saves and raises `Stopped`.
        note: called after each sampling with when it began and ended, in seconds since the epoch, and by name with
            the fields of `observability.timeline.Interval`.
    """

    config: Config
    routing: Routing
    engine: RolloutEngine
    prompts: TrainingPrompts
    teacher_inputs: list[TeacherInputs | None]
    cache: ResumeCache
    first_step: int
    should_cancel: Callable[[], bool]
    stop: Callable[[int, int, int, int], NoReturn]
    note: Callable[..., None] = lambda began, ended, **more: None
    _ready: dict[int, list[Rollout]] = field(default_factory=dict)  # by their step; none of steps that are over
    _under_way: Sampling | None = None
    _unchecked: list[list[Rollout]] = field(default_factory=list)

    def rollouts(self, step: int) -> list[Rollout]:
        """The rollouts of a step with their teachers' sequences, the same on every rank. Every rank calls this.

        The engine has the weights after `step` steps.

        Raises:
            Stopped: a signal asked the run to stop before all responses were complete.
        """
        requests = self._requests(step)
        for earlier in [each for each in self._ready if each < step]:
            del self._ready[earlier]
        if requests:
            self._sample_up_to(step)
        else:
            self._came(step, self.engine.generate(requests, training_sampling(self.config, step)))
        rollouts = ended_on_purpose(self._ready[step], self.config)
        taught_by = self.routing.teachers_of(rollout.data_source for rollout in rollouts)
        return add_teacher_inputs(self.teacher_inputs, taught_by, rollouts, requests)

    def settle(self, step: int) -> None:
        """Waits for responses that are under way: the weights after `step` steps are about to change.

        A server that died meanwhile can get the same weights again until here.

        Raises:
            Stopped: as `rollouts`.
        """
        if self._under_way is not None:
            self._collect(self._under_way, step)

    def unchecked(self) -> list[list[Rollout]]:
        """What was sampled from the engine's weights since the last call, step by step."""
        found, self._unchecked = self._unchecked, []
        return found

    def write_ahead(self, done: int, directory: Path) -> None:
        """Writes the rollouts of steps that follow `done` steps, for `read_ahead`; one rank calls this."""
        for step in sorted(each for each in self._ready if each >= done):
            params = training_sampling(self.config, step)
            self.cache.write(directory / _file_name(step), step, self._ready[step], params)

    def read_ahead(self, directory: Path) -> None:
        """Takes up what `write_ahead` wrote into the checkpoint that the run begins with. Every rank calls this.

        Rollouts that were sampled with other settings, `rollout.max_lag` among them, are sampled anew.
        """
        lag, first = self.config.rollout.max_lag, self.first_step
        for step in range(first, min(first + lag, self.config.train.steps)):
            requests, params = self._requests(step), training_sampling(self.config, step)
            found = self.cache.take(step, requests, params, directory / _file_name(step))
            if len(found) == len(requests):
                self._ready[step] = [found[i] for i in range(len(requests))]
            else:
                logger.info(f"the checkpoint has no such rollouts of step {step + 1} as this run samples: sampled anew")

    def _requests(self, step: int) -> list[Request]:
        count = self.config.train.prompts_per_step
        return training_requests(self.prompts, self.config, step * count, count) if self.prompts.requests else []

    def _sample_up_to(self, step: int) -> None:
        """Brings the responses of a step home, and leaves those of the last step that may be ahead of it under way."""
        last = min(step + self.config.rollout.max_lag, self.config.train.steps - 1)
        for each in range(step, last + 1):
            if each in self._ready:
                continue
            sampling = self._begin(each)
            if sampling is not None and (each == step or each < last):
                self._collect(sampling, step)

    def _begin(self, step: int) -> Sampling | None:
        """Begins to sample the responses of a step; None if the cache has all of them from the interrupted run."""
        requests, params = self._requests(step), training_sampling(self.config, step)
        lag = self.config.rollout.max_lag
        self.cache.check()
        # only what the weights with which the run begins have sampled
        cached = self.cache.take(step, requests, params) if max(0, step - lag) == self.first_step else {}
        if cached:
            number = f"the {len(cached)}" if len(cached) == len(requests) else f"{len(cached)} of {len(requests)}"
            logger.info(f"step {step + 1} resumes with {number} rollouts sampled before the interruption")
        if len(cached) == len(requests):
            if not lag:
                self.engine.rest()
            self._came(step, [cached[i] for i in range(len(requests))])
            return None
        self._under_way = Sampling(step, requests, params, self.engine.submit(requests, params, cached))
        return self._under_way

    def _collect(self, sampling: Sampling, done: int) -> None:
        """Waits for the responses of a step, while the run has made `done` steps, and keeps them for a resume."""
        step, requests, params = sampling.step, sampling.requests, sampling.params
        lag = self.config.rollout.max_lag
        self._under_way, began = None, time.time()
        try:
            rollouts = self.engine.collect(sampling.ticket, self.should_cancel, last=not lag)
        except GenerationCancelled as cancelled:
            # a run that resumes after `done` steps looks for these
            kept = cancelled.completed if max(0, step - lag) == done else {}
            if kept:
                self.cache.put(step, kept, params, len(requests))
                self.cache.finish()  # before the message says that they are kept
            self.stop(done, step, len(kept), len(requests))
        self._note(sampling, began)
        if step == done + lag:  # earlier ones, at a run's start, would be in the way of the last one
            self.cache.put(step, dict(enumerate(rollouts)), params, len(requests))
        self._came(step, rollouts)

    def _note(self, sampling: Sampling, began: float) -> None:
        """Says when the responses of a step were sampled; `began`: when this process began to collect them."""
        collected, served = time.time(), sampling.ticket.served
        spans = list(served.values()) or [(began, collected)]
        more = {"batch": sampling.step + 1, "submitted": sampling.submitted, "collected": collected}
        self.note(min(spans)[0], max(ended for _, ended in spans), **more, servers={str(i): served[i] for i in served})

    def _came(self, step: int, rollouts: list[Rollout]) -> None:
        self._ready[step] = rollouts
        self._unchecked.append(rollouts)


def _file_name(step: int) -> str:
    return f"rollouts/step_{step + 1:07d}.safetensors"  # not among the checkpoint's weights
