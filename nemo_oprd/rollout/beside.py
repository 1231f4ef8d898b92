"""An evaluation that is sampled beside the responses of a step, from the same weights, in one call of the engine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from nemo_oprd.batch.types import Rollout
from nemo_oprd.rollout.engine import GenerationCancelled, Keep, Request, RolloutEngine, SamplingParams, Ticket


@dataclass(frozen=True)
class Beside:
    """What to sample besides, each request with its own `Request.sampled`, and what takes the responses.

    `keep` is called as in `RolloutEngine.submit`, with the indices of these requests. `take` gets all responses, in
    order, on every rank, when they are complete.
    """

    requests: list[Request]
    keep: Keep
    take: Callable[[list[Rollout]], None]


class EngineBeside:
    """`submit` and `collect` of a rollout engine; the next call of `submit` also samples what was added."""

    def __init__(self, engine: RolloutEngine) -> None:
        self._engine = engine
        self._waiting: Beside | None = None
        self._under_way: Beside | None = None
        self._own = 0  # the requests of the ticket that are not besides

    def add(self, beside: Beside) -> None:
        """Samples `beside` with what is asked for next. Every rank calls this."""
        self._waiting = beside

    def drop(self) -> None:
        """Does not sample what was added, if nothing was asked for since."""
        self._waiting = None

    def submit(
        self,
        requests: list[Request],
        sampling: SamplingParams,
        done: dict[int, Rollout] | None = None,
        keep: Keep | None = None,
    ) -> Ticket:
        """See `RolloutEngine`."""
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
        """See `RolloutEngine`: the rollouts of the requests that were asked for."""
        try:
            rollouts = self._engine.collect(ticket, should_cancel, last=last)
        except GenerationCancelled as cancelled:
            own = {i: rollout for i, rollout in cancelled.completed.items() if i < self._own}
            raise GenerationCancelled(own) from None
        if self._under_way is not None:
            self._under_way.take(rollouts[self._own :])
            self._under_way = None
        return rollouts[: self._own]
