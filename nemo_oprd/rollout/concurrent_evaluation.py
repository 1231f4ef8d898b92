"""Evaluations that an engine samples together with the responses of a step, from the same weights, in one call."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from nemo_oprd.batch.types import Rollout
from nemo_oprd.rollout.engine import Enough, GenerationCancelled, Keep, Request, RolloutEngine, SamplingParams, Ticket


@dataclass(frozen=True)
class Beside:
    """An additional set of requests, each with its own `Request.sampled`, and the receiver of the responses.

    `keep` is called as in `RolloutEngine.submit`, with the indices of these requests. `take` gets all responses, in
    order, on every rank, when they are complete.
    """

    requests: list[Request]
    keep: Keep
    take: Callable[[list[Rollout]], None]


class EngineBeside:
    """The sampling calls of a rollout engine; the next call of `submit` also samples the added requests."""

    def __init__(self, engine: RolloutEngine) -> None:
        self._engine = engine
        self._waiting: Beside | None = None
        self._under_way: Beside | None = None
        self._own = 0  # the number of the ticket's requests that were not added
        self._came: dict[int, Rollout] = {}  # responses to the added ones, from `gather`

    def add(self, beside: Beside) -> None:
        """Adds `beside` to the next call of `submit`. Every rank calls this."""
        self._waiting = beside

    def drop(self) -> None:
        """Drops the added requests, unless `submit` was called since."""
        self._waiting = None

    def submit(
        self,
        requests: list[Request],
        sampling: SamplingParams,
        done: dict[int, Rollout] | None = None,
        keep: Keep | None = None,
    ) -> Ticket:
        """Submits the requests, followed by the added ones; see `RolloutEngine`."""
        beside, self._waiting, self._own = self._waiting, None, len(requests)
        self._under_way = beside
        if beside is None:
            return self._engine.submit(requests, sampling, done, keep)
        count = len(requests)

        def keep_both(found: dict[int, Rollout]) -> None:
            others = {i - count: rollout for i, rollout in found.items() if i >= count}
            if others:
                beside.keep(others)
            if keep is not None:
                keep({i: rollout for i, rollout in found.items() if i < count})

        return self._engine.submit([*requests, *beside.requests], sampling, done, keep_both)

    def collect(
        self, ticket: Ticket, should_cancel: Callable[[], bool] | None = None, *, last: bool = False
    ) -> list[Rollout]:
        """See `RolloutEngine`; returns the rollouts of the call's own requests."""
        try:
            rollouts = self._engine.collect(ticket, should_cancel, last=last)
        except GenerationCancelled as cancelled:
            raise GenerationCancelled(self._own_of(cancelled.completed)) from None
        self._take(dict(enumerate(rollouts)))
        return rollouts[: self._own]

    def gather(
        self, ticket: Ticket, enough: Enough, should_cancel: Callable[[], bool] | None = None
    ) -> dict[int, Rollout]:
        """See `RolloutEngine`; `enough` receives the indices of the call's own requests."""
        own = set(range(self._own))
        try:
            found = self._engine.gather(ticket, lambda complete: enough(own & complete), should_cancel)
        except GenerationCancelled as cancelled:
            raise GenerationCancelled(self._own_of(cancelled.completed)) from None
        self._came |= {i: rollout for i, rollout in found.items() if i not in own}
        return self._own_of(found)

    def cut(self, ticket: Ticket, should_cancel: Callable[[], bool] | None = None) -> dict[int, Rollout]:
        """See `RolloutEngine`; waits first until the added requests are complete."""
        found = dict[int, Rollout]()
        try:
            if self._under_way is not None:
                wanted = set(range(self._own, len(ticket.requests)))
                found = self._engine.gather(ticket, lambda complete: wanted <= complete, should_cancel)
            found |= self._engine.cut(ticket, should_cancel)
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
