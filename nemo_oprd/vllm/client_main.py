"""The client process of a controller: sends requests to its servers, parses and checks the answers, reports to it.

`python -m nemo_oprd.vllm.client_main DESCRIPTOR`, the descriptor of a socket to the controller (`client_process.py`).
It is a process of its own because parsing the answers of a step takes seconds to minutes of Python, which would delay
the trainer's rank. It imports neither torch nor Megatron, and ends when the controller ends, however that happens.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import socket
import sys
import time
import traceback
from collections import deque
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import TypeAdapter, ValidationError
from typing_extensions import TypedDict

from nemo_oprd.data.token_ids import TokenIds
from nemo_oprd.rollout.response import Response
from nemo_oprd.vllm.channel import Channel, SegmentWriter
from nemo_oprd.vllm.client import Client
from nemo_oprd.vllm.sampling import Claimed, RequestRound
from nemo_oprd.vllm.server import Server, ServerDied, ServerRefused, last_words

# Parsing of answers: a server's answer -> the ids and log-probabilities of a response, or the reason of a refusal.
#
# Answers have some 150 bytes per token, of which a few are needed. Compiled code of pydantic makes Python objects of
# those alone, in a third of the time of `json.loads`.


# how far rounding may lift the logarithm of a probability above 0
LOGPROB_ROUNDING = 1e-3
# vLLM's answer in place of NaN, of minus infinity and of a log-probability that it does not know
NO_LOGPROB = -9999.0


class _Token(TypedDict):
    logprob: float


class _Logprobs(TypedDict):
    content: list[_Token]


class _Span(TypedDict):
    version: str | None
    start: int
    end: int


class _Choice(TypedDict):
    token_ids: list[int]
    weight_versions: list[_Span]
    finish_reason: str | None
    logprobs: _Logprobs


class _Answer(TypedDict):
    choices: list[_Choice]


_ANSWER = TypeAdapter(_Answer)


@dataclass
class AnswerCheck:
    """Checks the responses of a round: the version of the weights, and the ids that may be sampled.

    `may_be_cut`: the controller has cut the round, so that a response may have its first tokens only, or none.
    """

    version: str
    known_ids: TokenIds
    may_be_cut: bool = False

    def read(self, index: int, answer: bytes, most: int, server: str) -> Response:
        """Returns the response in a server's answer to request `index`, which asked for at most `most` tokens.

        The response has no ids if the round was cut before the first one.

        Raises:
            ServerDied: the server aborted the request, as it does while it shuts down.
            ServerRefused: other weights or unknown ids were sampled, or the answer lacks a field.
        """
        try:
            (choice,) = _ANSWER.validate_json(answer, strict=True)["choices"]
        except ValueError as error:
            raise ServerRefused(
                f"{server} answered response {index} in another form ({_first_error(error)}); expected ids, their log-"
                "probabilities and the version of the weights: does it run the vLLM of scripts/setup_vllm.sh?"
            ) from error
        ids, spans, reason = choice["token_ids"], choice["weight_versions"], choice["finish_reason"]
        cut = reason == "abort" and self.may_be_cut
        if not cut and reason not in ("stop", "length"):
            raise ServerDied(f"{server} gave response {index} up ({reason})")
        if cut and not ids:
            return Response(np.zeros(0, np.int32), finished=False, cut=True)
        if [(span["version"], span["start"], span["end"]) for span in spans] != [(self.version, 0, len(ids))]:
            found = ", ".join(f"{span['version']} (tokens {span['start']} to {span['end']})" for span in spans)
            raise ServerRefused(
                f"{server} sampled response {index} from the weights {found or 'of no version'}, expected "
                f"{self.version} for all tokens: does somebody else use or update this server?"
            )
        if reason == "length" and len(ids) < most:
            raise ServerRefused(
                f"{server} ended response {index} after {len(ids)} tokens, expected up to {most}: remove "
                "--max-model-len from its flags, or lower rollout.max_new_tokens"
            )
        logprobs = np.array([token["logprob"] for token in choice["logprobs"]["content"]], np.float32)
        return Response(self._ids(index, ids, logprobs, server), reason == "stop", logprobs, cut=cut)

    def _ids(self, index: int, ids: list[int], logprobs: np.ndarray, server: str) -> np.ndarray:
        """Returns the ids as an array; raises unless they and their log-probabilities can be those of a response."""
        outside = self.known_ids.outside(ids)
        if outside or len(logprobs) != len(ids) or not ids:
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
        return np.array(ids, np.int32)


def _first_error(error: ValueError) -> str:
    if not isinstance(error, ValidationError):
        return str(error)
    first = error.errors(include_url=False, include_input=False)[0]
    return f"{'.'.join(map(str, first['loc'])) or 'the answer'}: {first['msg']}"


_PR_SET_PDEATHSIG = 1


@dataclass
class OthersServer(Server):
    """A server that the controller has started, or whose address it has.

    Attributes:
        label: its name for messages.
        log: its log, if it is on this machine.
    """

    label: str = ""
    log: Path | None = None

    def __post_init__(self) -> None:
        """Converts the paths, which arrive as text."""
        self.socket = None if self.socket is None else Path(self.socket)
        self.log = None if self.log is None else Path(self.log)

    @property
    def name(self) -> str:
        """The name of the server in messages."""
        return self.label

    def last_words(self) -> str:
        """The last line of its log that names an error."""
        return "" if self.log is None else last_words(self.log)


class ToldRound:
    """One round, and the messages about it to the controller: responses, claims, and the result at the end.

    One message carries all events of one turn of the event loop: a round begins with a claim for every slot, and
    servers often finish several responses at a time.
    """

    def __init__(self, channel: Channel, client: Client, message: dict[str, Any]) -> None:
        """Reads the round from `message`, which `Job.message` has made."""
        self._channel, self._waited_s = channel, time.monotonic() - message["asked"]
        self._writer = SegmentWriter(lambda file: channel.send({"kind": "segment"}, file))
        self._servers: list[Server] = [OthersServer(**server) for server in message["servers"]]
        self._check = AnswerCheck(message["version"], TokenIds(**message["known_ids"]))
        self.work = RequestRound(
            client, self._check, message["timeout_s"], self._claim, message["slots"], self._deliver
        )
        self._responses: list[dict[str, Any]] = []  # not yet sent, like `_claims`
        self._claims: list[asyncio.Future[Claimed | None]] = []
        self._told: deque[list[asyncio.Future[Claimed | None]]] = deque()  # the claims of each message
        self._will_tell = self._is_exhausted = False

    async def run(self) -> None:
        """Samples until the round ends; sends the result."""
        work = self.work
        try:
            await work.run(self._servers)
        finally:
            self._writer.close()
        self._tell()
        self._channel.send({"kind": "over", "died": [*work.died.items()], "error": work.error,
                            "busy_s": [*work.busy_s.items()], "waited_s": self._waited_s})  # fmt: skip

    async def cut(self) -> None:
        """Ends the round; servers answer unfinished requests with their tokens so far."""
        self._check.may_be_cut = True
        await self.work.cut()

    def _deliver(self, index: int, response: Response, server: int) -> None:
        if not len(response.ids):  # the round was cut before its first token
            return
        assert response.logprobs is not None
        segment, offset = self._writer.write(response.ids, response.logprobs)
        place = {"segment": segment, "offset": offset, "tokens": len(response.ids)}
        how = {"finished": response.finished, "cut": response.cut}
        self._responses.append({"index": index, "server": server, **how, **place})
        self._tell_soon()

    async def _claim(self) -> Claimed | None:
        if self._is_exhausted:
            return None
        future = asyncio.get_running_loop().create_future()
        self._claims.append(future)
        self._tell_soon()
        return await future

    def _tell_soon(self) -> None:
        if not self._will_tell:
            self._will_tell = True
            asyncio.get_running_loop().call_soon(self._tell)

    def _tell(self) -> None:
        self._will_tell = False
        claims = [future for future in self._claims if not future.cancelled()]
        if claims:
            self._told.append(claims)
        if claims or self._responses:
            self._channel.send({"kind": "news", "claims": len(claims), "responses": self._responses})
        self._claims, self._responses = [], []

    def claimed(self, requests: list[Claimed]) -> None:
        """Takes the controller's requests for the claims of a message; fewer requests than claims are the last ones."""
        futures = self._told.popleft()
        self._is_exhausted = len(requests) < len(futures)
        for future, request in zip_longest(futures, requests):
            if not future.cancelled():
                future.set_result(request)
            elif request is not None:  # its server has died meanwhile
                self.work.give_back(request)


