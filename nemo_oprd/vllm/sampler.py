"""The controller's side of sampling: request bodies and seeds, checks of answers, rounds and their summaries.

The servers answer with a few bytes per token (`worker/nemo_oprd_answers.py`), so a thread with an event loop takes them
while the trainer's rank computes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from queue import SimpleQueue
from typing import Any

import numpy as np

from nemo_oprd.data.token_ids import TokenIds
from nemo_oprd.rollout.engine import Request, SamplingParams
from nemo_oprd.rollout.response import Response
from nemo_oprd.runtime.background import BackgroundWriter
from nemo_oprd.vllm.client import Client
from nemo_oprd.vllm.request_round import Claimed, RequestRound
from nemo_oprd.vllm.server_lifecycle import Server, ServerDied, ServerRefused
from nemo_oprd.vllm.worker.nemo_oprd_answers import PACKED, unpack

# The requests of a call to the engine: one HTTP request per response.


@dataclass(frozen=True)
class Task:
    """The requests of a call to the engine, and the limits that all responses share."""

    requests: Sequence[Request]
    sampling: SamplingParams
    max_positions: int
    eos_ids: tuple[int, ...]
    known_ids: TokenIds
    timeout_s: float

    def body(self, index: int) -> dict[str, Any]:
        """Returns the body of one response's HTTP request. The server silently ignores unknown sampling parameters."""
        request = self.requests[index]
        sampling, number = request.sampled or (self.sampling, index)
        return {
            "token_ids": [*map(int, request.prompt_ids)],
            "sampling_params": {
                "max_tokens": sampling.limit_of(request, self.max_positions),
                "temperature": sampling.temperature,
                "top_p": sampling.top_p if sampling.temperature else 1.0,
                "seed": seed_of(sampling.key_of(request, number)),
                "logprobs": 0,  # of the sampled id only
                # our ids end a response, whatever generation_config.json says
                "ignore_eos": True,
                "stop_token_ids": list(self.eos_ids),
                "detokenize": False,
            },
        }


def seed_of(key: tuple[int, ...]) -> int:
    """Derives the seed of a response, or of a part; every one of its 32 bits depends on the whole key."""
    return int(np.random.SeedSequence(key).generate_state(1)[0])


@dataclass
class Round:
    """Result of a controller's round, which grows while the round is under way."""

    sampled: dict[int, Response] = field(default_factory=dict)  # by the index of the request
    cut: dict[int, Response] = field(default_factory=dict)  # the first tokens of responses, when the round was cut
    died: dict[int, str] = field(default_factory=dict)  # per server, why
    error: str | None = None  # an error that makes further sampling pointless
    began: float = field(default_factory=time.monotonic, compare=False)
    busy_s: dict[int, float] = field(default_factory=dict)  # per server, the seconds until its last response
    is_cut: bool = False  # see `Sampler.cut`


# how far rounding may lift the logarithm of a probability above 0
LOGPROB_ROUNDING = 1e-3
# vLLM's answer in place of NaN, of minus infinity and of a log-probability that it does not know
NO_LOGPROB = -9999.0


