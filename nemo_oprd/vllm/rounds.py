"""The rounds of a call to the engine: all controllers sample until no request is left to claim, or a failure ends it.

Every rank has one `Rounds` and calls it alike. A round begins without a collective, and continues while the trainer
computes. The ranks take its responses when it is over, or before: `watch` takes complete ones, `cut` ends the round.
"""

from __future__ import annotations

import datetime
import itertools
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from collections.abc import Set as AbstractSet
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from nemo_oprd.batch.types import Rollout
from nemo_oprd.megatron.parallel import everyones, first_ranks
from nemo_oprd.rollout.engine import Enough, GenerationHandle, Request, Weights
from nemo_oprd.rollout.exchange import Exchange
from nemo_oprd.rollout.response import Response
from nemo_oprd.vllm.fleet import Fleet
from nemo_oprd.vllm.placement import ServerPlacement
from nemo_oprd.vllm.sampler import Job, Round, RoundSummary, Sampler, Task
from nemo_oprd.vllm.server_lifecycle import ServerRefused

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
    """Progress of a round; every rank has one and calls it alike. `controllers`: the ranks that call servers."""

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
            should_go: called repeatedly on every rank; True ends the wait of all ranks.
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
        """Begins a round; returns a function that claims the next index in `order` (equal on all ranks), or None."""
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
        """Returns whether a rank asked to stop."""
        return self._waits.check([self._key("cancelled")])

    def close(self) -> None:
        """Removes the round's keys from the store, after all ranks have seen its end."""
        if dist.get_rank() == 0:
            for name in ("claimed", "finished", "all", "cancelled"):
                self._waits.delete_key(self._key(name))

    def _key(self, name: str) -> str:
        return f"{self._prefix}/{self._round}/{name}"


class LengthEstimate:
    """Estimates a response's length: the mean of earlier ones to its prompt or, without any, of all earlier ones."""

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

        If the prompt has no earlier responses, a begun one is only known not to be short: its remaining length is
        estimated as the mean of whole responses.
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


# The state of a call to `VllmEngine` while its servers sample.


@dataclass
class VllmGenerationHandle(GenerationHandle):
    """A `GenerationHandle` with the state of its rounds.

    Attributes:
        own: responses that this rank's servers have sampled, by the index of their request.
        complete: the indices of all requests that have a response on some rank.
        under_way: the current round, with this rank's part in it.
        round_began: the start of the last round, in seconds since the epoch.
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
        """Returns the indices of requests without a response, in order."""
        return [i for i in range(len(self.requests)) if i not in self.complete]

    def note_served(self, busy_s: dict[int, float]) -> None:
        """Records each server's start and last response; `busy_s`: seconds from the round's start to that response."""
        for number, seconds in busy_s.items():
            began, _ = self.served.get(number, (self.round_began, 0.0))
            self.served[number] = began, self.round_began + seconds

    def forget(self) -> None:
        """Drops all responses sampled since the handle was made."""
        self.own, self.complete = {}, set(self.done)

    def new(self) -> dict[int, Response]:
        """Returns this rank's complete responses that `gather` and `cut` have not returned."""
        return {i: response for i, response in self.own.items() if i not in self.given}

    def keeping(self, rollout: Callable[[Request, Response], Rollout]) -> Callable[[dict[int, Response]], None] | None:
        """Returns a function that converts responses by `rollout` and passes them to `keep`; None without `keep`."""
        keep = self.keep
        if keep is None:
            return None
        return lambda responses: keep({i: rollout(self.requests[i], one) for i, one in responses.items()})


logger = logging.getLogger(__name__)

# seconds between two checks of a waiting rank whether it should cancel
CANCEL_CHECK_S = 0.5


