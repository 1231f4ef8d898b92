"""The rounds of a call: all controllers sample together until no request is left to claim, or a failure ends the round.

Every rank has one `Rounds` and calls it alike. A round begins without a collective, and continues while the trainer
computes. The ranks take its responses when it is over, or before: `watch` takes complete ones, `cut` ends the round.
"""

from __future__ import annotations

import datetime
import logging
import time
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout

import torch.distributed as dist

from nemo_oprd.batch.types import Rollout
from nemo_oprd.config.rollout_schema import VllmConfig
from nemo_oprd.megatron.parallel import everyones
from nemo_oprd.rollout.engine import Enough, Request, Weights
from nemo_oprd.rollout.exchange import Exchange
from nemo_oprd.rollout.response import Response
from nemo_oprd.runtime.messages import ON_STDOUT
from nemo_oprd.vllm.client_process import Job, Round, RoundSummary
from nemo_oprd.vllm.controller import Controlled
from nemo_oprd.vllm.pending_call import VllmTicket
from nemo_oprd.vllm.placement import Place
from nemo_oprd.vllm.request_queue import LengthEstimate, Progress, RequestQueue, Seen
from nemo_oprd.vllm.server import ServerRefused

logger = logging.getLogger(__name__)

# seconds between two checks of a waiting rank whether it should cancel
CANCEL_CHECK_S = 0.5


