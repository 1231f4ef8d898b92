"""The progress of a round, the queue from which controllers claim requests, and the order of requests in it."""

from __future__ import annotations

import datetime
import itertools
import time
from collections.abc import Callable, Iterable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from nemo_oprd.megatron.parallel import first_ranks
from nemo_oprd.rollout.engine import Request
from nemo_oprd.vllm.client_process import Round

# Progress of a round: which responses the controllers have, and whether these are enough.
#
# The controllers write to the job's key-value store; the world's first rank reads it, and writes when all ranks may
# continue. So a waiting rank takes part in no collective, and sends no request to the machines that sample.


# seconds between two reads of a waiting rank
LOOK_S = 0.05


@dataclass(frozen=True)
class Seen:
    """The state of a rank's part in a round: the complete responses, whether it is over, whether it failed."""

    complete: frozenset[int] = frozenset()
    is_over: bool = True
    has_failed: bool = False

    @staticmethod
    def of(mine: Round, *, is_over: bool) -> Seen:
        """Returns a controller's state, as a copy that does not grow with the round."""
        return Seen(frozenset(list(mine.sampled)), is_over, is_over and mine.error is not None)

    def packed(self) -> bytes:
        """Encodes the state for the store."""
        flags = np.array([self.is_over, self.has_failed], np.int32)
        return np.concatenate([flags, np.array(sorted(self.complete), np.int32)]).tobytes()

    @staticmethod
    def unpacked(data: bytes) -> Seen:
        """Decodes the result of `packed`."""
        over, failed, *complete = np.frombuffer(data, np.int32).tolist()
        return Seen(frozenset(complete), bool(over), bool(failed))

    @staticmethod
    def joined(parts: Iterable[Seen]) -> Seen:
        """Merges the states of several ranks: over if all are, failed if one has."""
        parts = [*parts]
        complete = frozenset[int]().union(*(part.complete for part in parts))
        return Seen(complete, all(part.is_over for part in parts), any(part.has_failed for part in parts))


class Progress:
    """Progress of a round; every rank has one and calls it alike. `controllers`: the ranks with client processes."""

    def __init__(self, controllers: Iterable[int]) -> None:
        self._controllers = sorted(controllers)
        self._wait = 0
        self._judged: Seen | None = None  # the last state that was not enough
        self._prefix = f"nemo_oprd/vllm/progress/{first_ranks(time.time_ns())}"  # of no earlier engine of this job
        self._store: Any = _get_default_store().clone()  # type: ignore[attr-defined]

    def wait(
        self, look: Callable[[], Seen] | None, enough: Callable[[AbstractSet[int]], bool], should_go: Callable[[], bool]
    ) -> None:
        """Waits on every rank until enough responses are complete, the round is over, or a rank failed.

        Args:
            look: returns this controller's state; None on other ranks.
            enough: see `RolloutEngine.gather`; the first rank calls it.
            should_go: called repeatedly on every rank; True ends the wait of all of them.
        """
        self._wait += 1
        self._judged = None
        go, told = self._key("go"), None
        while not self._store.check([go]):
            seen = None if look is None else look()
            if seen is not None and seen != told:
                self._store.set(self._key(dist.get_rank()), seen.packed())
                told = seen
            if should_go() or (dist.get_rank() == 0 and self._is_due(enough)):
                self._store.set(go, "yes")
                break
            time.sleep(LOOK_S)

    def forget(self) -> None:
        """Removes the last wait's keys from the store, after all ranks have seen its end."""
        if dist.get_rank() == 0:
            for key in (self._key("go"), *map(self._key, self._controllers)):
                self._store.delete_key(key)

    def _is_due(self, enough: Callable[[AbstractSet[int]], bool]) -> bool:
        keys = [self._key(rank) for rank in self._controllers]
        parts = [Seen.unpacked(self._store.get(key)) if self._store.check([key]) else None for key in keys]
        seen = Seen.joined(Seen(is_over=False) if part is None else part for part in parts)
        if seen == self._judged:
            return False
        self._judged = seen
        return seen.is_over or seen.has_failed or enough(seen.complete)

    def _key(self, name: str | int) -> str:
        return f"{self._prefix}/{self._wait}/{name}"