class Rounds:
    """The rounds of one engine. `mine`: the servers of this rank, called by `sampler`; `places`: those of the run."""

    def __init__(self, mine: Fleet, sampler: Sampler | None, places: list[ServerPlacement]) -> None:
        controllers = {place.controller for place in places}
        self._mine, self._sampler, self._servers = mine, sampler, len(places)
        self._queue = RequestQueue(sampler is not None, len(controllers))
        self._exchange = Exchange(controllers, None if mine.folder is None else mine.folder.path)
        self._progress = Progress(controllers)
        self.lengths = LengthEstimate()

    def begin(self, handle: VllmGenerationHandle, version: str, weights: Weights) -> None:
        """Begins a round for a handle's missing requests. `weights`: the current ones, whose version is `version`."""
        order = self.lengths.longest_first(handle.requests, handle.missing())
        if not order:
            return
        claim, sampler = self._queue.open(order), self._sampler
        mine, work, handle.round_began = Round(), None, time.time()
        if sampler is not None:
            slots = -(-len(order) // self._servers)
            job = Job(handle.task, version, weights.steps, claim, slots, handle.keeping(rollout_of))
            work = sampler.start(job, [*self._mine.servers.values()], mine)
        handle.under_way = mine, work

    def watch(self, handle: VllmGenerationHandle, enough: Enough, stop: Callable[[], bool]) -> bool:
        """Waits until enough responses are complete, and notes them; returns whether the round continues."""
        assert handle.under_way is not None
        mine, work = handle.under_way

        def look() -> Seen:
            return Seen() if work is None else Seen.of(mine, is_over=work.done())

        self._progress.wait(
            None if work is None else look, lambda complete: enough(handle.complete | complete), should_go=stop
        )
        own, asked = look(), stop()
        parts = everyones((own, asked))
        self._progress.forget()
        seen, asked = Seen.joined(part for part, _ in parts), any(each for _, each in parts)
        handle.own |= {i: mine.sampled[i] for i in own.complete}
        handle.complete |= seen.complete
        if (seen.has_failed or asked) and not seen.is_over:
            self._queue.cancel()
        return not (seen.has_failed or asked or seen.is_over)

    def take(self, handle: VllmGenerationHandle, should_cancel: Callable[[], bool] | None) -> RoundSummary:
        """Waits for a round's end, notes its responses, returns its summary; ServerRefused if a server refused."""
        mine, found = self._end(handle, should_cancel)
        handle.own |= mine.sampled
        handle.complete |= found.sampled
        handle.busy_s |= found.busy_s
        handle.note_served(found.busy_s)
        if found.error is not None:
            raise ServerRefused(found.error)
        return found

    def cut(self, handle: VllmGenerationHandle) -> tuple[RoundSummary, dict[int, Response]]:
        """Stops the round now; returns its summary and the partial responses of this rank."""
        assert handle.under_way is not None
        mine, work = handle.under_way
        if work is not None:
            assert self._sampler is not None
            self._sampler.cut(mine)
        return self.take(handle, None), mine.cut

    def _end(
        self, handle: VllmGenerationHandle, should_cancel: Callable[[], bool] | None
    ) -> tuple[Round, RoundSummary]:
        """Waits for the round of all controllers; returns (this rank's result, the summary of all)."""
        assert handle.under_way is not None
        (mine, work), handle.under_way = handle.under_way, None
        cancelled = self._wait(work, should_cancel)
        found = RoundSummary.joined(everyones(RoundSummary.of(mine, cancelled)))
        self._queue.close()
        return mine, found

    def _wait(self, work: Future | None, should_cancel: Callable[[], bool] | None) -> bool:
        """Waits for all controllers; returns whether a cancellation ended this rank's part.

        Any rank on which `should_cancel` returns True tells the controllers; ranks may differ in what it returns.
        """
        cancelled, sampler = False, self._sampler
        while work is not None and not work.done():
            assert sampler is not None
            try:
                work.result(CANCEL_CHECK_S)
            except FutureTimeout:
                cancelled = cancelled or self._queue.is_cancelled() or (should_cancel is not None and should_cancel())
                if cancelled:
                    self._queue.cancel()
                    sampler.stop()
        if work is not None:
            work.result()  # raises errors of this program
        self._queue.finish()
        while not self._queue.wait_for_all(datetime.timedelta(seconds=2)):
            if should_cancel is not None and should_cancel():
                self._queue.cancel()
        return cancelled

    def given(
        self, handle: VllmGenerationHandle, first_tokens: dict[int, Response] | None = None
    ) -> dict[int, Rollout]:
        """Returns all ranks' complete responses not yet returned, and partial ones: `first_tokens` has this rank's."""
        is_first = not handle.given
        found = self.shared(handle, handle.new() | (first_tokens or {}))
        handle.given |= {i for i, one in found.items() if one.finish_reason is not None}
        if is_first:
            found |= handle.done
            handle.given |= handle.done.keys()
        return found

    def shared(self, handle: VllmGenerationHandle, own: dict[int, Response]) -> dict[int, Rollout]:
        """Returns the rollouts of all controllers' responses, equal on every rank; views of the exchanged arrays.

        The length estimate learns from the whole ones.
        """
        shared = self._exchange.share({i: response.columns() for i, response in own.items()})
        found = {i: rollout_of(handle.requests[i], Response.of(columns)) for i, columns in shared.items()}
        whole = {i: len(rollout.response_ids) for i, rollout in found.items() if _is_whole(handle, i, rollout)}
        self.lengths.learn(handle.requests, whole)
        return found


def rollout_of(request: Request, response: Response) -> Rollout:
    assert response.versions is not None and len(response.versions) == 1  # `AnswerCheck` refuses others
    recorded = {"logprobs": response.logprobs, "weight_versions": response.versions}
    return request.answered(response.ids, finished=response.finished, cut=response.cut, **recorded)


def _is_whole(handle: VllmGenerationHandle, index: int, rollout: Rollout) -> bool:
    """Returns whether a response is whole: neither cut, nor only a requested part of one."""
    if rollout.finish_reason != "length":
        return rollout.finish_reason is not None
    request = handle.requests[index]
    sampling, _ = request.sampled or (handle.sampling, index)
    tokens = request.begun + len(rollout.response_ids)
    return tokens == sampling.max_new_tokens or rollout.length == handle.task.max_positions
