"""The client process of a controller: talks to its servers, and reads and checks what they answer.

`python -m nemo_oprd.rollout.vllm.client_main DESCRIPTOR`: of a socket to the controller (`client_process.py`). It is a
process of its own because reading the answers of a step takes seconds to minutes of Python, which would hold up the
trainer's rank. It imports neither torch nor Megatron, and ends when the controller ends, however that happens.
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

from nemo_oprd.data.tokenization.token_ids import TokenIds
from nemo_oprd.rollout.response import Response
from nemo_oprd.rollout.vllm.answers import AnswerCheck
from nemo_oprd.rollout.vllm.channel import Channel
from nemo_oprd.rollout.vllm.client import Client
from nemo_oprd.rollout.vllm.sampling import Claimed, Sampling
from nemo_oprd.rollout.vllm.segments import SegmentWriter
from nemo_oprd.rollout.vllm.server import Server, last_words

_PR_SET_PDEATHSIG = 1


@dataclass
class OthersServer(Server):
    """A server that the controller has started, or has an address of.

    Attributes:
        label: its name for messages.
        log: its log, if it is on this machine.
    """

    label: str = ""
    log: Path | None = None

    def __post_init__(self) -> None:
        """Paths come as text."""
        self.socket = None if self.socket is None else Path(self.socket)
        self.log = None if self.log is None else Path(self.log)

    @property
    def name(self) -> str:
        """For messages."""
        return self.label

    def last_words(self) -> str:
        """The last line of its log that names an error."""
        return "" if self.log is None else last_words(self.log)


class ToldRound:
    """One round, and what the controller is told of it: responses, claims, and at the end how it went.

    What arises in one turn of the event loop goes in one message: a round begins with a claim for every slot, and
    servers often finish several responses at a time.
    """

    def __init__(self, channel: Channel, client: Client, message: dict[str, Any]) -> None:
        """`message`: `Job.message`."""
        self._channel, self._waited_s = channel, time.monotonic() - message["asked"]
        self._writer = SegmentWriter(lambda file: channel.send({"kind": "segment"}, file))
        self._servers: list[Server] = [OthersServer(**server) for server in message["servers"]]
        self._check = AnswerCheck(message["version"], TokenIds(**message["known_ids"]))
        self.work = Sampling(client, self._check, message["timeout_s"], self._claim, message["slots"], self._deliver)
        self._responses: list[dict[str, Any]] = []  # not yet told, like `_claims`
        self._claims: list[asyncio.Future[Claimed | None]] = []
        self._told: deque[list[asyncio.Future[Claimed | None]]] = deque()  # the claims of each message
        self._will_tell = self._is_exhausted = False

    async def run(self) -> None:
        """Samples; says how it went."""
        work = self.work
        try:
            await work.run(self._servers)
        finally:
            self._writer.close()
        self._tell()
        self._channel.send({"kind": "over", "died": [*work.died.items()], "error": work.error,
                            "busy_s": [*work.busy_s.items()], "waited_s": self._waited_s})  # fmt: skip

    async def cut(self) -> None:
        """Ends the round with the tokens so far of what is under way."""
        self._check.may_be_cut = True
        await self.work.cut()

    def _deliver(self, index: int, response: Response, server: int) -> None:
        if not len(response.ids):  # it was cut before its first token
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
        """Takes what the controller gives for the claims of a message; fewer requests are the last ones."""
        futures = self._told.popleft()
        self._is_exhausted = len(requests) < len(futures)
        for future, request in zip_longest(futures, requests):
            if not future.cancelled():
                future.set_result(request)
            elif request is not None:  # its server has not lived to see it
                self.work.give_back(request)


class ClientMain:
    """Does what the controller asks for. Everything but `take` runs in the thread of the client's event loop."""

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
    """Lets the kernel end this process when its parent has ended; the end of the channel says the same."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(0)


def main() -> None:
    """See the module's docstring."""
    descriptor, parent = map(int, sys.argv[1:])
    _end_with_parent(parent)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the controller decides when the run ends
    channel = Channel(socket.socket(fileno=descriptor))
    process = ClientMain(channel)
    while (message := channel.receive()) is not None:
        process.take(message)
    os._exit(0)  # whatever the servers still answer, nobody waits for it


if __name__ == "__main__":
    main()