@dataclass
class AnswerCheck:
    """Checks the responses of a round: the version of the weights, and the ids that may be sampled.

    `result`: the round's; once the controller has cut the round, a response may have its first tokens only, or none.
    """

    version: str
    known_ids: TokenIds
    result: Round

    def read(self, index: int, answer: bytes, most: int, server: str) -> Response:
        """Returns the response in a server's answer to request `index`, which asked for at most `most` tokens.

        The response has no ids if the round was cut before the first one. Its arrays are views of `answer`.

        Raises:
            ServerDied: the server aborted the request, as it does while it shuts down.
            ServerRefused: `pack` did not make the answer, or its weights, length, ids or log-probabilities are wrong.
        """
        try:
            head, ids_bytes, logprobs_bytes = unpack(answer)
            ids, logprobs = np.frombuffer(ids_bytes, np.int32), np.frombuffer(logprobs_bytes, np.float32)
            reason, spans = head["finish_reason"], [(version, start, end) for version, start, end in head["spans"]]
        except (ValueError, KeyError, TypeError) as error:
            raise ServerRefused(
                f"{server} answered response {index} in another form ({error!r}); expected ids and log-probabilities "
                "as this version of nemo_oprd packs them: start the server with the same version"
            ) from error
        cut = reason == "abort" and self.result.is_cut
        if not cut and reason not in ("stop", "length"):
            raise ServerDied(f"{server} gave response {index} up ({reason})")
        if cut and not len(ids):
            return Response(ids, finished=False, cut=True)
        if spans != [(self.version, 0, len(ids))]:
            found = ", ".join(f"{version} (tokens {start} to {end})" for version, start, end in spans)
            raise ServerRefused(
                f"{server} sampled response {index} from the weights {found or 'of no version'}, expected "
                f"{self.version} for all tokens: does somebody else use or update this server?"
            )
        if reason == "length" and len(ids) < most:
            raise ServerRefused(
                f"{server} ended response {index} after {len(ids)} tokens, expected up to {most}: remove "
                "--max-model-len from its flags, or lower rollout.max_new_tokens"
            )
        self._check_values(index, ids, logprobs, server)
        return Response(ids, reason == "stop", logprobs, cut=cut)

    def _check_values(self, index: int, ids: np.ndarray, logprobs: np.ndarray, server: str) -> None:
        """Raises ServerRefused unless the ids and their log-probabilities can be those of a response."""
        outside = self.known_ids.outside(ids)
        if outside or len(logprobs) != len(ids) or not len(ids):
            raise ServerRefused(
                f"{server} answered response {index} with {len(ids)} ids, {len(logprobs)} log-probabilities and the "
                f"ids {outside[:3]} outside {self.known_ids}; expected ids inside, and a log-probability of each"
            )
        wrong = np.flatnonzero(~((logprobs > NO_LOGPROB) & (logprobs <= LOGPROB_ROUNDING)))  # NaN compares as false
        if len(wrong):
            raise ServerRefused(
                f"{server} answered response {index} with the log-probability {logprobs[wrong[0]]:g} of token "
                f"{wrong[0]}; expected a finite number of at most 0 ({NO_LOGPROB:g} stands for minus infinity or NaN): "
                "look for NaN in the weights or in the server's kernels (rollout.vllm.flags)"
            )


@dataclass
class RoundSummary:
    """Summary of a round for other ranks: a `Round` with the indices of responses instead of the responses."""

    sampled: set[int]
    died: dict[int, str]
    error: str | None
    busy_s: dict[int, float]
    cancelled: bool

    @staticmethod
    def of(mine: Round, cancelled: bool) -> RoundSummary:
        """Summarises one rank's round; `cancelled`: whether a cancellation ended it."""
        return RoundSummary({*mine.sampled}, mine.died, mine.error, mine.busy_s, cancelled)

    @staticmethod
    def joined(parts: list[RoundSummary]) -> RoundSummary:
        """Merges the summaries of several ranks."""
        return RoundSummary(
            {i for part in parts for i in part.sampled},
            {number: why for part in parts for number, why in part.died.items()},
            error=next((part.error for part in parts if part.error is not None), None),
            busy_s={number: seconds for part in parts for number, seconds in part.busy_s.items()},
            cancelled=any(part.cancelled for part in parts),
        )


@dataclass(frozen=True)
class Job:
    """One round of a controller.

    Attributes:
        version: of the weights; servers with another version do not take part.
        step: optimizer steps behind these weights.
        claim: returns the index of the next request; None if none is left. Other controllers use the same queue.
        slots: the largest number of requests that a server gets at a time.
        keep: stores responses, by the index of their request; each counts once `keep` has returned.
    """

    task: Task
    version: str
    step: int
    claim: Callable[[], int | None]
    slots: int
    keep: Callable[[dict[int, Response]], None] | None = None


