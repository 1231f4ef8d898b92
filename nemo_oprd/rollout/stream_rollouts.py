"""Rollouts with `rollout.mode=stream`: the rules by which a step takes complete responses, and the sampler.

From the weights after v steps one call of the engine samples all admitted responses that are not complete. A step
gathers those that it takes; the engine samples the others while the step computes its gradient, until the trainer cuts
the call before the weights change. The next weights continue an unfinished response, as a request whose prompt is the
original one and the tokens so far. So every token comes from one version of the weights, which the spans of a response
name, and the student still has this version when the trainer checks the token.

Which responses a step takes depends on timing. A checkpoint holds all places not taken, with their tokens so far.
"""

from __future__ import annotations

import json
from collections.abc import Container, Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypeAlias

from nemo_oprd.batch.types import Rollout
from nemo_oprd.megatron.parallel import first_ranks
from nemo_oprd.rollout.engine import GenerationCancelled, Request
from nemo_oprd.rollout.schedule import SamplingCall, stream_settings, training_sampling
from nemo_oprd.rollout.training_rollouts import STREAM_FILE, RolloutSampler
from nemo_oprd.runtime.files import replacing

# The rules: which responses a step takes, and how many the engine samples at a time, by arithmetic on their places.
#
# A place is (group, number): the step that would take this response if every step took its own, and the number in that
# step. With N = `rollout.max_lag`, the groups up to v + N // 2 are admitted once the student has made v steps. A step
# takes the oldest complete responses, as many as one group has. It waits if later steps could not take the rest in
# time: step v + N at the latest takes a response that was admitted after v steps, so none of its tokens is more than N
# steps old. No response is dropped, and exactly one step takes each place.
#
# The other half of N is the extra time of long responses. If admission were N groups ahead, the places of every step
# would be fixed.


Place: TypeAlias = "tuple[int, int]"


