"""The state of a call to `VllmEngine` while its servers sample."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field

from nemo_oprd.batch.types import Rollout
from nemo_oprd.rollout.engine import Request, Ticket
from nemo_oprd.rollout.response import Response
from nemo_oprd.vllm.client_process import Round, Task


@dataclass
class VllmTicket(Ticket):
    """See `Ticket`.

    Attributes:
        own: responses of this rank's client process, by the index of their request.
        complete: the indices of all requests that have a response on some rank.
        under_way: the current round, with this rank's part in it.
        round_began: the begin of the last round, in seconds since the epoch.
        busy_s: per server, the seconds until its last response in its last round.
    """

    task: Task
    own: dict[int, Response] = field(default_factory=dict)
    complete: set[int] = field(init=False)
    under_way: tuple[Round, Future | None] | None = None
    round_began: float = 0.0
    busy_s: dict[int, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.complete = set(self.done)

    def missing(self) -> list[int]:
        """The requests without a response, in order."""
        return [i for i in range(len(self.requests)) if i not in self.complete]

    def note_served(self, served_s: dict[int, tuple[float, float]]) -> None:
        """Records when each server was busy, in seconds since the last round began."""
        for number, (first, last) in served_s.items():
            began, _ = self.served.get(number, (self.round_began + first, 0.0))
            self.served[number] = began, self.round_began + last

    def forget(self) -> None:
        """Drops all samples since the ticket was made."""
        self.own, self.complete = {}, set(self.done)

    def new(self) -> dict[int, Response]:
        """Returns this rank's complete responses that `gather` and `cut` have not returned."""
        return {i: response for i, response in self.own.items() if i not in self.given}

    def keeping(self, rollout: Callable[[Request, Response], Rollout]) -> Callable[[dict[int, Response]], None] | None:
        """Wraps `keep` to take responses, which `rollout` turns into rollouts; None without a `keep`."""
        keep = self.keep
        if keep is None:
            return None
        return lambda responses: keep({i: rollout(self.requests[i], one) for i, one in responses.items()})