class Keeper:
    """Adds responses to `result` once `keep` has returned, in a thread, so that a slow disk delays nothing else.

    If `keep` fails, the thread calls `failed`, and the end of the context raises the error.
    """

    def __init__(
        self, keep: Callable[[dict[int, Response]], None] | None, result: Round, failed: Callable[[], None]
    ) -> None:
        self._keep, self._result, self._failed = keep, result, failed
        self._waiting = SimpleQueue[tuple[int, Response] | None]()  # None: there are no more
        self._writer = BackgroundWriter("the responses to keep")

    def __enter__(self) -> Keeper:
        if self._keep is not None:
            keep = self._keep
            self._writer.start(lambda: self._work(keep))
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Waits until all responses are stored; does not wait if the context raised an error."""
        self._waiting.put(None)
        if kind is None:
            self._writer.finish()
        else:
            self._writer.abandon()

    def add(self, index: int, response: Response) -> None:
        """Takes a response, by the index of its request."""
        if self._keep is None:
            self._result.sampled[index] = response
        else:
            self._waiting.put((index, response))

    def _work(self, keep: Callable[[dict[int, Response]], None]) -> None:
        try:
            is_over = False
            while not is_over:
                found = [self._waiting.get()]
                while not self._waiting.empty():  # no other thread takes from it
                    found.append(self._waiting.get())
                is_over, responses = found[-1] is None, dict(filter(None, found))
                if responses:
                    keep(responses)
                    self._result.sampled |= responses
        except BaseException:
            self._failed()
            raise


class Sampler:
    """Samples the rounds of a controller, one at a time, in the thread of its client's event loop.

    A thread of this object waits for the round, and another one calls `Job.keep`.
    """

    def __init__(self, client: Client) -> None:
        self._client, self._is_closed = client, False
        self._thread = ThreadPoolExecutor(1, "vllm-sampler")
        self._work: RequestRound[Response] | None = None  # of the round under way; only the event loop uses it

    def start(self, job: Job, servers: list[Server], result: Round) -> Future[None]:
        """Begins a round, which fills `result`; returns a future, which raises errors of this program only."""
        taking_part = [server for server in servers if server.pushed == job.version]
        return self._thread.submit(self._carry_out, job, taking_part, result)

    def stop(self) -> None:
        """Ends the round under way; the servers abort requests whose connections close."""

        def stop() -> None:
            if self._work is not None:
                self._work.stopped.set()

        self._client.call(stop)

    def cut(self, result: Round) -> None:
        """Ends the round of `result` now; its partial responses go to `Round.cut`."""
        result.is_cut = True  # before the call: perhaps the round's thread has not started the round yet

        async def cut() -> None:
            if self._work is not None:
                await self._work.cut()

        self._client.start(cut())

    def _carry_out(self, job: Job, servers: list[Server], result: Round) -> None:
        with Keeper(job.keep, result, self.stop) as keeper:
            self._client.run(self._sample(job, servers, result, keeper))

    async def _sample(self, job: Job, servers: list[Server], result: Round, keeper: Keeper) -> None:
        async def claim() -> Claimed | None:
            # not awaited, so that no cancelled wait loses a request; the store of several controllers answers at once
            index = job.claim()
            return None if index is None else (index, job.task.body(index))

        def deliver(index: int, response: Response, _: int) -> None:
            self._deliver(job, keeper, result, index, response)

        check = AnswerCheck(job.version, job.task.known_ids, result)
        limits = job.task.timeout_s, claim, job.slots
        work = RequestRound(self._client, check, *limits, deliver, path_of=lambda _: PACKED, began=result.began)
        self._work, work.is_cut = work, result.is_cut
        try:
            if not self._is_closed:
                await work.run(servers)
        finally:
            work.abandon()  # of no effect, unless an error of this program ends the round
            self._work = None
            result.died, result.error, result.busy_s = work.died, work.error, work.busy_s

    def _deliver(self, job: Job, keeper: Keeper, result: Round, index: int, response: Response) -> None:
        """Takes a response; a partial one is not stored, one that was cut before its first token is dropped."""
        if not len(response.ids):
            return
        versions = np.array([[job.step, 0, len(response.ids)]], np.int32)  # `AnswerCheck` has compared `Job.version`
        response = replace(response, versions=versions)
        if response.cut:
            result.cut[index] = response
        else:
            keeper.add(index, response)

    def close(self) -> None:
        """Ends the round under way, and the thread."""
        self._is_closed = True

        def abandon() -> None:
            if self._work is not None:
                self._work.abandon()

        self._client.call(abandon)
        self._thread.shutdown()