@dataclass(frozen=True)
class StreamRules:
    """The rules for the places of a run; see the comment above.

    Attributes:
        lag: `rollout.max_lag`.
        early_groups: groups that are admitted beyond the next step's; less than `lag`.
        size: responses of a group and of a step.
        steps: groups and steps of the run.
    """

    lag: int
    early_groups: int
    size: int
    steps: int

    def admitted(self, done: int) -> int:
        """Returns the number of groups that are admitted once the student has made `done` steps."""
        return min(done + self.early_groups + 1, self.steps)

    def deadline(self, group: int) -> int:
        """Returns the last step that may take a response of a group: its tokens may be as old as its admission."""
        return max(0, group - self.early_groups) + self.lag

    def batch(self, step: int, pool: Iterable[Place], complete: Container[Place]) -> list[Place] | None:
        """Returns the places that step `step` (from 0) takes from `pool`, the open ones; None if it must wait."""
        oldest_first = sorted(pool)
        chosen = [place for place in oldest_first if place in complete][: self.size]
        taken = set(chosen)
        left = [place for place in oldest_first if place not in taken]
        # deadlines never fall: the later steps take what is left in this order at the latest
        in_time = all(self.deadline(group) > step + i // self.size for i, (group, _) in enumerate(left))
        return chosen if in_time and len(chosen) == self.size else None


@dataclass
class StreamSampler(RolloutSampler):
    """Samples the rollouts of each step with `rollout.mode=stream`; see `RolloutSampler` and the module's docstring."""

    # by place, the admitted responses not taken: the tokens so far, None without any; and their requests
    _pool: dict[Place, Rollout | None] = field(default_factory=dict)
    _asked: dict[Place, Request] = field(default_factory=dict)
    _home: set[int] = field(default_factory=set)  # the requests of the last call whose responses are in the pool
    _groups: int | None = None  # the number of admitted groups; None: the number of steps made
    # the places that the last step took; the weights do not contain them before that step is over
    _taken: dict[Place, Rollout] = field(default_factory=dict)
    _taken_by: int = -1

    @cached_property
    def _rules(self) -> StreamRules:
        rollout, train = self.config.rollout, self.config.train
        size = train.prompts_per_step * rollout.per_prompt
        return StreamRules(rollout.max_lag, rollout.early_steps, size, train.steps)

    def settle(self, step: int) -> None:
        """See `RolloutSampler`; unfinished responses keep their tokens so far."""
        if self._under_way is None:
            return
        (call, handle), self._under_way = self._under_way, None
        try:
            found = self._engine_of(call).cut(handle, self.should_cancel)
        except GenerationCancelled as cancelled:  # while an evaluation is sampled, too; this step is not made
            self._take(call, cancelled.completed)
            self._stop(call, cancelled.completed, step)
        self._note(call, handle, handle.submitted)
        self._take(call, found)

    def write_pending(self, done: int, directory: Path) -> dict[str, str]:
        """Writes the admitted responses that none of the `done` steps took, for `read_pending`; one rank calls this.

        Returns the SHA-256 of the file with the tokens, by its path in `directory`; the small JSON file has none.
        """
        pool: dict[Place, Rollout | None] = {**self._pool}
        if done <= self._taken_by:  # the step that took these did not complete
            pool |= self._taken
        places = sorted(pool)
        told = {"settings": stream_settings(self.config), "groups": self._groups, "places": places}
        directory.joinpath(STREAM_FILE).parent.mkdir(parents=True, exist_ok=True)
        with replacing(directory / STREAM_FILE) as partial:
            partial.write_text(json.dumps(told))
        begun = {i: rollout for i, place in enumerate(places) if (rollout := pool[place]) is not None}
        params = training_sampling(self.config, done)
        tokens = _tokens_file(directory)
        return {str(tokens.relative_to(directory)): self.cache.write(tokens, done, begun, params, len(places))}

    def read_pending(self, directory: Path) -> None:
        """Reads the files of `write_pending` from the checkpoint with which the run begins. Every rank calls this.

        Raises:
            ValueError: a run with other settings of the stream wrote them, their tokens come from weights with another
                digest than the known one of the same step, or the JSON file is damaged.
        """
        file, done = directory / STREAM_FILE, self.first_step
        told = first_ranks(_read_places(file))
        if told is None:  # a run in which every step took its own group
            return
        if not told:
            raise ValueError(
                f"{file} is damaged; expected the responses that no step had taken: remove this checkpoint, so that "
                "the run resumes from the one before it"
            )
        wanted = stream_settings(self.config)
        if told["settings"] != wanted:
            raise ValueError(
                f"{file} says that the run's steps took responses as they were complete, with {told['settings']}, and "
                f"this run has {wanted}; expected the same settings until the end of the run, because some prompts "
                "would be left out or taken twice: set them back"
            )
        places: list[Place] = [(group, number) for group, number in told["places"]]
        self._groups = told["groups"]
        self._admit(places)
        requests = [self._asked[place] for place in places]
        params = training_sampling(self.config, done)
        found = self.cache.take(done, requests, params, _tokens_file(directory))
        self._pool |= {places[i]: rollout for i, rollout in found.items()}

    def _of_step(self, step: int) -> tuple[list[Request], list[Rollout]]:
        self._note_weights()
        groups = self.first_step if self._groups is None else self._groups
        self._groups = max(groups, self._rules.admitted(step))
        self._admit([(group, i) for group in range(groups, self._groups) for i in range(self._rules.size)])
        self._taken = {}  # the step before is over
        self._submit(step)
        if self._rules.batch(step, self._pool, self._complete()) is None:
            self._gather(step)
        places = self._rules.batch(step, self._pool, self._complete())
        assert places is not None
        requests = [self._asked.pop(place) for place in places]
        self._taken_by, self._taken = step, {place: rollout for place in places if (rollout := self._pool.pop(place))}
        return requests, [*self._taken.values()]

    def _complete(self) -> set[Place]:
        return {place for place, rollout in self._pool.items() if rollout is not None and rollout.finish_reason}

    def _admit(self, places: list[Place]) -> None:
        """Puts places into the pool, without tokens."""
        of_group = {group: self.schedule.requests(group) for group in sorted({group for group, _ in places})}
        for group, number in places:
            self._asked[group, number] = of_group[group][number]
            self._pool.setdefault((group, number), None)

    def _submit(self, step: int) -> None:
        """Submits all incomplete responses to the engine, the oldest first."""
        complete = self._complete()
        places = [place for place in sorted(self._pool) if place not in complete]
        self._home = set()
        if not places:
            return
        # the oldest first: a long response of a later step would delay the responses of this one
        requests = [
            replace(self.schedule.continued(self._asked[place], self._pool[place], *place), turn=place[0])
            for place in places
        ]
        params = training_sampling(self.config, step)
        # each request has a key of its own; this one identifies the sampling call in the cache
        named = replace(params, key=(*params.key, *(number for place in places for number in place)))
        self._begin(SamplingCall(step, requests, named, places, weights=step, urgent=False, last=True))

    def _gather(self, step: int) -> None:
        """Waits until the step has its responses; raises StoppedSampling if the run was asked to stop before."""
        assert self._under_way is not None, "everything is complete"
        call, handle = self._under_way
        have = self._complete()

        def enough(indices: Any) -> bool:
            complete = have | {call.places[i] for i in indices}
            return self._rules.batch(step, self._pool, complete) is not None

        try:
            found = self._engine_of(call).gather(handle, enough, self.should_cancel)
        except GenerationCancelled as cancelled:
            self._under_way = None
            self._take(call, cancelled.completed)  # for the checkpoint that is written now
            self._stop(call, cancelled.completed, step)
        self._take(call, found)

    def _came(self, call: SamplingCall, rollouts: list[Rollout]) -> None:
        """Takes all responses of a call that the cache had."""
        self._take(call, dict(enumerate(rollouts)))

    def _take(self, call: SamplingCall, found: dict[int, Rollout]) -> None:
        """Takes responses, or their next tokens, by the index of their request; ignores those taken before."""
        new = sorted(found.keys() - self._home)
        self._home |= {*new}
        for i in new:
            place = call.places[i]
            self._pool[place] = self.schedule.grown(self._pool[place], found[i])
        if new:
            self._unchecked.append([found[i] for i in new])


def _read_places(file: Path) -> dict[str, Any] | None:
    """Returns the content of the JSON file of `write_pending`; {} if it is damaged, None without the file."""
    try:
        told = json.loads(file.read_bytes())
    except FileNotFoundError:
        return None
    except ValueError:
        return {}
    if not isinstance(told, dict) or not isinstance(told.get("settings"), dict):
        return {}
    groups, places = told.get("groups"), told.get("places")
    if not isinstance(places, list) or not (groups is None or type(groups) is int):
        return {}
    pairs = (isinstance(each, list) and [type(number) for number in each] == [int, int] for each in places)
    return told if all(pairs) else {}


def _tokens_file(directory: Path) -> Path:
    return directory / STREAM_FILE.with_suffix(".safetensors")
