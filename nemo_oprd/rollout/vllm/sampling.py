"""One controller's part of a generation: requests go to its servers as fast as these finish others."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from nemo_oprd.rollout.engine import Request, SamplingParams
from nemo_oprd.rollout.vllm.client import Client, ConnectionBroken
from nemo_oprd.rollout.vllm.server import Server, ServerDied, ServerRefused

GENERATE = "/inference/v1/generate"
# of a request whose connection broke although its server was well
REPETITIONS = 3


@dataclass(frozen=True)
class Sampled:
    """One response: ids, their log-probabilities under the distribution sampled from, and how it ended."""

    ids: list[int]
    logprobs: list[float]
    finished: bool


@dataclass
class Round:
    """What a controller brings home; also while the round is under way.

    `stop` is set to end the round; requests under way are given up and their connections closed.
    """

    sampled: dict[int, Sampled] = field(default_factory=dict)  # by the index of the request
    died: dict[int, str] = field(default_factory=dict)  # per server, why
    error: str | None = None  # what makes further sampling pointless
    busy_s: dict[int, float] = field(default_factory=dict)  # per server, the seconds until its last response
    stop: asyncio.Event = field(default_factory=asyncio.Event)

    def portable(self) -> Round:
        """A copy that can be sent to other ranks."""
        return Round(self.sampled, self.died, self.error, self.busy_s, None)  # type: ignore[arg-type]


def joined(parts: list[Round]) -> Round:
    """What several controllers bring home together."""
    return Round(
        {i: sampled for part in parts for i, sampled in part.sampled.items()},
        {number: why for part in parts for number, why in part.died.items()},
        next((part.error for part in parts if part.error is not None), None),
        {number: seconds for part in parts for number, seconds in part.busy_s.items()},
    )


@dataclass(frozen=True)
class Task:
    """What a round samples with: the requests of the call, and the limits that all responses share."""

    requests: Sequence[Request]
    sampling: SamplingParams
    max_positions: int
    eos_ids: tuple[int, ...]
    known_ids: int
    timeout_s: float

    def body(self, index: int) -> dict[str, Any]:
        """The request of one response. Unknown sampling parameters are ignored by the server without a word."""
        prompt, sampling = self.requests[index].prompt_ids, self.sampling
        return {
            "token_ids": prompt,
            "sampling_params": {
                "max_tokens": min(sampling.max_new_tokens, self.max_positions - len(prompt)),
                "temperature": sampling.temperature,
                "top_p": sampling.top_p if sampling.temperature else 1.0,
                "seed": seed_of(sampling, index),
                "logprobs": 0,  # of the sampled id only
                # the ids that end a response are ours, whatever generation_config.json says
                "ignore_eos": True,
                "stop_token_ids": list(self.eos_ids),
                "detokenize": False,
            },
        }

    def check(self, index: int, answer: dict[str, Any], version: str, server: str) -> Sampled:
        """The response in a server's answer.

        Raises:
            ServerDied: the server gave the response up, as one does that somebody ends.
            ServerRefused: it was not sampled from the current weights and the known ids alone, or says too little.
        """
        try:
            choice = answer["choices"][0]
            ids, spans, reason = choice["token_ids"], choice["weight_versions"], choice["finish_reason"]
            logprobs = [float(token["logprob"]) for token in choice["logprobs"]["content"]]
        except (KeyError, IndexError, TypeError) as error:
            raise ServerRefused(
                f"{server} answered response {index} in another form ({error!r}); expected ids, their log-"
                "probabilities and the version of the weights: does it run the vLLM of scripts/setup_vllm.sh?"
            ) from error
        if reason not in ("stop", "length"):
            raise ServerDied(f"{server} gave response {index} up ({reason})")
        if [(span["version"], span["start"], span["end"]) for span in spans] != [(version, 0, len(ids))]:
            found = ", ".join(f"{span['version']} (tokens {span['start']} to {span['end']})" for span in spans)
            raise ServerRefused(
                f"{server} sampled response {index} from the weights {found or 'of no version'}, expected {version} "
                "for all tokens: does somebody else use or update this server?"
            )
        most = self.body(index)["sampling_params"]["max_tokens"]
        if reason == "length" and len(ids) < most:
            raise ServerRefused(
                f"{server} ended response {index} after {len(ids)} tokens, expected up to {most}: remove "
                "--max-model-len from its flags, or lower rollout.max_new_tokens"
            )
        outside = [i for i in ids if not 0 <= i < self.known_ids]
        if outside or len(logprobs) != len(ids) or not ids or not all(map(math.isfinite, logprobs)):
            raise ServerRefused(
                f"{server} answered response {index} with {len(ids)} ids, {len(logprobs)} log-probabilities and the "
                f"ids {outside[:3]} outside 0..{self.known_ids - 1}; expected ids inside, and for each a finite one"
            )
        return Sampled(ids, logprobs, reason == "stop")


def seed_of(sampling: SamplingParams, index: int) -> int:
    """The seed of a response; 32 bits, of which every one depends on all of the key."""
    return int(np.random.SeedSequence([*sampling.key, index]).generate_state(1)[0])


@dataclass
class Sampling:
    """One round of a controller: `run` samples until nothing is left to claim, or no server is left.

    Attributes:
        claim: the index of the next request; None if there are no more. Other controllers claim from the same queue.
        slots: the most requests that a server gets at a time, so that no server takes what another one has room for.
        result: where the responses go.
        keep: called with every response, by the index of its request.
    """

    client: Client
    task: Task
    version: str
    claim: Callable[[], int | None]
    slots: int
    result: Round
    keep: Callable[[int, Sampled], None] | None = None
    _again: list[int] = field(default_factory=list)  # claimed by a server that died
    _started: float = field(default_factory=time.monotonic)

    async def run(self, servers: list[Server]) -> None:
        """Samples on the servers that have the weights."""
        alive = [server for server in servers if server.pushed == self.version]
        while alive and not self.result.stop.is_set():
            await asyncio.gather(*(self._serve(server) for server in alive))
            alive = [server for server in alive if server.number not in self.result.died]
            if not self._again:
                return

    async def _serve(self, server: Server) -> None:
        """Keeps a server busy until there is nothing left to claim, it dies, or the round is stopped."""
        watch = asyncio.create_task(self.client.watch(server))
        stop = asyncio.create_task(self.result.stop.wait())
        slots = asyncio.gather(*(self._slot(server) for _ in range(min(self.slots, server.in_flight))))
        waiting: list[asyncio.Future] = [slots, watch, stop]
        try:
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            if slots.done():
                slots.result()  # raises what went wrong in our own code
            if watch.done():
                self.result.died.setdefault(server.number, watch.result())
        finally:
            for unfinished in waiting:
                unfinished.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)

    async def _slot(self, server: Server) -> None:
        """One request after the other."""
        result = self.result
        while not result.stop.is_set() and server.number not in result.died:
            index = self._again.pop() if self._again else self.claim()
            if index is None:
                return
            try:
                answer = await self._ask(server, self.task.body(index))
                sampled = self.task.check(index, answer, self.version, server.name)
                if self.keep is not None:
                    self.keep(index, sampled)
                result.sampled[index] = sampled
                result.busy_s[server.number] = time.monotonic() - self._started
            except ServerDied as death:
                self._again.append(index)
                result.died.setdefault(server.number, str(death))
            except ServerRefused as refusal:
                result.error = result.error or str(refusal)
                result.stop.set()
            except asyncio.CancelledError:
                self._again.append(index)
                raise

    async def _ask(self, server: Server, body: dict[str, Any]) -> dict[str, Any]:
        """The answer to one request, which is repeated if its connection broke and the server is well."""
        for _ in range(REPETITIONS):
            try:
                return await self.client.post(server, GENERATE, body, timeout=self.task.timeout_s)
            except ConnectionBroken:
                if not await self.client.stays_healthy(server):
                    raise
        return await self.client.post(server, GENERATE, body, timeout=self.task.timeout_s)