class Rounds:
    """The rounds of one engine. `mine`: the servers of this rank; `places`: those of the run."""

    def __init__(self, mine: Controlled, places: list[Place], settings: VllmConfig) -> None:
        controllers = {place.controller for place in places}
        self._mine, self._settings, self._servers = mine, settings, len(places)
        self._queue = RequestQueue(mine.client is not None, len(controllers))
        self._exchange = Exchange(controllers, None if mine.folder is None else mine.folder.path)
        self._progress = Progress(controllers)
        self._lost_clients = 0
        self.lengths = LengthEstimate()

    def begin(self, ticket: VllmTicket, version: str, weights: Weights) -> None:
        """Lets the controllers claim a ticket's missing requests; `weights`, of this version, are the current ones."""
        order = self.lengths.longest_first(ticket.requests, ticket.missing())
        if not order:
            return
        claim, sampler = self._queue.open(order), self._mine.sampler
        mine, work, ticket.round_began = Round(), None, time.time()
        if sampler is not None:
            slots = -(-len(order) // self._servers)
            job = Job(ticket.task, version, weights.steps, claim, slots, ticket.keeping(rollout_of))
            work = sampler.start(job, [*self._mine.servers.values()], mine)
        ticket.under_way = mine, work

    def watch(self, ticket: VllmTicket, enough: Enough, stop: Callable[[], bool]) -> bool:
        """Waits until enough responses are complete, and notes them; returns whether the round continues."""
        assert ticket.under_way is not None
        mine, work = ticket.under_way

        def look() -> Seen:
            self._mine.report_deaths()
            return Seen() if work is None else Seen.of(mine, is_over=work.done())

        self._progress.wait(
            None if work is None else look, lambda complete: enough(ticket.complete | complete), should_go=stop
        )
        own, asked = look(), stop()
        parts = everyones((own, asked))
        self._progress.forget()
        seen, asked = Seen.joined(part for part, _ in parts), any(each for _, each in parts)
        ticket.own |= {i: mine.sampled[i] for i in own.complete}
        ticket.complete |= seen.complete
        if (seen.has_failed or asked) and not seen.is_over:
            self._queue.cancel()
        return not (seen.has_failed or asked or seen.is_over)

    def take(self, ticket: VllmTicket, should_cancel: Callable[[], bool] | None) -> RoundSummary:
        """Waits for a round and notes its responses; ServerRefused if a server refused something."""
        mine, found = self._end(ticket, should_cancel)
        ticket.own |= mine.sampled
        ticket.complete |= found.sampled
        ticket.busy_s |= found.busy_s
        ticket.note_served(found.served_s)
        if found.error is not None:
            raise ServerRefused(found.error)
        self._lost_clients += len(found.lost)
        _check_clients(self._lost_clients, found.lost, self._settings.max_restarts)
        return found

    def cut(self, ticket: VllmTicket) -> tuple[RoundSummary, dict[int, Response]]:
        """Stops the round now; returns its summary and the partial responses of this rank."""
        assert ticket.under_way is not None
        mine, work = ticket.under_way
        if work is not None:
            assert self._mine.sampler is not None
            self._mine.sampler.cut(mine)
        return self.take(ticket, None), mine.cut

    def _end(self, ticket: VllmTicket, should_cancel: Callable[[], bool] | None) -> tuple[Round, RoundSummary]:
        """Waits for the round of all controllers; returns (this rank's result, the summary of all)."""
        assert ticket.under_way is not None
        (mine, work), ticket.under_way = ticket.under_way, None
        cancelled = self._wait(work, should_cancel)
        found = RoundSummary.joined(everyones(RoundSummary.of(mine, cancelled)))
        self._queue.close()
        return mine, found

    def _wait(self, work: Future | None, should_cancel: Callable[[], bool] | None) -> bool:
        """Waits for all controllers; returns whether this rank was asked to cancel before its part was done.

        The first rank that is asked to stop tells the controllers; the ranks' answers may differ.
        """
        cancelled, sampler = False, self._mine.sampler
        while work is not None and not work.done():
            assert sampler is not None
            try:
                work.result(CANCEL_CHECK_S)
            except FutureTimeout:
                cancelled = cancelled or self._queue.is_cancelled() or (should_cancel is not None and should_cancel())
                if cancelled:
                    self._queue.cancel()
                    sampler.stop()
                self._mine.report_deaths()
        if work is not None:
            work.result()  # raises errors of this program
        self._queue.finish()
        while not self._queue.wait_for_all(datetime.timedelta(seconds=2)):
            if should_cancel is not None and should_cancel():
                self._queue.cancel()
        return cancelled

    def given(self, ticket: VllmTicket, first_tokens: dict[int, Response] | None = None) -> dict[int, Rollout]:
        """Returns complete responses not returned before, with the partial responses of this rank in `first_tokens`."""
        is_first = not ticket.given
        found = self.shared(ticket, ticket.new() | (first_tokens or {}))
        ticket.given |= {i for i, one in found.items() if one.finish_reason is not None}
        if is_first:
            found |= ticket.done
            ticket.given |= ticket.done.keys()
        return found

    def shared(self, ticket: VllmTicket, own: dict[int, Response]) -> dict[int, Rollout]:
        """Returns the rollouts of all controllers' responses, equal on every rank; views of the exchanged arrays.

        The queue learns how long whole responses are.
        """
        shared = self._exchange.share({i: response.columns() for i, response in own.items()})
        found = {i: rollout_of(ticket.requests[i], Response.of(columns)) for i, columns in shared.items()}
        whole = {i: len(rollout.response_ids) for i, rollout in found.items() if _is_whole(ticket, i, rollout)}
        self.lengths.learn(ticket.requests, whole)
        return found


def _check_clients(count: int, lost: list[str], most: int) -> None:
    """Reports the client processes that a round has `lost`; ServerRefused beyond `most` in all (`count`)."""
    for how in lost:
        said = f"the client of the vLLM servers ({how}) is started again, and what it lacked is sampled again"
        if dist.get_rank() == 0:
            logger.warning(said, extra=ON_STDOUT)
    if count > most:
        raise ServerRefused(
            f"the client of the vLLM servers ended {count} times, the last time: {lost[-1]}; expected at most {most} "
            "times (rollout.vllm.max_restarts): see whether the machine runs out of memory"
        )


def rollout_of(request: Request, response: Response) -> Rollout:
    assert response.versions is not None and len(response.versions) == 1  # `client_main.py` refuses others
    recorded = {"logprobs": response.logprobs, "weight_versions": response.versions}
    return request.answered(response.ids, finished=response.finished, cut=response.cut, **recorded)


def _is_whole(ticket: VllmTicket, index: int, rollout: Rollout) -> bool:
    """Whether a response has ended, and not only the requested part of it."""
    if rollout.finish_reason != "length":
        return rollout.finish_reason is not None
    request = ticket.requests[index]
    sampling, _ = request.sampled or (ticket.sampling, index)
    tokens = request.begun + len(rollout.response_ids)
    return tokens == sampling.max_new_tokens or rollout.length == ticket.task.max_positions
