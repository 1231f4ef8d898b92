"""Evaluations that an engine samples in the same call as the responses of a step, from the same weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from nemo_oprd.batch.types import Rollout
from nemo_oprd.rollout.engine import (
    Enough,
    GenerationCancelled,
    GenerationHandle,
    Keep,
    Request,
    RolloutEngine,
    SamplingParams,
)


@dataclass(frozen=True)
class EvaluationRequests:
    """The added requests of an evaluation, each with its own `Request.sampled`, and the receiver of the responses.

    `keep` is called as in `RolloutEngine.submit`, with the indices of these requests. `take` gets all responses, in
    order, on every rank, when they are complete.
    """

    requests: list[Request]
    keep: Keep
    take: Callable[[list[Rollout]], None]


class EngineWithEvaluation:
    """The sampling calls of a rollout engine; the next call of `submit` also samples the added requests."""

    def __init__(self, engine: RolloutEngine) -> None:
        self._engine = engine
        self._waiting: EvaluationRequests | None = None
        self._under_way: EvaluationRequests | None = None
        self._own = 0  # the number of the handle's requests that were not added
        self._came: dict[int, Rollout] = {}  # responses to the added ones, from `gather`

    def add(self, added: EvaluationRequests) -> None:
        """Adds `added` to the next call of `submit`. Every rank calls this."""
        self._waiting = added

    def drop(self) -> None:
        """Drops the added requests, unless `submit` was called since."""
        self._waiting = None

    def submit(
        self,
        requests: list[Request],
        sampling: SamplingParams,
        done: dict[int, Rollout] | None = None,
        keep: Keep | None = None,
    ) -> GenerationHandle:
        """Submits the requests, followed by the added ones; see `RolloutEngine`."""
        added, self._waiting, self._own = self._waiting, None, len(requests)
        self._under_way = added
        if added is None:
            return self._engine.submit(requests, sampling, done, keep)
        count = len(requests)

        def keep_both(found: dict[int, Rollout]) -> None:
            others = {i - count: rollout for i, rollout in found.items() if i >= count}
            if others:
                added.keep(others)
            if keep is not None:
                keep({i: rollout for i, rollout in found.items() if i < count})

        return self._engine.submit([*requests, *added.requests], sampling, done, keep_both)

    def collect(
        self, handle: GenerationHandle, should_cancel: Callable[[], bool] | None = None, *, last: bool = False
    ) -> list[Rollout]:
        """See `RolloutEngine`; returns the rollouts of the call's own requests."""
        try:
            rollouts = self._engine.collect(handle, should_cancel, last=last)
        except GenerationCancelled as cancelled:
            raise GenerationCancelled(self._own_of(cancelled.completed)) from None
        self._take(dict(enumerate(rollouts)))
        return rollouts[: self._own]

    def gather(
        self, handle: GenerationHandle, enough: Enough, should_cancel: Callable[[], bool] | None = None
    ) -> dict[int, Rollout]:
        """See `RolloutEngine`; `enough` receives the indices of the call's own requests."""
        own = set(range(self._own))
        try:
            found = self._engine.gather(handle, lambda complete: enough(own & complete), should_cancel)
        except GenerationCancelled as cancelled:
            raise GenerationCancelled(self._own_of(cancelled.completed)) from None
        self._came |= {i: rollout for i, rollout in found.items() if i not in own}
        return self._own_of(found)

    def cut(self, handle: GenerationHandle, should_cancel: Callable[[], bool] | None = None) -> dict[int, Rollout]:
        """See `RolloutEngine`; waits first until the added requests are complete."""
        found = dict[int, Rollout]()
        try:
            if self._under_way is not None:
                wanted = set(range(self._own, len(handle.requests)))
                found = self._engine.gather(handle, lambda complete: wanted <= complete, should_cancel)
            found |= self._engine.cut(handle, should_cancel)
        except GenerationCancelled as cancelled:
            raise GenerationCancelled(self._own_of(cancelled.completed)) from None
        self._take(self._came | found)
        return self._own_of(found)

    def _own_of(self, found: dict[int, Rollout]) -> dict[int, Rollout]:
        return {i: rollout for i, rollout in found.items() if i < self._own}

    def _take(self, found: dict[int, Rollout]) -> None:
        """Gives the responses to the added requests to their receiver, if there are any."""
        if self._under_way is not None:
            self._under_way.take([found[self._own + i] for i in range(len(self._under_way.requests))])
        self._under_way, self._came = None, {}
