"""The rollouts of each training step: prompts -> sampled responses -> the sequences that the teachers read."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

from nemo_oprd.batch.types import Rollout
from nemo_oprd.config.schema import Config
from nemo_oprd.config.teacher_routing import Routing
from nemo_oprd.megatron.parallel import first_ranks
from nemo_oprd.rollout.concurrent_evaluation import EngineWithEvaluation
from nemo_oprd.rollout.engine import GenerationCancelled, GenerationHandle, Request, RolloutEngine
from nemo_oprd.rollout.resume_cache import ResumeCache
from nemo_oprd.rollout.schedule import SamplingCall, Schedule, check_versions, ended_on_purpose, training_sampling
from nemo_oprd.rollout.teacher_inputs import TeacherInputs, add_teacher_inputs

logger = logging.getLogger(__name__)

# in a checkpoint: which responses the steps of a run with `rollout.mode=stream` have not taken yet
STREAM_FILE = Path("rollouts/stream.json")


@dataclass(eq=False)
class StoppedSampling(Exception):  # noqa: N818 - no error, like Stopped
    """Raised if the run was asked to stop while it sampled; on every rank of the world, at the same place.

    Attributes:
        done: the number of steps that the run has made.
        sampled: the step whose responses were being sampled, from 0.
        completed, requests: the numbers of complete responses, which are kept, and of all requests.
    """

    done: int
    sampled: int
    completed: int
    requests: int


@dataclass
class RolloutSampler:
    """Samples the rollouts of each step; they depend on the configuration, the step and the weights only.

    With `rollout.max_lag` the engine samples responses of later steps before a step is computed (`schedule.py`). At
    most one call of the engine is under way, and `settle` collects its responses before the weights change.

    Attributes:
        teacher_inputs: per teacher, an object that adds its sequences to rollouts, None if it reads the student's ids;
            empty if recorded rollouts already have the sequences.
        cache: stores the rollouts that were sampled last, for a resumed run.
        first_step: the number of steps behind the weights with which the run begins.
        should_cancel: returns whether the run was asked to stop; the sampler then cancels the sampling of a step.
        note: called after each sampling with its start and end, in seconds since the epoch, and with other fields of
            `Interval` (`run/timeline.py`) as keyword arguments.
        with_evaluation: the engine for calls that may include an evaluation; None if evaluations have their own calls.
        complete: called with a step and responses of it as soon as they are complete, on the rank that has them; None
            if no part of the run needs them early.
    """

    config: Config
    routing: Routing
    engine: RolloutEngine
    schedule: Schedule
    teacher_inputs: list[TeacherInputs | None]
    cache: ResumeCache
    first_step: int
    should_cancel: Callable[[], bool]
    note: Callable[..., None] = lambda began, ended, **more: None
    with_evaluation: EngineWithEvaluation | None = None
    complete: Callable[[int, list[Rollout]], None] | None = None
    # by step, of steps that are not over: all responses of the step, some perhaps unfinished (`finish_reason` None)
    _sampled: dict[int, list[Rollout]] = field(default_factory=dict)
    _under_way: tuple[SamplingCall, GenerationHandle] | None = None
    _unchecked: list[list[Rollout]] = field(default_factory=list)

    def rollouts(self, step: int) -> list[Rollout]:
        """Returns the rollouts of a step with their teachers' sequences, the same on every rank. Every rank calls this.

        The engine has the weights after `step` steps.

        Raises:
            ValueError: a response comes from other weights than the schedule demands.
            StoppedSampling: the run was asked to stop before all responses were complete.
        """
        requests, sampled = self._of_step(step)
        if requests:
            most = self.config.rollout.max_lag * self.config.train.updates_per_rollout
            check_versions(sampled, step, self.engine.weights.steps, most)
        rollouts = ended_on_purpose(sampled, self.config)
        taught_by = self.routing.teachers_of([rollout.data_source for rollout in rollouts])
        return add_teacher_inputs(self.teacher_inputs, taught_by, rollouts, requests)

    def _of_step(self, step: int) -> tuple[list[Request], list[Rollout]]:
        """Returns (the requests, the responses) of a step."""
        requests = self.schedule.requests(step)
        for earlier in [each for each in self._sampled if each < step]:
            del self._sampled[earlier]
        if requests:
            self._sample(step)
        else:  # recorded
            self._sampled[step] = self.engine.generate(requests, training_sampling(self.config, step))
            self._unchecked.append(self._sampled[step])
        return requests, self._sampled[step]

    def settle(self, step: int) -> None:
        """Waits for responses that are under way: the weights after `step` steps are about to change.

        Until this call returns, the engine can send the same weights again to a server that it restarts.

        Raises:
            StoppedSampling: as `rollouts`.
        """
        if self._under_way is not None:
            self._collect(*self._under_way, step)

    def unchecked(self) -> list[list[Rollout]]:
        """Returns the rollouts sampled from the engine's weights since the last call: lists, in the order of sampling.

        A part of a response is a rollout whose prompt is the whole text before the part.
        """
        found, self._unchecked = self._unchecked, []
        return found

    def write_pending(self, done: int, directory: Path) -> dict[str, str]:
        """Writes the rollouts of steps that follow `done` steps, for `read_pending`; one rank calls this.

        Returns the SHA-256 of each file by its path in `directory`.
        """
        digests = {}
        for step in sorted(each for each in self._sampled if each >= done):
            params, rollouts, name = training_sampling(self.config, step), self._sampled[step], _file_name(step)
            kept = dict(enumerate(rollouts))
            digests[name] = self.cache.write(directory / name, step, kept, params, len(rollouts))
        return digests

    def read_pending(self, directory: Path) -> None:
        """Reads the files of `write_pending` from the checkpoint with which the run begins. Every rank calls this.

        The run samples rollouts anew if settings have changed, `rollout.max_lag` among them.

        Raises:
            ValueError: they come from weights with another digest than the known one of the same step; or a run with
                `rollout.mode=stream` wrote the checkpoint.
        """
        if first_ranks((directory / STREAM_FILE).exists()):
            raise ValueError(
                f"{directory / STREAM_FILE} says that the run's steps took responses as they were complete "
                f"(rollout.mode=stream), and this run has rollout.mode={self.config.rollout.mode}; expected stream "
                "until the end of the run, because some prompts would be left out or taken twice: set it back"
            )
        lag, first = self.config.rollout.max_lag, self.first_step
        for step in range(first, min(first + lag, self.config.train.steps)):
            requests, params = self.schedule.requests(step), training_sampling(self.config, step)
            found = self.cache.take(step, requests, params, directory / _file_name(step))
            if len(found) == len(requests):
                self._sampled[step] = [found[i] for i in range(len(requests))]
            else:
                logger.info(f"the checkpoint has no such rollouts of step {step + 1} as this run samples: sampled anew")

    def _sample(self, step: int) -> None:
        """Makes the sampling calls due after `step` steps; leaves the last one under way unless the step needs it."""
        self._note_weights()
        calls = self.schedule.due(self._sampled, step)
        for call in calls:
            handle = self._begin(call)
            if handle is not None and (call.urgent or call is not calls[-1]):
                self._collect(call, handle, step)

    def _note_weights(self) -> None:
        """Notes which weights the engine has, before it samples from them."""
        weights = self.engine.weights
        self.cache.digests.note(weights.steps, weights.digest, "this run")

    def _begin(self, call: SamplingCall) -> GenerationHandle | None:
        """Submits a sampling call to its engine; None if the cache has all its responses from the interrupted run."""
        step, requests, params = call.step, call.requests, call.params
        self.cache.check()
        # the cache holds only samples of the weights with which the run begins
        cached = self.cache.take(step, requests, params) if call.weights == self.first_step else {}
        if cached:
            number = f"the {len(cached)}" if len(cached) == len(requests) else f"{len(cached)} of {len(requests)}"
            logger.info(f"step {step + 1} resumes with {number} rollouts sampled before the interruption")
        if len(cached) == len(requests):
            if not self.config.rollout.max_lag:
                self.engine.rest()
            self._came(call, [cached[i] for i in range(len(requests))])
            return None
        complete = self.complete
        keep = None if complete is None else lambda found: complete(step, [*found.values()])
        handle = self._engine_of(call).submit(requests, params, cached, keep)
        self._under_way = call, handle
        return handle

    def _collect(self, call: SamplingCall, handle: GenerationHandle, done: int) -> None:
        """Waits for a sampling call's responses, stores them for a resume; `done`: the steps that the run has made."""
        step, requests, params = call.step, call.requests, call.params
        self._under_way, began = None, time.time()
        try:
            rollouts = self._engine_of(call).collect(handle, self.should_cancel, last=not self.config.rollout.max_lag)
        except GenerationCancelled as cancelled:
            self._stop(call, cancelled.completed, done)
        self._note(call, handle, began)
        if call.last:  # an earlier call would overwrite the last one
            self.cache.put(step, dict(enumerate(rollouts)), params, len(requests))
        self._came(call, rollouts)

    def _stop(self, call: SamplingCall, completed: dict[int, Rollout], done: int) -> NoReturn:
        """Stores the complete responses of a sampling call, and stops the run, which has made `done` steps."""
        step, requests = call.step, call.requests
        # a run that resumes after `done` steps looks for these
        kept = completed if call.weights == done else {}
        if kept:
            self.cache.put(step, kept, call.params, len(requests))
            self.cache.finish()  # before the message says that they are kept
        raise StoppedSampling(done, step, len(kept), len(requests))

    def _engine_of(self, call: SamplingCall) -> RolloutEngine | EngineWithEvaluation:
        """Returns the engine for a sampling call; an evaluation may join the last one with these weights."""
        return self.with_evaluation if self.with_evaluation is not None and call.last else self.engine

    def _note(self, call: SamplingCall, handle: GenerationHandle, began: float) -> None:
        """Reports when a call's responses were sampled; `began`: the start, if no server reports one."""
        collected, served = time.time(), handle.served
        spans = list(served.values()) or [(began, collected)]
        more = {"batch": call.step + 1, "submitted": handle.submitted, "collected": collected}
        self.note(min(spans)[0], max(ended for _, ended in spans), **more, servers={str(i): served[i] for i in served})

    def _came(self, call: SamplingCall, rollouts: list[Rollout]) -> None:
        """Adds a call's responses or parts to their steps; a step's first call covers all its responses."""
        came: dict[int, list[Rollout]] = {}
        for (step, i), rollout in zip(call.places, rollouts, strict=True):
            if step in self._sampled:
                self._sampled[step][i] = self.schedule.grown(self._sampled[step][i], rollout)
            else:
                came.setdefault(step, []).append(self.schedule.grown(None, rollout))
        self._sampled |= came
        self._unchecked.append(rollouts)


def _file_name(step: int) -> str:
    return f"rollouts/step_{step + 1:07d}.safetensors"  # not among the checkpoint's weights