class RequestQueue:
    """The queue of a round. All ranks make, open and close it together; controllers claim requests from it.

    The queue is a counter in the job's key-value store: a claim adds one and takes the request at that place. The store
    also has the number of controllers that have finished, and whether a rank asked to cancel. `is_controller`: whether
    this rank claims; `controllers`: how many ranks do.
    """

    def __init__(self, is_controller: bool, controllers: int) -> None:
        self._is_controller, self._controllers = is_controller, controllers
        self._round = 0
        # an earlier engine of this job may have left keys of a round that an error ended
        self._prefix = f"nemo_oprd/vllm/{first_ranks(time.time_ns())}"
        # connections of their own: while one waits, it serves no other call
        self._claims: Any = _get_default_store().clone()  # type: ignore[attr-defined]
        self._waits: Any = _get_default_store().clone()  # type: ignore[attr-defined]

    def open(self, order: Sequence[int]) -> Callable[[], int | None]:
        """Begins a round; returns a function that claims the next request of `order`, equal on every rank, or None."""
        self._round += 1

        own = itertools.count()  # a single controller needs no store

        def claim() -> int | None:
            place = next(own) if self._controllers == 1 else self._claims.add(self._key("claimed"), 1) - 1
            return order[place] if place < len(order) else None

        return claim

    def finish(self) -> None:
        """Reports that this rank's part is done, if it has one."""
        if self._is_controller and self._waits.add(self._key("finished"), 1) == self._controllers:
            self._waits.set(self._key("all"), "finished")

    def wait_for_all(self, limit: datetime.timedelta) -> bool:
        """Waits for all controllers, at most for `limit`; returns whether they have finished."""
        try:
            self._waits.wait([self._key("all")], limit)
        except dist.DistStoreError:
            return False
        return True

    def cancel(self) -> None:
        """Asks the controllers to stop."""
        self._waits.set(self._key("cancelled"), "yes")

    def is_cancelled(self) -> bool:
        """Whether a rank asked to stop."""
        return self._waits.check([self._key("cancelled")])

    def close(self) -> None:
        """Ends the round, after all ranks have seen its end; removes what it left in the store."""
        if dist.get_rank() == 0:
            for name in ("claimed", "finished", "all", "cancelled"):
                self._waits.delete_key(self._key(name))

    def _key(self, name: str) -> str:
        return f"{self._prefix}/{self._round}/{name}"


class LengthEstimate:
    """Expects a response to be as long as earlier responses to the same prompt, or as all earlier ones on average."""

    def __init__(self) -> None:
        self._of_prompt: dict[int, tuple[int, int]] = {}  # by the hash of the ids
        self._tokens, self._responses = 0, 0

    def learn(self, requests: Sequence[Request], lengths: dict[int, int]) -> None:
        """Learns the lengths of whole responses in tokens, by the index of their request."""
        for index, tokens_now in lengths.items():
            key, length = _prompt(requests[index]), requests[index].begun + tokens_now
            tokens, responses = self._of_prompt.get(key, (0, 0))
            self._of_prompt[key] = (tokens + length, responses + 1)
            self._tokens, self._responses = self._tokens + length, self._responses + 1

    def longest_first(self, requests: Sequence[Request], indices: Sequence[int]) -> list[int]:
        """Sorts the indices by turn, and by falling expected length of prompt and response: no long one comes last.

        A begun response without earlier ones to its prompt is only known not to be short: the estimate of its remaining
        length is the average length of a whole response.
        """
        mean = self._tokens / self._responses if self._responses else 0.0

        def expected(index: int) -> float:
            request = requests[index]
            tokens, responses = self._of_prompt.get(_prompt(request), (0, 0))
            return len(request.prompt_ids) + (max(0.0, tokens / responses - request.begun) if responses else mean)

        return sorted(indices, key=lambda index: (requests[index].turn, -expected(index), index))


def _prompt(request: Request) -> int:
    """Hashes a prompt, without the tokens of its response."""
    return hash(tuple(request.prompt_ids[: len(request.prompt_ids) - request.begun]))