class ClientMain:
    """Executes the controller's messages. Everything but `take` runs in the thread of the client's event loop."""

    def __init__(self, channel: Channel) -> None:
        self._channel, self._client = channel, Client()
        self._round: ToldRound | None = None

    def take(self, message: dict[str, Any]) -> None:
        """Takes a message of the controller: sample, claimed, died, cut or stop."""
        if message["kind"] == "sample":
            self._client.start(self._sample(message))
        elif message["kind"] == "cut":
            self._client.start(self._cut())
        else:
            self._client.call(lambda: getattr(self, f"_{message['kind']}")(message))

    async def _sample(self, message: dict[str, Any]) -> None:
        try:
            self._round = ToldRound(self._channel, self._client, message)
            await self._round.run()
        except BaseException:
            self._channel.send({"kind": "failed", "traceback": traceback.format_exc()})
            raise
        finally:
            self._round = None

    async def _cut(self) -> None:
        if self._round is not None:
            await self._round.cut()

    def _claimed(self, message: dict[str, Any]) -> None:
        if self._round is not None:
            self._round.claimed([(index, body) for index, body in message["requests"]])

    def _died(self, message: dict[str, Any]) -> None:
        if self._round is not None:
            self._round.work.note_death(message["server"], message["why"])

    def _stop(self, _: dict[str, Any]) -> None:
        if self._round is not None:
            self._round.work.stopped.set()


def _end_with_parent(parent: int) -> None:
    """Makes the kernel end this process when its parent has ended; the closed channel ends it, too."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(0)


def main() -> None:
    """Runs the client process; see the module's docstring."""
    descriptor, parent = map(int, sys.argv[1:])
    _end_with_parent(parent)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the controller decides when the run ends
    channel = Channel(socket.socket(fileno=descriptor))
    process = ClientMain(channel)
    while (message := channel.receive()) is not None:
        process.take(message)
    os._exit(0)  # drops answers still to come: no request needs them


if __name__ == "__main__":
    main()
